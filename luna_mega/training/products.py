"""float32 matrix products of a CPU: choose the faster library of PyTorch's wheel."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from luna_mega.training.arguments import say

# Largest accepted error of a product. Products in float32 have 6e-7, in bfloat16 3e-3.
LARGEST_ERROR = 5e-6


def use_onednn(
    device: str | torch.device,
    *,
    cpu: Mapping[str, Any] | None = None,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
) -> None:
    """Compute float32 products of this process with oneDNN instead of MKL if it is faster and as accurate.

    It is faster on AMD processors with AVX-512. The choice depends on the processor and not on measured times, so that
    a run that resumes on the same machine has the same results. A setting of the user is kept.

    Args:
        device: Device of the models. GPUs and their settings are not affected, and nothing changes for them.
        cpu: Properties of the processor; by default, `torch.cpu.get_capabilities()`.
        product: Function whose error is measured on float32 matrices `[256, 256]`.
    """
    matmul = torch.backends.mkldnn.matmul
    cpu = torch.cpu.get_capabilities() if cpu is None else cpu
    is_faster = cpu.get("cpu_name", "").startswith("AMD ") and cpu.get("avx512_bw")
    if torch.device(device).type != "cpu" or not is_faster or matmul.fp32_precision != "none":
        return
    # PyTorch calls oneDNN only if bfloat16 is allowed. oneDNN 3.12 makes use of this permission on processors with AMX
    # only, and otherwise computes in float32.
    matmul.fp32_precision = "bf16"
    error = product_error(product)
    if error < LARGEST_ERROR:
        say(f"float32 products are computed by oneDNN (error {error:.0e})")
    else:
        matmul.fp32_precision = "none"


def product_error(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
    """Return the largest error of a float32 product of random matrices, relative to its largest value."""
    numbers = torch.Generator().manual_seed(0)  # keeps the random state of the caller
    a, b = torch.randn(2, 256, 256, generator=numbers, dtype=torch.float32, device="cpu")
    exact = a.double() @ b.double()
    return ((product(a, b) - exact).abs().max() / exact.abs().max()).item()
