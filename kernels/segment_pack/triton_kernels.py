"""Position-aware pack in Triton: one program per row, which iterates over the tokens of the row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from luna_mega.kernels.common.triton_launch import block_of, cdiv, contiguous, launch

BLOCK_T = 32
# Most features that a program of the forward pass packs, and that a tile of the backward pass has.
LARGEST_D = 128


@triton.jit
def _tile(SCORE, KEPT, first, end, BLOCK_T: tl.constexpr):
    """Return the tokens of a tile, whether they are in the row, whether they are unmasked, and their scores."""
    token = first + tl.arange(0, BLOCK_T)
    there = token < end
    kept = there
    if KEPT is not None:
        kept = there & (tl.load(KEPT + token, there, other=0) != 0)
    return token, there, kept, tl.load(SCORE + token, kept, other=float("-inf"))


@triton.jit
def _forward_kernel(
    X,  # [tokens, width]
    SCORE, KEPT,  # [tokens]
    STARTS,  # [rows + 1]
    PACKED,  # [rows, width]
    ENTROPY, PEAK, TOTAL,  # [rows]
    width,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the weighted mean of a block of features, the entropy, the largest score and the sum of weights.

    The program index is `(row, block of features)`.
    """
    row = tl.program_id(0)
    feature = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin, end = tl.load(STARTS + row), tl.load(STARTS + row + 1)
    peaks = tl.full([BLOCK_T], float("-inf"), tl.float32)
    for first in range(begin, end, BLOCK_T):
        _, _, _, score = _tile(SCORE, KEPT, first, end, BLOCK_T)
        peaks = tl.maximum(peaks, score)
    peak = tl.max(peaks, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)  # no token
    totals = tl.zeros([BLOCK_T], tl.float32)
    moments = tl.zeros([BLOCK_T], tl.float32)
    packed = tl.zeros([BLOCK_D], tl.float32)
    for first in range(begin, end, BLOCK_T):
        token, _, kept, score = _tile(SCORE, KEPT, first, end, BLOCK_T)
        relative = tl.where(kept, score - peak, 0.0)
        weight = tl.where(kept, tl.exp(relative), 0.0)
        totals += weight
        moments += weight * relative
        inside = kept[:, None] & (feature < width)[None, :]
        x = tl.load(X + token[:, None] * width + feature[None, :], inside, other=0.0).to(tl.float32)
        packed += tl.sum(weight[:, None] * x, 0)
    total = tl.sum(totals, 0)
    divisor = tl.where(total == 0.0, 1.0, total)
    place = row.to(tl.int64) * width + feature
    tl.store(PACKED + place, packed / divisor, feature < width)
    if tl.program_id(1) == 0:
        tl.store(ENTROPY + row, tl.log(divisor) - tl.sum(moments, 0) / divisor)
        tl.store(PEAK + row, peak)
        tl.store(TOTAL + row, total)


@triton.jit
def _backward_kernel(
    DPACKED, DENTROPY,  # [rows, width], [rows]
    X,  # [tokens, width]
    SCORE, KEPT,  # [tokens]
    STARTS,  # [rows + 1]
    PACKED,  # [rows, width]
    ENTROPY, PEAK, TOTAL,  # [rows]
    DX, DSCORE,  # [tokens, width], [tokens]
    width,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the tokens of a row; masked tokens have gradient 0. The program index is `row`."""
    row = tl.program_id(0)
    begin, end = tl.load(STARTS + row), tl.load(STARTS + row + 1)
    place = row.to(tl.int64) * width
    of_entropy, entropy = tl.load(DENTROPY + row), tl.load(ENTROPY + row)
    peak, total = tl.load(PEAK + row), tl.load(TOTAL + row)
    divisor = tl.where(total == 0.0, 1.0, total)
    products = tl.zeros([BLOCK_D], tl.float32)
    for block in range(0, width, BLOCK_D):
        feature = block + tl.arange(0, BLOCK_D)
        of_packed = tl.load(DPACKED + place + feature, feature < width, other=0.0)
        products += of_packed * tl.load(PACKED + place + feature, feature < width, other=0.0)
    # The weighted mean over the tokens of the row.
    mean = tl.sum(products, 0) - of_entropy * (tl.log(divisor) - entropy)
    for first in range(begin, end, BLOCK_T):
        token, there, kept, score = _tile(SCORE, KEPT, first, end, BLOCK_T)
        relative = tl.where(kept, score - peak, 0.0)
        weight = tl.where(kept, tl.exp(relative) / divisor, 0.0)
        own = -of_entropy * relative
        for block in range(0, width, BLOCK_D):
            feature = block + tl.arange(0, BLOCK_D)
            of_packed = tl.load(DPACKED + place + feature, feature < width, other=0.0)
            places = token[:, None] * width + feature[None, :]
            inside = kept[:, None] & (feature < width)[None, :]
            x = tl.load(X + places, inside, other=0.0).to(tl.float32)
            own += tl.sum(of_packed[None, :] * x, 1)
            of_x = weight[:, None] * of_packed[None, :]
            tl.store(DX + places, of_x.to(DX.dtype.element_ty), there[:, None] & (feature < width)[None, :])
        tl.store(DSCORE + token, weight * (own - mean), there)


def forward(x: Tensor, score: Tensor, kept: Tensor | None, starts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the packed rows `[R, D]` of tokens `[N, D]`, and the entropy, the largest score and the sum of weights.

    `starts` `[R + 1]` int64 are the bounds of the rows; score `[N]` and all results are float32.
    """
    x, score, kept = contiguous(x, score, kept)
    rows, width = starts.shape[0] - 1, x.shape[1]
    packed = x.new_empty(rows, width, dtype=torch.float32)
    entropy, peak, total = (x.new_empty(rows, dtype=torch.float32) for _ in range(3))
    block = block_of(width, LARGEST_D)
    launch(
        _forward_kernel, (rows, cdiv(width, block)), x, score, kept, starts, packed, entropy, peak, total, width,
        BLOCK_T=BLOCK_T, BLOCK_D=block, num_warps=4, num_stages=2,
    )  # fmt: skip
    return packed, entropy, peak, total


def backward(
    grad_packed: Tensor, grad_entropy: Tensor | None, packed: Tensor, entropy: Tensor, peak: Tensor, total: Tensor,
    x: Tensor, score: Tensor, kept: Tensor | None, starts: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of `x` and `score`; `packed` to `total` are the results of `forward`."""
    grad_entropy = torch.zeros_like(entropy) if grad_entropy is None else grad_entropy
    grad_packed, grad_entropy, x, score, kept = contiguous(grad_packed, grad_entropy, x, score, kept)
    rows, width = grad_packed.shape
    grad_x, grad_score = x.new_empty(x.shape), score.new_empty(score.shape)
    launch(
        _backward_kernel, (rows,),
        grad_packed, grad_entropy, x, score, kept, starts, packed, entropy, peak, total, grad_x, grad_score, width,
        BLOCK_T=BLOCK_T, BLOCK_D=block_of(width, LARGEST_D), num_warps=4, num_stages=2,
    )  # fmt: skip
    return grad_x, grad_score
