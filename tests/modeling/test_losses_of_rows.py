"""Losses and gradients of every class: a batch with padding equals its rows without padding."""

import pytest
import torch

from luna_mega.kernels.api import use_backend
from tests.marks import diagonal

from . import luna, luna_decoders, mega, mega_decoders, megalodon_decoders

LENGTHS, TOTAL = [9, 4, 1], 12
COLUMNS = {
    "right": lambda length: torch.arange(length),
    "left": lambda length: torch.arange(TOTAL - length, TOTAL),
    "gaps": lambda length: torch.randperm(TOTAL, generator=torch.Generator().manual_seed(length))[:length].sort()[0],
}
CHUNKS = {"use_chunking": True, "chunk_size": 4}
ADAPTIVE = {"adaptive_input_cutoffs": [8, 20], "adaptive_softmax_cutoffs": [8, 20], "adaptive_input_factor": 2}
ADAPTIVE |= {"adaptive_softmax_factor": 2}
FEATURES = {"pair_features": "interaction"}
BATCH_NORM = mega.VARIANTS["batchnorm, norms around"]
ENCODER_HEADS = [name for name in luna.HEADS if name != "Model"]
CASES = {f"luna {head}": (luna, head, {}) for head in ENCODER_HEADS}
CASES |= {f"mega {head}": (mega, head, {}) for head in ENCODER_HEADS}
CASES |= {f"luna {pooling}": (luna, "ForSequenceClassification", {"pooling": pooling}) for pooling in luna.POOLINGS}
CASES |= {
    "luna sparse": (luna, "ForMaskedLM", {"sparse_prediction": True}),
    "luna values": (luna, "ForTokenClassification", luna.VALUES),
    "mega chunks": (mega, "ForTokenClassification", CHUNKS),
    "luna values, mean": (luna, "ForSequenceClassification", luna.VALUES | {"pooling": "mean"}),
    "mega values, mean": (mega, "ForSequenceClassification", mega.VALUES),
    "mega values, chunks": (mega, "ForTokenClassification", mega.VALUES | mega.VARIANTS["laplace chunks"]),
    "mega values, batch norm": (mega, "ForSequenceClassification", mega.VALUES | BATCH_NORM),
    "mega pairs, mean": (mega, "ForSequencePairClassification", CHUNKS | {"pooling": "mean", **FEATURES}),
    "luna ForCausalLM": (luna_decoders, "ForCausalLM", {}),
    "luna ForCausalLM, pre-norm": (luna_decoders, "ForCausalLM", luna_decoders.DECODER_ONLY["pre-norm"]),
    "luna ForConditionalGeneration": (luna_decoders, "ForConditionalGeneration", {"is_encoder_decoder": True}),
    "mega ForCausalLM": (mega_decoders, "ForCausalLM", {}),
    "mega ForCausalLM, chunks": (mega_decoders, "ForCausalLM", CHUNKS),
    "mega ForCausalLM, adaptive": (mega_decoders, "ForCausalLM", ADAPTIVE),
    "mega ForConditionalGeneration": (mega_decoders, "ForConditionalGeneration", {"is_encoder_decoder": True}),
    "megalodon ForCausalLM": (megalodon_decoders, "ForCausalLM", {}),
    "megalodon mean": (megalodon_decoders, "ForSequenceClassification", {"num_labels": 3, "pooling": "mean"}),
    "megalodon last": (megalodon_decoders, "ForSequenceClassification", {"num_labels": 3, "pooling": "last"}),
}
# "device": masks whose values are expensive to read, as on a GPU.
OPTIONS = ["dense", "device", "unpadded", "eager", "triton"]


def make(case, option):
    family, head, fields = CASES[case]
    if family in (luna, mega):
        model = family.make(head, **fields).double()
    elif family is megalodon_decoders:
        model = family.make(head, **fields)
    else:
        model = family.make(**fields)
    model.config.unpad_inputs = option == "unpadded" and not model.config.is_encoder_decoder
    if option == "eager":
        model.set_attn_implementation("eager")
    return model.float() if option == "triton" else model


def draw(kind, row, length):
    """Return an input of a row: token ids, values, or labels, some of which are ignored."""
    generator = torch.Generator().manual_seed(10 * row + len(kind))
    if kind == "input_values":
        return torch.randn(length, generator=generator, dtype=torch.float64)
    if kind.endswith("input_ids"):
        return torch.randint(4, 30, (length,), generator=generator)
    return torch.randint(0, 3, (length,), generator=generator).masked_fill(torch.arange(length) == 2, -100)


def rows_of(case, row):
    """Return the inputs of a row without padding as two dicts: those with an entry per position, and the others."""
    _, head, fields = CASES[case]
    length = LENGTHS[row]
    names = ["input_values" if fields.get("input_type") == "values" else "input_ids"]
    names += {
        "ForConditionalGeneration": ["decoder_input_ids"],
        "ForSequencePairClassification": ["pair_input_ids"],
    }.get(head, [])
    inputs = {name: draw(name, row, length) for name in names}
    if head == "ForMultipleChoice":
        inputs["input_ids"] = torch.stack([inputs["input_ids"], inputs["input_ids"].flip(0) + 3])
    if head in ("ForMaskedLM", "ForTokenClassification", "ForCausalLM", "ForConditionalGeneration"):
        return inputs | {"labels": draw("labels", row, length)}, {}
    if head == "ForQuestionAnswering":
        return inputs, {"start_positions": 0, "end_positions": length - 1}
    return inputs, {"labels": row % 2}


