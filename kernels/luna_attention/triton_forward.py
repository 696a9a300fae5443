"""Triton forward of pack and unpack: one kernel over splits of the keys and one that merges the splits.

`varlen_side` is the side with varlen sequences: `"query"`, `"key"` (see `kernels/sequences.py`) or None. A varlen
tensor has batch size 1, and `cu_seqlens` bounds its sequences.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import triton_choice, triton_launch
from ..common.triton_launch import block_of, cdiv, contiguous, rows_contiguous, strides
from ..common.triton_tiles import LOG2_E, dot, dropping, load_kept, load_tile, rise, store_tile, undropped


@triton.jit
def _span(CU_SEQLENS, sequence, length, VARLEN: tl.constexpr):
    """Return the batch index, first token and number of tokens of a sequence; without varlen, `length` tokens."""
    if VARLEN:
        first = tl.load(CU_SEQLENS + sequence).to(tl.int64)
        return sequence * 0, first, (tl.load(CU_SEQLENS + sequence + 1).to(tl.int64) - first).to(tl.int32)
    else:
        return sequence, sequence * 0, length


@triton.jit
def place(CU_SEQLENS, queries, keys, heads, blocks, QUERY_VARLEN: tl.constexpr, KEY_VARLEN: tl.constexpr):
    """Return this program's weight matrix and head, then batch index, first token and length of queries and keys."""
    matrix = tl.program_id(0) // blocks
    sequence = (matrix // heads).to(tl.int64)
    batch, first, count = _span(CU_SEQLENS, sequence, queries, QUERY_VARLEN)
    key_batch, first_key, key_count = _span(CU_SEQLENS, sequence, keys, KEY_VARLEN)
    # 64-bit, because a head times its stride may overflow 32 bits.
    return matrix, (matrix % heads).to(tl.int64), batch, first, count, key_batch, first_key, key_count


@triton.jit
def share(count, BLOCK: tl.constexpr):
    """Return the first token of this split and the end of its tokens (exclusive), among `count` tokens."""
    length = tl.cdiv(tl.cdiv(count, BLOCK), tl.num_programs(1)) * BLOCK
    begin = tl.program_id(1) * length
    return begin, tl.minimum(begin + length, count)


@triton.jit(do_not_specialize=["blocks"])
def _forward_kernel(
    Q, K, V,  # [B, T or M, heads, HEAD_SIZE]
    MASK,  # [B, M]
    CU_SEQLENS,  # [sequences + 1]
    SEED,  # [1]
    OUT,  # [splits, B, T, heads, HEAD_SIZE], without splits the result
    LSE,  # [splits, B, heads, T], log2-sum-exp
    queries, keys, heads, blocks, split_rows, scale, threshold, rescale,  # blocks per head, rows per split, `dropping`
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, o_batch, o_token, o_head,  # strides
    HEAD_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
    QUERY_VARLEN: tl.constexpr, KEY_VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend over a split of the keys. If V is None, K is also the value and is loaded only once.

    The grid is (query blocks * sequences * heads, splits of the keys).
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
    K += key_batch * k_batch + first_key * k_token + head * k_head
    if V is not None:
        V += key_batch * v_batch + first_key * v_token + head * v_head

    largest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    o = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    begin, end = share(key_count, BLOCK_M)
    for start in range(begin, end, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        kept = load_kept(MASK, key_batch * keys + first_key, m, key_count)
        k = load_tile(K, m, k_token, kept, column, HEAD_SIZE)
        s = dot(q, tl.trans(k), None, PRECISION) * (scale * LOG2_E)
        s = tl.where(kept[None, :], s, float("-inf"))
        largest, shift, shrink = rise(largest, tl.max(s, 1))
        p = tl.exp2(s - shift[:, None])
        total = total * shrink + tl.sum(p, 1)
        if SEED is not None:
            p = tl.where(undropped(SEED, threshold, matrix, t, start, BLOCK_Q, BLOCK_M), p, 0.0)
        v = k if V is None else load_tile(V, m, v_token, kept, column, HEAD_SIZE)
        o = dot(p.to(v.dtype), v, o * shrink[:, None], PRECISION)

    some = tl.where(total > 0, total, 1.0)
    OUT += split * split_rows * HEAD_SIZE + batch * o_batch + first * o_token + head * o_head
    store_tile(OUT, t, o_token, valid, column, HEAD_SIZE, o * (rescale / some)[:, None])
    LSE += split * split_rows + (batch * heads + head) * queries + first
    tl.store(LSE + t, largest + tl.log2(some), mask=valid)


@triton.jit(do_not_specialize=["blocks", "splits"])
def _merge_kernel(
    PARTIAL, PARTIAL_LSE,  # [splits, B, heads, T, HEAD_SIZE], [splits, B, heads, T]
    OUT, LSE,  # [B, T, heads, HEAD_SIZE], [B, heads, T]
    queries, heads, blocks, split_rows, splits,
    HEAD_SIZE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Merge the splits in order, from PARTIAL `[splits, B, H, T, K]` to OUT `[B, T, H, K]`.

    The grid is (query blocks * B * H,).
    """
    matrix = (tl.program_id(0) // blocks).to(tl.int64)
    t, column = tl.program_id(0) % blocks * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
    valid = t < queries
    largest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    o = tl.zeros([BLOCK_Q, BLOCK_K], tl.float32)
    at = matrix * queries
    for _ in range(0, splits):
        lse = tl.load(PARTIAL_LSE + at + t, mask=valid, other=float("-inf"))
        part = load_tile(PARTIAL + at * HEAD_SIZE, t, HEAD_SIZE, valid, column, HEAD_SIZE)
        largest, shift, shrink = rise(largest, lse)
        weight = tl.exp2(lse - shift)
        total = total * shrink + weight
        o = o * shrink[:, None] + part * weight[:, None]
        at += split_rows
    some = tl.where(total > 0, total, 1.0)
    OUT += ((matrix // heads) * queries * heads + matrix % heads) * HEAD_SIZE
    store_tile(OUT, t, heads * HEAD_SIZE, valid, column, HEAD_SIZE, o / some[:, None])
    tl.store(LSE + matrix * queries + t, largest + tl.log2(some), mask=valid)


class Tiles(NamedTuple):
    """A configuration: the tiles `[block_q, block_m]` of a kernel, queries by keys, and its options."""

    block_q: int
    block_m: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        """Return the launch options determined by the configuration."""
        tiles = {"BLOCK_Q": self.block_q, "BLOCK_M": self.block_m}
        return tiles | {"num_warps": self.warps, "num_stages": self.stages}


class AttentionCall:
    """The arguments of one call in the form required by the kernels, and the sizes that divide it into programs.

    Attributes:
        tensors: the arguments of the kernels from `Q` to `SEED`.
        constants: constants of every kernel.
    """

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor | None, mask: Tensor | None, cu_seqlens: Tensor | None,
        seed: Tensor | None, varlen_side: str | None, max_seqlen: int, scale: float, dropout: float, precision: str,
    ) -> None:  # fmt: skip
        self.query, self.key, self.value = rows_contiguous(query, key, value)
        self.tensors = self.query, self.key, self.value, *contiguous(mask), cu_seqlens, seed
        self.scale, self.dropping = scale, dropping(dropout)
        self.sequences = len(query) if cu_seqlens is None else len(cu_seqlens) - 1
        _, queries, self.heads, self.head_size = query.shape
        self.block_k, self.precision = block_of(self.head_size), precision
        self.longest_query = max_seqlen if varlen_side == "query" else queries
        self.longest_key = max_seqlen if varlen_side == "key" else key.shape[1]
        self.processors = triton_launch.processors(query.device, self.sequences)
        self.constants: dict[str, Any] = {
            "HEAD_SIZE": self.head_size, "BLOCK_K": self.block_k, "QUERY_VARLEN": varlen_side == "query",
            "KEY_VARLEN": varlen_side == "key", "PRECISION": precision,
        }  # fmt: skip

    def numbers(self, blocks: int, split_rows: int) -> tuple[Any, ...]:
        """Return the arguments of the kernels from `queries` to `v_head`."""
        sizes = self.query.shape[1], self.key.shape[1], self.heads, blocks, split_rows
        return *sizes, self.scale, *self.dropping, *strides(self.query, self.key, self.value, number=3)

    def splits(self, owned: int, owned_block: int, walked: int, walked_block: int) -> int:
        """Return the number of splits of the walked side that results in two programs per multiprocessor.

        A split has at least four blocks: with fewer, partial results cost more than the second program saves.
        """
        programs = max(1, cdiv(owned, owned_block) * self.sequences * self.heads)
        return max(1, min(cdiv(2 * self.processors, programs), cdiv(walked, 4 * walked_block)))

    def choose(self, kernel: Any, configurations: list[Tiles], run: Callable[[Tiles], Any]) -> Any:
        """Return the result of `run` for the selected configuration, with blocks limited to the sizes of the call."""
        _, _, value, mask, _, seed = self.tensors
        kind = [self.query.dtype, f"heads of {self.block_k}", self.query.dtype == torch.float32 and self.precision]
        kind += [value is None and "tied", mask is not None and "masked", seed is not None and "dropout"]
        sizes = {"heads": self.sequences * self.heads, "queries": self.longest_query, "keys": self.longest_key}

        def run_fitted(tiles: Tiles) -> Any:
            block_q, block_m = block_of(self.longest_query, tiles.block_q), block_of(self.longest_key, tiles.block_m)
            return run(tiles._replace(block_q=block_q, block_m=block_m))

        return triton_choice.choose(kernel, kind, sizes, configurations, run_fitted, self.query.device)


def _configurations(call: AttentionCall) -> list[Tiles]:
    """Return the candidate configurations. The first one does not spill registers; in float32 it uses all of them."""
    small = call.block_k <= 64
    if call.query.dtype == torch.float32:
        if not small:
            return [Tiles(16, 32, 8 if call.precision == "ieee" else 4, 1)]
        large = triton_launch.target(call.query.device).large and call.precision == "tf32x3"
        return [Tiles(64, 32, 4, 2) if large else Tiles(32, 32, 4, 2)]
    if small:
        candidates = [Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(64, 128, 4, 2)]
        return candidates[::-1] if _large_tiles(call) else candidates
    return [Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 2)]


def _large_tiles(call: AttentionCall) -> bool:
    """Return whether tiles of 128 keys are faster on an H200: for 16 queries, if they do not reduce the splits."""
    _, _, value, _, _, seed = call.tensors
    plain = call.block_k == 64 and call.longest_query <= 16 and value is None and seed is None
    few, many = (call.splits(call.longest_query, 16, call.longest_key, block) for block in (128, 64))
    return plain and few == many and triton_launch.target(call.query.device).large


def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the output `[B, T, H, K]`, and log2 of the sum of exponentials `[B, H, T]`, -inf without keys."""
    call = AttentionCall(*arguments)
    query = call.query
    batch, queries, heads, head_size = query.shape

    def run(tiles: Tiles) -> tuple[Tensor, Tensor]:
        blocks = cdiv(call.longest_query, tiles.block_q)
        splits = call.splits(call.longest_query, tiles.block_q, call.longest_key, tiles.block_m)
        output = query.new_empty(query.shape)
        log_sum_exp = query.new_empty((batch, heads, queries), dtype=torch.float32)
        split_rows = log_sum_exp.numel()
        to, to_log, to_strides = output, log_sum_exp, output.stride()[:3]
        if splits > 1:
            to = query.new_empty((splits, batch, heads, queries, head_size), dtype=torch.float32)
            to_log = query.new_empty((splits, batch, heads, queries), dtype=torch.float32)
            to_strides = (to.stride(1), to.stride(3), to.stride(2))
        triton_launch.launch(
            _forward_kernel, (blocks * call.sequences * heads, splits),
            *call.tensors, to, to_log, *call.numbers(blocks, split_rows), *to_strides, **tiles.options(),
            **call.constants,
        )  # fmt: skip
        if splits > 1:
            block = min(tiles.block_q, 16)
            blocks = cdiv(queries, block)
            triton_launch.launch(
                _merge_kernel, (blocks * batch * heads,),
                to, to_log, output, log_sum_exp, queries, heads, blocks, split_rows, splits,
                HEAD_SIZE=head_size, BLOCK_K=call.block_k, BLOCK_Q=block, num_warps=4, num_stages=1,
            )  # fmt: skip
        return output, log_sum_exp

    return call.choose(_forward_kernel, _configurations(call), run)
