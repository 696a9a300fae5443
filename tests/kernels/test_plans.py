"""How calls are divided into programs, for several GPUs and batch sizes; nothing is launched on a GPU."""

from collections.abc import Iterator
from fractions import Fraction
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from luna_mega.kernels import api  # noqa: E402
from luna_mega.kernels.common import triton_choice, triton_launch  # noqa: E402
from luna_mega.kernels.luna_causal_attention import triton_forward  # noqa: E402
from luna_mega.kernels.moving_average import triton_plan  # noqa: E402
from tests.kernels import host_counts  # noqa: E402
from tests.kernels.aot_calls import BF16, ENWIK8, FP16, FP32, LRA, average, causal, gated, luna, turning  # noqa: E402

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


@pytest.mark.parametrize("call, limit", [(average, 58), (turning, 29)])
@pytest.mark.parametrize("missing", [0, 1])
def test_averages_of_many_sequences_are_not_divided(call, limit, missing):
    """From 7/8 of the programs of an H100 on: 58 x 16 blocks of 32 channels, 29 x 32 blocks of 16 channels."""
    with triton_launch.recording(triton_launch.Target()) as launches:
        call(batch=limit - missing, length=512, channels=512)
    divided = any(launch.kernel.fn.__name__ == "_chunk_state_kernel" for launch in launches)
    assert divided == bool(missing)


# Calls, their default configurations on an H100, and other candidates. The first call of each operator was measured.
SCANS, PACK = partial(partial, causal, 8, backward=False), partial(partial, luna, "luna_pack", 16)
DEFAULTS = [
    (SCANS(rows=128, dtype=BF16), (64, 64, 4), (64, 64, 8)),
    (SCANS(rows=256, dtype=BF16), (64, 64, 8), (64, 64, 4)),
    (SCANS(rows=128, dtype=BF16, size=128), (64, 64, 8), (64, 64, 4)),
    (SCANS(rows=128, dtype=FP16), (64, 64, 8), (64, 64, 4)),
    (partial(gated, *LRA), (64, 128, 128, 4, 3), (64, 128, 128, 4, 2)),
    (partial(gated, *LRA[:5], 128, *LRA[6:]), (64, 128, 128, 4, 2), (64, 128, 128, 4, 3)),
    (partial(gated, *LRA, varlen=True), (64, 128, 128, 8, 2), (64, 128, 128, 8, 3)),
    (PACK(), (64, 128, 4, 2), (64, 64, 4, 3)),
    (PACK(length=1024), (64, 64, 4, 3), (64, 128, 4, 2)),
    (partial(luna, "luna_pack", 32), (64, 64, 4, 3), (64, 128, 4, 2)),
    (PACK(dropout=0.1), (64, 64, 4, 3), (64, 128, 4, 2)),
    (partial(gated, *ENWIK8), (2,), (1,)),
    (partial(gated, *ENWIK8[:5], 512, *ENWIK8[6:]), (128, 64, 256, 8, 2), None),
]


def configurations_of(call, target: triton_launch.Target) -> tuple:
    """Return the candidate configurations of the first kernel of a call, with the default first."""
    seen = []

    def record(kernel, key, configurations, run):
        seen.append(configurations)
        return run(configurations[0])

    with triton_launch.recording(target), triton_choice.choosing(record):
        call()
    return seen[0]


@pytest.mark.parametrize("call, default, other", DEFAULTS)
def test_default_configurations(call, default, other):
    found = configurations_of(call, triton_launch.Target())
    assert found[0] == default and (other is None or other in found[1:])


@pytest.mark.parametrize("memory, size, rows", [(99, 128, 64), (99, 129, 32), (99, 256, 32), (163, 256, 64)])
def test_wide_queries_in_float32_fit_the_shared_memory(memory, size, rows):
    """64 rows of 256 columns need 152 KB; `test_aot.py` compiles all sizes for 99 KB."""
    call = partial(gated, 4, 4096, 4096, 4096, size, 1024, "softmax", True, True, FP32)
    assert configurations_of(call, triton_launch.Target((8, 6), 84, memory * 1024))[0].rows == rows


def results(op: str, batch: int, processors: int, monkeypatch) -> list[torch.Tensor]:
    """Return the outputs and gradients of the first sequence of a batch."""
    monkeypatch.setattr(triton_launch, "_target", triton_launch.Target(processors=processors))
    monkeypatch.setattr(triton_forward, "MIN_SEGMENT", 16)
    monkeypatch.setattr(triton_plan, "SHORTEST_CHUNK", 16)
    generator, length = torch.Generator().manual_seed(0), 260 if op == "luna_pack" else 40

    def randoms(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    if op == "luna_pack":
        leaves = [randoms(2, n, 1, 16) for n in (5, length, length)]
        run = api.luna_pack
    elif op == "luna_causal_attention":
        leaves = [randoms(2, n, 1, 16) for n in (length, 5, length, length, length)]
        run = api.luna_causal_attention
    else:
        leaves, parameters = [randoms(2, length, 16)], [randoms(16, 16) for _ in range(4)]
        run = partial(api.damped_ema, **dict(zip(("input_logit", "damping_logit", "expansion", "projection"),
                                                 parameters, strict=True)))  # fmt: skip
    leaves = [x[:batch].clone().requires_grad_() for x in leaves]
    output = run(*leaves, backend="triton")
    gradients = torch.autograd.grad(output, leaves, randoms(2, *output.shape[1:])[:batch])
    return [x[0] for x in (output, *gradients)]


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
@pytest.mark.parametrize("cases", [host_counts.operator_cases, host_counts.model_cases])
def test_counts_are_within_their_budgets(triton_device, cases):
    """Operators and launches per call determine the speed of small models on a GPU."""
    for name, run in cases():
        counts, most = host_counts.measure(run), host_counts.BUDGETS[name]
        assert counts[0] <= most[0] and counts[1] <= most[1], f"{name}: {counts} operators and launches, at most {most}"
