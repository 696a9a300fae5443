"""The C library of the averages: accuracy, missing and tiny values, threads, forked processes."""

import math
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from luna_mega.kernels.api import damped_ema
from luna_mega.kernels.recurrence import native, torch_backend
from luna_mega.kernels.recurrence.coefficients import Coefficients
from tests.distributed.ranks import PATIENCE
from tests.kernels import contract
from tests.kernels.backends import needs_library
from tests.kernels.contract import Inputs
from tests.kernels.test_contract import matrix
from tests.marks import slow_but

pytestmark = needs_library

NAMES = ("y", "state", *(f"gradient of {x}" for x in ("x", "log |q|", "angle", "p", "w")))
BOUND = 5e-7


def results(average, tensors, seed):
    """Return the output, the state and the gradients of all tensors; tensors may be None."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
    y, state = average(leaves[0], Coefficients(*leaves[1:]))
    found = iter(torch.autograd.grad(y, [x for x in leaves if x is not None], seed))
    return [y.detach(), state, *(None if x is None else next(found) for x in leaves)]


SYSTEMS = ["real", "real, two directions", "complex", "complex, small angles"]
LONG = [(kind, length, slowest) for kind in SYSTEMS for length in (512, 4096, 70_000) for slowest in (0.1, 1e-3, 1e-6)]


@pytest.mark.parametrize(
    "kind, length, slowest",
    slow_but([*(row for row in LONG if row[1:] == (512, 1e-6)), ("complex", 70_000, 1e-6)], LONG),
)
def test_errors_do_not_grow_with_the_length(kind, length, slowest):
    """Errors are at most 5e-7 of the largest value, which PyTorch's algorithm exceeds up to a hundredfold."""
    channels, turning = 32, "complex" in kind
    shape = channels * (2 if "two" in kind else 1), 16
    log_decay = torch.log1p(-slowest * 10 ** torch.rand(shape, dtype=torch.float64)).float()
    turn = (1e-3 if "small" in kind else 1.0) * torch.rand(shape, dtype=torch.float64) if turning else None
    x, seed = torch.randn(2, 1, length, channels)
    tensors = [x, log_decay, turn, torch.rand(shape), torch.randn(*shape, *([2] if turning else []))]
    actual = results(native.average, tensors, seed)
    exact = results(torch_backend.average, [None if x is None else x.double() for x in tensors], seed.double())
    for name, found, right in zip(NAMES, actual, exact, strict=False):
        if right is not None:
            assert (found - right).abs().max() <= BOUND * right.abs().max(), name


@pytest.mark.parametrize("turning", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("both", [False, True], ids=["one direction", "two directions"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_missing_value_changes_later_positions_of_its_channel(value, both, turning):
    rows, place, channel = 17 * (1 + both), 40, 3
    of = -torch.rand(rows, 3), torch.rand(rows, 3).double() if turning else None
    of = *of, torch.randn(rows, 3), torch.randn(rows, 3, *([2] if turning else []))
    x, seed = torch.randn(2, 2, 130, 17)
    found = []
    for content in (0.0, value):
        x[1, place, channel] = content
        found.append(results(native.average, [x, *of], seed))
    (y, _, grad_x, *grads), (other, _, other_x, *others) = found
    changed = torch.zeros_like(x, dtype=torch.bool)
    changed[1, slice(None) if both else slice(place, None), channel] = True
    assert torch.equal(other[~changed], y[~changed]) and not other[changed].isfinite().any()
    assert torch.equal(grad_x, other_x)
    kept = torch.arange(rows) % 17 != channel
    for a, b in zip(grads, others, strict=True):
        assert a is None or torch.equal(a[kept], b[kept]) and not b[~kept].isfinite().all()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other processors compute with them quickly")
def test_numbers_below_the_normal_range_count_as_0():
    """They would take a hundred times as long; the setting of the processor is that of before, after the call."""
    x, decay = torch.zeros(1, 3000, 17), torch.full((17, 2), -0.1)
    x[:, 0] = 1.0
    tensors = [x, decay, None, torch.ones(17, 2), torch.ones(17, 2)]
    for y in results(native.average, tensors, x.flip(1)):
        assert y is None or not ((y != 0.0) & (y.abs() < torch.finfo(torch.float32).tiny)).any()
    assert torch.tensor([2e-40]) * 0.5 > 0.0


@pytest.fixture
def threads(monkeypatch):
    """Return a function that sets the number of threads, also for small calls."""
    before = torch.get_num_threads()
    monkeypatch.setattr(native, "MANY_NUMBERS", 0)
    yield torch.set_num_threads
    torch.set_num_threads(before)


def random_calls() -> list[Inputs]:
    """Return calls of all averages, layouts and options, some of them with many channels."""
    cases = [row.values[0] for row in matrix("native")]
    sizes = [case.sizes._replace(channels=(6, 40, 17)[index % 3]) for index, case in enumerate(cases)]
    return [Inputs(replace(case, dtype=torch.float32, sizes=size)) for case, size in zip(cases, sizes, strict=True)]


def run_call(inputs: Inputs) -> list[torch.Tensor]:
    return contract.results(inputs, partial(inputs.run, "native"), inputs.given(torch.float32))


def test_results_do_not_depend_on_threads(threads):
    """Several threads, and four threads of Python at once that start another one each, have the results of one."""
    calls, found = random_calls(), []
    for count in (1, 5, 2):
        threads(count)
        found.append([run_call(inputs) for inputs in calls])
    with ThreadPoolExecutor(4) as pool:
        found.append(list(pool.map(run_call, calls)))
    for expected, *others in zip(*found, strict=True):
        assert all(torch.equal(x, y) for other in others for x, y in zip(other, expected, strict=True))


def small_call():
    """Return the result and a gradient of a call with few coefficients: in a forked process, `exp` of many hangs."""
    x, tables = torch.linspace(-1, 1, 3000).view(5, 200, 3).requires_grad_(), [torch.linspace(-2, 1, 6).view(3, 2)] * 4
    output = damped_ema(x, *tables, backend="native")
    return output.detach(), *torch.autograd.grad(output, x, torch.ones_like(output))


class Calls:
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return small_call()


@pytest.mark.skipif(sys.platform != "linux", reason="forked processes")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_workers_of_a_data_loader(threads):
    threads(2)
    expected = small_call()
    loader = DataLoader(Calls(), None, num_workers=2, timeout=PATIENCE, multiprocessing_context="fork")
    for found in loader:
        assert all(map(torch.equal, found, expected))