def collate(case, columns):
    """Return the batch in which `columns(length)` selects the places of a row; all other entries are arbitrary."""
    batch, rows = {}, range(len(LENGTHS))
    places = [columns(LENGTHS[row]) for row in rows]
    for name in rows_of(case, rows[0])[0]:
        values = []
        for row, place in zip(rows, places, strict=True):
            value = rows_of(case, row)[0][name]
            filled = draw(name.replace("labels", "input_ids"), 7 + row, TOTAL).expand(*value.shape[:-1], TOTAL)
            values.append(filled.clone().index_copy(-1, place, value))
        batch[name] = torch.stack(values)
        if name != "labels":
            mask = torch.zeros(len(rows), TOTAL, dtype=torch.long)
            for row, place in enumerate(places):
                mask[row, place] = 1
            prefix = name.removesuffix("input_ids").removesuffix("input_values")
            batch[f"{prefix}attention_mask"] = (
                mask[:, None].expand(batch[name].shape) if batch[name].dim() == 3 else mask
            )
    for name in rows_of(case, rows[0])[1]:
        batch[name] = torch.tensor([rows_of(case, row)[1][name] for row in rows])
        if name.endswith("positions"):
            batch[name] = torch.stack([place[i] for place, i in zip(places, batch[name], strict=True)])
    return batch


def options(model):
    return {"use_cache": False} if model.config.is_decoder or model.config.is_encoder_decoder else {}


def weigh(case, row):
    """Return the number of terms in the loss of a row."""
    labels = rows_of(case, row)[0].get("labels")
    if labels is None:
        return 1
    return int((labels[1:] if CASES[case][1] == "ForCausalLM" else labels).ne(-100).sum())


def run(model, inputs):
    """Return the loss and all gradients."""
    model.zero_grad()
    loss = model(**inputs, **options(model)).loss
    loss.backward()
    gradients = {name: x.grad.to("cpu", copy=True) for name, x in model.named_parameters() if x.grad is not None}
    return loss.detach().double().cpu(), gradients


def expected(model, case):
    """Return the loss and all gradients, computed from each row without padding."""
    total, gradients, terms = 0.0, {}, sum(weigh(case, row) for row in range(len(LENGTHS)))
    for row in range(len(LENGTHS)):
        share = weigh(case, row) / terms
        if not share:
            continue
        inputs, others = rows_of(case, row)
        batch = {name: value[None] for name, value in inputs.items()}
        for name in [name for name in batch if name != "labels"]:
            prefix = name.removesuffix("input_ids").removesuffix("input_values")
            batch[f"{prefix}attention_mask"] = torch.ones_like(batch[name], dtype=torch.long)
        loss, found = run(model, batch | {name: torch.tensor([value]) for name, value in others.items()})
        total = total + share * loss
        for name, gradient in found.items():
            gradients[name] = gradients.get(name, 0.0) + share * gradient
    return total, gradients


@pytest.mark.covering(1)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("layout", COLUMNS)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_the_rows(case, layout, option, request, monkeypatch):
    """A batch has the loss and gradients of its rows, whatever inputs and labels are at padding."""
    total, gradients = expected(make(case, "dense"), case)
    device = request.getfixturevalue("triton_device") if option == "triton" else torch.device("cpu")
    model = make(case, option).to(device)
    batch = {name: x.to(device) for name, x in collate(case, COLUMNS[layout]).items()}
    if option == "device":
        monkeypatch.setattr("luna_mega.modeling_common.layout.can_look", lambda mask: False)
    with use_backend("triton" if option == "triton" else "auto"):
        loss, found = run(model, batch)
    scale = 1e3 if option == "triton" else 1.0  # Triton kernels compute in float32
    torch.testing.assert_close(loss, total, rtol=1e-6 * scale, atol=1e-6 * scale)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            found[name].double(),
            gradient.double(),
            rtol=1e-5 * scale,
            atol=1e-6 * scale,
            msg=lambda text, n=name: f"{n}: {text}",
        )


@pytest.mark.parametrize(
    "case, layout", diagonal([case for case in CASES if CASES[case][1] == "ForCausalLM"], ["left", "gaps"])
)
def test_no_gradient_flows_through_padding(case, layout):
    """Logits at padding, which label smoothing of Trainer counts, have no gradients in the layers."""
    model, batch = make(case, "dense"), collate(case, COLUMNS[layout])
    del batch["labels"]
    logits = model(**batch, **options(model)).logits
    logits[batch["attention_mask"] == 0].square().sum().backward()
    assert not [
        name for name, x in model.named_parameters() if "layers." in name and x.grad is not None and x.grad.any()
    ]
