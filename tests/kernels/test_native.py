"""The C library of the averages: random calls with each instruction set, accuracy, threads, forked processes."""

import math
import multiprocessing
import platform
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.utils.data import DataLoader

from luna_mega.kernels.api import damped_ema, diagonal_ssm, diagonal_ssm_step
from luna_mega.kernels.moving_average import native, torch_backend
from luna_mega.kernels.moving_average.coefficients import Coefficients, conjugate, powers_less_one
from tests.distributed.ranks import PATIENCE
from tests.kernels.backends import needs_library
from tests.marks import slow_but
from tests.random_cases import in_blocks, run_block

pytestmark = needs_library

LENGTHS = (1, 2, 15, 16, 17, 33, 48, 63, 64, 65, 80, 129, 130)
CHANNELS, STATES = (1, 3, 8, 15, 16, 17, 31, 40), (1, 2, 3, 4, 5, 7, 8, 13, 16, 33)
NAMES = ("y", "state", *(f"gradient of {x}" for x in ("x", "log |q|", "angle", "p", "w", "skip", "initial states")))
# Error of a number, relative to the sum of the absolute values of its terms, and rounding of bfloat16.
BOUND, ROUNDING = 5e-7, 2.0**-8
LAYOUTS = (
    lambda x: x,
    lambda x: torch.cat((x.new_zeros(3), x.flatten()))[3:].view(x.shape),  # at an odd address
    lambda x: torch.stack((x, x), -1)[..., 1],
    lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
)


def sums(x, log_decay, turn, weight_in, weight_out, skip, initial, mask, shift, silu, bounds):
    """Return the result `[total, D]`, or the argument of silu, and the final states, from their definition.

    h_t = q^(t+1) h + sum_s q^(t-s) p x_s, y_t = Re sum_n w h_t. x is `[total, D]`.
    """
    exponent, weight = log_decay.clamp(min=-1000.0), weight_out
    if turn is not None:
        exponent, weight = torch.complex(exponent, 2 * math.pi * turn), as_numbers(weight_out)
        initial = None if initial is None else as_numbers(initial)
    kept = x if mask is None else x * mask[:, None]
    channels, outputs, states = x.shape[1], [], []
    for sequence, (start, end) in enumerate(pairwise(bounds)):
        rows, times = kept[start:end], torch.arange(end - start + 1)
        powers = torch.exp(exponent[..., None] * times)
        taps = ((weight_in * weight)[..., None] * powers).sum(1).real
        powers, lag = powers[:channels], times[:-1, None] - times[:-1]
        matrix = taps[:channels][:, lag.clamp(min=0)] * (lag >= 0)
        if len(taps) > channels:
            lag = -lag - int(shift)
            matrix = matrix + taps[channels:][:, lag.clamp(min=0)] * (lag >= 0)
        output = torch.einsum("dts,sd->td", matrix, rows)
        state = torch.einsum("dnt,td->dn", powers[..., :-1].flip(-1), rows.to(powers.dtype)) * weight_in[:channels]
        if initial is not None:
            first = initial[sequence]
            output = output + ((weight * first)[..., None] * powers[..., 1:]).sum(1).real.mT
            state = state + powers[..., -1] * first
        outputs.append(output)
        states.append(state if turn is None else torch.view_as_real(state))
    output = torch.cat([x[:0], *outputs])
    if skip is not None:
        output = output + skip * (x if silu else kept)
    return output, torch.stack(states) if states else None


def as_numbers(pairs):
    return torch.complex(*pairs.unbind(-1))


