"""`diagonal_ssm`: Triton against a loop in complex128, S4D's convolution, memory, invalid arguments."""

import math
import subprocess
import sys

import pytest
import torch

from luna_mega.kernels.api import diagonal_ssm, diagonal_ssm_step, discretize
from tests.distributed.ranks import PATIENCE
from tests.kernels.backends import NATIVE, graded
from tests.kernels.comparisons import assert_same
from tests.kernels.leaves import MASKS, Leaves, random_mask

KINDS = ["causal", "states", "bidirectional"]
FLOAT32 = 5e-6


def loop(x, log_decay, phase, weight, skip, mask=None, state=None):
    """Return the output and the last states of the recurrence, one position at a time, with complex numbers."""
    q = torch.exp(log_decay if phase is None else torch.complex(log_decay, phase))
    x = x if mask is None else x * mask[..., None]
    state, outputs = torch.zeros((), dtype=q.dtype) if state is None else state, []
    for t in range(x.shape[1]):
        state = q * state + x[:, t, :, None]
        outputs.append((weight * state).real.sum(-1) + (0.0 if skip is None else skip * x[:, t]))
    return torch.stack(outputs, 1), state


class Inputs(Leaves):
    """The leaves of a call: x, log_decay, phase, weight and skip (None if absent), and the state, all real."""

    def __init__(self, length, kind="causal", turning=True, masking="none", states=3, batch=2, channels=5, skip=True):
        generator = torch.Generator().manual_seed(100 * length + states)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.turning, self.has_skip, self.states, self.kind = turning, skip, int(kind == "states"), kind
        self.channels, self.pairs = channels, True
        shape, pair = (2 * channels if kind == "bidirectional" else channels, states), (2,) if turning else ()
        log_decay = -torch.exp(1.5 * normal(*shape) - 2.0)
        log_decay[::2] *= 1e-2  # every second row decays slowly
        tensors = [normal(batch, length, channels), log_decay, *([3.0 * normal(*shape)] if turning else [])]
        tensors += [normal(*shape, *pair), *([normal(channels)] if skip else [])]
        tensors += [normal(batch, channels, states, *pair)] if self.states else []
        self.mask = random_mask(masking, batch, length, generator)
        self.leaves = [tensor.requires_grad_() for tensor in tensors]

    def arguments(self, *leaves):
        """Return x, log_decay, phase, weight, skip and the state; both weight and state are complex unless `pairs`."""
        x, log_decay, *rest = leaves
        state = rest.pop() if self.states else None
        skip = rest.pop() if self.has_skip else None
        weight, phase = rest.pop(), rest[0] if self.turning else None
        if self.turning and not self.pairs:
            weight, state = (None if y is None else torch.view_as_complex(y) for y in (weight, state))
        return x, log_decay, phase, weight, skip, state

    def call(self, *leaves, **options):
        *arguments, state = self.arguments(*leaves)
        options = {"mask": self.mask, "initial_state": state, "return_state": bool(self.states)} | options
        return self.real(diagonal_ssm(*arguments, **options))

    @staticmethod
    def real(results):
        """Return the results with states as pairs."""
        if isinstance(results, torch.Tensor):
            return results
        return tuple(torch.view_as_real(x) if x.is_complex() else x for x in results)

    def loop(self, *leaves):
        x, log_decay, phase, weight, skip, state = self.arguments(*leaves)
        if self.turning and self.pairs:
            weight, state = (None if y is None else torch.view_as_complex(y) for y in (weight, state))
        d = self.channels
        first = [None if y is None else y[:d] for y in (log_decay, phase, weight)]
        output, last = loop(x, *first, skip, self.mask, state)
        if self.kind == "bidirectional":
            second = [None if y is None else y[d:] for y in (log_decay, phase, weight)]
            mask = None if self.mask is None else self.mask.flip(1)
            output = output + loop(x.flip(1), *second, None, mask)[0].flip(1)
        return self.real((output, last)) if self.states else output

    def check(self, bound=1e-12, **options):
        """Compare outputs and gradients with those of the loop in complex128."""
        dtype = self.leaves[0].dtype
        exact = self.to(torch.float64).run(self.loop)
        assert_same(self.to(dtype).run(**options), exact, bound)


