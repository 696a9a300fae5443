"""Models in float16 and bfloat16: training steps are finite; averages and statistics stay in float32."""

import math

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

import luna_mega
from luna_mega import MegaForMaskedLM
from luna_mega.modeling_common.layout import DENSE
from luna_mega.modeling_luna.modeling_luna import LunaModelOutput
from tests.marks import diagonal

from . import luna, mega, megalodon_decoders
from .decoders import a_third
from .luna import head_inputs, labels
from .mega import make

FAMILIES = {"luna": luna, "mega": mega}
VARIANTS = [(name, variant) for name, family in FAMILIES.items() for variant in family.VARIANTS]
HALF = (torch.bfloat16, torch.float16)


def training_step(model, head, inputs):
    """Run one step of SGD and check that everything is finite before and after it."""
    output = model.train()(**inputs, **labels(head, inputs))
    output[0].float().square().sum().backward()
    assert torch.isfinite(output[0]).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())
    assert torch.isfinite(model.eval()(**inputs)[0]).all()


@pytest.mark.parametrize("case, dtype", a_third(diagonal(VARIANTS, HALF)))
def test_autocast(case, dtype):
    """Losses with autocast are close to float32, with and without recorded attention weights."""
    inputs, family = head_inputs("ForMaskedLM", [21, 5]), FAMILIES[case[0]]
    model = family.make("ForMaskedLM", **family.VARIANTS[case[1]], **family.NO_DROPOUT).train()
    expected = model(**inputs, **labels("ForMaskedLM", inputs)).loss
    for options in ({}, {"output_attentions": True}):
        model.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = model(**inputs, **labels("ForMaskedLM", inputs), **options).loss
        loss.backward()
        torch.testing.assert_close(loss, expected, atol=0.0, rtol=0.01)
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    "weight, damping, dtype",
    [(-40.0, -40.0, torch.float32), (-40.0, 40.0, torch.float16), (40.0, -40.0, torch.float16), (40.0, 40.0, HALF[0])],
)
def test_saturated_logits(weight, damping, dtype):
    """A training step is finite for averages with decay 0, with decay 1, and with input weight 0."""
    model = make("ForMaskedLM")
    with torch.no_grad():
        for layer in model.mega.layers:
            layer.mega_layer.ema_gate.damping_factor.fill_(weight)
            layer.mega_layer.ema_gate.decay_factor.fill_(damping)
    training_step(model.to(dtype), "ForMaskedLM", head_inputs("ForMaskedLM", [48, 5]))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_slow_decay_is_exact_in_a_half_precision_model(tmp_path, dtype):
    """The average is loaded in float32, because q = 1 - 2^-12 would be 1 in bfloat16."""
    model = make("ForMaskedLM", num_hidden_layers=1).double()
    average = model.mega.layers[0].mega_layer.ema_gate
    with torch.no_grad():
        average.damping_factor.fill_(math.log(2.0**-6 / (1 - 2.0**-6)))
        average.decay_factor.fill_(math.log(2.0**-6 / (1 - 2.0**-6)))
        average.ema_expansion_matrix.abs_()
        average.kernel_projection_matrix.abs_()
    x = torch.rand(2, 4096, 24).to(dtype)
    expected = average(x.double(), DENSE)
    model.save_pretrained(tmp_path)
    loaded = MegaForMaskedLM.from_pretrained(tmp_path, dtype=dtype)
    average = loaded.mega.layers[0].mega_layer.ema_gate
    assert loaded.dtype == dtype and all(p.dtype == torch.float32 for p in average.parameters())
    actual = average(x, DENSE)
    assert actual.dtype == dtype
    assert ((actual.double() - expected).norm() / expected.norm()) < 0.01
    training_step(loaded, "ForMaskedLM", head_inputs("ForMaskedLM", [21, 5]))


