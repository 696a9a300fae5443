"""Triton backward of pack and unpack. Each gradient is written by one program, or as partial sums in a fixed order."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import triton_launch
from ..common.triton_launch import cdiv
from ..common.triton_tiles import LOG2_E, dot, load_kept, load_tile, store_tile, undropped
from .triton_forward import AttentionCall, Tiles, place, share


@triton.jit(do_not_specialize=["blocks"])
def _query_kernel(
    Q, K, V,  # [B, T or M, heads, HEAD_SIZE]
    MASK,  # [B, M]
    CU_SEQLENS,  # [sequences + 1]
    SEED,  # [1]
    OUT, DO,  # [B, T, heads, HEAD_SIZE]
    LSE, DELTA,  # [B, heads, T]
    DQ,  # [splits, B, T, heads, HEAD_SIZE]
    queries, keys, heads, blocks, split_rows, scale, threshold, rescale,  # blocks per head, rows per split, `dropping`
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,  # strides
    HEAD_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
    QUERY_VARLEN: tl.constexpr, KEY_VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the queries, and DELTA = <OUT, DO> for the other kernel.

    The grid is (query blocks * sequences * heads, splits of the keys); DQ is `[splits, B, T, H, K]`.
    """
    matrix, head, batch, first, count, key_batch, first_key, key_count = place(
        CU_SEQLENS, queries, keys, heads, blocks, QUERY_VARLEN, KEY_VARLEN
    )
    split = tl.program_id(1).to(tl.int64)
    begin_query = tl.program_id(0) % blocks * BLOCK_Q
    if begin_query >= count:  # past the end of a varlen sequence
        return
    t, column = begin_query + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
    valid = t < count
    q = load_tile(Q + batch * q_batch + first * q_token + head * q_head, t, q_token, valid, column, HEAD_SIZE)
    o_token = heads * HEAD_SIZE
    at = ((batch * queries + first) * heads + head) * HEAD_SIZE
    do = load_tile(DO + at, t, o_token, valid, column, HEAD_SIZE)
    o = load_tile(OUT + at, t, o_token, valid, column, HEAD_SIZE)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    at_log = (batch * heads + head) * queries + first
    if split == 0:
        tl.store(DELTA + at_log + t, delta, mask=valid)
    lse = tl.load(LSE + at_log + t, mask=valid, other=float("inf"))
    K += key_batch * k_batch + first_key * k_token + head * k_head
    if V is not None:
        V += key_batch * v_batch + first_key * v_token + head * v_head

    dq = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    begin, end = share(key_count, BLOCK_M)
    for start in range(begin, end, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        kept = load_kept(MASK, key_batch * keys + first_key, m, key_count)
        k = load_tile(K, m, k_token, kept, column, HEAD_SIZE)
        v = k if V is None else load_tile(V, m, v_token, kept, column, HEAD_SIZE)
        s = dot(q, tl.trans(k), None, PRECISION) * (scale * LOG2_E)
        p = tl.where(kept[None, :], tl.exp2(s - lse[:, None]), 0.0)
        dp = dot(do, tl.trans(v), None, PRECISION)
        if SEED is not None:
            dp = tl.where(undropped(SEED, threshold, matrix, t, start, BLOCK_Q, BLOCK_M), dp * rescale, 0.0)
        # Scaled before rounding, because float16 overflows at 65504.
        ds = (p * (dp - delta[:, None]) * scale).to(k.dtype)
        dq = dot(ds, k, dq, PRECISION)
    store_tile(DQ + split * split_rows * HEAD_SIZE + at, t, o_token, valid, column, HEAD_SIZE, dq)


@triton.jit(do_not_specialize=["blocks"])
def _key_kernel(
    Q, K, V,  # [B, T or M, heads, HEAD_SIZE]
    MASK,  # [B, M]
    CU_SEQLENS,  # [sequences + 1]
    SEED,  # [1]
    DO,  # [B, T, heads, HEAD_SIZE]
    LSE, DELTA,  # [B, heads, T]
    DK, DV,  # [splits, B, M, heads, HEAD_SIZE]
    queries, keys, heads, blocks, split_rows, scale, threshold, rescale,  # blocks per head, rows per split, `dropping`
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,  # strides
    HEAD_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
    QUERY_VARLEN: tl.constexpr, KEY_VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys and values; without V, DK is their sum. Tiles are transposed, `[BLOCK_M, BLOCK_Q]`.

    The grid is (key blocks * sequences * heads, splits of the queries); DK and DV are `[splits, B, M, H, K]`.
    """
    matrix, head, batch, first, count, key_batch, first_key, key_count = place(
        CU_SEQLENS, queries, keys, heads, blocks, QUERY_VARLEN, KEY_VARLEN
    )
    split = tl.program_id(1).to(tl.int64)
    begin_key = tl.program_id(0) % blocks * BLOCK_M
    if begin_key >= key_count:  # past the end of a varlen sequence
        return
    m, column = begin_key + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    kept = load_kept(MASK, key_batch * keys + first_key, m, key_count)
    k = load_tile(K + key_batch * k_batch + first_key * k_token + head * k_head, m, k_token, kept, column, HEAD_SIZE)
    if V is None:
        v = k
    else:
        v = load_tile(
            V + key_batch * v_batch + first_key * v_token + head * v_head, m, v_token, kept, column, HEAD_SIZE
        )
    Q += batch * q_batch + first * q_token + head * q_head
    o_token = heads * HEAD_SIZE
    DO += ((batch * queries + first) * heads + head) * HEAD_SIZE
    LSE += (batch * heads + head) * queries + first
    DELTA += (batch * heads + head) * queries + first

    dk = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    dv = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    begin, end = share(count, BLOCK_Q)
    for start in range(begin, end, BLOCK_Q):
        t = start + tl.arange(0, BLOCK_Q)
        valid = t < count
        q = load_tile(Q, t, q_token, valid, column, HEAD_SIZE)
        do = load_tile(DO, t, o_token, valid, column, HEAD_SIZE)
        lse = tl.load(LSE + t, mask=valid, other=float("inf"))
        delta = tl.load(DELTA + t, mask=valid, other=0.0)
        s = dot(k, tl.trans(q), None, PRECISION) * (scale * LOG2_E)
        p = tl.where(kept[:, None], tl.exp2(s - lse[None, :]), 0.0)
        dp = dot(v, tl.trans(do), None, PRECISION)
        weight = p
        if SEED is not None:
            alive = tl.trans(undropped(SEED, threshold, matrix, t, begin_key, BLOCK_Q, BLOCK_M))
            weight = tl.where(alive, p * rescale, 0.0)
            dp = tl.where(alive, dp * rescale, 0.0)
        ds = (p * (dp - delta[None, :]) * scale).to(q.dtype)
        if V is None:
            dk = dot(weight.to(do.dtype), do, dk, PRECISION)
        else:
            dv = dot(weight.to(do.dtype), do, dv, PRECISION)
        dk = dot(ds, q, dk, PRECISION)

    at = split * split_rows * HEAD_SIZE + ((key_batch * keys + first_key) * heads + head) * HEAD_SIZE
    store_tile(DK + at, m, o_token, m < key_count, column, HEAD_SIZE, dk)
    if V is not None:
        store_tile(DV + at, m, o_token, m < key_count, column, HEAD_SIZE, dv)


def _query_configurations(call: AttentionCall) -> list[Tiles]:
    """Return the candidate configurations; as in the forward pass, the first one does not spill registers."""
    small, hopper = call.block_k <= 64, triton_launch.target(call.query.device).large
    if call.query.dtype == torch.float32:
        ieee = call.precision == "ieee"
        if small and hopper and not ieee:
            return [Tiles(64, 32, 4, 2)]
        return [Tiles(16, 32, 8 if ieee and not small else 4, 1)]
    if hopper:
        return [Tiles(64, 64, 4, 2), Tiles(64, 64, 8, 2)]
    return [Tiles(64, 32, 4, 2), Tiles(64, 64, 8, 2)]


def _key_configurations(call: AttentionCall) -> list[Tiles]:
    small, hopper = call.block_k <= 64, triton_launch.target(call.query.device).large
    if call.query.dtype == torch.float32:
        return [Tiles(32, 16, 4, 1) if small else Tiles(16, 16, 8 if call.precision == "ieee" else 4, 1)]
    if hopper:
        return [Tiles(64, 64, 4 if small else 8, 2), Tiles(64, 32, 4, 2)]
    return [Tiles(64, 32, 4, 2), Tiles(64, 64, 8, 2)]


def backward(grad_output: Tensor, output: Tensor, log_sum_exp: Tensor, *arguments: Any) -> list[Tensor | None]:
    """Return the gradients of query, key and value, None for None; `arguments` as in `forward`."""
    call, grad_output, delta = AttentionCall(*arguments), grad_output.contiguous(), torch.empty_like(log_sum_exp)
    query, key, value = call.query, call.key, call.value

    def run(kernel: Any, tiles: Tiles, blocks: int, splits: int, split_rows: int, *tensors: Tensor | None) -> None:
        grid = (blocks * call.sequences * call.heads, splits)
        arguments = (*call.tensors, *tensors, *call.numbers(blocks, split_rows))
        triton_launch.launch(kernel, grid, *arguments, **tiles.options(), **call.constants)

    def query_gradient(tiles: Tiles) -> Tensor:
        blocks = cdiv(call.longest_query, tiles.block_q)
        splits = call.splits(call.longest_query, tiles.block_q, call.longest_key, tiles.block_m)
        gradient, tensors = _partial(query, splits), (output, grad_output, log_sum_exp, delta)
        run(_query_kernel, tiles, blocks, splits, log_sum_exp.numel(), *tensors, gradient)
        return _summed(gradient, query)

    def key_gradients(tiles: Tiles) -> tuple[Tensor | None, ...]:
        blocks = cdiv(call.longest_key, tiles.block_m)
        splits = call.splits(call.longest_key, tiles.block_m, call.longest_query, tiles.block_q)
        grad_key, grad_value = _partial(key, splits), None if value is None else _partial(key, splits)
        tensors = grad_output, log_sum_exp, delta, grad_key, grad_value
        run(_key_kernel, tiles, blocks, splits, key[..., 0].numel(), *tensors)
        return _summed(grad_key, key), None if grad_value is None else _summed(grad_value, key)

    # The order matters: the first kernel writes DELTA, which the second reads.
    grad_query = call.choose(_query_kernel, _query_configurations(call), query_gradient)
    return [grad_query, *call.choose(_key_kernel, _key_configurations(call), key_gradients)]


def _partial(x: Tensor, splits: int) -> Tensor:
    if splits == 1:
        return x.new_empty(x.shape)
    return x.new_empty((splits, *x.shape), dtype=torch.float32)


def _summed(partial: Tensor, x: Tensor) -> Tensor:
    return partial if partial.dim() == x.dim() else partial.sum(dim=0).to(x.dtype)
