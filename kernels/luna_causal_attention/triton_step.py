"""One token of causal Luna attention in Triton."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import triton_launch
from ..common.triton_launch import block_of, contiguous, rows_contiguous, strides
from ..common.triton_tiles import dropping, load_kept
from .triton_weights import activate, load_pack_query, pack_dropout, softmax, tile_of, unpack_dropout


@triton.jit
def _move(
    MEAN, NEXT, head, new, rate, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Move the mean of a head toward the new token's product by the fraction `rate`; store it in NEXT and return it."""
    offsets, inside = tile_of(ROWS, COLUMNS, BR, BC, False)
    if MEAN is not None:
        before = tl.load(MEAN + head * ROWS * COLUMNS + offsets, mask=inside, other=0.0)
        new = before + (new - before) * rate
    else:
        new *= rate
    tl.store(NEXT + head * ROWS * COLUMNS + offsets, new, mask=inside)
    return new


@triton.jit
def _step_kernel(
    Q, PK, K, V,  # [B, H, SIZE], V and Y [B, H, WIDTH]
    PQ,  # [B, L, H, SIZE]
    MASK, PACK_MASK,  # [B], [B, L]
    SEED,  # [1]
    MEAN_K, MEAN_V, PAST,  # the state: [B, H, SIZE, L], [B, H, L, WIDTH], [B]
    Y,
    NEXT_K, NEXT_V, COUNT,  # the next state
    scale, threshold, rescale,
    q_b, q_h, pk_b, pk_h, k_b, k_h, v_b, v_h, pq_b, pq_l, pq_h,  # strides
    H,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, L: tl.constexpr, ELU: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Compute one token of one head; each mean moves toward the new token by the fraction 1 / count."""
    head = tl.program_id(0).to(tl.int64)
    b, h = head // H, head % H
    at_k, at_v = tl.arange(0, BK), tl.arange(0, BV)
    token = tl.arange(0, 1)
    kept = load_kept(MASK, b, token, 1)
    count = kept.to(tl.int64)
    if PAST is not None:
        count += tl.load(PAST + b)
    # If the first token is masked, the state remains 0.
    rate = tl.where(kept | (count == 0), 1.0 / tl.maximum(count, 1).to(tl.float32), 0.0)[:, None]
    pack_query, used = load_pack_query(PQ + b * pq_b + h * pq_h, PACK_MASK, pq_l, b, SIZE, L, BK, BL)
    pack_key = tl.load(PK + b * pk_b + h * pk_h + at_k, mask=(at_k < SIZE) & kept, other=0.0).to(tl.float32)
    scores = tl.sum(pack_query.to(tl.float32) * pack_key[None, :], 1) * scale
    packed = tl.where(used, activate(scores, ELU), 0.0)
    if SEED is not None:
        packed = tl.sum(pack_dropout(packed[None, :], SEED, threshold, rescale, head, token, 1, BL), 0)
    k = tl.load(K + b * k_b + h * k_h + at_k, mask=(at_k < SIZE) & kept, other=0.0).to(tl.float32)
    mean = k[:, None] * packed[None, :]
    mean = _move(MEAN_K, NEXT_K, head, mean, rate, SIZE, L, BK, BL)
    q = tl.load(Q + b * q_b + h * q_h + at_k, mask=at_k < SIZE, other=0.0).to(tl.float32)
    w = softmax(tl.sum(q[:, None] * mean, 0)[None, :] * scale, used)
    w = unpack_dropout(w, SEED, threshold, rescale, head, token, 1, BL)
    v = tl.load(V + b * v_b + h * v_h + at_v, mask=(at_v < WIDTH) & kept, other=0.0).to(tl.float32)
    mean = packed[:, None] * v[None, :]
    mean = _move(MEAN_V, NEXT_V, head, mean, rate, L, WIDTH, BL, BV)
    y = tl.sum(tl.sum(w, 0)[:, None] * mean, 0)
    tl.store(Y + head * WIDTH + at_v, y.to(Y.dtype.element_ty), mask=at_v < WIDTH)
    if h == 0:
        tl.store(COUNT + b + token, count)


def forward_step(
    query: Tensor, pack_key: Tensor, key: Tensor, value: Tensor, pack_query: Tensor, mask: Tensor | None,
    pack_mask: Tensor | None, key_mean: Tensor | None, value_mean: Tensor | None, past: Tensor | None, activation: str,
    dropout: float, seed: Tensor | None, *, into: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the result and the next state, whose means are written to `into`; `into` may be the given means."""
    *tokens, pack_query = rows_contiguous(query, pack_key, key, value, pack_query)
    mask, pack_mask, past = contiguous(mask, pack_mask, past)
    means = (None if x is None else x.float().contiguous() for x in (key_mean, value_mean))
    outputs = empty_step(query, value, pack_query, into)
    (batch, heads, size), packed_rows, width = query.shape, pack_query.shape[1], value.shape[2]
    numbers = (size**-0.5, *dropping(dropout), *strides(*tokens, number=2), *strides(pack_query, number=3), heads)
    tile = block_of(packed_rows) * block_of(max(size, width))
    triton_launch.launch(
        _step_kernel, (batch * heads,), *tokens, pack_query, mask, pack_mask, seed, *means, past, *outputs, *numbers,
        SIZE=size, WIDTH=width, L=packed_rows, ELU=activation == "elu",
        BK=block_of(size), BV=block_of(width), BL=block_of(packed_rows),
        num_warps=4 if tile <= 4096 else 8, num_stages=1,
    )  # fmt: skip
    return outputs


def empty_step(
    query: Tensor, value: Tensor, pack_query: Tensor, means: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return empty tensors for the result and the next state, using `means` if given."""
    (batch, heads, size), packed_rows, width = query.shape, pack_query.shape[1], value.shape[2]
    if means is None:
        shapes = ((batch, heads, size, packed_rows), (batch, heads, packed_rows, width))
        means = [query.new_empty(shape, dtype=torch.float32) for shape in shapes]
    # Every head reads the old count, so the new count needs separate memory.
    return value.new_empty(value.shape), means[0], means[1], query.new_empty((batch,), dtype=torch.int64)
