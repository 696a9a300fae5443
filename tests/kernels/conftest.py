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
