"""Every op with 0 sequences, 0 positions, one position or one head, and with arbitrary strides."""

import pytest
import torch

from luna_mega.kernels import api
from tests.kernels.backends import SLOW_TRITON, TRITON
from tests.kernels.calls import CALLS, Sizes, calls, results

CAUSAL = [name for name in CALLS if name.startswith("luna_causal_attention ")]
# Two varlen sequences have tokens, and truncation is not on Triton.
NAMES = [name for name in CALLS if not any(word in name for word in ("padding_free", "size=128", "truncated", "first"))]
# Steps of real states have no kernel, and two of the causal calls would take 40 seconds.
GRIDS = [name for name in NAMES if name not in ("diagonal_ssm_step real", *CAUSAL[:2])]
EDGES = {"no sequence": (0, 5, 2), "length 0": (2, 0, 2), "nothing": (0, 0, 1), "one head": (2, 5, 1), "one": (1, 1, 1)}


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
@pytest.mark.parametrize("backend", ["torch", TRITON])
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", NAMES)
def test_edges(name, edge, backend, triton_device):
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
@pytest.mark.parametrize("name", GRIDS)
def test_grids_of_many_sequences(name, triton_device):
    """Only the first axis of a grid can have more than 65,535 programs."""
    from luna_mega.kernels.common import triton_launch

    call = make(name, 65_544, 2, 1)
    with triton_launch.recording(triton_launch.Target()) as launches:
        run(call, "triton", triton_device)
        with torch.no_grad():
            call.run(**{key: x.float().to(triton_device) for key, x in call.leaves.items()}, backend="triton")
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
