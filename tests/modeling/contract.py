"""The contract of the models: what must hold for every class.

* A batch has the results, the loss and the gradients of its rows without padding, in every layout and in every way
  (`check_batch`). Inputs and labels at padding are arbitrary, and position tables are as long as the longest row.
* A text of a decoder has the logits of the complete text in one call, however a cache divides it (`check_division`).

A `Member` is one row of the contract: a class and fields of its configuration. `MEMBERS` has all classes and variants;
`encoders` and `language_models` are random ones. A new class or option is a row of `MEMBERS`, and a field below.
"""

import copy
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st

from tests.marks import diagonal
from tests.modeling import decoders, luna, mega, megalodon_decoders

HEADS = {"luna": luna, "mega": mega, "megalodon": megalodon_decoders}
DECODERS = ("ForCausalLM", "ForConditionalGeneration")
POOLED = ("ForSequenceClassification", "ForSequencePairClassification", "ForMultipleChoice")


class Member(NamedTuple):
    """A class, and fields of its configuration."""

    family: str
    head: str
    fields: dict[str, Any] = {}

    def make(self, dtype: torch.dtype = torch.float64, **more: Any) -> torch.nn.Module:
        """Return a model whose weights are large enough that every parameter affects the results."""
        fields = self.fields | more
        if self.head in DECODERS:
            fields |= {"is_encoder_decoder": True} if self.translates else {}
            model = decoders.FAMILIES[self.family].make(**fields)
        else:
            model = HEADS[self.family].make(self.head, **fields).double()
        with torch.no_grad():
            for parameter in model.parameters() if self.family == "mega" and self.head in DECODERS else ():
                parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() > 1 else 0.3))
        return model.to(dtype)

    @property
    def translates(self) -> bool:
        return self.head == "ForConditionalGeneration"

    @property
    def has_token_results(self) -> bool:
        """Whether the results belong to tokens of one sequence, so that batches can be padding-free."""
        return self.head in ("Model", "ForMaskedLM", "ForTokenClassification", "ForCausalLM")

    def tables(self, longest: int) -> dict[str, int]:
        """Return the fields by which position tables have the length of the longest row, unless the member has some."""
        names = {"luna": ("max_position_embeddings",), "mega": ("max_positions",), "megalodon": ()}[self.family]
        names += ("decoder_max_positions",) if self.family == "mega" and self.translates else ()
        return {name: longest for name in names if name not in self.fields}


ADAPTIVE = {"adaptive_input_cutoffs": [8, 20], "adaptive_softmax_cutoffs": [8, 20], "adaptive_input_factor": 2}
ADAPTIVE |= {"adaptive_softmax_factor": 2}
CHUNKS = {"use_chunking": True, "chunk_size": 4}
INTERACTION = {"pooling": "mean", "pair_features": "interaction"}
TYPES = {"type_vocab_size": 3, "embedding_size": 10}
CHANNELS = {"num_channels": 3}