class Case:
    """A random call: x `[total, D]`, coefficients, skip and initial states, and the gradients of both results."""

    def __init__(self, seed):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.turning, both, self.silu, self.varlen = (rng.random() < p for p in (0.5, 0.4, 0.3, 0.5))
        channels, states, batch = rng.choice(CHANNELS), rng.choice(STATES), rng.choice((0, 1, 2, 3))
        several = LENGTHS[: rng.choice((4, len(LENGTHS)))]
        lengths = [rng.choice(several)] * batch
        if self.varlen:
            lengths = [*(rng.choice((0, *several)) for _ in range(batch)), rng.choice(several)]
        self.bounds = torch.tensor([0, *lengths], dtype=rng.choice((torch.int32, torch.int64))).cumsum(0)
        total = int(self.bounds[-1])
        self.shape = (1, total) if self.varlen else (batch, max([1, *lengths]))
        self.shift, self.stateful = both and rng.random() < 0.5, not both and rng.random() < 0.6
        self.mask = LAYOUTS[2](torch.rand(total) < rng.choice((0.3, 0.9))) if rng.random() < 0.5 else None
        dtype, shape = rng.choice((torch.float32, torch.float32, torch.bfloat16)), (channels * (1 + both), states)
        numbers, (initial, changed) = (channels, *shape[1:]), (rng.random() < 0.6 for _ in range(2))
        pair = (2,) if self.turning else ()
        tensors = [
            torch.randn(total, channels, dtype=dtype),
            *self.exponents(rng, shape),
            torch.randn(shape),
            torch.randn(*shape, *pair),
            torch.randn(channels) if rng.random() < 0.6 else None,
            torch.randn(len(lengths), *numbers, *pair) if self.stateful and initial else None,
        ]
        self.tensors = [None if x is None else rng.choice(LAYOUTS)(x) for x in tensors]
        self.seeds = [rng.choice(LAYOUTS)(torch.randn(total, channels, dtype=dtype)), None]
        if self.stateful and changed:
            self.seeds[1] = torch.randn(len(lengths), *numbers, *pair)

    def exponents(self, rng, shape):
        """Return log |q| between 0 (q = 1) and -inf (q = 0), and the angles in turns."""
        slowest, turn = rng.choice((0.1, 1e-3, 1e-6)), None
        log_decay = -slowest * (1.0 / slowest) ** torch.rand(shape)
        if rng.random() < 0.4:
            extremes = torch.tensor([0.0, -30.0, -1000.0, -math.inf])[torch.randint(4, shape)]
            log_decay = torch.where(torch.rand(shape) < 0.3, extremes, log_decay)
        if self.turning:
            turn = rng.choice((1.0, 1e-3, 5.0)) * torch.rand(shape, dtype=torch.float64)
            turn = torch.where(torch.rand(shape) < 0.1, 0.5, turn)
        return log_decay, turn

    def native(self, x, log_decay, turn, weight_in, weight_out, skip, initial):
        options = {"cu_seqlens": self.bounds} if self.varlen else {}
        options |= {"initial_state": initial, "return_state": self.stateful, "silu": self.silu}
        mask = None if self.mask is None else self.mask.unflatten(0, self.shape)
        coefficients = Coefficients(log_decay, turn, weight_in, weight_out)
        output, state = native.average(x.unflatten(0, self.shape), coefficients, skip, mask, self.shift, **options)
        return output.flatten(0, 1), state

    def by_definition(self, silu, *tensors):
        output, state = sums(*tensors, self.mask, self.shift, self.silu, self.bounds.tolist())
        return silu(output) if self.silu else output, state if self.stateful else None


