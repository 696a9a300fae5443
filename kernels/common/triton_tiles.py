"""Building blocks of the Triton kernels of all ops: matrix products, row tiles, masks, dropout and softmax."""

import triton
import triton.language as tl

from .triton_launch import INTERPRETED

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rounded(x):
    """Return x, rounded to TF32 if it is float32."""
    if x.dtype == tl.float32:
        x = tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)
    return x


@triton.jit
def dot(a, b, accumulator, PRECISION: tl.constexpr):
    """Return a b + accumulator in float32; a has the dtype of b or 16 bits. PRECISION applies if b is float32."""
    if INTERPRETED:  # the interpreter would multiply the bit patterns of bfloat16
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    elif PRECISION == "tf32":  # tensor cores truncate the extra digits, so round first
        a = _rounded(a)
        b = _rounded(b)
    a = a.to(b.dtype)
    return tl.dot(a, b, accumulator, input_precision=PRECISION)


@triton.jit
def load_tile(X, rows, stride, kept, columns, width):
    """Return `[rows, columns]` of X, 0 in masked rows. Masked rows are not read because they may hold NaN."""
    mask = kept[:, None] & (columns < width)[None, :]
    return tl.load(X + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(X, rows, stride, kept, columns, width, tile):
    """Write a tile to `[rows, columns]` of X, except to masked rows."""
    mask = kept[:, None] & (columns < width)[None, :]
    tl.store(X + rows.to(tl.int64)[:, None] * stride + columns[None, :], tile.to(X.dtype.element_ty), mask=mask)


@triton.jit
def load_kept(MASK, first, rows, length):
    """Return which rows are below `length` and kept by the mask; row 0 is at `MASK + first`."""
    kept = rows < length
    if MASK is not None:
        kept = kept & (tl.load(MASK + first + rows, mask=kept, other=0) != 0)
    return kept


@triton.jit
def undropped(SEED, threshold, stream, rows, column, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the dropout keep mask `[BLOCK_R, BLOCK_C]`; the columns start at `column`, a multiple of 4.

    A Philox counter, (column // 4, row, stream), provides the random bits of four weights. The dropped weights are
    therefore independent of the tiles and equal in the forward and backward pass. Each weight matrix of a call is a
    stream.
    """
    zero = tl.zeros([BLOCK_R, BLOCK_C // 4], tl.int32)
    quads = column // 4 + tl.arange(0, BLOCK_C // 4)
    row, stream = zero + rows.to(tl.int32)[:, None], zero + stream.to(tl.int32)
    a, b, c, d = tl.philox(tl.load(SEED), zero + quads[None, :], row, stream, zero)
    bits = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK_R, BLOCK_C])
    return (bits >> 1).to(tl.int32) >= threshold


@triton.jit
def drop(weights, SEED, threshold, rescale, stream, rows, column, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the weights after dropout, or the gradients before it; without SEED there is no dropout."""
    if SEED is not None:
        kept = undropped(SEED, threshold, stream, rows, column, BLOCK_R, BLOCK_C)
        weights *= tl.where(kept, rescale, 0.0)
    return weights


def dropping(dropout: float) -> tuple[int, float]:
    """Return the threshold for 31 random bits at which a weight is kept, and the scale of kept weights."""
    return round(dropout * 2**31), 1.0 / (1.0 - dropout)


@triton.jit
def rise(largest, block_largest):
    """Return the running maximum of a softmax after one more block of scores, the shift and the rescaling factor.

    The shift is subtracted from scores before exp2; earlier sums are multiplied by the factor. The maximum of no scores
    is -inf.
    """
    larger = tl.maximum(largest, block_largest)
    shift = tl.where(larger > float("-inf"), larger, 0.0)
    return larger, shift, tl.exp2(largest - shift)