# One member for each class, with the default configuration of the tests.
CLASSES = {f"{family} {head}": Member(family, head) for family in ("luna", "mega") for head in luna.HEADS}
CLASSES |= {f"megalodon {head}": Member("megalodon", head) for head in ("Model", "ForSequenceClassification")}
CLASSES |= {f"{family} decoder": Member(family, "ForCausalLM") for family in decoders.FAMILIES}
CLASSES |= {f"{family} seq2seq": Member(family, "ForConditionalGeneration") for family in decoders.TRANSLATING}
MEMBERS = CLASSES | {
    f"{family} {name}": Member(family, "ForMaskedLM", fields)
    for family, module in (("luna", luna), ("mega", mega))
    for name, fields in module.VARIANTS.items()
}
MEMBERS |= {
    name: Member(family, "ForCausalLM", decoders.FAMILIES[family].DECODER_ONLY[shape])
    for name, (family, shape) in decoders.DECODER_ONLY.items()
}
MEMBERS |= {
    name: Member(family, "ForConditionalGeneration", decoders.FAMILIES[family].WITH_ENCODER[shape])
    for name, (family, shape) in decoders.WITH_ENCODER.items()
}
MEMBERS |= {
    f"luna {pooling}": Member("luna", head, {"pooling": pooling, "dynamic_projection_length": False})
    for head, pooling in diagonal(POOLED, luna.POOLINGS)
}
MEMBERS |= {
    "luna types": Member("luna", "ForTokenClassification", TYPES),
    "luna types of choices": Member("luna", "ForMultipleChoice", TYPES),
    "luna narrow": Member("luna", "ForMaskedLM", {"embedding_size": 10}),
    "luna sparse": Member("luna", "ForMaskedLM", {"sparse_prediction": True}),
    "luna pairs": Member("luna", "ForSequencePairClassification", INTERACTION),
    "luna values": Member("luna", "ForTokenClassification", luna.VALUES),
    "luna channels, mean": Member("luna", "ForSequenceClassification", luna.VALUES | CHANNELS | {"pooling": "mean"}),
    "mega adaptive": Member("mega", "ForCausalLM", ADAPTIVE),
    "mega legacy table": Member(
        "mega",
        "ForMaskedLM",
        {"relative_positional_bias": "simple", "legacy_bias_table": True, "chunk_size": 16, "max_positions": 20},
    ),
    "mega odd width": Member(
        "mega", "Model", CHUNKS | {"relative_positional_bias": "simple", "shared_representation_size": 13}
    ),
    "mega sparse": Member("mega", "ForMaskedLM", {"sparse_prediction": True}),
    "mega types": Member("mega", "ForQuestionAnswering", {"add_token_type_embeddings": True, "type_vocab_size": 3}),
    "mega values, mean": Member("mega", "ForSequenceClassification", mega.VALUES),
    "mega channels, chunks": Member(
        "mega", "ForTokenClassification", mega.VALUES | CHANNELS | mega.VARIANTS["laplace chunks"]
    ),
    "mega values, batch norm": Member(
        "mega", "ForSequenceClassification", mega.VALUES | mega.VARIANTS["batchnorm, norms around"]
    ),
    "mega pairs, mean": Member("mega", "ForSequencePairClassification", CHUNKS | INTERACTION),
    "megalodon mean": Member("megalodon", "ForSequenceClassification", {"num_labels": 3, "pooling": "mean"}),
    "megalodon last": Member("megalodon", "ForSequenceClassification", {"num_labels": 3, "pooling": "last"}),
}


# Batches -------------------------------------------------------------------------------------------------------------

PADDED = ("right", "left", "gaps", "inferred")  # "inferred": on the right, without a mask
# The arguments that separate the sequences; "every": those that the collator of transformers can return together.
PADDING_FREE = ("position_ids", "cu_seq_lens", "seq_idx", "two rows", "every")
MASKS = {"right": torch.bool, "left": torch.long, "gaps": torch.half}  # the types of masks
# "device": masks whose values are expensive to read, as on a GPU. "embeddings": with NaN at padding. "loaded": from a
# saved folder. "padding token": also with another padding token, which the model has no embedding for. "empty": into
# memory without values.
WAYS = ("dense", "device", "unpadded", "eager", "recorded", "embeddings", "checkpointed", "loaded", "padding token")
WAYS += ("empty",)
PADDING_TOKEN = 99
# Infinities may also result from finite numbers, for example from uninitialized memory.
DIRT = [float("nan"), float("inf"), float("-inf"), 3e38, -1e15]


class Batch(NamedTuple):
    """Rows with these numbers of tokens, some without a token, and their layout in `longest + extra` columns.

    `first` is the number of the first row, which determines its contents.
    """

    layout: str = "right"
    lengths: tuple[int, ...] = (9, 1, 4, 6, 0)
    extra: int = 3
    first: int = 0

    def rows(self) -> tuple[int, ...]:
        """Return the lengths of the rows; a padding-free batch has no empty ones, and two equally long rows."""
        if self.layout not in PADDING_FREE:
            return self.lengths
        kept = tuple(length for length in self.lengths if length)
        return kept + kept[::-1] if self.layout == "two rows" else kept

    def places(self, count: int, width: int) -> torch.Tensor:
        """Return the columns of `count` tokens."""
        if self.layout == "gaps":
            return torch.randperm(width, generator=torch.Generator().manual_seed(count))[:count].sort()[0]
        return torch.arange(width - count, width) if self.layout == "left" else torch.arange(count)


