"""Triton backward of pack and unpack: every gradient has one owner, or partial sums in a fixed order."""

import torch
import triton
import triton.language as tl

from luna_mega.kernels import _triton
from luna_mega.kernels._triton import dot
from luna_mega.kernels.luna_attention.triton_forward import (
    LOG2_E,
    Configuration,
    Problem,
    dropping,
    fitted,
    load_kept,
    load_tile,
    problem,
    rows_in_place,
    span,
    store_tile,
    strides,
    undropped,
)


@triton.jit
def _query_kernel(
    Q,
    K,
    V,
    MASK,
    CU_SEQLENS,
    SEED,
    OUT,
    DO,
    LSE,
    DELTA,
    DQ,
    queries,
    keys,
    heads,
    blocks,
    split_rows,
    scale,
    threshold,
    rescale,
    q_batch,
    q_row,
    q_head,
    k_batch,
    k_row,
    k_head,
    v_batch,
    v_row,
    v_head,
    HEAD_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    QUERY_PACKED: tl.constexpr,
    KEY_PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of the queries, and DELTA = <OUT, DO> for the other kernel.

    Grid (query blocks * sequences * heads, splits of the keys), DQ `[splits, B, T, H, K]`.
    """
    row = tl.program_id(0) // blocks
    sequence = (row // heads).to(tl.int64)
    head = row % heads
    split = tl.program_id(1).to(tl.int64)
    batch, first, count = span(CU_SEQLENS, sequence, queries, QUERY_PACKED)
    key_batch, first_key, key_count = span(CU_SEQLENS, sequence, keys, KEY_PACKED)
    begin_query = tl.program_id(0) % blocks * BLOCK_Q
    if begin_query >= count:  # beyond a packed sequence
        return
    t = begin_query + tl.arange(0, BLOCK_Q)
    valid = t < count
    q = load_tile(Q + batch * q_batch + first * q_row + head * q_head, t, q_row, valid, HEAD_SIZE, BLOCK_K)
    o_row = heads * HEAD_SIZE
    at = ((batch * queries + first) * heads + head) * HEAD_SIZE
    do = load_tile(DO + at, t, o_row, valid, HEAD_SIZE, BLOCK_K)
    o = load_tile(OUT + at, t, o_row, valid, HEAD_SIZE, BLOCK_K)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    at_log = (batch * heads + head) * queries + first
    if split == 0:
        tl.store(DELTA + at_log + t, delta, mask=valid)
    lse = tl.load(LSE + at_log + t, mask=valid, other=float("inf"))
    K += key_batch * k_batch + first_key * k_row + head * k_head
    if V is not None:
        V += key_batch * v_batch + first_key * v_row + head * v_head
    if MASK is not None:
        MASK += key_batch * keys + first_key

    dq = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    share = tl.cdiv(tl.cdiv(key_count, BLOCK_M), tl.num_programs(1)) * BLOCK_M
    begin = tl.program_id(1) * share
    for start in range(begin, tl.minimum(begin + share, key_count), BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        kept = load_kept(MASK, m, key_count)
        k = load_tile(K, m, k_row, kept, HEAD_SIZE, BLOCK_K)
        v = k if V is None else load_tile(V, m, v_row, kept, HEAD_SIZE, BLOCK_K)
        s = dot(q, tl.trans(k), None, PRECISION) * (scale * LOG2_E)
        p = tl.where(kept[None, :], tl.exp2(s - lse[:, None]), 0.0)
        dp = dot(do, tl.trans(v), None, PRECISION)
        if SEED is not None:
            dp = tl.where(undropped(SEED, threshold, row, t, start, BLOCK_Q, BLOCK_M), dp * rescale, 0.0)
        ds = p * (dp - delta[:, None])
        dq = dot(ds.to(k.dtype), k, dq, PRECISION)
    store_tile(DQ + split * split_rows * HEAD_SIZE + at, t, o_row, valid, dq * scale, HEAD_SIZE, BLOCK_K)


@triton.jit
def _key_kernel(
    Q,
    K,
    V,
    MASK,
    CU_SEQLENS,
    SEED,
    DO,
    LSE,
    DELTA,
    DK,
    DV,
    queries,
    keys,
    heads,
    blocks,
    split_rows,
    scale,
    threshold,
    rescale,
    q_batch,
    q_row,
    q_head,
    k_batch,
    k_row,
    k_head,
    v_batch,
    v_row,
    v_head,
    HEAD_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    QUERY_PACKED: tl.constexpr,
    KEY_PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of keys and values; V None: of both together in DK. Tiles are transposed, `[BLOCK_M, BLOCK_Q]`.

    Grid (key blocks * sequences * heads, splits of the queries), DK and DV `[splits, B, M, H, K]`.
    """
    row = tl.program_id(0) // blocks
    sequence = (row // heads).to(tl.int64)
    head = row % heads
    split = tl.program_id(1).to(tl.int64)
    batch, first, count = span(CU_SEQLENS, sequence, queries, QUERY_PACKED)
    key_batch, first_key, key_count = span(CU_SEQLENS, sequence, keys, KEY_PACKED)
    begin_key = tl.program_id(0) % blocks * BLOCK_M
    if begin_key >= key_count:  # beyond a packed sequence
        return
    m = begin_key + tl.arange(0, BLOCK_M)
    if MASK is not None:
        MASK += key_batch * keys + first_key
    kept = load_kept(MASK, m, key_count)
    k = load_tile(K + key_batch * k_batch + first_key * k_row + head * k_head, m, k_row, kept, HEAD_SIZE, BLOCK_K)
    if V is None:
        v = k
    else:
        v = load_tile(V + key_batch * v_batch + first_key * v_row + head * v_head, m, v_row, kept, HEAD_SIZE, BLOCK_K)
    Q += batch * q_batch + first * q_row + head * q_head
    o_row = heads * HEAD_SIZE
    DO += ((batch * queries + first) * heads + head) * HEAD_SIZE
    LSE += (batch * heads + head) * queries + first
    DELTA += (batch * heads + head) * queries + first

    dk = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    dv = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    share = tl.cdiv(tl.cdiv(count, BLOCK_Q), tl.num_programs(1)) * BLOCK_Q
    begin = tl.program_id(1) * share
    for start in range(begin, tl.minimum(begin + share, count), BLOCK_Q):
        t = start + tl.arange(0, BLOCK_Q)
        valid = t < count
        q = load_tile(Q, t, q_row, valid, HEAD_SIZE, BLOCK_K)
        do = load_tile(DO, t, o_row, valid, HEAD_SIZE, BLOCK_K)
        lse = tl.load(LSE + t, mask=valid, other=float("inf"))
        delta = tl.load(DELTA + t, mask=valid, other=0.0)
        s = dot(k, tl.trans(q), None, PRECISION) * (scale * LOG2_E)
        p = tl.where(kept[:, None], tl.exp2(s - lse[None, :]), 0.0)
        dp = dot(v, tl.trans(do), None, PRECISION)
        weight = p
        if SEED is not None:
            alive = tl.trans(undropped(SEED, threshold, row, t, begin_key, BLOCK_Q, BLOCK_M))
            weight = tl.where(alive, p * rescale, 0.0)
            dp = tl.where(alive, dp * rescale, 0.0)
        ds = (p * (dp - delta[None, :]) * scale).to(q.dtype)
        if V is None:
            dk = dot(weight.to(do.dtype), do, dk, PRECISION)
        else:
            dv = dot(weight.to(do.dtype), do, dv, PRECISION)
        dk = dot(ds, q, dk, PRECISION)

    at = split * split_rows * HEAD_SIZE + ((key_batch * keys + first_key) * heads + head) * HEAD_SIZE
    store_tile(DK + at, m, o_row, m < key_count, dk, HEAD_SIZE, BLOCK_K)
    if V is not None:
        store_tile(DV + at, m, o_row, m < key_count, dv, HEAD_SIZE, BLOCK_K)


def _query_configurations(sizes: Problem, dtype: torch.dtype, capability: tuple[int, int]) -> list[Configuration]:
    """As in the forward, the first is what compiles without spilled registers."""
    small, hopper = sizes.block_k <= 64, capability >= (9, 0)
    if dtype == torch.float32:
        wide = small and hopper and sizes.constants["PRECISION"] == "tf32x3"
        return [Configuration(64, 32, 4, 2) if wide else Configuration(16, 32, 4, 1)]
    if hopper:
        return [Configuration(64, 64, 4, 2), Configuration(64, 64, 8, 2)]
    return [Configuration(64, 32, 4, 2), Configuration(64, 64, 8, 2)]


def _key_configurations(sizes: Problem, dtype: torch.dtype, capability: tuple[int, int]) -> list[Configuration]:
    small, hopper = sizes.block_k <= 64, capability >= (9, 0)
    if dtype == torch.float32:
        return [Configuration(32, 16, 4, 1) if small else Configuration(16, 16, 4, 1)]
    if hopper:
        return [Configuration(64, 64, 4 if small else 8, 2), Configuration(64, 32, 4, 2)]
    return [Configuration(64, 32, 4, 2), Configuration(64, 64, 8, 2)]


def backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    seed: torch.Tensor | None,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    packed: str | None,
    max_seqlen: int,
    scale: float,
    dropout: float,
    precision: str,
) -> list[torch.Tensor]:
    """Gradients of query, key and, unless it is None, value, contiguous."""
    sizes = problem(query, key, cu_seqlens, packed, max_seqlen, precision)
    query, key, value = rows_in_place(query), rows_in_place(key), rows_in_place(value)
    mask = None if mask is None else mask.contiguous()
    grad_output = grad_output.contiguous()
    heads = query.shape[2]
    delta = torch.empty_like(log_sum_exp)
    shared = (query, key, value, mask, cu_seqlens, seed)
    numbers = (scale, *dropping(dropout), *strides(query), *strides(key), *strides(value))

    def query_gradient(configuration: Configuration) -> torch.Tensor:
        block_q, block_m, *_ = configuration = fitted(configuration, sizes)
        blocks = triton.cdiv(sizes.longest_query, block_q)
        splits = sizes.splits(sizes.longest_query, block_q, sizes.longest_key, block_m)
        gradient = _partial(query, splits)
        _triton.launch(
            _query_kernel,
            (blocks * sizes.sequences * heads, splits),
            *(*shared, output, grad_output, log_sum_exp, delta, gradient),
            *(query.shape[1], key.shape[1], heads, blocks, log_sum_exp.numel(), *numbers),
            **configuration.options(),
            **sizes.constants,
        )
        return _summed(gradient, query)

    def key_gradients(configuration: Configuration) -> list[torch.Tensor]:
        block_q, block_m, *_ = configuration = fitted(configuration, sizes)
        blocks = triton.cdiv(sizes.longest_key, block_m)
        splits = sizes.splits(sizes.longest_key, block_m, sizes.longest_query, block_q)
        gradients = [_partial(key, splits) for _ in range(1 if value is None else 2)]
        _triton.launch(
            _key_kernel,
            (blocks * sizes.sequences * heads, splits),
            *(*shared, grad_output, log_sum_exp, delta, gradients[0], None if value is None else gradients[1]),
            *(query.shape[1], key.shape[1], heads, blocks, key[..., 0].numel(), *numbers),
            **configuration.options(),
            **sizes.constants,
        )
        return [_summed(gradient, key) for gradient in gradients]

    name = (query.dtype, value is None, packed, precision, sizes[:-1], mask is None, seed is None)
    choice = sizes, query.dtype, _triton.target(query.device).capability
    # In this order: the first writes what the second reads.
    of_query = _triton.choose(("luna_attention, queries", *name), _query_configurations(*choice), query_gradient)
    return [of_query, *_triton.choose(("luna_attention, keys", *name), _key_configurations(*choice), key_gradients)]


def _partial(x: torch.Tensor, splits: int) -> torch.Tensor:
    if splits == 1:
        return x.new_empty(x.shape)
    return x.new_empty((splits, *x.shape), dtype=torch.float32)


def _summed(partial: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return partial if partial.dim() == x.dim() else partial.sum(dim=0).to(x.dtype)
