"""How calls are divided into programs, for several GPUs and batch sizes; nothing is launched on a GPU."""

from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from luna_mega.kernels.common import triton_choice, triton_launch  # noqa: E402
from tests.kernels import host_counts  # noqa: E402
from tests.kernels.aot_calls import BF16, LRA, average, causal, gated, luna, turning  # noqa: E402
from tests.kernels.backends import shrink_blocks  # noqa: E402
from tests.kernels.calls import OF_SEQUENCES, OPERATORS, TOKENS, Sizes  # noqa: E402

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


@pytest.mark.triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts launches on the CPU")
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_counts_are_within_their_budgets(triton_device):
    """Operators and launches per call determine the speed of small models on a GPU."""
    for name, run in host_counts.cases():
        counts, most = host_counts.measure(run), host_counts.BUDGETS[name]
        assert counts[0] <= most[0] and counts[1] <= most[1], f"{name}: {counts} operators and launches, at most {most}"
