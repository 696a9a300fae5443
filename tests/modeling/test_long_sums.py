"""Sums over 70,000 numbers with a mean of 12, which half precision cannot represent, are accurate."""

import pytest
import torch

import luna_mega
from luna_mega.modeling_common.pooled_heads import masked_mean
from luna_mega.modeling_luna.modeling_luna import LunaModelOutput
from luna_mega.modeling_mega.batch_norm_mega import MegaBatchNorm
from tests.marks import diagonal

from . import luna, mega, megalodon_decoders

LENGTH, MEAN = 70_000, 12
DTYPES = [torch.float16, torch.bfloat16]
KEEP = torch.arange(LENGTH)[None] < LENGTH - 5_000  # the last positions are padding
MASKS = {"no mask": None, "all": torch.ones_like(KEEP), "padded": KEEP}


def draw(*shape, dtype, seed=0):
    """Return numbers with a mean of 12 that `dtype` represents exactly."""
    return (MEAN + torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def assert_near(actual, expected, dtype, roundings=4):
    """Check that the error relative to a float64 result is at most a few roundings of `dtype`."""
    assert actual.isfinite().all()
    error = (actual.double() - expected).abs().max() / expected.abs().max()
    assert error < roundings * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
def test_mean(mask, dtype):
    states, mask = draw(1, LENGTH, 4, dtype=dtype), MASKS[mask]
    result = masked_mean(states, mask)
    assert result.dtype == dtype
    assert_near(result, (states if mask is None else states[:, mask[0]]).double().mean(1), dtype)
    states.requires_grad_(True)
    masked_mean(states, mask).sum().backward()
    kept = LENGTH if mask is None else int(mask.sum())
    assert states.grad[0, 0, 0].item() == pytest.approx(1 / kept, rel=0.01)


HEADS = {
    **{f"luna {pooling}": lambda pooling=pooling: luna.make("ForSequenceClassification", pooling=pooling)
       for pooling in ("mean", "packed_mean", "packed_attention")},
    "luna pairs": lambda: luna.make("ForSequencePairClassification", pooling="mean"),
    "luna choices": lambda: luna.make("ForMultipleChoice", pooling="mean"),
    "luna tokens": lambda: luna.make("ForTokenClassification"),
    "luna masked LM": lambda: luna.make("ForMaskedLM"),
    "luna answers": lambda: luna.make("ForQuestionAnswering"),
    "luna regression": lambda: luna.make("ForSequenceClassification", pooling="mean", num_labels=1),
    "mega mean": lambda: mega.make("ForSequenceClassification", pooling="mean"),
    "mega pairs": lambda: mega.make("ForSequencePairClassification", pooling="mean"),
    "mega masked LM": lambda: mega.make("ForMaskedLM"),
    "megalodon mean": lambda: megalodon_decoders.make(
        "ForSequenceClassification", hidden_size=24, pooling="mean", num_labels=3
    ),
}  # fmt: skip


@pytest.mark.parametrize("name, dtype", diagonal(HEADS, DTYPES))
@torch.no_grad()
def test_heads_and_losses(name, dtype):
    """Every head computes accurate results and losses from the states of 70,000 tokens."""
    model = HEADS[name]().to(dtype)
    ids = torch.full((1, LENGTH), 5)
    inputs = {"input_ids": ids, "attention_mask": KEEP.long()}
    labels = {"labels": torch.tensor([0])}
    if "pairs" in name:
        inputs |= {f"pair_{key}": value for key, value in inputs.items()}
    elif "choices" in name:
        inputs = {key: value[:, None].expand(1, 2, LENGTH) for key, value in inputs.items()}
    elif "tokens" in name or "LM" in name:
        labels = {"labels": torch.arange(LENGTH)[None] % 3}
    elif "answers" in name:
        labels = {"start_positions": torch.tensor([40_000]), "end_positions": torch.tensor([60_000])}
    elif "regression" in name:
        labels = {"labels": torch.tensor([-300.0], dtype=dtype)}  # its square overflows in float16
    outputs, rows = [], 1 + ("choices" in name)
    given = [draw(rows, LENGTH, 24, dtype=dtype, seed=seed) for seed in (1, 2)]
    for each in (dtype, torch.float64):
        states, packed = (x.to(each) for x in given)
        body = LunaModelOutput(states, packed_last_hidden_state=packed, packed_mask=KEEP.long().expand(rows, LENGTH))
        model.base_model.forward = lambda body=body, **inputs: body
        outputs.append(model.to(each)(**inputs, **labels))
    assert_near(outputs[0].loss, outputs[1].loss.double(), dtype, roundings=16)
    for field in ("logits", "start_logits", "end_logits"):
        if (expected := getattr(outputs[1], field, None)) is not None:
            kept = KEEP if expected.shape[:2] == KEEP.shape else slice(None)
            assert_near(getattr(outputs[0], field)[kept], expected[kept], dtype, roundings=16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
def test_statistics_of_batch_norm(mask, dtype):
    states, mask = draw(1, LENGTH, 4, dtype=dtype), MASKS[mask]
    results = []
    for x in (states, states.double()):
        norm = MegaBatchNorm(4, 1e-5, affine=False, padded_statistics=False).to(x.dtype).train()
        results.append((norm(x, mask), norm))
    (normed, norm), (expected, reference) = results
    assert_near(normed, expected, dtype)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(norm, name).double(), getattr(reference, name), rtol=1e-4, atol=1e-5)


SIZES = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8, "num_labels": 3}
LUNA = {"num_attention_heads": 2, "projection_length": 4, "position_embedding_type": "sinusoidal"}
MODELS = {
    "Luna": LUNA,
    "Mega": {"shared_representation_size": 4, "ema_projection_size": 2, "nffn_hidden_size": 8, "chunk_size": 32,
             "use_chunking": True, "final_norm": True},
    "Megalodon": {"shared_representation_size": 4, "value_size": 4, "ema_projection_size": 2, "norm_num_groups": 2,
                  "chunk_size": 32},
}  # fmt: skip


@pytest.mark.parametrize("name, dtype", diagonal(MODELS, DTYPES))
@torch.no_grad()
def test_models(name, dtype):
    """Complete models are accurate if their last norm returns a feature with a mean of 12."""
    family, inputs = name.split(",")[0], torch.randint(3, 20, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    config = getattr(luna_mega, f"{family}Config")(**SIZES, **MODELS[name], pooling="mean")
    model = luna.enlarged(getattr(luna_mega, f"{family}ForSequenceClassification"), config)
    for key, parameter in model.named_parameters():
        if key.endswith(("final_layer_norm.bias", "final_norm.bias", "final_norm.norm.bias")):
            parameter[5] = MEAN
    logits = [model.to(each)(inputs, attention_mask=KEEP.long()).logits for each in (dtype, torch.float32)]
    assert_near(logits[0], logits[1].double(), dtype, roundings=16)
