"""Every op with 0 sequences, 0 positions, one position or one head, and with arbitrary strides."""

from collections.abc import Callable

import pytest
import torch

from luna_mega.kernels import api
from tests.kernels.backends import SLOW_TRITON, TRITON
from tests.kernels.calls import calls, results

SIZE, ROWS = 16, 4


def luna_tokens(batch, length, heads):
    return dict.fromkeys(("query", "key", "value"), (batch, length, heads, SIZE)) | {"rows": (batch, ROWS, heads, SIZE)}


def parameters(x, *shapes):
    """Return parameters on the device of `x`."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(x.device) for shape in shapes]


def real(x, rows=8):
    return parameters(x, *[(rows, 2)] * 4)


def complex_(x):
    return parameters(x, (8, 2), (8, 2), (8,), (8, 2, 2))


def turning(x, rows=8):
    log_decay, phase, weight = parameters(x, (rows, 2), (rows, 2), (rows, 2, 2))
    return -log_decay.abs(), phase, weight


# Op -> shapes of the tensors of a call, and the call.
CALLS: dict[str, tuple[Callable, Callable]] = {
    "luna_attention": (
        luna_tokens,
        lambda query, key, value, rows, **options: api.luna_attention(
            query, rows, key, value, lambda packed: (packed, packed), **options
        )[0],
    ),
    "luna_pack": (luna_tokens, lambda query, key, value, rows, **options: api.luna_pack(rows, key, value, **options)),
    "luna_unpack": (
        luna_tokens,
        lambda query, key, value, rows, **options: api.luna_unpack(query, rows, rows, **options),
    ),
    "luna_causal_attention": (
        luna_tokens,
        lambda query, key, value, rows, **options: api.luna_causal_attention(
            query, rows, key, key, value, return_state=True, **options
        ),
    ),
    "luna_causal_attention_step": (
        lambda batch, length, heads: luna_tokens(batch, 1, heads),
        lambda query, key, value, rows, **options: api.luna_causal_attention_step(
            query[:, 0], rows, key[:, 0], key[:, 0], value[:, 0], None, **options
        ),
    ),
    "damped_ema": (
        lambda batch, length, heads: {"x": (batch, length, 8)},
        lambda x, **options: api.damped_ema(x, *real(x), return_state=True, **options),
    ),
    "damped_ema, two directions": (
        lambda batch, length, heads: {"x": (batch, length, 8)},
        lambda x, **options: api.damped_ema(x, *real(x, 16), **options),
    ),
    "damped_ema_step": (
        lambda batch, length, heads: {"x": (batch, 8), "state": (batch, 8, 2)},
        lambda x, state, **options: api.damped_ema_step(x, state, *real(x), **options),
    ),
    "complex_ema": (
        lambda batch, length, heads: {"x": (batch, length, 8), "state": (batch, 8, 2, 2)},
        lambda x, state, **options: api.complex_ema(x, *complex_(x), initial_state=state, return_state=True, **options),
    ),
    "complex_ema_step": (
        lambda batch, length, heads: {"x": (batch, 8), "state": (batch, 8, 2, 2)},
        lambda x, state, **options: api.complex_ema_step(x, state, *complex_(x), **options),
    ),
    "diagonal_ssm": (
        lambda batch, length, heads: {"x": (batch, length, 8), "state": (batch, 8, 2, 2)},
        lambda x, state, **options: api.diagonal_ssm(x, *turning(x), initial_state=state, return_state=True, **options),
    ),
    "diagonal_ssm, two directions": (
        lambda batch, length, heads: {"x": (batch, length, 8)},
        lambda x, **options: api.diagonal_ssm(x, *turning(x, 16), x.new_ones(8), **options),
    ),
    "diagonal_ssm, real": (
        lambda batch, length, heads: {"x": (batch, length, 8), "state": (batch, 8, 2)},
        lambda x, state, **options: api.diagonal_ssm(
            x, turning(x)[0], None, turning(x)[1], initial_state=state, return_state=True, **options
        ),
    ),
    "diagonal_ssm_step": (
        lambda batch, length, heads: {"x": (batch, 8), "state": (batch, 8, 2, 2)},
        lambda x, state, **options: api.diagonal_ssm_step(x, state, *turning(x), **options),
    ),
    "timestep_norm": (
        lambda batch, length, heads: {"x": (batch, length, 8)},
        lambda x, **options: api.timestep_norm(x, 2, return_state=True, **options),
    ),
    "timestep_norm_step": (
        lambda batch, length, heads: {"x": (batch, 8)},
        lambda x, **options: api.timestep_norm_step(x, None, 2, **options),
    ),
    "gated_attention": (
        lambda batch, length, heads: dict.fromkeys(("query", "key", "value"), (batch, length, SIZE)),
        lambda query, key, value, **options: api.gated_attention(query, key, value, causal=True, **options),
    ),
    "gated_attention, chunks": (
        lambda batch, length, heads: dict.fromkeys(("query", "key", "value"), (batch, length, SIZE)),
        lambda query, key, value, **options: api.gated_attention(
            query, key, value, function="laplace", chunk_size=4, **options
        ),
    ),
    "gated_attention_step": (
        lambda batch, length, heads: {
            "query": (batch, SIZE),
            "key": (batch, length, SIZE),
            "value": (batch, length, 8),
        },
        lambda query, key, value, **options: api.gated_attention_step(query, key, value, **options),
    ),
}
EDGES = {"no sequence": (0, 5, 2), "length 0": (2, 0, 2), "nothing": (0, 0, 1), "one head": (2, 5, 1), "one": (1, 1, 1)}


def run(name, shapes, backend, device):
    """Return the results and all gradients of a call, or the message if it raises a `ValueError`."""
    generator = torch.Generator().manual_seed(0)
    leaves = {key: torch.randn(shape, generator=generator).to(device).requires_grad_() for key, shape in shapes.items()}
    try:
        results = CALLS[name][1](**leaves, backend=backend)
    except ValueError as error:
        return str(error)
    results = [x for x in torch.utils._pytree.tree_leaves(results) if x.is_floating_point()]
    total = sum(x.double().sin().sum() for x in results)
    return [*results, *torch.autograd.grad(total, [*leaves.values()], allow_unused=True)]


def test_every_op_is_covered():
    assert {name.partition(",")[0] for name in CALLS} == api.OPS.keys()


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("backend", ["torch", TRITON])
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", CALLS)
def test_edges(name, edge, backend, triton_device):
    shapes = CALLS[name][0](*EDGES[edge])
    expected, actual = (run(name, shapes, chosen, triton_device) for chosen in ("reference", backend))
    if isinstance(expected, str):
        assert actual == expected and "of length 1 or more" in expected
        return
    assert edge != "no sequence" or len(expected[0]) == 0
    for got, reference in zip(actual, expected, strict=True):
        if reference is None:
            assert got is None or not got.any()
        else:
            torch.testing.assert_close(got, reference, atol=2e-5, rtol=2e-4)


@pytest.mark.triton
@pytest.mark.parametrize("name", CALLS)
def test_grids_of_many_sequences(name, triton_device):
    """Only the first axis of a grid can have more than 65,535 programs."""
    from luna_mega.kernels.common import triton_launch

    shapes = CALLS[name][0](65_544, 2, 1)
    with triton_launch.recording(triton_launch.Target()) as launches:
        run(name, shapes, "triton", triton_device)
        with torch.no_grad():
            CALLS[name][1](
                **{key: torch.zeros(shape, device=triton_device) for key, shape in shapes.items()}, backend="triton"
            )
    assert launches
    for launch in launches:
        assert max(launch.grid[1:], default=1) < 65_536, (launch.kernel.__name__, launch.grid)


@pytest.mark.parametrize("backend", ["torch", SLOW_TRITON])
@pytest.mark.parametrize("name", dict(calls(40, toy=True)))
def test_last_dimensions_with_any_stride(name, backend, device):
    call = dict(calls(40, toy=True))[name]()
    strided = {key: x.mT.contiguous().mT if x.dim() > 1 else x for key, x in call.leaves.items()}
    assert not any(x.is_contiguous() for x in strided.values() if min(x.shape[-2:]) > 1 and x.dim() > 1)
    expected, actual = (results(one, device, torch.float32, backend) for one in (call, call._replace(leaves=strided)))
    torch.testing.assert_close(actual, expected)
