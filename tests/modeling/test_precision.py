"""Models in float16 and bfloat16: training steps are finite; averages and statistics stay in float32."""

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from luna_mega.modeling_luna.modeling_luna import LunaModelOutput
from tests.marks import diagonal
from tests.modeling import luna, mega
from tests.modeling.contract import CLASSES, MEMBERS, Batch, collate

HALF = (torch.bfloat16, torch.float16)
VARIANTS = ["luna tied", "luna pre-norm", "mega laplace chunks", "mega batchnorm, norms around", "luna decoder"]
VARIANTS += ["megalodon decoder"]


@pytest.mark.parametrize("name, dtype", diagonal(VARIANTS, HALF))
def test_autocast(name, dtype):
    """Losses with autocast are close to float32, with and without recorded attention weights."""
    member = MEMBERS[name]
    model = member.make(torch.float32).train()
    for module in model.modules():
        module.train(module.training and not isinstance(module, torch.nn.Dropout))
    inputs, _ = collate(member, Batch("right", (21, 5)))
    expected = model(**inputs).loss
    for options in ({}, {"output_attentions": True, "use_cache": False} if "coder" in name else {}):
        model.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = model(**inputs, **options).loss
        loss.backward()
        torch.testing.assert_close(loss, expected, atol=0.0, rtol=0.02)
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


SAVED = {
    "luna": ("luna Model", {}),
    "batchnorm": ("mega ForMaskedLM", {"normalization_type": "batchnorm"}),
    "syncbatchnorm": ("mega Model", {"normalization_type": "syncbatchnorm"}),
    "megalodon": ("megalodon decoder", {}),
}


def dtypes(model):
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name, dtype", diagonal(SAVED, [torch.bfloat16, torch.float16, torch.float64]))
def test_constructed_and_loaded_models_have_the_same_dtypes(name, dtype, tmp_path):
    """Averages are loaded in float32: a decay of 1 - 2^-12 would be 1. So are running statistics, also converted."""
    key, fields = SAVED[name]
    model = CLASSES[key].make(torch.float32, **fields)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.add_(1e-6)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
    built = [type(model)._from_config(model.config, dtype=dtype)]
    if key.endswith(("Model", "decoder")):
        auto = AutoModelForCausalLM if key.endswith("decoder") else AutoModel
        built.append(auto.from_config(model.config, dtype=dtype))
    assert all(dtypes(other) == dtypes(loaded) for other in built)
    wide = torch.promote_types(dtype, torch.float32)
    exact = {key for key in dtypes(loaded) if "ema" in key.split(".")[-2]}
    assert bool(exact) is (name != "luna") and {dtypes(loaded)[key] for key in exact} <= {wide}
    for half in (loaded, model.to(dtype)):
        for key, buffer in half.named_buffers():
            if "running" in key:
                assert buffer.dtype == wide
                torch.testing.assert_close(buffer, dict(loaded.named_buffers())[key], atol=0.0, rtol=0.0)
    assert {p.dtype for key, p in loaded.named_parameters() if "norm" in key} == {dtype}


LENGTH, MEAN = 70_000, 12
KEEP = torch.arange(LENGTH)[None] < LENGTH - 5_000  # the last positions are padding


def assert_near(actual, expected, dtype):
    """Check that the error relative to a float64 result is at most a few roundings of `dtype`."""
    assert actual.isfinite().all()
    error = (actual.double() - expected).abs().max() / expected.abs().max()
    assert error < 16 * torch.finfo(dtype).eps


POOLED = "ForSequenceClassification"
HEADS = {  # family, class, fields and labels of heads
    **{f"luna {pooling}": ("luna", POOLED, {"pooling": pooling}, {"labels": torch.tensor([0])})
       for pooling in ("mean", "packed_mean", "packed_attention")},
    "luna tokens": ("luna", "ForTokenClassification", {}, {"labels": torch.arange(LENGTH)[None] % 3}),
    "mega masked LM": ("mega", "ForMaskedLM", {}, {"labels": torch.arange(LENGTH)[None] % 3}),
    "luna answers": (
        "luna", "ForQuestionAnswering", {},
        {"start_positions": torch.tensor([40_000]), "end_positions": torch.tensor([60_000])},
    ),
    # The square of the label overflows in float16.
    "mega regression": ("mega", POOLED, {"pooling": "mean", "num_labels": 1}, {"labels": torch.tensor([-300.0])}),
}  # fmt: skip


@pytest.mark.parametrize("name, dtype", diagonal(HEADS, HALF))
@torch.no_grad()
def test_heads_and_losses(name, dtype):
    """Every head computes accurate results and losses from states of 70,000 tokens with a mean of 12."""
    family, head, fields, labels = HEADS[name]
    model, outputs = {"luna": luna, "mega": mega}[family].make(head, **fields).to(dtype), []
    inputs = {"input_ids": torch.full((1, LENGTH), 5), "attention_mask": KEEP.long()}
    generator = torch.Generator().manual_seed(0)
    given = [(MEAN + torch.randn(1, LENGTH, 24, generator=generator)).to(dtype) for _ in range(2)]
    for each in (dtype, torch.float64):
        states, packed = (x.to(each) for x in given)
        masks = {"packed_mask": KEEP.long(), "attention_mask": KEEP.long()}
        body = LunaModelOutput(states, packed_last_hidden_state=packed, **masks)
        model.base_model.forward = lambda body=body, **inputs: body
        labels = {key: x.to(each) if x.is_floating_point() else x for key, x in labels.items()}
        outputs.append(model.to(each)(**inputs, **labels))
    assert_near(outputs[0].loss, outputs[1].loss.double(), dtype)
    for field in ("logits", "start_logits", "end_logits"):
        if (expected := getattr(outputs[1], field, None)) is not None:
            kept = KEEP if expected.shape[:2] == KEEP.shape else slice(None)
            assert_near(getattr(outputs[0], field)[kept], expected[kept], dtype)
