"""One matrix of layouts: a batch of any class has the results, loss and gradients of its rows without padding.

Inputs and labels at padding are arbitrary, and batches are wider than the tables of positions.
"""

from itertools import accumulate

import pytest
import torch

from luna_mega.kernels.api import use_backend
from tests.marks import diagonal, slow_but

from . import decoders, luna, mega, megalodon_decoders

LENGTHS, TOTAL = [9, 1, 4, 6], 12
COLUMNS = {
    "right": lambda length: torch.arange(length),
    "left": lambda length: torch.arange(TOTAL - length, TOTAL),
    "gaps": lambda length: torch.randperm(TOTAL, generator=torch.Generator().manual_seed(length))[:length].sort()[0],
    "without a mask": lambda length: torch.arange(length),
}
# "device": masks whose values are expensive to read, as on a GPU. "embeddings": with NaN at padding.
OPTIONS = ["dense", "device", "unpadded", "eager", "recorded", "embeddings", "checkpointed"]
# Infinities may also result from finite numbers, for example from uninitialized memory.
DIRT = [float("nan"), float("inf"), float("-inf"), 3e38, -1e15]
MARKERS = ["position_ids", "cu_seq_lens", "seq_idx", "two rows"]
CHUNKS = {"use_chunking": True, "chunk_size": 4}
ADAPTIVE = {"adaptive_input_cutoffs": [8, 20], "adaptive_softmax_cutoffs": [8, 20], "adaptive_input_factor": 2}
ADAPTIVE |= {"adaptive_softmax_factor": 2}
INTERACTION = {"pooling": "mean", "pair_features": "interaction"}
BATCH_NORM = mega.VARIANTS["batchnorm, norms around"]
HEADS = [name for name in luna.HEADS if name not in ("Model", "ForMaskedLM")]
POOLED = ("ForSequenceClassification", "ForSequencePairClassification", "ForMultipleChoice")
TYPES = {"type_vocab_size": 3, "embedding_size": 10}
# Cases with one result per token, which can be padding-free, and other cases.
TOKENS = {f"luna {name}": (luna, "ForMaskedLM", fields) for name, fields in luna.VARIANTS.items()}
TOKENS |= {f"mega {name}": (mega, "ForMaskedLM", fields) for name, fields in mega.VARIANTS.items()}
TOKENS |= {name: (decoders, "ForCausalLM", {}) for name in decoders.DECODER_ONLY}
TOKENS |= {
    "luna types": (luna, "ForTokenClassification", TYPES),
    "luna sparse": (luna, "ForMaskedLM", {"sparse_prediction": True}),
    "mega adaptive": (decoders.FAMILIES["mega"], "ForCausalLM", ADAPTIVE),
}
CASES = (
    TOKENS | {f"luna {head}": (luna, head, {}) for head in HEADS} | {f"mega {head}": (mega, head, {}) for head in HEADS}
)
CASES |= {
    f"luna {pooling}": (luna, head, {"pooling": pooling, "dynamic_projection_length": False})
    for head, pooling in diagonal(POOLED, luna.POOLINGS)
}
CASES |= {name: (decoders, "ForConditionalGeneration", {}) for name in decoders.WITH_ENCODER}
CASES |= {
    "luna types of choices": (luna, "ForMultipleChoice", TYPES),
    "luna pairs": (luna, "ForSequencePairClassification", INTERACTION),
    "luna values": (luna, "ForTokenClassification", luna.VALUES),
    "luna values, mean": (luna, "ForSequenceClassification", luna.VALUES | {"pooling": "mean"}),
    "mega values, mean": (mega, "ForSequenceClassification", mega.VALUES),
    "mega values, chunks": (mega, "ForTokenClassification", mega.VALUES | mega.VARIANTS["laplace chunks"]),
    "mega values, batch norm": (mega, "ForSequenceClassification", mega.VALUES | BATCH_NORM),
    "mega pairs, mean": (mega, "ForSequencePairClassification", CHUNKS | INTERACTION),
    "megalodon mean": (megalodon_decoders, "ForSequenceClassification", {"num_labels": 3, "pooling": "mean"}),
    "megalodon last": (megalodon_decoders, "ForSequenceClassification", {"num_labels": 3, "pooling": "last"}),
}
FAST = [case for case in CASES if case not in decoders.DECODERS or case in decoders.SOME]
# One case for each kernel, of which the first is fast.
KERNELS = ["mega rotary scalenorm", "luna tied", "luna: elu, untied", "mega: laplace chunks", "megalodon: heads"]
KERNELS += [
    "luna packed_attention",
    "mega batchnorm, norms around",
    "luna seq2seq: translation",
    "mega seq2seq: softmax",
]


def make(case, option="dense", **more):
    """Return a model with tables of positions that are as long as the longest row."""
    family, head, fields = CASES[case]
    fields = decoders.tables(case, LENGTHS[0]) | fields | more
    if family is decoders:
        model = decoders.make(case, **fields)
    else:
        model = family.make(**fields) if head == "ForCausalLM" else family.make(head, **fields).double()
    model.config.unpad_inputs = option == "unpadded"
    if option == "eager":
        model.set_attn_implementation("eager")
    if option == "checkpointed":
        model.train().gradient_checkpointing_enable()
        for module in model.modules():
            module.train(not isinstance(module, (torch.nn.Dropout, torch.nn.BatchNorm1d)) and module.training)
    return model


