"""How calls are divided into programs, for several GPUs and batch sizes, and the work of the host; without a GPU."""

from collections.abc import Callable, Iterator
from fractions import Fraction
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is not installed")

from luna_mega.kernels import _mode, api  # noqa: E402
from luna_mega.kernels.common import triton_choice  # noqa: E402
from luna_mega.kernels.common.triton_launch import Target, recording  # noqa: E402
from luna_mega.modeling_common.cache import keep_derived  # noqa: E402
from tests.kernels.aot_calls import BF16, LRA, average, causal, gated, luna, turning  # noqa: E402
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
            with recording(Target(processors=processors)) as launches:
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
    """Then the results of a sequence do not depend on them either."""
    first, *others = plans(name)
    assert first and all(other == first for other in others)


@pytest.mark.parametrize("name", CALLS)
def test_other_plans_fill_the_gpu(name):
    first, *others = plans(name)
    assert any(other != first for other in others)


def test_deterministic_calls_are_not_tuned(deterministic, monkeypatch):
    """Deterministic calls use the default configuration, because the fastest one depends on the GPU."""
    monkeypatch.setenv("LUNA_MEGA_AUTOTUNE", "1")
    configurations = ["default", "other"]
    assert triton_choice.choose(None, [], {}, configurations, str, torch.device("cuda")) == "default"


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


def measure(run: Callable) -> tuple[int, int]:
    """Return the number of PyTorch operators and the number of launches of a call; no kernel runs."""
    with api.use_backend("triton"), keep_derived(True), recording(Target()) as launches:  # decodes as `generate` does
        for _ in range(2):
            run()
        before = len(launches)
        with mock.patch.object(_mode, "_len_torch_dispatch_stack", lambda: 0), Counts() as counts:
            run()
    return counts.operators, len(launches) - before


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
        assert counts[0] <= most[0] and 0 < counts[1] <= most[1], f"{name}: {counts} instead of {most}"
