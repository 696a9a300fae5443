"""Triton forward of pack and unpack: one kernel over splits of the keys and one that merges them.

`packed` says which side lies end to end (`kernels/varlen.py`): `"query"`, `"key"` or None. A packed tensor has batch
size 1; the sequences are those of `cu_seqlens`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from luna_mega.kernels import _triton
from luna_mega.kernels._triton import dot

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def span(CU_SEQLENS, sequence, length, PACKED: tl.constexpr):
    """Batch index, first row and number of rows of a sequence on a side that is `length` rows long."""
    if PACKED:
        first = tl.load(CU_SEQLENS + sequence).to(tl.int64)
        return sequence * 0, first, (tl.load(CU_SEQLENS + sequence + 1).to(tl.int64) - first).to(tl.int32)
    else:
        return sequence, sequence * 0, length


@triton.jit
def load_tile(X, rows, stride, kept, HEAD_SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """`[rows, BLOCK_K]` of X, 0 in rows that are not kept: whatever lies there, it is not read."""
    column = tl.arange(0, BLOCK_K)
    mask = kept[:, None] & (column < HEAD_SIZE)[None, :]
    return tl.load(X + rows.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(X, rows, stride, kept, tile, HEAD_SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    column = tl.arange(0, BLOCK_K)
    mask = kept[:, None] & (column < HEAD_SIZE)[None, :]
    tl.store(X + rows.to(tl.int64)[:, None] * stride + column[None, :], tile.to(X.dtype.element_ty), mask=mask)


@triton.jit
def load_kept(MASK, rows, length):
    """Which keys there are and may be attended to."""
    kept = rows < length
    if MASK is not None:
        kept = kept & (tl.load(MASK + rows, mask=kept, other=0) != 0)
    return kept


@triton.jit
def undropped(SEED, threshold, row, queries, key, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr):
    """`[BLOCK_Q, BLOCK_M]` bool: the weights that dropout keeps, for keys from `key` on, a multiple of 4.

    A counter of Philox, (key // 4, query, row), gives four weights their 32 random bits, whatever the tiles.
    """
    zero = tl.zeros([BLOCK_Q, BLOCK_M // 4], tl.int32)
    quads = key // 4 + tl.arange(0, BLOCK_M // 4)
    a, b, c, d = tl.philox(tl.load(SEED), zero + quads[None, :], zero + queries[:, None], zero + row, zero)
    bits = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK_Q, BLOCK_M])
    return (bits >> 1).to(tl.int32) >= threshold


@triton.jit
def _forward_kernel(
    Q,
    K,
    V,
    MASK,
    CU_SEQLENS,
    SEED,
    OUT,
    LSE,
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
    o_batch,
    o_row,
    o_head,
    HEAD_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    QUERY_PACKED: tl.constexpr,
    KEY_PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (query blocks * sequences * heads, splits of the keys). V None: K serves as both and is loaded once."""
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
    K += key_batch * k_batch + first_key * k_row + head * k_head
    if V is not None:
        V += key_batch * v_batch + first_key * v_row + head * v_head
    if MASK is not None:
        MASK += key_batch * keys + first_key

    largest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    o = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    share = tl.cdiv(tl.cdiv(key_count, BLOCK_M), tl.num_programs(1)) * BLOCK_M
    begin = tl.program_id(1) * share
    for start in range(begin, tl.minimum(begin + share, key_count), BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        kept = load_kept(MASK, m, key_count)
        k = load_tile(K, m, k_row, kept, HEAD_SIZE, BLOCK_K)
        s = dot(q, tl.trans(k), None, PRECISION) * (scale * LOG2_E)
        s = tl.where(kept[None, :], s, float("-inf"))
        new = tl.maximum(largest, tl.max(s, 1))
        shift = tl.where(new > float("-inf"), new, 0.0)
        p = tl.exp2(s - shift[:, None])
        shrink = tl.exp2(largest - shift)
        total = total * shrink + tl.sum(p, 1)
        if SEED is not None:
            p = tl.where(undropped(SEED, threshold, row, t, start, BLOCK_Q, BLOCK_M), p, 0.0)
        v = k if V is None else load_tile(V, m, v_row, kept, HEAD_SIZE, BLOCK_K)
        o = dot(p.to(v.dtype), v, o * shrink[:, None], PRECISION)
        largest = new

    some = tl.where(total > 0, total, 1.0)
    OUT += split * split_rows * HEAD_SIZE + batch * o_batch + first * o_row + head * o_head
    store_tile(OUT, t, o_row, valid, o * (rescale / some)[:, None], HEAD_SIZE, BLOCK_K)
    LSE += split * split_rows + (batch * heads + head) * queries + first
    tl.store(LSE + t, largest + tl.log2(some), mask=valid)


@triton.jit
def _merge_kernel(
    PARTIAL,
    PARTIAL_LSE,
    OUT,
    LSE,
    queries,
    heads,
    blocks,
    split_rows,
    splits,
    HEAD_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """The splits in their order. PARTIAL `[splits, B, H, T, K]` -> OUT `[B, T, H, K]`. Grid (query blocks * B * H,)."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    t = tl.program_id(0) % blocks * BLOCK_Q + tl.arange(0, BLOCK_Q)
    valid = t < queries
    largest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    o = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    at = row * queries
    for _ in range(0, splits):
        lse = tl.load(PARTIAL_LSE + at + t, mask=valid, other=float("-inf"))
        part = load_tile(PARTIAL + at * HEAD_SIZE, t, HEAD_SIZE, valid, HEAD_SIZE, BLOCK_K)
        new = tl.maximum(largest, lse)
        shift = tl.where(new > float("-inf"), new, 0.0)
        shrink, weight = tl.exp2(largest - shift), tl.exp2(lse - shift)
        total = total * shrink + weight
        o = o * shrink[:, None] + part * weight[:, None]
        largest = new
        at += split_rows
    some = tl.where(total > 0, total, 1.0)
    OUT += ((row // heads) * queries * heads + row % heads) * HEAD_SIZE
    store_tile(OUT, t, heads * HEAD_SIZE, valid, o / some[:, None], HEAD_SIZE, BLOCK_K)
    tl.store(LSE + row * queries + t, largest + tl.log2(some), mask=valid)


class Problem(NamedTuple):
    """Sizes of a call, and what the kernels take in common."""

    sequences: int
    heads: int
    head_size: int
    block_k: int
    longest_query: int
    longest_key: int
    processors: int
    constants: dict

    def splits(self, owned: int, owned_block: int, walked: int, walked_block: int) -> int:
        """Into how many the walk over a side is cut, so that every processor has two programs.

        Four blocks are the shortest walk: below, partial results cost more than they hide.
        """
        programs = max(1, triton.cdiv(owned, owned_block) * self.sequences * self.heads)
        return max(1, min(triton.cdiv(2 * self.processors, programs), triton.cdiv(walked, 4 * walked_block)))


def problem(query, key, cu_seqlens, packed: str | None, max_seqlen: int, precision: str) -> Problem:
    block_k = max(16, triton.next_power_of_2(query.shape[-1]))
    constants = {
        "HEAD_SIZE": query.shape[-1],
        "BLOCK_K": block_k,
        "QUERY_PACKED": packed == "query",
        "KEY_PACKED": packed == "key",
        "PRECISION": precision,
    }
    return Problem(
        len(query) if packed is None else len(cu_seqlens) - 1,
        query.shape[2],
        query.shape[-1],
        block_k,
        max_seqlen if packed == "query" else query.shape[1],
        max_seqlen if packed == "key" else key.shape[1],
        _triton.target(query.device).processors,
        constants,
    )


class Configuration(NamedTuple):
    """Tiles are `[block_q, block_m]`, queries by keys."""

    block_q: int
    block_m: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        """What a launch is told."""
        tiles = {"BLOCK_Q": self.block_q, "BLOCK_M": self.block_m}
        return tiles | {"num_warps": self.num_warps, "num_stages": self.num_stages}


def fitted(configuration: Configuration, sizes: Problem) -> Configuration:
    """With smaller blocks where there is less to put into them."""
    block_q = min(configuration.block_q, max(16, triton.next_power_of_2(sizes.longest_query)))
    block_m = min(configuration.block_m, max(16, triton.next_power_of_2(sizes.longest_key)))
    return configuration._replace(block_q=block_q, block_m=block_m)


def dropping(dropout: float) -> tuple[int, float]:
    """What 31 random bits must reach for a weight to be kept, and the factor of those that are."""
    return round(dropout * 2**31), 1.0 / (1.0 - dropout)


def strides(x: torch.Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if x is None else x.stride()[:3]


def rows_in_place(x: torch.Tensor | None) -> torch.Tensor | None:
    """x, copied only where a row of a head is not contiguous."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _configurations(sizes: Problem, dtype: torch.dtype, capability: tuple[int, int]) -> list[Configuration]:
    """The first is what compiles without spilled registers; three products for one fill them in float32."""
    small = sizes.block_k <= 64
    if dtype == torch.float32:
        if not small:
            return [Configuration(16, 32, 4, 1)]
        wide = capability >= (9, 0) and sizes.constants["PRECISION"] == "tf32x3"
        return [Configuration(64, 32, 4, 2) if wide else Configuration(32, 32, 4, 2)]
    if small:
        return [Configuration(64, 64, 4, 3), Configuration(128, 64, 8, 3), Configuration(64, 128, 4, 2)]
    return [Configuration(64, 64, 4, 2), Configuration(128, 64, 8, 2)]


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    seed: torch.Tensor | None,
    packed: str | None,
    max_seqlen: int,
    scale: float,
    dropout: float,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, contiguous, `[B, T, H, K]`, and log2 of the sum of the exponentials `[B, H, T]`, -inf without a key."""
    sizes = problem(query, key, cu_seqlens, packed, max_seqlen, precision)
    query, key, value = rows_in_place(query), rows_in_place(key), rows_in_place(value)
    mask = None if mask is None else mask.contiguous()
    batch, queries, heads, head_size = query.shape

    def run(configuration: Configuration) -> tuple[torch.Tensor, torch.Tensor]:
        block_q, block_m, *_ = configuration = fitted(configuration, sizes)
        blocks = triton.cdiv(sizes.longest_query, block_q)
        splits = sizes.splits(sizes.longest_query, block_q, sizes.longest_key, block_m)
        output = query.new_empty(query.shape)
        log_sum_exp = query.new_empty((batch, heads, queries), dtype=torch.float32)
        to, to_log, to_strides = output, log_sum_exp, output.stride()[:3]
        if splits > 1:
            to = query.new_empty((splits, batch, heads, queries, head_size), dtype=torch.float32)
            to_log = query.new_empty((splits, batch, heads, queries), dtype=torch.float32)
            to_strides = (to.stride(1), to.stride(3), to.stride(2))
        _triton.launch(
            _forward_kernel,
            (blocks * sizes.sequences * heads, splits),
            *(query, key, value, mask, cu_seqlens, seed, to, to_log),
            *(queries, key.shape[1], heads, blocks, log_sum_exp.numel(), scale, *dropping(dropout)),
            *(*strides(query), *strides(key), *strides(value), *to_strides),
            **configuration.options(),
            **sizes.constants,
        )
        if splits > 1:
            merge_block = min(block_q, 16)
            merge_blocks = triton.cdiv(queries, merge_block)
            _triton.launch(
                _merge_kernel,
                (merge_blocks * batch * heads,),
                *(to, to_log, output, log_sum_exp, queries, heads, merge_blocks, log_sum_exp.numel(), splits),
                HEAD_SIZE=head_size,
                BLOCK_K=sizes.block_k,
                BLOCK_Q=merge_block,
                num_warps=4,
                num_stages=1,
            )
        return output, log_sum_exp

    capability = _triton.target(query.device).capability
    name = (
        "luna_attention forward",
        query.dtype,
        value is None,
        packed,
        precision,
        sizes[:-1],
        mask is None,
        seed is None,
    )
    return _triton.choose(name, _configurations(sizes, query.dtype, capability), run)
