"""Floors: lower bounds of the time of an op on this machine, for any implementation.

The formulas count every input read once, every output written once, and the multiplications of the algorithm. The rates
of copying and of matrix products are measured in the same run; the others come from the processor's data sheet.
"""

from dataclasses import dataclass

import torch
from torch.utils.benchmark import Timer


@dataclass(frozen=True)
class Floor:
    """Work of one pass: bytes to and from memory, operations of matrix products, float32 operations, exponentials."""

    bytes: float
    flops: float = 0.0
    float32: float = 0.0
    exponentials: float = 0.0


@dataclass(frozen=True)
class Rates:
    """Measured operations and bytes per second of the machine; None = unknown and not counted."""

    bytes: float
    flops: float
    float32: float
    exponentials: float | None

    def milliseconds(self, floor: Floor) -> float:
        """Return the time of the slowest of the four."""
        pairs = ((floor.bytes, self.bytes), (floor.flops, self.flops))
        pairs += ((floor.float32, self.float32), (floor.exponentials, self.exponentials))
        return 1000 * max(amount / rate for amount, rate in pairs if rate is not None)


def luna_attention(width, l, n, b=1, heads=12, head_size=64, **_):  # noqa: E741 - the paper's l
    """Count pack, with tied keys and values, and unpack: context and query are read, the output is written."""
    row, tokens, d = heads * head_size * width, b * n, heads * head_size
    exponentials = 2 * heads * l * tokens
    return (
        Floor(3 * row * tokens, 8 * l * d * tokens, exponentials=exponentials),
        Floor(5 * row * tokens, 20 * l * d * tokens, exponentials=exponentials),
    )


def luna_causal_attention(width, l, n, b=1, heads=8, head_size=64, chunk=64, **_):  # noqa: E741
    """Count query, pack key and context read, the output written, and the products of chunks of 64."""
    d, tokens = heads * head_size, b * n
    flops = (4 * chunk * d + 4 * chunk * l * heads + 10 * l * d) * tokens
    exponentials = 3 * heads * l * tokens
    return (
        Floor(4 * d * width * tokens, flops, exponentials=exponentials),
        Floor(7 * d * width * tokens, 2.5 * flops, exponentials=exponentials),
    )


def damped_ema(width, n, b=1, directions=1, d=512, states=16, **_):
    """Count the input read, the output written, and two multiply-adds of every state, for itself and the output."""
    elements = b * n * d
    return (
        Floor(2 * width * elements, float32=4 * states * directions * elements),
        Floor(3 * width * elements, float32=14 * states * directions * elements),
    )


def complex_ema(width, n, b=1, d=512, states=16, **_):
    """Count the input read, the output written, and the multiply-adds of every complex state and for the output."""
    elements = b * n * d
    return (
        Floor(2 * width * elements, float32=14 * states * elements),
        Floor(3 * width * elements, float32=48 * states * elements),
    )


def diagonal_ssm(width, n, b=1, directions=1, d=512, states=16, **_):
    """Count the same as for `complex_ema`."""
    return complex_ema(width, n, b, d, states * directions)


def timestep_norm(width, n, b=1, d=1024, **_):
    """Count the input read, the output written, and a few operations on every feature."""
    elements = b * n * d
    return Floor(2 * width * elements, float32=6 * elements), Floor(3 * width * elements, float32=14 * elements)


def gated_attention(width, n, chunk, b=1, shared=128, values=1024, causal=0, **_):
    """Count query, key and value read, the output written, scores and their products with the value (causal: half)."""
    tokens, keys = b * n, (chunk or n) / (2 if causal else 1)
    return (
        Floor((2 * shared + 2 * values) * width * tokens, 2 * keys * (shared + values) * tokens),
        Floor((4 * shared + 3 * values) * width * tokens, 2 * keys * (3 * shared + 2 * values) * tokens),
    )


def rates(device: str, dtype: str) -> Rates:
    """Measure copying and multiplying large matrices, the fastest of five; the rest is from the data sheet."""
    size, side = (2**30, 8192) if device == "cuda" else (2**27, 2048)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    left = torch.randn(side, side, device=device, dtype=getattr(torch, dtype))
    copied = 2 * size / _seconds(lambda: target.copy_(source))
    multiplied = 2 * side**3 / _seconds(lambda: left @ left)
    if device != "cuda":
        return Rates(copied, multiplied, multiplied, None)
    # A multiprocessor issues 16 exponentials a clock, and 64 (compute capability 8.0) or 128 multiply-adds.
    properties = torch.cuda.get_device_properties(device)
    clocks = 1000.0 * properties.clock_rate * properties.multi_processor_count
    lanes = 64 if (properties.major, properties.minor) == (8, 0) else 128
    return Rates(copied, multiplied, 2 * lanes * clocks, 16 * clocks)


def _seconds(function):
    """Return the time of the fastest of five calls after a warm-up call; on a GPU, wait until it is idle."""
    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    return min(timer.timeit(1).mean for _ in range(5))
