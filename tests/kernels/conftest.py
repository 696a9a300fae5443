from collections.abc import Iterator

import pytest
import torch

from luna_mega.kernels.moving_average import native


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill new memory with NaN, so that elements which no kernel writes are noticed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).new_empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[2, 1, 0], ids=["avx512", "avx2", "base"])
def level(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run the test with one instruction set of the C library."""
    if native.library.moving_average_level(request.param) != request.param:
        pytest.skip("the processor does not have these instructions")
    yield request.param
    native.library.moving_average_level(-1)


@pytest.fixture
def small_tiles() -> None:
    """Make the tiles of the Triton kernels small; the test modules of the operators override this fixture."""


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return the device of the parameter `backend`.

    New memory is filled with NaN for Triton (the default) and the C library. For Triton, tiles are small.
    """
    callspec = getattr(request.node, "callspec", None)
    backend = callspec.params.get("backend", "triton") if callspec else "triton"
    if backend in ("native", "triton"):
        request.getfixturevalue("poisoned_memory")
    if backend != "triton":
        return torch.device("cpu")
    device = request.getfixturevalue("triton_device")
    request.getfixturevalue("small_tiles")
    return device
