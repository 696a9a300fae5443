"""FLOPs that `FlopCounterMode` counts for every operator, on every backend: the table of `kernels/_flops.py`."""

from functools import partial
from importlib import import_module

import pytest
import torch
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

from luna_mega.kernels.api import gated_attention, luna_pack, luna_unpack
from luna_mega.kernels.gated_attention import torch_backend
from tests.kernels.backends import on_native
from tests.kernels.calls import OPERATORS, Sizes

AVERAGES = ("damped_ema", "complex_ema", "diagonal_ssm", "diagonal_ssm real")


@pytest.fixture(autouse=True)
def triton_operators(triton_device):
    """Register the operators of Triton, because a `FlopCounterMode` only counts those that exist when it is made."""
    for op in ("gated_attention", "luna_attention", "luna_causal_attention", "recurrence", "timestep_norm"):
        import_module(f"luna_mega.kernels.{op}.triton_ops")


def count(run):
    """Return the FLOPs of the forward pass and of the backward pass, if outputs have gradients."""
    with FlopCounterMode(display=False) as forward:
        outputs = run()
    total = sum(x.sum() for x in outputs)
    with FlopCounterMode(display=False) as backward:
        if total.requires_grad:
            total.backward()
    return forward.get_total_flops(), backward.get_total_flops()


def flops_of(operator: str, s: Sizes, directions: int = 1, chunk: int | None = None, **_) -> tuple[int, int]:
    """Return the FLOPs of the forward pass, and those that the backward pass recomputes."""
    tokens, length, name = s.batch * s.length, s.length, operator.removesuffix("_step")
    if name.startswith("luna_causal"):
        return 10 * tokens * s.heads * s.rows * s.size, 8 * tokens * s.heads * s.rows * s.size
    if name.startswith("luna"):
        pairs = tokens * s.rows * s.heads * s.size * (2 if name == "luna_attention" else 1)
        return 4 * pairs, 2 * pairs
    if name.startswith("gated"):
        chunk = chunk or length
        pairs = s.batch * (length // chunk * chunk**2 + (length % chunk) ** 2)
        return 2 * pairs * (s.size + s.width), 2 * pairs * s.size
    if name in AVERAGES:  # real numbers, or complex ones
        states, real = tokens * directions * s.channels * s.states, "damped" in name or "real" in name
        return (6 * states, 4 * states) if real else (14 * states, 10 * states)
    return 0, 0


CALLS = [(name, {}) for name in OPERATORS if "other keys" not in name and "_step" not in name]
CALLS += [(name, {"directions": 2}) for name in ("damped_ema", "diagonal_ssm", "diagonal_ssm real")]
CALLS += [("gated_attention", {"chunk": chunk}) for chunk in (8, 64)]
LENGTHS = 20, 700  # with an FFT, and with chunks of which the last one is short


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("backend", "device", "operator", "options"),
    [(*backend, *call) for backend in (("torch", "cpu"), ("triton", "meta")) for call in CALLS]
    + [on_native("cpu", *call) for call in CALLS if call[0] in AVERAGES],
)
def test_operators(backend, device, operator, options, length, monkeypatch):
    """The backward pass counts two products for each of the forward pass, and again those that it recomputes."""
    monkeypatch.setattr(torch_backend, "KEPT", 0.0)  # scores are not stored
    sizes = Sizes(2, length, 3, 8, 5, 4, 4, 2, 24)
    call = OPERATORS[operator].make(sizes, **options)
    leaves = {key: x.float().to(device).requires_grad_() for key, x in call.leaves.items()}
    forward, recomputed = flops_of(operator, sizes, **options)
    assert count(lambda: call.run(**leaves, backend=backend)) == (forward, 2 * forward + recomputed)


def test_varlen_calls_count_their_tokens(triton_device):
    few, tokens = torch.rand(3, 5, 2, 8, device="meta"), torch.rand(1, 20, 2, 8, device="meta")
    bounds = {"cu_seqlens": torch.zeros(4, dtype=torch.int32, device="meta"), "max_seqlen": 10, "backend": "triton"}
    for run in (lambda: luna_unpack(tokens, few, few, **bounds), lambda: luna_pack(few, tokens, tokens, **bounds)):
        assert count(lambda run=run: [run()])[0] == 4 * 20 * 5 * 2 * 8
    query, value = torch.rand(1, 20, 8, device=triton_device), torch.rand(1, 20, 24, device=triton_device)
    lengths = torch.tensor([0, 5, 5, 18, 20], device=triton_device, dtype=torch.int32)
    options = {"function": "laplace", "chunk_size": 8, "max_seqlen": 13, "backend": "triton"}
    for device, pairs in ((triton_device, 5**2 + 8**2 + 5**2 + 2**2), ("meta", 20 * 8)):  # all chunks are complete
        tensors = [x.to(device) for x in (query, query, value)]
        run = partial(gated_attention, *tensors, cu_seqlens=lengths.to(device), **options)
        assert count(lambda run=run: [run()])[0] == 2 * pairs * (8 + 24)


def test_every_operator_has_a_formula():
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("luna_mega::")}
    operators = {getattr(torch.ops.luna_mega, name.removeprefix("luna_mega::")) for name in names}
    assert len(operators) > 20
    assert not operators - flop_counter.flop_registry.keys()
