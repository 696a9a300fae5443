"""Functions of all ops for exported and compiled models: sizes for every length, and exact logarithms.

An exported program must not need this package, so it is made of PyTorch's own operators, those that ONNX has as well.
"""

import torch


def in_program() -> bool:
    """Return whether the call is compiled, exported or traced."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def count_chunks(length: int, size: int, device: torch.device) -> int:
    """Return ceil(length / size) + 1, in an exported program as a number that it computes.

    Computed from a shape, it would tie the program to lengths like the one it was traced with. One more than needed, as
    compilers treat a size of 1 as a constant.
    """
    if not torch.compiler.is_exporting():
        return -(-length // size) + 1
    chunks = ((torch.full((), length, device=device) + size - 1) // size + 1).item()
    torch._check(chunks >= 2)
    return chunks


def chunk_positions(length: int, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions `[chunks, size]`, filled up with the last one, and which are real; not those of the last row."""
    chunks = count_chunks(length, size, device)
    position = torch.arange(chunks * size, device=device).view(chunks, size)
    return position.clamp(max=length - 1), position < length


def log1p(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 + x), accurate around 0, where ONNX adds and takes the logarithm."""
    return 2.0 * torch.atanh(x / (2.0 + x)) if torch.compiler.is_exporting() else torch.log1p(x)


def expm1(x: torch.Tensor) -> torch.Tensor:
    """Return exp(x) - 1, accurate around 0, where ONNX subtracts."""
    return torch.tanh(0.5 * x) * (torch.exp(x) + 1.0) if torch.compiler.is_exporting() else torch.expm1(x)


def lerp(start: torch.Tensor, end: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return start + weight (end - start), where exporters take `torch.lerp` apart into what not all runtimes have."""
    return start + weight * (end - start) if torch.compiler.is_exporting() else torch.lerp(start, end, weight)