def draw(kind, row, length):
    """Return an input of a row: token ids, types, values, or labels, some of which are ignored."""
    generator = torch.Generator().manual_seed(10 * row + len(kind))
    if kind == "input_values":
        return torch.randn(length, generator=generator, dtype=torch.float64)
    if kind == "labels":
        return torch.randint(0, 3, (length,), generator=generator).masked_fill(torch.arange(length) == 2, -100)
    return torch.randint(*((0, 3) if kind == "token_type_ids" else (4, 23)), (length,), generator=generator)


def rows_of(case, row):
    """Return the inputs of a row without padding as two dicts: those with an entry per position, and the others."""
    _, head, fields = CASES[case]
    length = LENGTHS[row]
    names = ["input_values" if fields.get("input_type") == "values" else "input_ids"]
    names += ["token_type_ids"] if fields.get("type_vocab_size") else []
    names += {
        "ForConditionalGeneration": ["decoder_input_ids"],
        "ForSequencePairClassification": ["pair_input_ids"],
    }.get(head, [])
    inputs = {name: draw(name, row, length) for name in names}
    if head == "ForMultipleChoice":
        inputs = {name: torch.stack([x, x.flip(0) + 3 * (name == "input_ids")]) for name, x in inputs.items()}
    if head in ("ForMaskedLM", "ForTokenClassification", "ForCausalLM", "ForConditionalGeneration"):
        return inputs | {"labels": draw("labels", row, length)}, {}
    if head == "ForQuestionAnswering":
        return inputs, {"start_positions": 0, "end_positions": length - 1}
    return inputs, {"labels": row % 2}


def mask_name(name):
    """Return the name of the mask of an input, or None if it has none of its own."""
    kind = next((kind for kind in ("input_ids", "input_values") if name.endswith(kind)), None)
    return kind and name.replace(kind, "attention_mask")


def collate(case, layout):
    """Return the batch in a layout, and its mask; entries at padding are arbitrary unless the mask is inferred."""
    batch, rows = {}, range(len(LENGTHS))
    inferred = layout == "without a mask" and CASES[case][2].get("input_type") != "values"
    places, kept = [COLUMNS[layout](length) for length in LENGTHS], torch.zeros(len(rows), TOTAL, dtype=torch.bool)
    for row, place in enumerate(places):
        kept[row, place] = True
    for name in rows_of(case, 0)[0]:
        values = []
        for row, place in enumerate(places):
            value = rows_of(case, row)[0][name]
            filled = draw("input_values" if name == "input_values" else "input_ids", 7 + row, TOTAL)
            filled = torch.ones_like(filled) if inferred and mask_name(name) else filled
            values.append(filled.expand(*value.shape[:-1], TOTAL).clone().index_copy(-1, place, value))
        batch[name] = torch.stack(values)
        if mask_name(name) and not inferred:
            batch[mask_name(name)] = (
                (kept[:, None] if batch[name].dim() == 3 else kept).expand(batch[name].shape).long()
            )
    for name in rows_of(case, 0)[1]:
        batch[name] = torch.tensor([rows_of(case, row)[1][name] for row in rows])
        if name.endswith("positions"):
            batch[name] = torch.stack([place[i] for place, i in zip(places, batch[name], strict=True)])
    return batch, kept


def pack(case, marker):
    """Return the rows without padding one after the other: in one row of the batch, or in two of equal lengths."""
    rows = [rows_of(case, row)[0] for row in range(len(LENGTHS))]
    batch = {name: torch.cat([row[name] for row in rows])[None] for name in rows[0]}
    if marker == "cu_seq_lens":
        bounds = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32)
        return batch | {"cu_seq_lens_q": bounds, "max_length_q": max(LENGTHS)}
    if marker == "seq_idx":
        return batch | {"seq_idx": torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None]}
    batch["position_ids"] = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return {name: x.view(2, -1) for name, x in batch.items()} if marker == "two rows" else batch


def soil(x, mask):
    """Return `x` with NaN, infinities and very large numbers at masked positions."""
    dirt = torch.tensor(DIRT, dtype=x.dtype)[torch.arange(x.numel()) % len(DIRT)].view(x.shape)
    return torch.where(mask[(..., *(None,) * (x.dim() - mask.dim()))].bool(), x, dirt)


def embed(model, batch):
    """Return a batch with embeddings in place of tokens, and with NaN at padding."""
    embedded = dict(batch)
    for name in [name for name in batch if mask_name(name)]:
        if name.endswith("input_ids"):
            side = model.get_decoder() if name.startswith("decoder") else model
            new = name.replace("input_ids", "inputs_embeds")
            embedded[new] = side.get_input_embeddings()(embedded.pop(name))
        else:
            new = name
        if (mask := batch.get(mask_name(name))) is not None:
            embedded[new] = soil(embedded[new], mask)
    return embedded


