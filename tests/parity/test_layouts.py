"""Models have the results of the original code for any layout of the batch.

The original code uses right-padded rows. Here the same rows are left-padded, have gaps, or are passed one by one,
padding-free, with `unpad_inputs`, with eager attention, and in segments with a cache.
"""

import functools

import pytest
import torch

from luna_mega.convert import convert_checkpoint
from tests.parity.original import Original

FIXTURES = [
    "luna/bert_heads",
    "luna/head_bert_tied",
    "mega/07_lm_postnorm_laplace_simple_trunc",
    "mega/08_lm_adaptive_tied_factor2_base",
    "mega/hf_clm_softmax_chunk",
    "mega/hf_mlm_softmax_chunk_short",
    "mega/hf_qa",
    "megalodon/05_sharded_mp2",
]
DECODERS = [name for name in FIXTURES if "_lm_" in name or "_clm_" in name or name.startswith("megalodon")]
PAD = 1


class Case(Original):
    """Rows of tokens `[B, T]`, their mask, and the original's logits or log-probabilities."""

    def __init__(self, folder, outputs):
        super().__init__(folder, outputs)
        if folder.parent.name == "megalodon" and not self.convert().exists():
            convert_checkpoint(folder, self.convert())
        batch = {"luna": "A.", "megalodon": "C."}.get(folder.parent.name, "")
        names = ("input_ids", "ids", "src_tokens")
        self.ids = next(self.io[batch + name] for name in names if batch + name in self.io)
        default = torch.ones_like(self.ids) if batch == "C." else self.ids != PAD
        self.mask = self.io.get("attention_mask", default).bool()
        names = ("logits", "lprobs", "start_logits", "end_logits")
        self.expected = {name: self.io[batch + name] for name in names if batch + name in self.io}

    @functools.cached_property
    def model(self):
        return self.load()

    def convert(self, head=None):
        return self.outputs / "default" if self.folder.parent.name == "megalodon" else super().convert(head)

    def results(self, model, ids, mask, **options):
        """Return the tensors `[B, T, ...]` that correspond to `expected`."""
        output = model(ids, attention_mask=mask, **options)
        if "start_logits" in self.expected:
            return {name: getattr(output, name) for name in self.expected}
        return {name: output.logits.log_softmax(-1) if name == "lprobs" else output.logits for name in self.expected}

    def check(self, parity, results, places):
        """Compare the results at the bool mask `places` with the original's at unmasked tokens, row by row."""
        for name, expected in self.expected.items():
            parity.check(name, results[name][places], expected[self.mask], scaled=True, **self.tight)

    def spread(self, places):
        """Return token ids and mask with the unmasked tokens at `places` (bool, `[B, S]`)."""
        ids = torch.full(places.shape, PAD)
        ids[places] = self.ids[self.mask]
        return ids, places


@pytest.fixture
def case(request, parity_folder, outputs):
    return Case(parity_folder(*request.param.split("/")), outputs)


@torch.no_grad()
@pytest.mark.parametrize(
    "fields", [{"attn_implementation": "eager"}, {"unpad_inputs": True}], ids=["eager", "unpadded"]
)
@pytest.mark.parametrize("case", FIXTURES, indirect=True)
def test_options(case, parity, fields):
    case.check(parity, case.results(case.load(**fields), case.ids, case.mask), case.mask)


@torch.no_grad()
@pytest.mark.covering(1)
@pytest.mark.parametrize("padding", ["left", "right", "both", "gaps"])
@pytest.mark.parametrize("case", FIXTURES, indirect=True)
def test_padding(case, parity, padding):
    rows, length = case.ids.shape
    places, counts = torch.zeros(rows, length + 9, dtype=torch.bool), case.mask.sum(dim=1)
    for row, count in zip(places, counts.tolist(), strict=True):
        if padding == "gaps":
            row[torch.randperm(len(row))[:count]] = True
        else:
            first = {"left": len(row) - count, "right": 0, "both": (len(row) - count) // 2}[padding]
            row[first : first + count] = True
    ids, mask = case.spread(places)
    case.check(parity, case.results(case.model, ids, mask), places)


@torch.no_grad()
@pytest.mark.parametrize("case", FIXTURES, indirect=True)
def test_one_row_at_a_time(case, parity):
    rows = [case.results(case.model, ids[kept][None], None) for ids, kept in zip(case.ids, case.mask, strict=True)]
    results = {name: torch.cat([row[name] for row in rows], dim=1)[0] for name in case.expected}
    case.check(parity, results, ...)


@torch.no_grad()
@pytest.mark.parametrize("case", FIXTURES, indirect=True)
def test_padding_free(case, parity):
    ids, positions = case.ids[case.mask][None], (case.mask.cumsum(dim=1) - 1)[case.mask][None]
    results = case.results(case.model, ids, None, position_ids=positions, use_cache=False)
    case.check(parity, {name: tensor[0] for name, tensor in results.items()}, ...)


@torch.no_grad()
@pytest.mark.parametrize("case", DECODERS, indirect=True)
def test_pieces_with_a_cache(case, parity):
    past, pieces, first = None, [], 0
    for length in (1, 6, 1, 2, case.ids.shape[1] - 10):
        last = first + length
        output = case.model(case.ids[:, first:last], attention_mask=case.mask[:, :last], cache=past, use_cache=True)
        past, first = output.cache, last
        pieces.append(output.logits)
    logits = torch.cat(pieces, dim=1)
    case.check(
        parity, {name: logits.log_softmax(-1) if name == "lprobs" else logits for name in case.expected}, case.mask
    )
