"""Every op on Triton with 0 sequences, 0 positions, one position or one head, and with arbitrary strides."""

import itertools

import pytest
import torch

from luna_mega.kernels import _dispatch, api
from tests.kernels.backends import on_triton
from tests.kernels.calls import CALLS, Sizes, results
from tests.marks import slow_but

# Two varlen sequences have tokens, and truncation is not on Triton.
NAMES = [name for name in CALLS if not any(word in name for word in ("padding_free", "size=128", "truncated", "first"))]
EDGES = {"no sequence": (0, 5, 2), "length 0": (2, 0, 2), "nothing": (0, 0, 1), "one head": (1, 5, 1), "one": (1, 1, 1)}
# Calls with some of the options of another call.
SOME = [name for name in NAMES if f"{name.removesuffix(' masked').removesuffix(' stateful')} masked, stateful" in NAMES]


def cases():
    for name, edge in itertools.product(NAMES, EDGES):
        repeated = edge == "one" or name in SOME
        yield on_triton(name, edge, slow=repeated, exhaustive=repeated)


def make(name, batch, length, heads):
    return CALLS[name](Sizes(batch, length, heads, rows=4, channels=8, states=2, width=8))


def run(call, backend, device):
    """Return the results and all gradients of a call, or the message if it raises a `ValueError`."""
    leaves = {key: x.float().to(device).requires_grad_() for key, x in call.leaves.items()}
    try:
        outputs = call.run(**leaves, backend=backend)
    except ValueError as error:
        return str(error)
    total = sum(x.double().sin().sum() for x in outputs)
    return [*outputs, *torch.autograd.grad(total, [*leaves.values()], allow_unused=True)]


def test_every_op_is_covered():
    assert {name.partition(" ")[0] for name in NAMES} == api.OPS.keys()


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("backend, name, edge", list(cases()))
def test_edges(backend, name, edge, triton_device):
    call = make(name, *EDGES[edge])
    expected, actual = (run(call, chosen, triton_device) for chosen in ("reference", backend))
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
@pytest.mark.parametrize("name", slow_but([name for name in NAMES if "rows=80" not in name], NAMES))
def test_grids_of_many_sequences(name, triton_device):
    """Only the first axis of a grid can have more than 65,535 programs."""
    from luna_mega.kernels.common import triton_launch

    call = CALLS[name](Sizes(65_544, 2, size=2, rows=2, channels=2, states=1, width=2))
    with triton_launch.recording(triton_launch.Target()) as launches:
        run(call, "triton", triton_device)
        with torch.no_grad():
            call.run(**{key: x.float().to(triton_device) for key, x in call.leaves.items()}, backend="triton")
    assert bool(launches) == (name != "diagonal_ssm_step real")  # has no kernel
    for launch in launches:
        assert max(launch.grid[1:], default=1) < 65_536, (launch.kernel.__name__, launch.grid)


@pytest.mark.triton
@pytest.mark.parametrize("precision", _dispatch.FLOAT32_PRECISIONS)
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("luna", "gated"))])
def test_float32_precision_of_kernels(name, precision, triton_device):
    """The precision is passed to the kernels, also in a backward pass outside of the context manager."""
    from luna_mega.kernels.common import triton_launch

    call = make(name, 2, 5, 1)

    def within(**leaves):
        with api.use_float32_precision(precision):
            return call.run(**leaves)

    with triton_launch.recording(triton_launch.Target()) as launches:
        run(call._replace(run=within), "triton", triton_device)
    told = {launch.constants["PRECISION"] for launch in launches if "PRECISION" in launch.constants}
    assert told == {precision}


VIEWS = (
    lambda x: x.mT.contiguous().mT,
    lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    lambda x: x.transpose(-2, -3).contiguous().transpose(-2, -3) if x.dim() > 2 else x,
    lambda x: torch.stack((x, x), -1)[..., 0],
    lambda x: x[:1].expand_as(x),
)


@pytest.mark.parametrize("backend, name", [on_triton(name) for name in NAMES if name not in SOME])
def test_strides(name, backend, device):
    """Results do not depend on the strides of tensors and gradients, and two calls have the same bits."""
    call = CALLS[name](Sizes(2, 17, 2))
    views = {
        key: VIEWS[(index + 4) % len(VIEWS)](x.float().to(device)) if x.dim() > 1 else x.float().to(device)
        for index, (key, x) in enumerate(call.leaves.items())
    }
    plain = call._replace(leaves={key: x.clone(memory_format=torch.contiguous_format) for key, x in views.items()})
    strided = call._replace(
        leaves=views, run=lambda **x: tuple(y.mT.contiguous().mT if y.dim() > 1 else y for y in call.run(**x))
    )
    expected, again, actual = (results(one, device, torch.float32, backend) for one in (plain, plain, strided))
    assert all(map(torch.equal, again.values(), expected.values()))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
