"""How calls are divided into programs, for several GPUs and batch sizes, and the work of the host; without a GPU."""

import contextlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is not installed")

from luna_mega.kernels import _export, api  # noqa: E402
from luna_mega.kernels.common import triton_choice, triton_launch  # noqa: E402
from luna_mega.modeling_common.cache import keep_derived  # noqa: E402
from tests.kernels.aot_calls import BF16, LRA, average, causal, gated, luna, turning  # noqa: E402
from tests.kernels.backends import shrink_blocks  # noqa: E402
from tests.kernels.calls import OF_SEQUENCES, OPERATORS, TOKENS, Sizes  # noqa: E402
from tests.kernels.steps import STEPS  # noqa: E402

# Calls by the number of sequences.
CALLS = {
    "luna_pack": lambda batch: luna("luna_pack", 64, batch=batch),
    "luna_pack varlen": lambda batch: luna("luna_pack", 64, masked=False, varlen=True, batch=batch),
    "luna_unpack": lambda batch: luna("luna_unpack", 64, batch=batch),
    "luna_causal_attention fused": lambda batch: causal(batch, 32, BF16),
    "luna_causal_attention scans": lambda batch: causal(batch, 128, BF16),
    "gated_attention": lambda batch: gated(batch, *LRA[1:]),
    "gated_attention backward": lambda batch: gated(batch, *LRA[1:], backward=True),
    "damped_ema": lambda batch: average(batch=batch, directions=2),
    "damped_ema varlen": lambda batch: average(batch=batch, varlen=True),
    "complex_ema": lambda batch: turning(batch=batch),
}
GPUS = 58, 132  # numbers of multiprocessors of an L4 and of an H100


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def plans(name: str) -> list:
    """Return the launches of a call for all GPUs and batch sizes, with the number of programs per sequence."""
    results = []
    for processors in GPUS:
        for batch in (1, 6):
            with triton_launch.recording(triton_launch.Target(processors=processors)) as launches:
                CALLS[name](batch)
            results.append(
                [
                    (x.kernel.fn.__name__, Fraction(x.grid[0], batch), x.grid[1:], x.constants)
                    for x in launches
                    # These kernels do not depend on the number of sequences.
                    if "coefficients" not in x.kernel.fn.__module__ and x.kernel.fn.__name__ != "_diagonals_kernel"
                ]
            )
    return results


@pytest.mark.parametrize("name", CALLS)
def test_deterministic_plans_do_not_depend_on_the_gpu_and_the_batch(name, deterministic):
    first, *others = plans(name)
    assert first and all(other == first for other in others)


@pytest.mark.parametrize("name", CALLS)
def test_other_plans_fill_the_gpu(name):
    first, *others = plans(name)
    assert any(other != first for other in others)


def results(op: str, batch: int, processors: int, monkeypatch) -> list[torch.Tensor]:
    """Return the output and the gradients of the tokens of the first sequence of a batch."""
    monkeypatch.setattr(triton_launch, "_target", triton_launch.Target(processors=processors))
    shrink_blocks(monkeypatch, "small", triton=True)
    call = OPERATORS[op].make(Sizes(2, 260 if op == "luna_pack" else 40, 1, rows=5))
    leaves = {key: (x[:batch] if key in TOKENS | OF_SEQUENCES else x).float() for key, x in call.leaves.items()}
    tokens = [leaves[key].requires_grad_() for key in leaves.keys() & TOKENS]
    output = call.run(**leaves, backend="triton")[0]
    seed = torch.randn(2, *output.shape[1:], generator=torch.Generator().manual_seed(0))[:batch]
    return [x[0] for x in (output, *torch.autograd.grad(output, tokens, seed))]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="replaces the target of interpreted kernels")
@pytest.mark.parametrize("op", ["luna_pack", "luna_causal_attention", "damped_ema"])
def test_deterministic_results_do_not_depend_on_the_gpu_and_the_batch(op, deterministic, monkeypatch):
    first, second = results(op, 1, 4, monkeypatch), results(op, 2, 132, monkeypatch)
    assert all(map(torch.equal, first, second))


def test_deterministic_calls_are_not_tuned(deterministic, monkeypatch):
    """Deterministic calls use the default configuration, because the fastest one depends on the GPU."""
    monkeypatch.setenv("LUNA_MEGA_AUTOTUNE", "1")
    device = torch.device("cuda")
    assert (
        triton_choice.choose(None, [], {}, ["default", "other"], lambda configuration: configuration, device)
        == "default"
    )


# The maximum numbers of operators and launches of each step of a model.
BUDGETS = {
    "LunaForMaskedLM, training": (393, 12),
    "LunaForCausalLM, training": (374, 8),
    "LunaForConditionalGeneration, training": (974, 32),
    "LunaModel, inference": (106, 4),
    "MegaForMaskedLM, training": (606, 34),
    "MegaForMaskedLM, padding-free training": (624, 34),
    "MegaForCausalLM, training": (592, 26),
    "MegaForConditionalGeneration, training": (1453, 76),
    "MegaModel, inference": (134, 8),
    "MegalodonForCausalLM, training": (624, 40),
    "MegaForCausalLM, decoding": (193, 2),
    "MegalodonForCausalLM, decoding": (248, 5),
}


class Counts(TorchDispatchMode):
    """Count the operators of PyTorch that eager mode calls, including those inside functions of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        self.operators += 1
        return operator(*arguments, **(options or {}))


@contextlib.contextmanager
def counted_launches() -> Iterator[list[int]]:
    """Yield a list that contains the number of launches, and run no kernel."""
    from triton.runtime.interpreter import InterpretedFunction

    launches = [0]

    def count(*arguments: object, **options: object) -> None:
        launches[0] += 1

    with mock.patch.object(InterpretedFunction, "run", count), api.use_backend("triton"):
        yield launches


def measure(run: Callable) -> tuple[int, int]:
    """Return the number of PyTorch operators and the number of launches of a call."""
    with counted_launches() as launches, keep_derived(True):  # decoding steps as in `generate`
        for _ in range(2):
            run()
        launches[0] = 0
        with mock.patch.object(_export, "_len_torch_dispatch_stack", lambda: 0), Counts() as counts:
            run()
    return counts.operators, launches[0]


@pytest.mark.triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts launches on the CPU")
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_counts_are_within_their_budgets(triton_device):
    """Operators and launches per step determine the speed of small models on a GPU.

    The counts are the same on a GPU, except for norms, which are one operator there. Decoding of Luna is not counted:
    the state counts positions, and nothing writes the count.
    """
    for name, most in BUDGETS.items():
        counts = measure(STEPS[name]().run)
        assert counts[0] <= most[0] and counts[1] <= most[1], f"{name}: {counts} operators and launches, at most {most}"