@pytest.fixture
def small_tiles(monkeypatch):
    """Use chunks of 8 positions for any number of processors."""
    from luna_mega.kernels.moving_average import triton_plan

    monkeypatch.setattr(triton_plan, "SHORTEST_CHUNK", 8)
    monkeypatch.setattr(triton_plan, "CONFIGURATIONS", (triton_plan.Configuration(1 << 20, 8),))


@pytest.mark.triton
@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("turning", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("masking", MASKS)
@pytest.mark.parametrize("length, states", graded([(1, 1), (9, 3)], [], [(1, 1), (9, 3), (9, 16), (19, 2)]))
def test_triton(device, length, states, masking, turning, kind):
    inputs = Inputs(length, kind, turning, masking, states, skip=masking != "some").to(torch.float32)
    inputs.pairs = length % 2 == 0
    inputs.check(FLOAT32, device=device, backend="triton")


def s4d(x, a, dt, c):
    """Convolve x `[B, T, D]` as S4D does (Gu et al. 2022): kernel 2 Re sum_n C (exp(dt A) - 1) / A exp(dt A t), FFT."""
    length, scaled = x.shape[1], a * dt[:, None]
    powers = torch.exp(scaled[..., None] * torch.arange(length))
    kernel = 2 * torch.einsum("dn,dnt->dt", c * (torch.exp(scaled) - 1.0) / a, powers).real
    product = torch.fft.rfft(x.mT, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
    return torch.fft.irfft(product, n=2 * length)[..., :length].mT


def s4d_parameters(channels=5, states=4):
    torch.manual_seed(0)
    a = torch.complex(torch.full((states,), -0.5), math.pi * torch.arange(states)).expand(channels, states)
    dt, c = 0.1 * torch.rand(channels), torch.randn(channels, states, dtype=torch.complex64)
    return a.to(torch.complex128), dt.double(), c.to(torch.complex128)


def test_it_is_s4d():
    leaves = [torch.randn(2, 300, 5, dtype=torch.float64), *s4d_parameters()]
    results = []
    for run in (s4d, lambda x, a, dt, c: diagonal_ssm(x, *discretize(a, dt, 2 * c))):
        inputs = [x.clone().requires_grad_() for x in leaves]
        output = run(*inputs)
        results.append([output, *torch.autograd.grad(output.sin().sum(), inputs)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("real", [False, True])
def test_methods_of_discretize(real):
    a, dt, c = s4d_parameters()
    if real:
        a, c = a.real, c.real
    z = a * dt[:, None]
    expected = {
        "zoh": (torch.exp(z), c * (torch.exp(z) - 1) / a),
        "bilinear": ((1 + z / 2) / (1 - z / 2), c * dt[:, None] / (1 - z / 2)),
        "none": (torch.exp(z), c),
    }
    for method, (q, weight) in expected.items():
        log_decay, phase, found = discretize(a, dt, c, method)
        assert (phase is None) == (real and method != "bilinear")
        got = torch.exp(log_decay) if phase is None else torch.polar(torch.exp(log_decay), phase)
        torch.testing.assert_close(got.to(torch.complex128), q.to(torch.complex128))
        torch.testing.assert_close(found.to(torch.complex128), weight.to(torch.complex128))
        steps = discretize(a, dt[:, None].expand_as(z), c, method)
        assert all(x is y is None or torch.equal(x, y) for x, y in zip(steps, (log_decay, phase, found), strict=True))
    assert torch.equal(discretize(a, dt, torch.ones_like(a))[2], discretize(a, dt)[2])


def test_discretize_is_accurate_for_short_steps_and_computes_in_float32():
    a, step = torch.full((1, 1), -0.5), torch.full((1,), 1e-6)
    assert abs(discretize(a, step)[2].item() / 1e-6 - 1) < 1e-5
    for half in (torch.bfloat16, torch.float16):
        log_decay, phase, weight = discretize(a.to(half), torch.full((1,), 1e-2, dtype=half))
        assert phase is None and log_decay.dtype == weight.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert discretize(a, step)[2].dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", NATIVE])
def test_inductor_trains_with_pairs_and_complex_weights(backend):
    torch.compiler.reset()
    for pairs in (True, False):
        inputs = Inputs(90, "states", True).to(torch.float32)
        inputs.pairs = pairs
        compiled = torch.compile(inputs.call, fullgraph=True)
        assert_same(inputs.run(compiled, backend=backend), inputs.run(backend=backend), 1e-6)


PEAK = """
import re, sys, torch
from luna_mega.kernels.api import diagonal_ssm
torch.set_num_threads(1)
def peak():  # not `ru_maxrss`, which a new process inherits
    return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
start = peak()
leaves = [torch.randn(4, int(sys.argv[1]), 128), -torch.rand(128, 16), torch.randn(128, 16), torch.randn(128, 16, 2)]
leaves = [x.requires_grad_() for x in leaves]
diagonal_ssm(*leaves, backend=sys.argv[2]).sum().backward()
print(peak() - start)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc has the peak of memory")
@pytest.mark.parametrize("backend", ["torch", NATIVE])
def test_memory_is_linear(repo_root, backend):
    """A training step with 16,384 positions takes at most twice the memory of one with 8,192, including its inputs."""
    peaks = []
    for length in (8192, 16384):
        command = [sys.executable, "-c", PEAK, str(length), backend]
        peaks.append(int(subprocess.check_output(command, cwd=repo_root, timeout=PATIENCE)))
    assert 1 < peaks[0] and peaks[1] <= 2 * peaks[0], peaks


NAMES = ("x", "log_decay", "phase", "weight", "skip")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": lambda x: x[0]}, "batch, length, channels"),
        ({"x": lambda x: x.long()}, "floating-point"),
        ({"x": lambda x: x[..., :3]}, "5 rows of log_decay fit neither 3 channels"),
        ({"log_decay": lambda x: x[:, :2]}, r"a phase \[5, 2\], the shape of log_decay, got \[5, 3\]"),
        ({"log_decay": lambda x: x[0]}, r"a log_decay \[rows, N\], got \[3\]"),
        ({"log_decay": lambda x: x.long()}, "floating-point"),
        ({"phase": lambda x: x[:, 0]}, r"a phase \[5, 3\], the shape of log_decay, got \[5\]"),
        ({"phase": lambda x: None}, r"a real weight \[5, 3\] if phase is None, got torch.float64 \[5, 3, 2\]"),
        ({"weight": lambda x: x[..., 0]}, r"complex weight \[5, 3\] or real pairs \[5, 3, 2\].* got torch.float64"),
        ({"weight": lambda x: torch.view_as_complex(x)[:2]}, r"got torch.complex128 \[2, 3\]"),
        ({"skip": lambda x: x[:4]}, "skip of shape"),
        ({"mask": lambda x: torch.ones(2, 6)}, "bool mask"),
        ({"initial_state": lambda x: torch.zeros(2, 5, 3)}, "state .2, 5, 3, 2., got"),
        ({"initial_state": lambda x: torch.zeros(2, 5, 3, 2).half()}, "float32 or float64 state"),
        ({"cu_seqlens": lambda x: torch.tensor([0, 6])}, r"x \[1, total, channels\]"),
        ({"max_seqlen": lambda x: 6}, "max_seqlen requires cu_seqlens"),
    ],
)
def test_bad_arguments(change, message):
    arguments = dict(zip(NAMES, Inputs(6).leaves, strict=True))
    arguments |= {name: make(arguments.get(name)) for name, make in change.items()}
    with pytest.raises(ValueError, match=message):
        diagonal_ssm(**arguments)


def test_bad_calls():
    x, *rest = Inputs(6, "bidirectional").leaves
    with pytest.raises(ValueError, match="bidirectional model has no state; omit initial_state and return_state"):
        diagonal_ssm(x, *rest, return_state=True)
    with pytest.raises(ValueError, match="one row of log_decay per channel, got 10 rows for 5 channels"):
        diagonal_ssm_step(x[:, 0], torch.zeros(2, 5, 3, 2), *rest)
    x, *rest, state = Inputs(6, "states").leaves
    with pytest.raises(ValueError, match="state .2, 5, 3, 2., got"):
        diagonal_ssm_step(x[:, 0], state[:1], *rest)
    a, dt, c = s4d_parameters()
    with pytest.raises(ValueError, match="no method 'euler' of discretize; choose one of zoh, bilinear, none"):
        discretize(a, dt, c, "euler")
    for wrong in ((a[0], dt, None), (a, dt[:2], None), (a, dt, c[:, :2])):
        with pytest.raises(ValueError, match=r"discretize needs a \[R, N\], a step \[R\] or \[R, N\]"):
            discretize(*wrong)