def draw(kind: str, row: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return an input of a row: token ids, types, values, or labels, some of which are ignored."""
    generator = torch.Generator().manual_seed(10 * row + len(kind))
    if kind == "input_values":
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "labels":
        return torch.randint(0, 3, shape, generator=generator).masked_fill(torch.arange(shape[0]) == 2, -100)
    return torch.randint(*((0, 3) if kind == "token_type_ids" else (4, 23)), shape, generator=generator)


def side_of(name: str) -> str:
    """Return the prefix of the names of the sequences to which an input belongs."""
    return next((prefix for prefix in ("pair_", "decoder_") if name.startswith(prefix)), "")


def mask_of(name: str) -> str | None:
    """Return the name of the mask of an input, or None if it has no mask."""
    kind = next((kind for kind in ("input_ids", "input_values", "inputs_embeds") if name.endswith(kind)), None)
    return kind and name.replace(kind, "attention_mask")


def row_of(member: Member, row: int, length: int) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Return the inputs of a row without padding: those with an entry per position, and the others.

    Second sequences and targets have about half of the length. The labels of a target are `decoder_labels`.
    """
    head, fields = member.head, member.fields
    names = ["input_values" if fields.get("input_type") == "values" else "input_ids"]
    names += ["token_type_ids"] if fields.get("type_vocab_size") else []
    names += {
        "ForConditionalGeneration": ["decoder_input_ids"],
        "ForSequencePairClassification": ["pair_input_ids"],
    }.get(head, [])
    channels = (fields["num_channels"],) if "input_values" in names and "num_channels" in fields else ()
    second = 0 if length == 0 else length // 2 + 1
    inputs = {name: draw(name, row, (second if side_of(name) else length, *channels)) for name in names}
    if head == "ForMultipleChoice":
        inputs = {name: torch.stack([x, x.flip(0) + 3 * (name == "input_ids")]) for name, x in inputs.items()}
    if member.translates:
        return inputs | {"decoder_labels": draw("labels", row, (second,))}, {}
    if head in ("ForMaskedLM", "ForTokenClassification", "ForCausalLM"):
        return inputs | {"labels": draw("labels", row, (length,))}, {}
    if head == "ForQuestionAnswering":
        return inputs, {"start_positions": 0, "end_positions": max(length - 1, 0)}
    return inputs, {} if head == "Model" else {"labels": row % 2}


def collate(member: Member, batch: Batch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the batch in a padded layout, and the mask of the positions with results.

    Entries at padding are arbitrary, unless the mask is inferred.
    """
    inputs: dict[str, torch.Tensor] = {}
    rows = [row_of(member, row, length) for row, length in enumerate(batch.lengths, start=batch.first)]
    inferred = batch.layout == "inferred" and member.fields.get("input_type") != "values"
    masks, places = {}, {}
    for name, first in rows[0][0].items():
        dim = 1 if member.head == "ForMultipleChoice" else 0
        counts, side = [row[name].shape[dim] for row, _ in rows], side_of(name)
        width = max(counts) + batch.extra
        places[side] = [batch.places(count, width) for count in counts]
        masks[side] = torch.stack([torch.zeros(width).index_fill(0, place, 1) for place in places[side]]).bool()
        filled = []
        for row, place in enumerate(places[side]):
            shape = [*first.shape]
            shape[dim] = width
            dirt = draw("input_values" if name == "input_values" else "input_ids", 7 + row, tuple(shape))
            dirt = torch.ones_like(dirt) if inferred and mask_of(name) else dirt
            filled.append(dirt.index_copy(dim, place, rows[row][0][name]))
        inputs[name.replace("decoder_labels", "labels")] = torch.stack(filled)
        if mask_of(name) and not inferred:
            mask = masks[side]
            mask = mask[:, None].expand(-1, 2, -1) if dim else mask
            inputs[mask_of(name)] = mask.to(MASKS.get(batch.layout, torch.int32))
    ids = inputs.get("input_ids")
    if (
        batch.layout == "gaps" and ids is not None and "token_type_ids" not in inputs
    ):  # as BERT's tokenizer returns them
        inputs["token_type_ids"] = torch.zeros_like(ids).masked_fill(inputs["attention_mask"] == 0, 9)
    for name in rows[0][1]:
        inputs[name] = torch.tensor([others[name] for _, others in rows])
        if name.endswith("positions"):
            chosen = [place[i] if len(place) else i for place, i in zip(places[""], inputs[name], strict=True)]
            inputs[name] = torch.stack(chosen)
    return inputs, masks["decoder_" if member.translates else ""]


def pack(member: Member, batch: Batch) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the rows without padding one after the other: in one row of the batch, or in two of equal lengths."""
    lengths, marker = batch.rows(), batch.layout
    rows = [row_of(member, row, length)[0] for row, length in enumerate(lengths)]
    inputs: dict[str, Any] = {name: torch.cat([row[name] for row in rows])[None] for name in rows[0]}
    if marker in ("cu_seq_lens", "every"):
        for side in ("q", "k") if marker == "every" else ("q",):
            inputs[f"cu_seq_lens_{side}"] = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            inputs[f"max_length_{side}"] = max(lengths)
    if marker in ("seq_idx", "every"):
        inputs["seq_idx"] = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    if marker in ("position_ids", "two rows", "every"):
        inputs["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
    if marker == "two rows":
        inputs = {name: x.view(2, -1, *x.shape[2:]) for name, x in inputs.items()}
    given = next(x for name, x in inputs.items() if mask_of(name))
    return inputs, torch.ones(given.shape[:2], dtype=torch.bool)


def soil(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return `x` with NaN, infinities and very large numbers at masked positions."""
    dirt = torch.tensor(DIRT, dtype=x.dtype)[torch.arange(x.numel()) % len(DIRT)].view(x.shape)
    return torch.where(mask[(..., *(None,) * (x.dim() - mask.dim()))].bool(), x, dirt)


def embed(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a batch with embeddings in place of tokens, and with NaN at padding."""
    embedded = dict(inputs)
    for name in [name for name in inputs if mask_of(name)]:
        new = name.replace("input_ids", "inputs_embeds")
        if new != name:
            side = model.get_decoder() if name.startswith("decoder") else model
            embedded[new] = side.get_input_embeddings()(embedded.pop(name))
        if (mask := inputs.get(mask_of(name))) is not None:
            embedded[new] = soil(embedded[new], mask)
    return embedded


def terms_of(member: Member, row: int, length: int) -> int:
    """Return the number of terms in the loss of a row."""
    inputs, _ = row_of(member, row, length)
    if (labels := inputs.get("labels", inputs.get("decoder_labels"))) is not None:
        return int((labels[1:] if member.head == "ForCausalLM" else labels).ne(-100).sum())
    return int(length > 0) if member.head == "ForQuestionAnswering" else 1


FIELDS = ("logits", "start_logits", "end_logits", "last_hidden_state")
OF_ROWS = ("pooler_output", "packed_last_hidden_state")  # a padding-free batch has none of each sequence


def run(
    model: torch.nn.Module, inputs: dict[str, Any], kept: torch.Tensor, of_rows: bool = True, **options: Any
) -> tuple[Any, ...]:
    """Return the loss, all gradients, and all results, of which those of tokens are `[kept tokens, ...]`.

    The loss of a model without one is a sum over its results, with `of_rows` also over those of rows.
    """
    model.zero_grad()
    if model.config.is_decoder or model.config.is_encoder_decoder:
        options["use_cache"] = False
    output = model(**inputs, **options)
    names = FIELDS + (OF_ROWS if of_rows else ())
    results = {name: x for name in names if (x := output.get(name)) is not None}
    recorded = output.get("decoder_hidden_states" if model.config.is_encoder_decoder else "hidden_states") or ()
    results |= {f"state {number}": x for number, x in enumerate(recorded) if x.shape[:2] == kept.shape}
    if (packed := results.pop("packed_last_hidden_state", None)) is not None:
        rows = output.packed_mask
        results["packed_last_hidden_state"] = packed.flatten(0, 1) if rows is None else packed[rows.bool()]
    if (states := results.get("last_hidden_state")) is not None and "attention_mask" in inputs:
        assert not states[~kept.any(dim=1)].any()  # of rows without a token
        assert output.attention_mask.bool().equal(kept) if "attention_mask" in output else kept.all()
    results = {name: x[kept] if x.shape[:2] == kept.shape else x for name, x in results.items()}
    for name in ("attentions", "decoder_attentions", "cross_attentions"):
        for number, weights in enumerate(output.get(name) or ()):
            if len(weights) == len(kept):  # not of pairs and choices
                results[f"{name} {number}"] = weights_of(weights, kept)
    loss = output.get("loss")
    loss = sum(x.sin().sum() for x in results.values()) if loss is None else loss
    loss.backward()
    gradients = {name: x.grad.to("cpu", copy=True) for name, x in model.named_parameters() if x.grad is not None}
    return loss.detach().double().cpu(), gradients, {name: x.detach().cpu() for name, x in results.items()}


def weights_of(weights: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return the sums of the squared weights of each token, `[kept tokens, heads]`, which no masked key has.

    Weights are `[B, heads, T, keys]`, or in chunks `[B, (heads,) chunks, c, c]`, indexed by the number of the token.
    """
    sums = weights.square().sum(-1)
    if sums.dim() == 3 and sums.shape[2] == kept.shape[1]:
        return sums.transpose(1, 2)[kept]
    sums = (sums if sums.dim() == 4 else sums[:, None]).flatten(2).transpose(1, 2)
    return sums[torch.arange(sums.shape[1]) < kept.sum(1, keepdim=True)]


def expected(member: Member, batch: Batch, model: torch.nn.Module, **options: Any) -> tuple[Any, ...]:
    """Return the loss, all gradients and all results, computed from each row without padding."""
    lengths, of_rows = batch.rows(), batch.layout not in PADDING_FREE
    terms = [terms_of(member, row, length) for row, length in enumerate(lengths)]
    total, gradients, results = 0.0, {}, {}
    for row, length in enumerate(lengths):
        share = 1.0 if member.head == "Model" else terms[row] / sum(terms)
        one = Batch("right", (length,), extra=0 if length else 1, first=row)
        loss, found, result = run(model, *collate(member, one), of_rows, **options)
        if share:
            total = total + share * loss
            for name, gradient in found.items():
                gradients[name] = gradients.get(name, 0.0) + share * gradient
        for name, x in result.items():
            results.setdefault(name, []).append(x)
    return total, gradients, {name: torch.cat(parts) for name, parts in results.items()}


def prepare(member: Member, batch: Batch, way: str, **more: Any) -> torch.nn.Module:
    """Return a model for this way, with position tables that are as long as the longest row."""
    model = member.make(**member.tables(max(batch.lengths)), **more)
    model.config.unpad_inputs = way == "unpadded"
    if way == "eager":
        model.set_attn_implementation("eager")
    if way == "checkpointed":
        model.train().gradient_checkpointing_enable()
        for module in model.modules():
            module.train(not isinstance(module, (torch.nn.Dropout, torch.nn.BatchNorm1d)) and module.training)
    if way == "empty":
        with torch.device("meta"):
            empty = type(model)(model.config).to(torch.float64)
        empty = empty.to_empty(device="cpu")
        for tensor in (*empty.parameters(), *empty.buffers()):
            tensor.data.fill_(99)
        empty.tie_weights()
        empty.load_state_dict(model.state_dict())
        model = empty.eval()
    if way in ("loaded", "padding token"):
        model = copy.deepcopy(model)
        model.config.pad_token_id = PADDING_TOKEN if way == "padding token" else 1
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            model = type(model).from_pretrained(folder, dtype=torch.float64).eval()
    return model


def recorded(way: str) -> dict[str, bool]:
    """Return the options that record states and weights."""
    return {"output_hidden_states": True, "output_attentions": True} if way == "recorded" else {}


@contextmanager
def on_device(enabled: bool = True) -> Iterator[None]:
    """Treat masks as those of a GPU, whose values are not read because reading waits for the device."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("layout", "padding_free", "arguments", "inputs", "masks") if enabled else ():
            patch.setattr(f"luna_mega.modeling_common.{module}.can_look", lambda x: False)
        yield


def run_batch(member: Member, batch: Batch, way: str = "dense", **more: Any) -> tuple[Any, ...]:
    """Return the results of `run` for a batch in a layout and a way."""
    model = prepare(member, batch, way, **more)
    if batch.layout in PADDING_FREE:
        return run(model, *pack(member, batch), of_rows=False)
    if way == "embeddings" and batch.layout == "inferred":  # a mask cannot be inferred
        batch = batch._replace(layout="right")
    inputs, kept = collate(member, batch)
    if way == "padding token" and batch.layout == "inferred":
        inputs |= {name: x.masked_fill(x == 1, PADDING_TOKEN) for name, x in inputs.items() if "input_ids" in name}
    with on_device(way == "device"):
        return run(model, embed(model, inputs) if way == "embeddings" else inputs, kept, **recorded(way))


def check_batch(member: Member, batch: Batch, way: str = "dense") -> None:
    """Check that a batch has the results of its rows."""
    wanted = expected(member, batch, prepare(member, batch, "dense"), **recorded(way))
    if member.fields.get("sparse_prediction") and way == "checkpointed":  # in training, only of predicted positions
        labels = torch.cat([row_of(member, row, length)[0]["labels"] for row, length in enumerate(batch.rows())])
        wanted[2]["logits"] = wanted[2]["logits"][labels != -100]
    compare(run_batch(member, batch, way), wanted)


def compare(found: tuple[Any, ...], wanted: tuple[Any, ...], scale: float = 1.0) -> None:
    """Check losses, gradients and results; losses, and so gradients, are computed in float32."""
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6 * scale, atol=1e-6 * scale)
    for actual, reference, exact in zip(found[1:], wanted[1:], (1.0, 1e-2 if scale == 1 else 1.0), strict=True):
        assert actual.keys() == reference.keys()
        for name, x in reference.items():
            torch.testing.assert_close(
                actual[name].double(),
                x.double(),
                rtol=1e-5 * scale * exact,
                atol=1e-6 * scale * exact,
                msg=lambda text, name=name: f"{name}: {text}",
            )


# Divisions -----------------------------------------------------------------------------------------------------------

CHANGES = ("reorder", "select", "repeat", "copy", "pickle", "crop", "drop")


class Division(NamedTuple):
    """Texts of a decoder, and the calls that compute them.

    Args:
        cuts: numbers of positions of the calls.
        lengths: numbers of tokens of the texts.
        side: "left", "right", "middle" or "gaps", see `decoders.padded`.
        static: number of calls after which the cache is static, so that calls have one position; None = never.
        changes: changes of the cache before calls, by the number of the call.
        eager, device: whether attention is "eager", and whether the values of masks are not read.
    """

    cuts: tuple[int, ...]
    lengths: tuple[int, ...] = (17, 9, 3, 12, 0)
    side: str = "left"
    static: int | None = None
    changes: dict[int, str] = {}
    eager: bool = False
    device: bool = False


class Texts:
    """Texts and their sources, and the logits of each text alone."""

    def __init__(self, model: torch.nn.Module, division: Division):
        self.model, self.total = model, sum(division.cuts)
        self.ids, self.mask = decoders.padded(division.lengths, self.total, division.side)
        self.source = decoders.source(model, len(self.ids), "left" if division.side == "right" else "right")
        self.encoded = model.get_encoder()(**self.source) if self.source else None
        self.expected = torch.stack([self.single(row) for row in range(len(self.ids))])

    def single(self, row: int) -> torch.Tensor:
        """Return the logits `[T, V]` of a text, computed without padding and other rows."""
        kept, source = self.mask[row].bool(), {}
        if self.source:
            source = {"input_ids": self.source["input_ids"][row, self.source["attention_mask"][row].bool()][None]}
        if not kept.any():
            return self.model.lm_head.weight.new_zeros(self.total, self.model.lm_head.weight.shape[0])
        text = decoders.target(self.model, self.ids[row][kept][None], self.mask[row][kept][None])
        logits = self.model(**source, **text, use_cache=False).logits
        return logits.new_full((self.total, logits.shape[-1]), torch.nan).masked_scatter(kept[:, None], logits[0])

    def select(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Change the rows of all tensors."""
        self.ids, self.mask, self.expected = (change(x) for x in (self.ids, self.mask, self.expected))
        if self.encoded is not None:
            self.source = {name: change(x) for name, x in self.source.items()}
            tensors = {name: change(x) for name, x in self.encoded.items() if torch.is_tensor(x)}
            self.encoded = type(self.encoded)(**tensors)

    def drop(self, at: int) -> None:
        """Drop a position of the first text, as after the end of a text."""
        self.mask, self.expected = self.mask.clone(), self.expected.clone()
        self.mask[0, at] = 0
        self.expected[0] = self.single(0)

    def given(self, number: int) -> dict[str, Any]:
        """Return the sources of a call as tokens or outputs of the encoder, or none if the cache contains them."""
        if self.encoded is None or number % 3 == 2:
            return {}
        encoded = {"encoder_outputs": self.encoded, "attention_mask": self.source["attention_mask"]}
        return encoded if number % 3 else self.source

    def run(self, number: int, start: int, stop: int, cache: Any, use_cache: bool = True) -> Any:
        """Compute positions with a mask of these, of all so far, or without a mask; return the output."""
        new = self.mask[:, start:stop]
        masks = [self.mask[:, :stop], new, None if start and new.all() else new]
        text = decoders.target(self.model, self.ids[:, start:stop], masks[number % 3], cache=cache, use_cache=use_cache)
        output = self.model(**self.given(number), **text)
        kept = new.bool()
        torch.testing.assert_close(output.logits[kept], self.expected[:, start:stop][kept], rtol=1e-7, atol=1e-8)
        return output

    def change(self, action: str, cache: Any, at: int) -> Any:
        """Change the cache, or replace it by a copy; return it."""
        rows = len(self.ids)
        order = torch.arange(rows).roll(1).clamp(max=max(rows - 2, 0))  # repeats a row, and drops another one
        if action == "reorder" or (action == "select" and cache.is_static):
            cache.reorder_cache(order)
            self.select(lambda x: x[order])
        elif action == "select":
            cache.batch_select_indices(order[: (rows + 1) // 2])
            self.select(lambda x: x[order[: (rows + 1) // 2]])
        elif action == "repeat" and not cache.is_static:
            cache.batch_repeat_interleave(2)
            self.select(lambda x: x.repeat_interleave(2, 0))
        elif action == "copy":  # another token has no effect on the cache that is returned
            other = copy.deepcopy(cache)
            ids = torch.full((rows, 1), 4)
            self.model(**self.given(0), **decoders.target(self.model, ids, cache=other))
        elif action == "pickle":
            cache = pickle.loads(pickle.dumps(cache))
        elif action == "crop":
            cache.crop(cache.get_seq_length())
        elif action == "drop":
            self.drop(at)
        return cache


def addresses(cache: Any) -> list[int]:
    return [x.data_ptr() for layer in decoders.own_cache(cache).layers for x in layer.tensors.values()]


@torch.no_grad()
def check_division(model: torch.nn.Module, division: Division) -> None:
    """Check that the calls, and one call without a cache, give each text its logits."""
    texts = Texts(model, division)
    model.set_attn_implementation("eager" if division.eager else "sdpa")
    with on_device(division.device):
        assert texts.run(0, 0, texts.total, None, use_cache=False).cache is None
        cache, stop = None, 0
        for number, length in enumerate(division.cuts):
            if number == division.static:
                cache.make_static(texts.total + 1)
                places = addresses(cache)
            if number and (action := division.changes.get(number)):
                cache = texts.change(action, cache, stop)
                places = addresses(cache)
            start, stop = stop, stop + length
            output = texts.run(number, start, stop, cache)
            assert cache is None or output.cache is cache
            cache = output.cache
            assert cache.get_seq_length() == stop
        if cache.is_static:
            assert addresses(cache) == places


def check_gradients(model: torch.nn.Module, division: Division) -> None:
    """Check that gradients flow through a cache, also into the encoder, as in one call."""
    ids, mask = decoders.padded(division.lengths, sum(division.cuts), division.side)
    source, found = decoders.source(model, len(ids), "left"), []
    for cuts in ((len(ids[0]),), division.cuts):
        model.zero_grad()
        cache, start, logits = None, 0, []
        for length in cuts:
            for _ in range(2 if start else 0):  # the second one restores the order; autograd has saved the states
                cache.reorder_cache(torch.tensor([1, 0]))
            segment = slice(start, start + length)
            text = decoders.target(model, ids[:, segment], mask[:, segment], cache=cache, use_cache=len(cuts) > 1)
            output = model(**source if start == 0 else {}, **text)
            cache, start = output.cache, start + length
            logits.append(output.logits)
        torch.cat(logits, 1)[mask.bool()].sin().sum().backward()
        found.append({name: x.grad for name, x in model.named_parameters() if x.grad is not None})
    torch.testing.assert_close(found[1], found[0])
    assert all("packed_layer_norm" in name for name, _ in model.named_parameters() if name not in found[0])


# Random members -------------------------------------------------------------------------------------------------------

BOTH = (True, False)
ALL = {"embedding_norm": BOTH, "scale_embedding": BOTH, "num_hidden_layers": (1, 2, 3)}
LUNA = ALL | {
    "num_attention_heads": (4, 1, 2), "num_pack_attention_heads": (None, 1, 2), "projection_length": (6, 1, 3),
    "tie_key_value": BOTH, "position_embedding_type": ("learned", "sinusoidal", "none"), "pre_norm": BOTH,
    "share_layers": (False, True), "first_position": (None, 0), "scale_embedding": (None, *BOTH),
}  # fmt: skip
MEGA = ALL | {
    "ema_projection_size": (3, 0, 1, 5), "shared_representation_size": (8, 4), "truncation": (None, 2, 5, 100),
    "normalize_before_mega": BOTH, "normalization_type": ("scalenorm", "layernorm", "rmsnorm", "batchnorm"),
    "norm_affine": BOTH, "attention_activation": ("softmax", "laplace", "relu2"), "use_normalized_ffn": BOTH,
    "normalize_before_ffn": BOTH, "relative_positional_bias": ("rotary", "simple", "t5", "alibi", "rope", "none"),
    "final_norm": BOTH, "legacy_rms_norm": (False, True), "chunk_size": (None, 3, 4, 8),
}  # fmt: skip
MEGALODON = {
    "num_hidden_layers": (1, 2, 3), "num_attention_heads": (1, 2, 4), "ema_projection_size": (3, 1, 5),
    "norm_num_groups": (3, 1, 4), "chunk_size": (4, 3, 8, 64), "norm_affine": BOTH, "swiglu": BOTH,
    "rescale_nffn": BOTH, "scale_embedding": BOTH, "tie_word_embeddings": BOTH,
}  # fmt: skip
ENCODER = {"embedding_size": (None, 8), "classifier_num_layers": (1, 0, 2)}
LUNA_ENCODER = LUNA | ENCODER | {
    "dynamic_projection_length": BOTH, "contextual_projection": BOTH, "type_vocab_size": (0, 3),
    "pooling": luna.POOLINGS, "projection_length": (6, 1, 3, 40),
}  # fmt: skip
MEGA_ENCODER = MEGA | ENCODER | {
    "bidirectional": BOTH, "add_token_type_embeddings": (False, True), "pooling": ("cls", "last", "mean"),
    "ema_shift": (False, True),
}  # fmt: skip
CAUSAL = {"luna": LUNA | {"causal_activation": ("softplus", "elu")}, "megalodon": MEGALODON}
CAUSAL["mega"] = MEGA | {"add_lm_hidden_dense_layer": BOTH, "tie_word_embeddings": BOTH}
SIDES = {"num_decoder_layers": (None, 1, 3), "decoder_vocab_size": (None, 35), "decoder_intermediate_size": (None, 20)}
SEQ2SEQ = {
    "luna": CAUSAL["luna"] | SIDES | {
        "num_decoder_attention_heads": (None, 2), "dynamic_projection_length": BOTH, "contextual_projection": BOTH,
        "decoder_position_embedding_type": (None, "learned", "sinusoidal"), "decoder_pre_norm": (None, True),
    },
    "mega": MEGA | SIDES | {"decoder_ema_projection_size": (None, 0, 2), "decoder_chunk_size": (None, 3, -1)},
}  # fmt: skip


@st.composite
def members(draw: Callable[[Any], Any], family: str, head: str, values: dict[str, tuple]) -> Member:
    """Draw the fields of a member, and correct those that exclude each other."""
    fields = {name: draw(st.sampled_from(options)) for name, options in values.items()}
    if family == "mega":
        if not fields["ema_projection_size"]:
            fields |= {"truncation": None} | ({"ema_shift": False} if "ema_shift" in fields else {})
        if fields["chunk_size"] is None:
            del fields["chunk_size"]
        else:
            fields["use_chunking"] = True
        fields |= {} if fields.get("bidirectional", True) else {"ema_shift": False}
    if "embedding_size" in fields:
        fields["tie_word_embeddings"] = fields["embedding_size"] is None
    return Member(family, head, {name: value for name, value in fields.items() if value is not None})


TOKEN_HEADS = ("ForMaskedLM", "ForTokenClassification", "Model")


def encoders(heads: tuple[str, ...] = (*TOKEN_HEADS, "ForSequenceClassification", "ForQuestionAnswering")) -> Any:
    """Return random encoders with one of the heads."""
    kinds = [("luna", head, LUNA_ENCODER) for head in heads] + [("mega", head, MEGA_ENCODER) for head in heads]
    return st.sampled_from(kinds).flatmap(lambda kind: members(*kind))


def language_models() -> st.SearchStrategy[Member]:
    """Return random decoders and encoder-decoders."""
    causal = [members(family, "ForCausalLM", values) for family, values in CAUSAL.items()]
    return st.one_of(
        causal + [members(family, "ForConditionalGeneration", values) for family, values in SEQ2SEQ.items()]
    )


def batches(layouts: tuple[str, ...]) -> st.SearchStrategy[Batch]:
    """Return random batches, in which at least one row has a loss."""
    lengths = st.lists(st.integers(0, 9), max_size=3).map(lambda others: (4, *others))
    return st.builds(Batch, st.sampled_from(layouts), lengths, st.integers(0, 3), st.just(0))


@st.composite
def divisions(draw: Callable[[Any], Any]) -> Division:
    """Draw texts and calls; after a random one, the cache may be static."""
    lengths = draw(st.lists(st.integers(0, 12), max_size=3).map(lambda others: (6, *others)))
    left, cuts = max(lengths) + draw(st.integers(0, 2)), []
    static = draw(st.none() | st.integers(1, 3))
    while left:
        single = static is not None and len(cuts) >= static
        cuts.append(1 if single else draw(st.integers(1, left)))
        left -= cuts[-1]
    static = None if static is None or static >= len(cuts) else static
    changes = draw(st.dictionaries(st.integers(1, max(len(cuts) - 1, 1)), st.sampled_from(CHANGES), max_size=4))
    side = draw(st.sampled_from(("left", "right", "middle", "gaps")))
    return Division(tuple(cuts), lengths, side, static, changes, draw(st.booleans()), draw(st.booleans()))
