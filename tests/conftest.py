import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

# Without a GPU the Triton kernels are interpreted. Triton reads this when a kernel is defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """Root folder of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Folder with the parity fixtures and data sets, beside the checkout; the test is skipped where it is absent."""
    path = ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip("../shared (parity fixtures and data sets) is absent")
    return path


@pytest.fixture(scope="session")
def triton_device() -> torch.device:
    """Where the Triton kernels run: the GPU, or interpreted on the CPU; the test is skipped without Triton."""
    pytest.importorskip("triton", reason="Triton is not installed")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def seed() -> None:
    """Same random numbers in every test, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
