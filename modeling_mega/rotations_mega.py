"""The rotations of a rotary relative bias, `MegaRotaryRelativeBias`."""

import math
from typing import Any

import torch

from luna_mega.kernels.support import is_plain

# Elements of the largest table that is kept.
LARGEST = 1 << 22
# Tables by powers of two of positions, pairs, dtype and device. None is removed, because a CUDA graph may read it.
_tables: dict[tuple[Any, ...], torch.Tensor] = {}


def rotations(length: int, vector: torch.Tensor) -> torch.Tensor:
    """Return the factors of alpha_1 beta_1, alpha_2 beta_2, alpha_2 beta_1 and alpha_1 beta_2, `[2 length - 1, 2 Z]`.

    alpha_1 and alpha_2 are the halves of a vector like `vector` `[..., Z]`. The rows are the distances j - i from
    `1 - length` to `length - 1`.
    """
    pairs, dtype, device = vector.shape[-1] // 2, vector.dtype, vector.device
    positions = 1 << max(length - 1, 0).bit_length() if is_plain((vector,)) else 0
    if not positions or 8 * positions * pairs > LARGEST:
        return _compute(length, pairs, dtype, device)
    key = positions, pairs, dtype, device
    if (table := _tables.get(key)) is None:
        with torch.inference_mode(False), torch.no_grad():
            table = _compute(positions, pairs, dtype, device)
        # A CUDA graph owns the memory that it allocates.
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _tables[key] = table
    return table[positions - length : positions + length - 1]


def _compute(length: int, pairs: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    frequency = torch.exp(torch.arange(pairs, dtype=dtype, device=device) * -(math.log(10000.0) / pairs))
    angle = torch.arange(1 - length, length, dtype=dtype, device=device)[:, None] * frequency
    cosine, sine = angle.cos(), angle.sin()
    return torch.cat((cosine, cosine, sine, -sine), 1)
