from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill new memory with NaN, so that an element that no kernel writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).new_empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_tiles() -> None:
    """Small tiles of the Triton kernels; overridden by the modules of the operators."""


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """Device of the parameter `backend`; Triton (the default) has small tiles and memory that is filled with NaN."""
    callspec = getattr(request.node, "callspec", None)
    if callspec and callspec.params.get("backend", "triton") != "triton":
        return torch.device("cpu")
    device = request.getfixturevalue("triton_device")
    request.getfixturevalue("poisoned_memory")
    request.getfixturevalue("small_tiles")
    return device
