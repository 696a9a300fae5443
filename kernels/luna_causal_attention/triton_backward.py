"""Triton backward of causal Luna attention, with the strategy of the forward pass."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.triton_launch import rows_contiguous
from ..common.triton_tiles import dot, load_kept, load_tile, store_tile
from .triton_forward import Fused, Scans, choose, prepare, scaled
from .triton_weights import (
    activate,
    load_pack_query,
    load_rate,
    load_sums,
    pack_dropout,
    pack_scores,
    place,
    slope,
    store_sums,
    unpack_dropout,
    weigh_chunk,
)


@triton.jit
def _query_kernel(
    Q, PK, K, V,  # [B, T, H, SIZE], V and DO [B, T, H, WIDTH]
    PQ,  # [B, L, H, SIZE]
    DO,
    COUNT, MASK,  # [B, T]
    PACK_MASK,  # [B, L]
    SEED,  # [1]
    START_K, START_V,  # sums before each segment, [B, H, segments, SIZE, L], [B, H, segments, L, WIDTH]
    DQ,  # [B, T, H, SIZE]
    W, DU,  # [B, H, T, L]
    scale, threshold, rescale,  # 1 / sqrt(SIZE), `dropping`
    q_b, q_t, q_h, pk_b, pk_t, pk_h, k_b, k_t, k_h, v_b, v_t, v_h, pq_b, pq_l, pq_h, do_b, do_t, do_h,  # strides
    T, H, S,  # tokens, heads, tokens of a segment
    SIZE: tl.constexpr, WIDTH: tl.constexpr, L: tl.constexpr,
    ELU: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BL: tl.constexpr,  # see `triton_weights`
):  # fmt: skip
    """Compute the query gradient, unpack weights W and score gradients DU `[B, H, T, L]`, forward in time."""
    segments, segment, head, b, h = place(1, T, H, S)
    Q, K, PK, V = Q + b * q_b + h * q_h, K + b * k_b + h * k_h, PK + b * pk_b + h * pk_h, V + b * v_b + h * v_h
    sum_k = load_sums(START_K, head * segments + segment, SIZE, L, BK, BL, False)
    sum_v = load_sums(START_V, head * segments + segment, WIDTH, L, BV, BL, True)
    pack_query, used = load_pack_query(PQ + b * pq_b + h * pq_h, PACK_MASK, pq_l, b, SIZE, L, BK, BL)
    r, column, packed_row = tl.arange(0, C), tl.arange(0, BV), tl.arange(0, BL)
    past = r[:, None] >= r[None, :]
    for start in range(segment * S, tl.minimum(segment * S + S, T), C):
        t = start + r
        ok = t < T
        kept, rate, k, a, w = weigh_chunk(
            Q, K, PK, COUNT, MASK, SEED, pack_query, used, sum_k, scale, threshold, rescale, q_t, k_t, pk_t, head, b,
            t, T, SIZE, ELU, INNER, PRECISION, C, BK, BL,
        )  # fmt: skip
        kept_w = unpack_dropout(w, SEED, threshold, rescale, head, t, C, BL)
        store_tile(W + head * T * L, t, L, ok, packed_row, L, kept_w)
        v = load_tile(V, t, v_t, kept, column, WIDTH)
        do = load_tile(DO + b * do_b + h * do_h, t, do_t, ok, column, WIDTH)
        d_blend = tl.where(past, dot(do, tl.trans(v), None, PRECISION), 0.0)
        dw = dot((d_blend * rate[:, None]).to(INNER), a, None, PRECISION)
        dw = dot(do.to(tl.float32) * rate[:, None], sum_v, dw, PRECISION)
        dw = unpack_dropout(dw, SEED, threshold, rescale, head, t, C, BL)
        du = w * (dw - tl.sum(w * dw, 1)[:, None]) * (rate * scale)[:, None]
        store_tile(DU + head * T * L, t, L, ok, packed_row, L, du)
        d_similarity = tl.where(past, dot(du.to(INNER), tl.trans(a), None, PRECISION), 0.0)
        k = k.to(INNER)
        dq = dot(d_similarity.to(INNER), k, None, PRECISION)
        dq = dot(du, tl.trans(sum_k), dq, PRECISION)
        store_tile(DQ + (b * T * H + h) * SIZE, t, H * SIZE, ok, tl.arange(0, BK), SIZE, dq)
        sum_k = dot(tl.trans(k), a, sum_k, PRECISION)
        sum_v = dot(tl.trans(v.to(INNER)), a, sum_v, PRECISION)


@triton.jit
def _key_kernel(
    X, Y, PK, Z,  # see below
    PQ,  # [B, L, H, SIZE]
    COUNT, MASK,  # [B, T]
    PACK_MASK,  # [B, L]
    SEED,  # [1]
    AFTER,  # sums after each segment
    DY, DA, DPK, DPQ, FIRST,  # see below
    scale, threshold, rescale,  # 1 / sqrt(SIZE), `dropping`
    x_b, x_t, x_h, y_b, y_t, y_h, pk_b, pk_t, pk_h, z_b, z_t, z_h, pq_b, pq_l, pq_h,  # strides
    T, H, S,  # tokens, heads, tokens of a segment
    KEYS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, L: tl.constexpr,
    ELU: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BL: tl.constexpr,  # see `triton_weights`
):  # fmt: skip
    """Compute, backward in time, the gradient of value or, in a second launch (KEYS), the gradient of key.

    Both need a sum over the tokens from j on; `sums` is the part over the tokens after the chunk:

        dy_j = a_j sum z_t^T x_t      da_j = y_j sum x_t^T z_t

    First launch: x is the gradient of the result / t, y is value, z the unpack weights. KEYS: x is query, y is key, z
    the gradient of scores. DA passes da from the first launch to the second, which converts it to the gradient of
    pack_key and this segment's part of the gradient of pack_query, `[B, H, segments, L, K]`. FIRST is the gradient of
    the initial sum.
    """
    segments, segment, head, b, h = place(1, T, H, S)
    number = head * segments + segment
    N: tl.constexpr = SIZE if KEYS else WIDTH
    BN: tl.constexpr = BK if KEYS else BV
    sums = load_sums(AFTER, number, N, L, BN, BL, not KEYS)
    pack_query, used = load_pack_query(PQ + b * pq_b + h * pq_h, PACK_MASK, pq_l, b, SIZE, L, BK, BL)
    if KEYS:
        d_pack_query = tl.zeros([BK, BL], tl.float32)
    r, n, column, packed_row = tl.arange(0, C), tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, BL)
    later = r[None, :] >= r[:, None]
    chunks = tl.cdiv(tl.minimum(S, T - segment * S), C)
    for i in range(0, chunks):
        t = segment * S + (chunks - 1 - i) * C + r
        ok = t < T
        kept = load_kept(MASK, b * T, t, T)
        x = load_tile(X + b * x_b + h * x_h, t, x_t, ok, n, N)
        if not KEYS:
            x = x.to(tl.float32) * load_rate(COUNT, b, t, ok, T)[:, None]
        x = x.to(INNER)
        y = load_tile(Y + b * y_b + h * y_h, t, y_t, kept, n, N)
        z = load_tile(Z + b * z_b + h * z_h, t, z_t, ok, packed_row, L)
        products = tl.where(later, dot(y.to(INNER), tl.trans(x), None, PRECISION), 0.0)
        da = dot(products.to(INNER), z, None, PRECISION)
        da = dot(y, sums, da, PRECISION)
        if not KEYS:
            store_tile(DA + head * T * L, t, L, ok, packed_row, L, da)
        pack_key = load_tile(PK + b * pk_b + h * pk_h, t, pk_t, kept, column, SIZE)
        scores = pack_scores(pack_key, pack_query, scale, PRECISION)
        a = tl.where(used[None, :], activate(scores, ELU), 0.0)
        a = pack_dropout(a, SEED, threshold, rescale, head, t, C, BL)
        if KEYS:
            da += load_tile(DA + head * T * L, t, L, ok, packed_row, L)
            da = pack_dropout(da, SEED, threshold, rescale, head, t, C, BL)
            ds = tl.where(used[None, :], da * slope(scores, ELU) * scale, 0.0).to(INNER)
            d_pack_key = dot(ds, pack_query.to(INNER), None, PRECISION)
            store_tile(DPK + (b * T * H + h) * SIZE, t, H * SIZE, ok, column, SIZE, d_pack_key)
            d_pack_query = dot(tl.trans(pack_key.to(INNER)), ds, d_pack_query, PRECISION)
        products = tl.where(later, dot(a.to(INNER), tl.trans(z), None, PRECISION), 0.0)
        dy = dot(products.to(INNER), x, None, PRECISION)
        dy = dot(a, tl.trans(sums), dy, PRECISION)
        store_tile(DY + (b * T * H + h) * N, t, H * N, ok, n, N, tl.where(kept[:, None], dy, 0.0))
        sums = dot(tl.trans(x), z, sums, PRECISION)
    if segment == 0 and FIRST is not None:
        store_sums(FIRST, head, sums, N, L, BN, BL, not KEYS)
    if KEYS:
        store_sums(DPQ, number, d_pack_query, SIZE, L, BK, BL, True)


def _fused(
    call: Fused, grad_output: Tensor, *grad_means: Tensor | None
) -> tuple[list[Tensor], Sequence[Tensor | None]]:
    grads = [x.new_empty(x.shape) for x in call.tokens[:4]]
    size = (2, call.batch, call.heads, call.length, call.packed_rows)
    weights, grad_scores = call.query.new_empty(size, dtype=call.kind)
    inputs = (*call.tokens, grad_output)
    call.launch(_query_kernel, *inputs, *call.options, *call.before(), grads[0], weights, grad_scores, strided=inputs)
    last = tuple(None if grad is None else scaled(grad, call.last_rate()) for grad in grad_means)
    grad_scores, weights = grad_scores.transpose(1, 2), weights.transpose(1, 2)
    after = call.sums(call.query, grad_output, grad_scores, weights, last, False)
    first = (None, None) if call.past is None else call.empty_sums()
    grad_packed = torch.empty_like(weights, dtype=torch.float32)
    grad_pack_query = grad_packed.new_empty((call.batch, call.heads, call.segments, call.packed_rows, call.size))
    outputs = (grad_packed, grads[1], grad_pack_query)
    for keys, x, y, z, sums, grad, end in (
        (False, grad_output, call.value, weights, after[1], grads[3], first[1]),
        (True, call.query, call.key, grad_scores, after[0], grads[2], first[0]),
    ):
        tensors = (x, y, call.pack_key, z, call.pack_query)
        call.launch(_key_kernel, *tensors, *call.options, sums, grad, *outputs, end, strided=tensors, KEYS=keys)
    return [*grads, grad_pack_query.sum(2).transpose(1, 2).to(call.dtype).contiguous()], first


def _scans(
    call: Scans, grad_output: Tensor, *grad_means: Tensor | None
) -> tuple[list[Tensor], Sequence[Tensor | None]]:
    first_key, first_value = call.first()
    after_key, after_value = (None if x is None else scaled(x, call.last_rate()) for x in grad_means)
    packed, scores, grad = call.pack(), call.empty(torch.float32), call.empty(torch.float32)
    query, key, value = call.query, call.key, call.value
    call.scan(query, key, packed, scores, first=first_key, scale=call.scale, rate=True)
    call.scan(grad_output, value, packed, grad, first=_transposed(first_value), rate=True)
    weights, grad_scores = call.weigh(scores), call.weigh(scores, grad)
    grad_query, grad_key, grad_value = (x.new_empty(x.shape) for x in (query, key, value))
    call.scan(grad_scores, packed, key, grad_query, first=_transposed(first_key))
    options = {"reverse": True, "ends": call.past is not None}
    end_value = call.scan(packed, weights, grad_output, grad_value, first=after_value, inside=True, **options)
    call.scan(value, grad_output, weights, grad, first=_transposed(after_value), reverse=True, inside=True)
    call.scan(key, query, grad_scores, grad, first=after_key, reverse=True, add=True)
    end_key = call.scan(packed, grad_scores, query, grad_key, first=_transposed(after_key), **options)
    grad = call.pack(grad).transpose(1, 2)
    pack_query, pack_key = (x.transpose(1, 2).to(call.kind) for x in (call.pack_query, call.pack_key))
    if call.mask is not None:
        masked = ~call.mask[:, :, None, None]
        pack_key = pack_key.masked_fill(masked.transpose(1, 2), 0.0)
        grad_key, grad_value = (x.masked_fill_(masked, 0.0) for x in (grad_key, grad_value))
    if call.pack_mask is not None:
        pack_query = pack_query.masked_fill(~call.pack_mask[:, None, :, None], 0.0)
    grad_pack_key, grad_pack_query = (
        x.transpose(1, 2).to(call.dtype).contiguous() for x in (grad @ pack_query, grad.mT @ pack_key)
    )
    return [grad_query, grad_pack_key, grad_key, grad_value, grad_pack_query], (_transposed(end_key), end_value)


def _transposed(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.mT.contiguous()


def backward(
    grad_output: Tensor, grad_key_mean: Tensor | None, grad_value_mean: Tensor | None, *arguments: Any
) -> list[Tensor | None]:
    """Return the gradients of query, pack_key, key, value, pack_query, and of both means, None for None.

    `arguments` as in `forward`.
    """
    call = prepare(*arguments)
    grad_outputs = *rows_contiguous(grad_output), grad_key_mean, grad_value_mean
    run: Any = _fused if isinstance(call, Fused) else _scans
    grads, first = choose("backward", call, lambda: run(call, *grad_outputs))
    for mean, grad in zip(call.means, first, strict=True):
        grads.append(None if mean is None or call.past is None else scaled(grad, call.past).to(mean.dtype))
    return grads
