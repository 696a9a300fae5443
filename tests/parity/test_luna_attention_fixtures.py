"""`LunaAttention` against the original `LunarMultiheadAttention`: outputs, packed context, weights, all gradients."""

import pytest

from luna_mega import LunaConfig
from luna_mega.convert.formats._luna import ATTENTION
from luna_mega.kernels.api import use_backend
from luna_mega.modeling_common.layout import PaddedLayout
from luna_mega.modeling_luna.modeling_luna import LunaAttention
from tests.parity.original import originals

CASES = ["self_tied", "self_untied_pheads2", "cross_tied_pheads2", "cross_untied"]


cases = originals("luna", [f"raw_mha_{case}" for case in CASES])


@pytest.mark.parametrize("output_weights", [False, True], ids=["fused", "weights"])
@cases
def test_raw_module(original, parity, output_weights):
    io, attention = original.io, _attention(original)
    batches = sorted({name.split(".")[0] for name in io if name.startswith("n")})
    assert batches
    for batch in batches:
        for masking in ("masked", "nomask"):
            _compare(parity, attention, io, batch, masking, output_weights)


@pytest.mark.slow
@cases
def test_raw_module_by_kernels(original, parity, triton_device):
    if triton_device.type == "cuda":
        pytest.skip("the fixtures are compared on the CPU, by interpreted kernels")
    with use_backend("triton"):
        test_raw_module(original, parity, output_weights=False)


def _attention(original):
    meta = original.meta
    config = LunaConfig(
        hidden_size=meta["embed_dim"],
        num_attention_heads=meta["num_heads"],
        num_pack_attention_heads=meta["num_pheads"],
        tie_key_value=meta["tie_kv"],
        attention_dropout=0.0,
    )
    attention = LunaAttention(config)
    attention.load_state_dict({_ours(name): value for name, value in original.starting_with("weights.").items()})
    return attention


def _ours(name):
    module, kind = name.split(".")
    return f"{ATTENTION[module]}.{kind}"


def _compare(parity, attention, io, batch, masking, output_weights):
    prefix = f"{batch}.{masking}"
    inputs = {  # the fixtures are time-major
        name: io[f"{batch}.{name}"].transpose(0, 1).clone().requires_grad_()
        for name in ("query", "pquery", "context")
        if f"{batch}.{name}" in io
    }
    context_mask = packed_mask = None
    if masking == "masked":
        context_mask, packed_mask = (io[f"{batch}.{name}"] == 0 for name in ("context_mask", "pmask"))
    layout, options = (
        PaddedLayout(context_mask),
        {"output_weights": output_weights, "encoder_hidden_states": inputs.get("context")},
    )
    output, packed, weights, _ = attention(inputs["query"], inputs["pquery"], layout, packed_mask, **options)
    parity.check(f"{prefix}.out", output.transpose(0, 1), io[f"{prefix}.out"])
    parity.check(f"{prefix}.pout", packed.transpose(0, 1), io[f"{prefix}.pout"])
    if output_weights:
        parity.check(f"{prefix}.attn", weights.transpose(0, 1), io[f"{prefix}.attn"])
    else:
        assert weights is None
    objective = (output.transpose(0, 1) * io[f"{batch}.w"]).sum() + (packed.transpose(0, 1) * io[f"{batch}.wp"]).sum()
    attention.zero_grad()
    objective.backward()
    # Sums over up to 65 x 3 positions with magnitudes of 10 to 100; see the README of the fixtures.
    loose = {"atol": 2e-4, "rtol": 1e-3}
    expected = {name.removeprefix(f"{prefix}.grad."): io[name] for name in io if name.startswith(f"{prefix}.grad.")}
    gradients = {name: inputs[name].grad.transpose(0, 1) for name in inputs}
    parameters = dict(attention.named_parameters())
    for name, value in expected.items():
        actual = gradients[name] if name in gradients else parameters[_ours(name)].grad
        parity.check(f"{prefix}.grad.{name}", actual, value, **loose)
    assert len(expected) == len(gradients) + len(parameters)