def results(function, tensors, seeds):
    """Return the outputs of a function and the gradients of its tensors; outputs, tensors and seeds may be None."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
    outputs = function(*leaves)
    pairs = [(y, seed) for y, seed in zip(outputs, seeds, strict=True) if y is not None and seed is not None]
    used, seeds = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(used, [x for x in leaves if x is not None], seeds, materialize_grads=True))
    outputs = (None if y is None else y.detach() for y in outputs)
    return [*outputs, *(None if x is None else next(found) for x in leaves)]


def double(tensors):
    return [None if x is None else x.double() for x in tensors]


def sizes(tensors, turning):
    """Return the absolute values of weights, states or their gradients, as real numbers."""
    pairs = [x is not None and turning and x.dim() > 2 for x in tensors]
    return double(
        x if x is None else (as_numbers(x) if pair else x).abs() for x, pair in zip(tensors, pairs, strict=True)
    )


def check_average(seed):
    case = Case(seed)
    actual = results(case.native, case.tensors, case.seeds)
    exact = results(partial(case.by_definition, torch.nn.functional.silu), double(case.tensors), double(case.seeds))
    # The sums of the absolute values of all terms. The first two derivatives of silu are at most 1.1 and .5.
    tensors = sizes(case.tensors, case.turning)
    tensors[1:3] = case.tensors[1].double(), None
    terms = partial(case.by_definition, lambda x: 1.1 * x + 0.25 * x.square())
    terms = results(terms, tensors, sizes(case.seeds, case.turning))
    terms[4] = 2 * math.pi * terms[3]
    for name, found, right, size in zip(NAMES, actual, exact, terms, strict=True):
        if right is not None:
            check_number(name, found, right, size)


def check_number(name, actual, exact, terms):
    """Check errors of results and gradients, given the sums of the absolute values of their terms."""
    terms = terms[..., None] if terms.dim() < exact.dim() else terms
    bound = BOUND * terms + torch.finfo(torch.float32).tiny  # smaller numbers count as 0
    if actual.dtype == torch.bfloat16:
        bound = bound + ROUNDING * exact.abs()
    error = ((actual.double() - exact).abs() / bound).detach()
    assert actual.shape == exact.shape and (error <= 1.0).all(), f"{name}: {error.max():.1e} of the bound"


@in_blocks(fast=75, slow=300)
def test_random_averages(first, level):
    run_block(check_average, first)


def check_step(seed):
    case, rng = Case(seed), random.Random(seed)
    x, *rest = case.tensors
    of, skip, batch, channels = (
        Coefficients(*(y if y is None else y[: x.shape[1]] for y in rest[:4])),
        rest[4],
        3,
        x.shape[1],
    )
    x, before = torch.randn(batch, channels, dtype=x.dtype), torch.randn(batch, *of.weight_out.shape)
    mask = LAYOUTS[2](torch.rand(batch) < 0.6) if rng.random() < 0.6 else None
    change = powers_less_one(of.log_decay.double(), of.turn, 1)
    entry, weight = of.weight_in[..., None], of.weight_out
    if case.turning:
        entry, weight = torch.cat((entry, torch.zeros_like(entry)), -1), conjugate(weight)
    coefficients = [rng.choice(LAYOUTS)(y.float().view(weight.shape)) for y in (change, entry, weight)]
    x, before = rng.choice(LAYOUTS)(x), rng.choice(LAYOUTS)(before)
    output, after = native.step(x, before, coefficients, skip, mask, case.silu)

    def by_definition(x, before, change, entry, weight, skip, silu):
        """Return the result and the states for numbers of any kind."""
        kept = torch.ones(batch, dtype=torch.bool) if mask is None else mask
        after = torch.where(kept[:, None, None], before + change * before + entry * x[..., None], before)
        output = (weight * after).real.sum(-1)
        output = output if skip is None else output + skip * x * kept[:, None]
        return silu(output) if case.silu else output, after

    numbers = double((x, before, *coefficients, skip))
    if case.turning:
        numbers[1:5] = map(as_numbers, numbers[1:5])
        numbers[4] = numbers[4].conj()
    exact = by_definition(*numbers, torch.nn.functional.silu)
    exact = exact[0], torch.view_as_real(exact[1]) if case.turning else exact[1]
    terms = by_definition(*(None if y is None else y.abs() for y in numbers), lambda x: 1.1 * x + 0.25 * x.square())
    for name, found, right, size in zip(NAMES, (output, after), exact, terms, strict=False):
        check_number(name, found, right, size)
    assert mask is None or torch.equal(after[~mask], before[~mask])


@in_blocks(fast=75, slow=300)
def test_random_steps(first, level):
    run_block(check_step, first)


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
    actual, exact = (
        results(lambda x, *of, average=average: average(x, Coefficients(*of)), given, (y, None))
        for average, given, y in (
            (native.average, tensors, seed),
            (torch_backend.average, double(tensors), seed.double()),
        )
    )
    for name, found, right in zip(NAMES, actual, exact, strict=False):
        if right is not None:
            assert (found - right).abs().max() <= BOUND * right.abs().max(), name


@pytest.mark.parametrize("turning", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("both", [False, True], ids=["one direction", "two directions"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_missing_value_changes_later_positions_of_its_channel(value, both, turning):
    rows, place, channel = 17 * (1 + both), 40, 3
    of = -torch.rand(rows, 3), torch.rand(rows, 3).double() if turning else None
    of = Coefficients(*of, torch.randn(rows, 3), torch.randn(rows, 3, *([2] if turning else [])))
    x, seed = torch.randn(2, 2, 130, 17)
    found = []
    for content in (0.0, value):
        x[1, place, channel] = content
        found.append(results(lambda x, *of: native.average(x, Coefficients(*of)), [x, *of], (seed, None)))
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
    seeds = x.flip(1), None
    for y in results(lambda x, *of: native.average(x, Coefficients(*of)), tensors, seeds):
        assert y is None or not ((y != 0.0) & (y.abs() < torch.finfo(torch.float32).tiny)).any()
    assert torch.tensor([2e-40]) * 0.5 > 0.0


WRONG = {
    "x": [torch.zeros(2, 5, 3, dtype=dtype) for dtype in (torch.float16, torch.float64)],
    "mask": [torch.ones(2, 4, dtype=torch.bool), torch.ones(2, 5)],
    "skip": [torch.zeros(4), torch.zeros(3, dtype=torch.float64)],
    "log_decay": [torch.zeros(3, 3), torch.zeros(6, 2)],
    "weight_in": [torch.zeros(3, 3), torch.zeros(4, 2), torch.zeros(9, 2), torch.zeros(3, 2, dtype=torch.float64)],
    "weight_out": [torch.zeros(3, 1), torch.zeros(3, 2, 2)],
    "initial": [torch.zeros(1, 3, 2), torch.zeros(2, 3, 2, dtype=torch.float64)],
}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in WRONG.items() for value in values])
def test_tensors_of_other_sizes_are_not_read(name, value):
    """The operator raises an error for arguments that the public functions have not checked."""
    call = {"x": torch.zeros(2, 5, 3), "mask": None, "skip": None, "log_decay": torch.zeros(3, 2), "turn": None}
    call |= {"weight_in": torch.zeros(3, 2), "weight_out": torch.zeros(3, 2), "initial": torch.zeros(2, 3, 2)}
    assert len(native.operator(*call.values(), None, False, False, True)) == 2
    with pytest.raises(ValueError, match="^moving_average (needs a contiguous|has 3 channels, but)"):
        native.operator(*(call | {name: value}).values(), None, False, False, True)


@torch.no_grad()
@pytest.mark.parametrize("name", ["x", "log_decay", "phase", "weight", "skip"])
def test_views_with_negated_values(name):
    """PyTorch stores the imaginary part of a conjugate, and similar views, with a mark instead of the opposite sign."""
    call = {"x": torch.randn(2, 20, 3), "log_decay": -torch.rand(3, 2), "phase": torch.randn(3, 2)}
    call |= {"weight": torch.randn(3, 2, 2), "skip": torch.randn(3)}
    marked = call | {name: torch._neg_view(-call[name])}
    assert marked[name].is_neg()
    assert torch.equal(diagonal_ssm(**marked, backend="native"), diagonal_ssm(**call, backend="native"))
    step = {"x": call["x"][:, 0], "state": torch.randn(2, 3, 2, 2)}
    marked |= step | ({"x": torch._neg_view(-step["x"])} if name == "x" else {})
    expected = diagonal_ssm_step(**call | step, backend="native")
    assert all(map(torch.equal, diagonal_ssm_step(**marked, backend="native"), expected))


@pytest.fixture
def threads(monkeypatch):
    """Return a function that sets the number of threads, also for small calls."""
    before = torch.get_num_threads()
    monkeypatch.setattr(native, "MANY_NUMBERS", 0)
    yield torch.set_num_threads
    torch.set_num_threads(before)


def run_case(case):
    return [y for y in results(case.native, case.tensors, case.seeds) if y is not None]


def test_results_do_not_depend_on_the_number_of_threads(threads):
    for case in map(Case, range(40)):
        found = []
        for count in (1, 2, 5):
            threads(count)
            found.append(run_case(case))
        assert all(map(torch.equal, found[1], found[0])) and all(map(torch.equal, found[2], found[0]))


def test_threads_of_python(threads):
    """Four threads at once, each of which starts another one, have the results of one thread."""
    cases = [Case(seed) for seed in range(40)]
    expected = [run_case(case) for case in cases]
    threads(2)
    with ThreadPoolExecutor(4) as pool:
        for actual, right in zip(pool.map(run_case, cases), expected, strict=True):
            assert all(map(torch.equal, actual, right))


def small_call():
    """Return the result and a gradient of a call with few coefficients: in a forked process, `exp` of many hangs."""
    x, tables = torch.linspace(-1, 1, 3000).view(5, 200, 3).requires_grad_(), [torch.linspace(-2, 1, 6).view(3, 2)] * 4
    output = damped_ema(x, *tables, backend="native")
    return output.detach(), *torch.autograd.grad(output, x, torch.ones_like(output))


def exit_with_equality(expected):
    raise SystemExit(0 if all(map(torch.equal, small_call(), expected)) else 1)


@pytest.mark.skipif(sys.platform != "linux", reason="forked processes")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_process_has_the_results_of_its_parent(threads):
    threads(2)
    expected = small_call()
    child = multiprocessing.get_context("fork").Process(target=exit_with_equality, args=(expected,))
    child.start()
    child.join(PATIENCE)
    child.kill()
    assert child.exitcode == 0, child.exitcode


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