def weigh(case, row):
    """Return the number of terms in the loss of a row."""
    labels = rows_of(case, row)[0].get("labels")
    if labels is None:
        return 1
    return int((labels[1:] if CASES[case][1] == "ForCausalLM" else labels).ne(-100).sum())


def run(model, inputs, kept, **options):
    """Return the loss, all gradients, and all results, of which those of tokens are `[kept tokens, ...]`."""
    model.zero_grad()
    if model.config.is_decoder or model.config.is_encoder_decoder:
        options["use_cache"] = False
    output = model(**inputs, **options)
    output.loss.backward()
    gradients = {name: x.grad.to("cpu", copy=True) for name, x in model.named_parameters() if x.grad is not None}
    results = {name: output[name].detach().cpu() for name in ("logits", "start_logits", "end_logits") if name in output}
    results = {name: x[kept] if x.shape[:2] == kept.shape else x for name, x in results.items()}
    return output.loss.detach().double().cpu(), gradients, results


def expected(case, **more):
    """Return the loss, all gradients and all results, computed from each row without padding."""
    model, terms = make(case, **more), sum(weigh(case, row) for row in range(len(LENGTHS)))
    total, gradients, results = 0.0, {}, {}
    for row, length in enumerate(LENGTHS):
        share, (inputs, others) = weigh(case, row) / terms, rows_of(case, row)
        batch = {name: value[None] for name, value in inputs.items()}
        batch |= {mask_name(name): torch.ones_like(batch[name]).long() for name in inputs if mask_name(name)}
        batch |= {name: torch.tensor([value]) for name, value in others.items()}
        loss, found, result = run(model, batch, torch.ones(1, length, dtype=torch.bool))
        if share:
            total = total + share * loss
            for name, gradient in found.items():
                gradients[name] = gradients.get(name, 0.0) + share * gradient
        for name, x in result.items():
            results.setdefault(name, []).append(x)
    return total, gradients, {name: torch.cat(parts) for name, parts in results.items()}


def check(case, found, scale=1.0, **more):
    """Check that results of a batch are those of its rows; losses, and so gradients, are computed in float32."""
    (loss, *found), (total, *wanted) = found, expected(case, **more)
    torch.testing.assert_close(loss, total, rtol=1e-6 * scale, atol=1e-6 * scale)
    for actual, reference, exact in zip(found, wanted, (1.0, 1e-2 if scale == 1 else 1.0), strict=True):
        assert actual.keys() == reference.keys()
        for name, x in reference.items():
            torch.testing.assert_close(
                actual[name].double(),
                x.double(),
                rtol=1e-5 * scale * exact,
                atol=1e-6 * scale * exact,
                msg=lambda text, name=name: f"{name}: {text}",
            )


def run_padded(case, layout, option):
    recorded = {"output_hidden_states": True, "output_attentions": True} if option == "recorded" else {}
    with pytest.MonkeyPatch.context() as patch:
        if option == "device":
            patch.setattr("luna_mega.modeling_common.layout.can_look", lambda mask: False)
        if option == "embeddings" and layout == "without a mask":
            layout = "gaps"
        model, (batch, kept) = make(case, option), collate(case, layout)
        return run(model, embed(model, batch) if option == "embeddings" else batch, kept, **recorded)


def run_packed(case, marker):
    batch = pack(case, marker)
    return run(make(case), batch, torch.ones_like(batch["input_ids"]).bool())


@pytest.mark.parametrize("case, layout, option", decoders.with_each(CASES, COLUMNS, OPTIONS, fast=FAST))
def test_padded(case, layout, option):
    check(case, run_padded(case, layout, option))


@pytest.mark.parametrize("case, marker", decoders.with_each(TOKENS, MARKERS, slow=1, fast=[*TOKENS][::3]))
def test_padding_free(case, marker):
    check(case, run_packed(case, marker))


@pytest.mark.parametrize("case, layout", slow_but(diagonal(KERNELS, COLUMNS)[:1], diagonal(KERNELS, COLUMNS)))
def test_triton(case, layout, triton_device):
    """Triton kernels compute in float32."""
    inputs, kept = collate(case, layout)
    model, inputs = (
        make(case, num_hidden_layers=1).float().to(triton_device),
        {name: x.to(triton_device) for name, x in inputs.items()},
    )
    with use_backend("triton"):
        found = run(model, inputs, kept)
    check(case, found, scale=1e3, num_hidden_layers=1)


@pytest.mark.parametrize("case, layout", diagonal(["mega adaptive", *decoders.DECODER_ONLY][::3], ["left", "gaps"]))
def test_no_gradient_flows_through_padding(case, layout):
    """Logits at padding, which label smoothing of Trainer counts, have no gradients in the layers."""
    model, (batch, kept) = make(case), collate(case, layout)
    del batch["labels"]
    model(**batch, use_cache=False).logits[~kept].square().sum().backward()
    assert not [
        name for name, x in model.named_parameters() if "layers." in name and x.grad is not None and x.grad.any()
    ]
