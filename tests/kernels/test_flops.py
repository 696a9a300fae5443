"""FLOPs that `FlopCounterMode` counts for every operator, compared with those of the reference."""

import pytest
import torch
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

from luna_mega import (
    LunaConfig,
    LunaForCausalLM,
    LunaModel,
    MegaConfig,
    MegalodonConfig,
    MegalodonForCausalLM,
    MegaModel,
)
from luna_mega.kernels.api import gated_attention, luna_unpack, timestep_norm, use_backend
from luna_mega.kernels.gated_attention import reference as gated_reference, torch_backend as gated_backend
from luna_mega.kernels.luna_attention import reference as luna_reference
from luna_mega.kernels.luna_causal_attention import reference as causal_reference, torch_backend as causal_backend
from tests.kernels.backends import on_native
from tests.kernels.calls import OPERATORS, Sizes


def count(run, *leaves):
    """Return the FLOPs of the forward pass and of the backward pass."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    with FlopCounterMode(display=False) as forward:
        output = run(*leaves)
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def draw(*shapes, device="cpu"):
    return [torch.rand(shape, device=device) for shape in shapes]


@pytest.fixture
def triton_operators(triton_device):
    """Return the modules of the Triton operators, whose FLOPs are counted on the meta device without a launch."""
    from luna_mega.kernels.gated_attention import triton_ops as gated
    from luna_mega.kernels.luna_attention import triton_ops as luna
    from luna_mega.kernels.luna_causal_attention import triton_ops as causal
    from luna_mega.kernels.moving_average import triton_ops as averages
    from luna_mega.kernels.timestep_norm import triton_ops as norms

    return {"gated": gated, "luna": luna, "causal": causal, "averages": averages, "norms": norms}


def test_every_operator_has_a_formula(triton_operators):
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("luna_mega::")}
    operators = {getattr(torch.ops.luna_mega, name.removeprefix("luna_mega::")) for name in names}
    assert len(operators) > 20
    assert not operators - flop_counter.flop_registry.keys()


@pytest.mark.parametrize("queries, keys", [(5, 7), (64, 2), (33, 100)])
def test_luna_attention_counts_as_sdpa(queries, keys, triton_operators):
    shapes = (2, queries, 3, 8), (2, keys, 3, 8), (2, keys, 3, 8)
    expected, gradients = count(lambda *x: luna_reference.attend(*x, None, 0.5)[0], *draw(*shapes))
    scores = expected // 2
    heads_first = [(batch, heads, length, size) for batch, length, heads, size in shapes]
    assert flop_counter.sdpa_flop_count(*heads_first) == expected
    assert flop_counter.sdpa_backward_flop_count(heads_first[0], *heads_first) == gradients + scores
    on_meta = draw(*shapes, device="meta")
    for run, leaves in (
        (lambda *x: luna_unpack(*x, backend="torch"), draw(*shapes)),
        (lambda *x: torch.ops.luna_mega.attend(*x, None, 0.5)[0], draw(*shapes)),
        (lambda *x: triton_operators["luna"].attend(*x, None, 0.5, 0.0), on_meta),
    ):
        assert count(run, *leaves) == (expected, gradients + scores)


def test_varlen_luna_attention_counts_tokens_once(triton_operators):
    few, tokens = draw((3, 5, 2, 8), (1, 20, 2, 8), device="meta")
    lengths = torch.zeros(4, dtype=torch.int32, device="meta")
    for side, call in (("query", (tokens, few, few)), ("key", (few, tokens, tokens))):
        with FlopCounterMode(display=False) as counter:
            triton_operators["luna"].attend(*call, None, 0.5, 0.0, lengths, side, 10)
        assert counter.get_total_flops() == 4 * 20 * 5 * 2 * 8


@pytest.mark.parametrize("length, rows", [(17, 3), (64, 16), (100, 5)])
def test_causal_luna_attention(length, rows, triton_operators):
    size, value_size = 8, 12
    shapes = [(2, length, 3, size), (2, rows, 3, size), *[(2, length, 3, size)] * 2, (2, length, 3, value_size)]
    options = (None, None, "softplus", None, 0.0)

    def reference(*x):
        return causal_reference.attend(*x, *options)[0]

    expected, gradients = count(reference, *draw(*shapes))
    # In the reference, sums are not matrix products. Their outer products are counted once, the gradients twice.
    sums = 2 * length * 2 * 3 * rows * (size + value_size)
    expected, gradients = expected + sums, gradients + 2 * sums
    recomputed = expected - 2 * length * 2 * 3 * rows * value_size
    on_meta = draw(*shapes, device="meta")
    for attend, leaves in ((causal_backend.attend, draw(*shapes)), (triton_operators["causal"].attend, on_meta)):
        found = count(lambda *x, attend=attend: attend(*x, *options)[0], *leaves)
        assert found == (expected, gradients + recomputed)
    one = [x if index == 1 else x[:, 0] for index, x in enumerate(on_meta)]
    step = count(lambda *x: triton_operators["causal"].step(*x, *options)[0], *one)
    assert [number * length for number in step] == [expected, gradients + recomputed]


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("length, chunk", [(5, 8), (24, 8), (20, 8), (20, None)])
def test_gated_attention(length, chunk, stored, triton_operators, monkeypatch):
    monkeypatch.setattr(gated_backend, "KEPT", 1.0 if stored else 0.0)
    shapes = (2, length, 8), (2, length, 8), (2, length, 24)
    parts = [(first, min(first + (chunk or length), length)) for first in range(0, length, chunk or length)]

    def reference(*tokens):
        chunks = ((x[:, first:stop] for x in tokens) for first, stop in parts)
        return sum(gated_reference.attend(*x, None, None, "laplace", False)[0].sum() for x in chunks)

    expected, gradients = count(reference, *draw(*shapes))
    scores = expected * 8 // (8 + 24)
    options = {"function": "laplace", "chunk_size": chunk, "backend": "torch"}
    found = count(lambda *x: gated_attention(*x, **options), *draw(*shapes))
    assert found == (expected, gradients + (0 if stored else scores))
    call = (None, None, "laplace", False, chunk, 0, 0.0)
    found = count(lambda *x: triton_operators["gated"].attend(*x, *call), *draw(*shapes, device="meta"))
    assert found == (expected, gradients + scores)


def test_gated_cross_attention_and_varlen_sequences(triton_operators, triton_device):
    shapes = (2, 3, 8), (2, 9, 8), (2, 9, 24)
    for device, attend in (
        ("cpu", lambda *x: gated_attention(*x, backend="torch")),
        ("meta", lambda *x: triton_operators["gated"].attend(*x, None, None, "softmax", False, None, 0, 0.0)),
    ):
        assert count(attend, *draw(*shapes, device=device))[0] == 2 * 2 * 3 * 9 * (8 + 24)
    tokens = [x.to(triton_device) for x in draw((1, 20, 8), (1, 20, 8), (1, 20, 24))]
    lengths = torch.tensor([0, 5, 5, 18, 20], device=triton_device, dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        gated_attention(*tokens, function="laplace", chunk_size=8, cu_seqlens=lengths, max_seqlen=13, backend="triton")
    assert counter.get_total_flops() == 2 * (5**2 + 8**2 + 5**2 + 2**2) * (8 + 24)
    with FlopCounterMode(display=False) as counter:  # without the sequence lengths, all chunks count as complete
        call = (*(x.to("meta") for x in tokens), None, None, "laplace", False, 8, 0, 0.0, lengths.to("meta"), 13)
        triton_operators["gated"].attend(*call)
    assert counter.get_total_flops() == 2 * 20 * 8 * (8 + 24)


# Operator, directions -> forward and backward FLOPs, in products with all states at all positions.
# Real numbers: h = q h + p beta x and y = eta h. Backward: gradients of h (2), x, q, p beta and eta; h is recomputed.
# Complex: h = q h (4) + p x (1), and the real part of eta h (2). Backward: twice these, and h is recomputed.
AVERAGES = {
    ("damped_ema", 1): (3, 8), ("damped_ema", 2): (3, 8), ("complex_ema", 1): (7, 19), ("diagonal_ssm real", 1): (3, 8),
    ("diagonal_ssm real", 2): (3, 8), ("diagonal_ssm", 1): (7, 19), ("diagonal_ssm", 2): (7, 19),
}  # fmt: skip


@pytest.mark.parametrize("length", [1, 20, 700])  # lengths with an FFT, and with chunks of which the last one is short
@pytest.mark.parametrize("backend, device", [("torch", "cpu"), on_native("cpu"), ("triton", "meta")])
@pytest.mark.parametrize(("operator", "directions"), AVERAGES)
@pytest.mark.usefixtures("triton_operators")
def test_averages_count_as_recurrences(operator, directions, backend, device, length):
    sizes, several = Sizes(2, length, channels=3, states=4), {} if directions == 1 else {"directions": 2}
    call = OPERATORS[operator].make(sizes, **several)
    products = 2 * (2 * length * directions * 3 * 4)  # 2 FLOPs per state and position
    forward, backward = (number * products for number in AVERAGES[operator, directions])
    leaves = [x.float().to(device) for x in call.leaves.values()]
    found = count(lambda *x: call.run(**dict(zip(call.leaves, x, strict=True)), backend=backend)[0], *leaves)
    assert found == (forward, backward)
    if backend == "triton" and directions == 1 and operator in ("damped_ema", "complex_ema"):
        step = OPERATORS[f"{operator}_step"].make(sizes)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            step.run(**{key: x.float().to(device) for key, x in step.leaves.items()}, backend=backend)
        assert counter.get_total_flops() * length == forward


def test_norm():
    x, weight, bias = draw((2, 5, 8), (8,), (8,))
    assert count(lambda *x: timestep_norm(x[0], 2, *x[1:], backend="torch"), x, weight, bias) == (0, 0)


SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2}
LUNA = {**SMALL, "num_attention_heads": 2, "intermediate_size": 32, "projection_length": 4}
MEGA = {**SMALL, "intermediate_size": 32, "shared_representation_size": 8, "ema_projection_size": 4, "chunk_size": 24}
MEGA |= {"use_chunking": True, "nffn_hidden_size": 32}
MEGALODON = {**SMALL, "num_attention_heads": 2, "intermediate_size": 32, "shared_representation_size": 8}
MEGALODON |= {"value_size": 32, "ema_projection_size": 4, "chunk_size": 24, "norm_num_groups": 2}


@pytest.mark.parametrize(
    "model_class, config, uncounted",
    [
        # In the reference, sums of causal attention and averages are elementwise; powers of q in Mega are products.
        (LunaModel, LunaConfig(**LUNA), 0),
        (LunaForCausalLM, LunaConfig(**LUNA, is_decoder=True), 4 * 24 * 4 * 16),
        (MegaModel, MegaConfig(**MEGA), 6 * 24 * 32 * 4 - 2 * 24 * 32 * 4 / 2),
        (MegalodonForCausalLM, MegalodonConfig(**MEGALODON), 14 * 24 * 16 * 4),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_models_count_as_their_reference(model_class, config, uncounted):
    """A model has the FLOPs of its reference.

    The length is one chunk (24), because the reference also computes the scores between chunks, which it then masks.
    """
    model, inputs, totals = model_class(config).eval(), torch.randint(5, 50, (2, 24)), {}
    for backend in ("reference", "torch"):
        with use_backend(backend), FlopCounterMode(display=False) as counter, torch.no_grad():
            model(inputs, **({"use_cache": False} if model.config.is_decoder else {}))
        totals[backend] = counter.get_total_flops()
    assert totals["torch"] == totals["reference"] + 2 * 2 * uncounted