@pytest.mark.parametrize("norm", ["batchnorm", "syncbatchnorm"])
def test_running_statistics_of_a_half_precision_model(tmp_path, norm):
    """Statistics are float32 in a loaded, converted or built half-precision model, and keep small differences."""
    model = make("ForMaskedLM", normalization_type=norm)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.add_(1e-6)
    model.save_pretrained(tmp_path)
    expected = dict(model.named_buffers())
    loaded = MegaForMaskedLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for half in (loaded, make("ForMaskedLM", normalization_type=norm).bfloat16()):
        assert {p.dtype for name, p in half.named_parameters() if "norm" in name} == {torch.bfloat16}
        assert {b.dtype for name, b in half.named_buffers() if "running" in name} == {torch.float32}
    torch.testing.assert_close(dict(loaded.named_buffers()), expected, atol=0.0, rtol=0.0)
    built = MegaForMaskedLM._from_config(model.config, dtype=torch.bfloat16)
    assert {b.dtype for name, b in built.named_buffers() if "running" in name} == {torch.float32}
    torch.testing.assert_close(dict(model.half().named_buffers()), expected, atol=0.0, rtol=0.0)


MODELS = {
    "luna": lambda: luna.make("Model"),
    "mega": lambda: mega.make("Model"),
    "mega batchnorm": lambda: mega.make("Model", normalization_type="batchnorm"),
    "megalodon": lambda: megalodon_decoders.make(dtype=torch.float32),
}


def dtypes(model):
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name, dtype", diagonal(MODELS, [torch.bfloat16, torch.float16, torch.float64]))
def test_constructed_and_loaded_models_have_the_same_dtypes(name, dtype, tmp_path):
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
    auto = AutoModelForCausalLM if name == "megalodon" else AutoModel
    for built in (type(model)._from_config(model.config, dtype=dtype), auto.from_config(model.config, dtype=dtype)):
        assert dtypes(built) == dtypes(loaded)
    exact = {key for key, value in dtypes(loaded).items() if "ema" in key.split(".")[-2]}
    assert bool(exact) is (name != "luna")
    assert {dtypes(loaded)[key] for key in exact} <= {torch.float64 if dtype == torch.float64 else torch.float32}


LENGTH, MEAN = 70_000, 12
DTYPES = [torch.float16, torch.bfloat16]
KEEP = torch.arange(LENGTH)[None] < LENGTH - 5_000  # the last positions are padding


def draw(*shape, dtype, seed=0):
    """Return numbers with a mean of 12 that `dtype` represents exactly."""
    return (MEAN + torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def assert_near(actual, expected, dtype, roundings=4):
    """Check that the error relative to a float64 result is at most a few roundings of `dtype`."""
    assert actual.isfinite().all()
    error = (actual.double() - expected).abs().max() / expected.abs().max()
    assert error < roundings * torch.finfo(dtype).eps


OF_HEADS = {
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


@pytest.mark.parametrize("name, dtype", diagonal(OF_HEADS, DTYPES))
@torch.no_grad()
def test_heads_and_losses(name, dtype):
    """Every head computes accurate results and losses from the states of 70,000 tokens."""
    model = OF_HEADS[name]().to(dtype)
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


SIZES = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8, "num_labels": 3}
LUNA = {"num_attention_heads": 2, "projection_length": 4, "position_embedding_type": "sinusoidal"}
LONG = {
    "Luna": LUNA,
    "Mega": {"shared_representation_size": 4, "ema_projection_size": 2, "nffn_hidden_size": 8, "chunk_size": 32,
             "use_chunking": True, "final_norm": True},
    "Megalodon": {"shared_representation_size": 4, "value_size": 4, "ema_projection_size": 2, "norm_num_groups": 2,
                  "chunk_size": 32},
}  # fmt: skip


@pytest.mark.parametrize("name, dtype", diagonal(LONG, DTYPES))
@torch.no_grad()
def test_models(name, dtype):
    """Complete models are accurate if their last norm returns a feature with a mean of 12."""
    family, inputs = name.split(",")[0], torch.randint(3, 20, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    config = getattr(luna_mega, f"{family}Config")(**SIZES, **LONG[name], pooling="mean")
    model = luna.enlarged(getattr(luna_mega, f"{family}ForSequenceClassification"), config)
    for key, parameter in model.named_parameters():
        if key.endswith(("final_layer_norm.bias", "final_norm.bias", "final_norm.norm.bias")):
            parameter[5] = MEAN
    logits = [model.to(each)(inputs, attention_mask=KEEP.long()).logits for each in (dtype, torch.float32)]
    assert_near(logits[0], logits[1].double(), dtype, roundings=16)
