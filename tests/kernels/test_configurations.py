"""The choice of a kernel's configuration: the default, or the fastest one according to Triton's autotuner."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
from luna_mega.kernels.common.comparison import row_error  # noqa: E402

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Tiles(NamedTuple):
    rows: int
    warps: int


A, B, C, TOO_LARGE, WRONG = Tiles(64, 4), Tiles(64, 8), Tiles(128, 8), Tiles(1, 1), Tiles(2, 2)
SECONDS = {A: 3.0, B: 2.0, C: 1.0, TOO_LARGE: 0.1, WRONG: 0.2}


class Kernel:
    """A mock kernel. The source of `fn` is part of the autotuner's cache key on disk."""

    @staticmethod
    def fn():
        pass


@pytest.fixture
def choice(monkeypatch):
    """Return the module in the state of a new process on a GPU, with mocked times `SECONDS` and an empty disk cache."""
    from luna_mega.kernels.common import triton_choice

    def do_bench(launch, quantiles, **options):
        launch()
        return [SECONDS[choice.last]] * len(quantiles)

    def check_disk_cache(tuner, key, configurations, benchmark):
        choice.keys.append(key)
        benchmark()

    choice = SimpleNamespace(module=triton_choice, ran=[], keys=[], last=None)
    triton_choice._tuner.cache_clear()
    monkeypatch.setenv("LUNA_MEGA_AUTOTUNE", "1")
    # interpreted kernels would not use the disk cache
    monkeypatch.setattr(triton_choice.triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(triton_choice.triton.testing, "do_bench", do_bench)
    monkeypatch.setattr(triton_choice.Autotuner, "check_disk_cache", check_disk_cache)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.inference_mode(False))
    yield choice
    triton_choice._tuner.cache_clear()


def pick(choice, kind="bfloat16", length=500, tiles=tuple(SECONDS), device=GPU):
    """Return the configuration that is chosen for a call.

    The mocked call has one incorrect result with the configuration `WRONG`.
    """
    from triton.runtime.errors import OutOfResources

    def run(tiles):
        choice.last = tiles
        choice.ran.append(tiles)
        if tiles == TOO_LARGE:
            raise OutOfResources(200_000, 100_000, "shared memory")
        lost = torch.arange(3000) == (1234 if tiles == WRONG else -1)
        return [(~lost).bfloat16()[:, None].expand(-1, 4), None]

    choice.ran.clear()
    result = choice.module.choose(Kernel, [kind], {"length": length}, tiles, run, device)
    assert (result[0] == 1.0).all()
    return choice.last


def test_the_fastest_that_is_right_and_fits(choice):
    """A call is benchmarked once per `kind` and `sizes`; incorrect and oversized configurations are excluded."""
    assert pick(choice, tiles=(B, B)) == B and not choice.keys and not choice.module._tuner.cache_info().currsize
    assert pick(choice) == C and {TOO_LARGE, WRONG} < set(choice.ran)
    assert pick(choice, length=512) == C and choice.ran == [C]
    assert pick(choice, tiles=(A, B)) == B and pick(choice, tiles=(A, WRONG)) == A
    assert pick(choice, "float32") == C and len(choice.ran) > 5


def test_the_cache_on_disk(choice):
    """Times are stored on disk per kind of call and device, and no result is kept in memory."""
    pick(choice)
    assert choice.keys == [("bfloat16 length=512 on NVIDIA H100 80GB HBM3",)]
    tuner = choice.module._tuner(Kernel, tuple(SECONDS))
    assert tuner.benchmarked is None and tuner.expected is None


def test_it_is_opt_in(choice, monkeypatch):
    assert pick(choice, device=CPU) == A and choice.ran == [A], "interpreted kernels are not tuned"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert pick(choice) == A and choice.ran == [A], "a graph is captured"
    monkeypatch.delenv("LUNA_MEGA_AUTOTUNE")
    assert pick(choice) == A and choice.ran == [A]
    assert pick(choice, tiles=(B,)) == B
    with choice.module.choosing(lambda kernel, key, tiles, run: run(tiles[key == "bfloat16 length=512"])):
        assert pick(choice, tiles=(A, A, B)) == B, "instead of the default, by the key and of different tiles"
    assert pick(choice) == A


def results(dtype):
    """Return rounded numbers `[1, 4000, 2, 16]` and the exact numbers, whose norms decrease by position."""
    exact = torch.randn(1, 4000, 2, 16, dtype=torch.float64) / torch.arange(1, 4001)[:, None, None] ** 0.25
    noise = torch.randn(exact.shape, dtype=torch.float64)
    return (exact + torch.finfo(dtype).eps / 4 * exact.abs() * noise).to(dtype), exact.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_wrong_position_is_a_difference(choice, dtype):
    """The norm of all positions hides it."""
    right, exact = results(dtype)
    assert choice.module.difference([right], [exact]) is None
    row = right[0, 1234, 1]
    for wrong in (0 * row, -row, row.roll(1), row * torch.nan):
        actual = right.clone()
        actual[0, 1234, 1] = wrong
        assert "differs" in choice.module.difference([actual], [exact])


def test_error_of_a_row():
    exact = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.3, 0.4], [30.0, 40.0]])  # the median of the nonzero norms is 5
    for row, size in ((0, 5.0), (1, 5.0), (2, 5.0), (3, 50.0)):
        actual = exact.clone()
        actual[row, 0] += 1.0
        assert row_error(actual, exact) == pytest.approx(1 / size)
    assert row_error(exact, exact) == 0.0 and row_error(exact[:0], exact[:0]) == 0.0
    assert row_error(0 * exact + 1e-3, 0 * exact, least=1.0) == pytest.approx(1e-3)
    empty = torch.tensor([1.0, -torch.inf])  # -inf is the logarithm of an empty sum
    assert row_error(empty, empty) == 0.0 and row_error(torch.ones(2), empty) > 0.5
