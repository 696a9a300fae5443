"""Triton forward of causal Luna attention, with one of two strategies.

`Fused`, for L up to 64, keeps both sums in registers. The tokens of a head are divided into segments. A program
iterates over one segment in chunks of C tokens; `_sums_kernel` and `_prefix_kernel` compute the sums before a segment.
Sums of `a^T value` are transposed in registers, `[V, L]`, so that tiles have 64 rows.

`Scans`, for more rows of P, iterates over the tokens once per sum, with a slice of the sum in registers. Pack weights,
unpack weights and the gradients of both are stored in memory, `[B, H, T, L]`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import triton_choice, triton_launch
from ..common.triton_launch import block_of, cdiv, contiguous, rows_contiguous, strides
from ..common.triton_tiles import dot, dropping, load_kept, load_tile, store_tile
from .triton_weights import (
    activate,
    load_pack_query,
    load_rate,
    load_sums,
    pack_dropout,
    pack_scores,
    place,
    slope,
    softmax,
    store_sums,
    unpack_dropout,
    weigh_chunk,
)

FUSED_ROWS = 64
# Size of heads if weights and sums are float32.
FUSED_SIZE = 64
# In tokens: in addition to its chunks, a segment has the cost of reading and writing its sums.
MIN_SEGMENT = 256


@triton.jit(do_not_specialize=["segments"])
def _prefix_kernel(SUMS, FIRST, segments, N, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """Replace `[heads, segments, N]` by the sums before (REVERSE: after) each segment, with `FIRST` `[heads, N]`."""
    blocks = tl.cdiv(N, BLOCK)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    if FIRST is not None:
        total += tl.load(FIRST + head * N + columns, mask=columns < N, other=0.0)
    for i in range(0, segments):
        segment = segments - 1 - i if REVERSE else i
        at = SUMS + (head * segments + segment) * N + columns
        here = tl.load(at, mask=columns < N, other=0.0)
        tl.store(at, total, mask=columns < N)
        total += here


@triton.jit
def _sums_kernel(
    X, Z, Y, W,  # [B, T, H, SIZE, WIDTH or L]
    PQ,  # [B, L, H, SIZE]
    COUNT, MASK,  # [B, T]
    PACK_MASK,  # [B, L]
    SEED,  # [1]
    SUM_X, SUM_Z,  # [B, H, segments, SIZE, L], [B, H, segments, L, WIDTH]
    scale, threshold, rescale,  # 1 / sqrt(SIZE), `dropping`
    x_b, x_t, x_h, z_b, z_t, z_h, y_b, y_t, y_h, w_b, w_t, w_h, pq_b, pq_l, pq_h,  # strides
    T, H, S,  # tokens, heads, tokens of a segment
    PACK: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, L: tl.constexpr,
    ELU: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BL: tl.constexpr,  # see `triton_weights`
):  # fmt: skip
    """Compute the sums of x_t^T y_t, `[K, L]`, and of w_t^T z_t, `[L, V]`, over every segment.

    PACK: x and z are key and value, y = w are the pack weights, and Y is pack_key. Otherwise z is divided by t.
    """
    segments, segment, head, b, h = place(1, T, H, S)
    key_column, value_column, packed_row = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BL)
    X += b * x_b + h * x_h
    Z += b * z_b + h * z_h
    Y += b * y_b + h * y_h
    sum_x = tl.zeros([BK, BL], tl.float32)
    sum_z = tl.zeros([BV, BL], tl.float32)
    if PACK:
        pack_query, used = load_pack_query(PQ + b * pq_b + h * pq_h, PACK_MASK, pq_l, b, SIZE, L, BK, BL)
    for start in range(segment * S, tl.minimum(segment * S + S, T), C):
        t = start + tl.arange(0, C)
        ok = t < T
        kept = ok
        if PACK:
            kept = load_kept(MASK, b * T, t, T)
        x = load_tile(X, t, x_t, kept, key_column, SIZE)
        z = load_tile(Z, t, z_t, kept, value_column, WIDTH)
        if PACK:
            pack_key = load_tile(Y, t, y_t, kept, key_column, SIZE)
            y = tl.where(used[None, :], activate(pack_scores(pack_key, pack_query, scale, PRECISION), ELU), 0.0)
            y = pack_dropout(y, SEED, threshold, rescale, head, t, C, BL).to(INNER)
            w = y
        else:
            z = z.to(tl.float32) * load_rate(COUNT, b, t, ok, T)[:, None]
            y = load_tile(Y, t, y_t, ok, packed_row, L)
            w = load_tile(W + b * w_b + h * w_h, t, w_t, ok, packed_row, L)
        sum_x = dot(tl.trans(x.to(INNER)), y, sum_x, PRECISION)
        sum_z = dot(tl.trans(z.to(INNER)), w, sum_z, PRECISION)
    number = head * segments + segment
    store_sums(SUM_X, number, sum_x, SIZE, L, BK, BL, False)
    store_sums(SUM_Z, number, sum_z, WIDTH, L, BV, BL, True)


@triton.jit
def _forward_kernel(
    Q, PK, K, V,  # [B, T, H, SIZE], V and Y [B, T, H, WIDTH]
    PQ,  # [B, L, H, SIZE]
    COUNT, MASK,  # [B, T]
    PACK_MASK,  # [B, L]
    SEED,  # [1]
    START_K, START_V,  # sums before each segment, [B, H, segments, SIZE, L], [B, H, segments, L, WIDTH]
    Y,
    END_K, END_V,  # [B, H, SIZE, L], [B, H, L, WIDTH]
    scale, threshold, rescale,  # 1 / sqrt(SIZE), `dropping`
    q_b, q_t, q_h, pk_b, pk_t, pk_h, k_b, k_t, k_h, v_b, v_t, v_h, pq_b, pq_l, pq_h,  # strides
    T, H, S,  # tokens, heads, tokens of a segment
    SIZE: tl.constexpr, WIDTH: tl.constexpr, L: tl.constexpr,
    ELU: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BL: tl.constexpr,  # see `triton_weights`
):  # fmt: skip
    """Compute Y; the program of the last segment also writes the means after the last token."""
    segments, segment, head, b, h = place(1, T, H, S)
    Q, K, PK, V = Q + b * q_b + h * q_h, K + b * k_b + h * k_h, PK + b * pk_b + h * pk_h, V + b * v_b + h * v_h
    sum_k = load_sums(START_K, head * segments + segment, SIZE, L, BK, BL, False)
    sum_v = load_sums(START_V, head * segments + segment, WIDTH, L, BV, BL, True)
    pack_query, used = load_pack_query(PQ + b * pq_b + h * pq_h, PACK_MASK, pq_l, b, SIZE, L, BK, BL)
    r, column = tl.arange(0, C), tl.arange(0, BV)
    for start in range(segment * S, tl.minimum(segment * S + S, T), C):
        t = start + r
        kept, rate, k, a, w = weigh_chunk(
            Q, K, PK, COUNT, MASK, SEED, pack_query, used, sum_k, scale, threshold, rescale, q_t, k_t, pk_t, head, b,
            t, T, SIZE, ELU, INNER, PRECISION, C, BK, BL,
        )  # fmt: skip
        w = unpack_dropout(w, SEED, threshold, rescale, head, t, C, BL)
        sum_k = dot(tl.trans(k.to(INNER)), a, sum_k, PRECISION)
        v = load_tile(V, t, v_t, kept, column, WIDTH).to(INNER)
        blend = tl.where(r[:, None] >= r[None, :], dot(w.to(INNER), tl.trans(a), None, PRECISION), 0.0)
        y = dot(blend.to(INNER), v, None, PRECISION)
        y = dot(w, tl.trans(sum_v), y, PRECISION) * rate[:, None]
        store_tile(Y + (b * T * H + h) * WIDTH, t, H * WIDTH, t < T, column, WIDTH, y)
        sum_v = dot(tl.trans(v), a, sum_v, PRECISION)
    if segment == segments - 1:
        rate = 1.0 / tl.maximum(tl.load(COUNT + b * T + T - 1), 1).to(tl.float32)
        store_sums(END_K, head, sum_k * rate, SIZE, L, BK, BL, False)
        store_sums(END_V, head, sum_v * rate, WIDTH, L, BV, BL, True)


@triton.jit
def _pack_kernel(
    PK,  # [B, T, H, SIZE]
    PQ,  # [B, L, H, SIZE]
    MASK, PACK_MASK,  # [B, T], [B, L]
    SEED,  # [1]
    DA, A,  # [B, H, T, L]
    scale, threshold, rescale,  # 1 / sqrt(SIZE), `dropping`
    pk_b, pk_t, pk_h, pq_b, pq_l, pq_h,  # strides
    T, H,
    SIZE: tl.constexpr, L: tl.constexpr, ELU: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Compute the pack weights of C tokens or, if the gradients DA of the weights are given, those of the scores."""
    _, chunk, head, b, h = place(1, T, H, C)
    t, packed_row = chunk * C + tl.arange(0, C), tl.arange(0, BL)
    kept = load_kept(MASK, b * T, t, T)
    pack_query, used = load_pack_query(PQ + b * pq_b + h * pq_h, PACK_MASK, pq_l, b, SIZE, L, BK, BL)
    pack_key = load_tile(PK + b * pk_b + h * pk_h, t, pk_t, kept, tl.arange(0, BK), SIZE)
    scores = pack_scores(pack_key, pack_query, scale, PRECISION)
    if DA is None:
        x = activate(scores, ELU)
    else:
        x = slope(scores, ELU) * load_tile(DA + head * T * L, t, L, t < T, packed_row, L) * scale
    x = pack_dropout(x, SEED, threshold, rescale, head, t, C, BL)
    store_tile(A + head * T * L, t, L, t < T, packed_row, L, tl.where(used[None, :], x, 0.0))


@triton.jit
def _softmax_kernel(
    SCORES,  # [B, H, T, L]
    COUNT, PACK_MASK,  # [B, T], [B, L]
    SEED,  # [1]
    DW, OUT,  # [B, H, T, L]
    scale, threshold, rescale, T, H,
    L: tl.constexpr, C: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Compute the unpack weights of C tokens or, if the gradients DW of the weights are given, those of the scores."""
    _, chunk, head, b, _ = place(1, T, H, C)
    t, packed_row = chunk * C + tl.arange(0, C), tl.arange(0, BL)
    ok = t < T
    used = load_kept(PACK_MASK, b * L, packed_row, L)
    x = softmax(load_tile(SCORES + head * T * L, t, L, ok, packed_row, L), used)
    if DW is None:
        x = unpack_dropout(x, SEED, threshold, rescale, head, t, C, BL)
    else:
        dw = load_tile(DW + head * T * L, t, L, ok, packed_row, L)
        dw = unpack_dropout(dw, SEED, threshold, rescale, head, t, C, BL)
        rate = load_rate(COUNT, b, t, ok, T) * scale
        x *= (dw - tl.sum(x * dw, 1)[:, None]) * rate[:, None]
    store_tile(OUT + head * T * L, t, L, ok, packed_row, L, x)


@triton.jit
def _scan_kernel(
    X, Y, Z,  # [B, T, H, N], [B, T, H, N], [B, T, H, M]
    COUNT,  # [B, T]
    START,  # sum before each segment, [B, H, segments, N, M]
    F,  # [B, T, H, M]
    END,  # [B, H, N, M], with SUMS [B, H, segments, N, M]
    scale,
    x_b, x_t, x_h, y_b, y_t, y_h, z_b, z_t, z_h, f_b, f_t, f_h,  # strides
    T, H, S,  # tokens, heads, tokens of a segment
    SUMS: tl.constexpr, REVERSE: tl.constexpr, RATE: tl.constexpr, RATE_INSIDE: tl.constexpr, ADD: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Compute F_t = X_t sum_{j<=t} Y_j^T Z_j for BM columns of Z `[T, M]`; REVERSE: sum over j >= t.

    RATE: multiply by scale / t. RATE_INSIDE: use Z_j / j (t and j count tokens). ADD: add the result to F. END: also
    write the sum over all tokens. SUMS: only write the sum over every segment.
    """
    blocks = tl.cdiv(M, BM)
    segments, segment, head, b, h = place(blocks, T, H, S)
    number = (head * segments + segment) * N * M
    rows, columns = tl.arange(0, BN)[:, None], tl.program_id(0) % blocks * BM + tl.arange(0, BM)
    offsets, inside = rows * M + columns[None, :], (rows < N) & (columns < M)[None, :]
    state = tl.zeros([BN, BM], tl.float32)
    if START is not None:
        state += tl.load(START + number + offsets, mask=inside, other=0.0)
    r, n = tl.arange(0, C), tl.arange(0, BN)
    chunks = tl.cdiv(tl.minimum(S, T - segment * S), C)
    for i in range(0, chunks):
        chunk = chunks - 1 - i if REVERSE else i
        t = segment * S + chunk * C + r
        ok = t < T
        rate = load_rate(COUNT, b, t, ok, T)
        y = load_tile(Y + b * y_b + h * y_h, t, y_t, ok, n, N)
        z = load_tile(Z + b * z_b + h * z_h, t, z_t, ok, columns, M)
        if RATE_INSIDE:
            z = z.to(tl.float32) * rate[:, None]
        z = z.to(INNER)
        if not SUMS:
            x = load_tile(X + b * x_b + h * x_h, t, x_t, ok, n, N)
            past = r[:, None] <= r[None, :] if REVERSE else r[:, None] >= r[None, :]
            products = tl.where(past, dot(x.to(INNER), tl.trans(y.to(INNER)), None, PRECISION), 0.0)
            f = dot(products.to(INNER), z, None, PRECISION)
            f = dot(x, state, f, PRECISION)
            if RATE:
                f *= rate[:, None] * scale
            at = F + b * f_b + h * f_h
            if ADD:
                f += load_tile(at, t, f_t, ok, columns, M)
            store_tile(at, t, f_t, ok, columns, M, f)
        state = dot(tl.trans(y.to(INNER)), z, state, PRECISION)
    if SUMS:
        tl.store(END + number + offsets, state, mask=inside)
    elif END is not None:
        if segment == (0 if REVERSE else segments - 1):
            tl.store(END + head * N * M + offsets, state, mask=inside)


class CausalCall:
    """The arguments of one call in the form required by the kernels, with their sizes and dtypes."""

    def __init__(
        self, query: Tensor, pack_key: Tensor, key: Tensor, value: Tensor, pack_query: Tensor, count: Tensor,
        mask: Tensor | None, pack_mask: Tensor | None, key_mean: Tensor | None, value_mean: Tensor | None,
        past: Tensor | None, activation: str, dropout: float, seed: Tensor | None, precision: str,
    ) -> None:  # fmt: skip
        self.tokens = rows_contiguous(query, pack_key, key, value, pack_query)
        self.query, self.pack_key, self.key, self.value, self.pack_query = self.tokens
        self.count, self.mask, self.pack_mask, self.past = contiguous(count, mask, pack_mask, past)
        self.options = self.count, self.mask, self.pack_mask, seed  # arguments of the kernels from `COUNT` to `SEED`
        self.means: tuple[Any, Any] = (key_mean, value_mean)
        self.seed, self.dropping = seed, dropping(dropout)
        self.batch, self.length, self.heads, self.size = query.shape
        self.packed_rows, self.width, self.scale = pack_query.shape[1], value.shape[3], self.size**-0.5
        self.device, self.dtype, self.hopper = query.device, query.dtype, triton_launch.target(query.device).large
        self.kind = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        self.inner = tl.bfloat16 if self.dtype == torch.bfloat16 else tl.float32
        self.precision = precision if self.dtype == torch.float32 else "tf32"
        self.elu = activation == "elu"

    def first(self) -> tuple[Tensor | None, Tensor | None]:
        """Return both sums before the first token."""
        key_mean, value_mean = self.means
        return (None, None) if self.past is None else (scaled(key_mean, self.past), scaled(value_mean, self.past))

    def last_rate(self) -> Tensor:
        """Return 1 / t of the last token, `[B]`."""
        return self.count[:, -1].clamp(min=1).float().reciprocal()


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """Return `[B, H, ...]` times `[B]`, in float32."""
    return (x.float() * factor[:, None, None, None]).contiguous()


class FusedTiles(NamedTuple):
    """A configuration of the fused kernels: the tokens of a chunk and the warps."""

    chunk: int
    warps: int


class Fused(CausalCall):
    def configure(self, configuration: FusedTiles) -> None:
        """Divide the call into programs for this configuration."""
        chunk, warps = configuration
        self.segment = segment_length(self.batch, self.heads, self.length, chunk, self.device)
        self.segments = cdiv(self.length, self.segment)
        self.constants = {
            "SIZE": self.size, "WIDTH": self.width, "L": self.packed_rows, "ELU": self.elu, "INNER": self.inner,
            "PRECISION": self.precision, "C": chunk,
            "BK": block_of(self.size), "BV": block_of(self.width), "BL": block_of(self.packed_rows),
            "num_warps": warps, "num_stages": 1,
        }  # fmt: skip

    def configurations(self) -> list[FusedTiles]:
        """Return the candidate configurations. The first keeps the kernels in registers."""
        if self.dtype == torch.float32:
            return [FusedTiles(16, 8), FusedTiles(16, 4)]
        tile = block_of(max(self.size, self.width)) * block_of(self.packed_rows)
        if tile <= 64 * 32 and (self.hopper or self.dtype == torch.bfloat16):
            # Not (64, 4): `ptxas` 12.8 of Triton 3.6 and 3.7 compiles `_sums_kernel` incorrectly.
            return [FusedTiles(32, 4), FusedTiles(64 if self.hopper and self.dtype == torch.bfloat16 else 32, 8)]
        if self.hopper:
            return [FusedTiles(32, 8), FusedTiles(16, 4)]
        few, many = FusedTiles(16, 4), FusedTiles(16, 8)
        return [few, many] if tile <= 64 * 64 else [many, few]

    def launch(self, kernel: Any, *tensors: Tensor | None, strided: tuple[Tensor, ...], **constants: Any) -> None:
        """Launch a kernel over all segments, with the strides of the tensors `strided`."""
        numbers = (self.scale, *self.dropping, *strides(*strided, number=3), self.length, self.heads, self.segment)
        triton_launch.launch(
            kernel, (self.batch * self.heads * self.segments,), *tensors, *numbers, **self.constants, **constants
        )

    def empty_sums(self, *leading: int) -> tuple[Tensor, Tensor]:
        leading = (self.batch, self.heads, *leading)
        key_sums = self.query.new_empty((*leading, self.size, self.packed_rows), dtype=torch.float32)
        return key_sums, key_sums.new_empty((*leading, self.packed_rows, self.width))

    def sums(
        self, x: Tensor, z: Tensor, y: Tensor, w: Tensor, first: Sequence[Tensor | None], pack: bool
    ) -> Sequence[Tensor | None]:
        """Return the sums before (`pack`) or after each segment; `first` contains the sums before or after all."""
        if self.segments == 1:
            return first
        sums, inputs = self.empty_sums(self.segments), (x, z, y, w, self.pack_query)
        self.launch(_sums_kernel, *inputs, *self.options, *sums, strided=inputs, PACK=pack)
        return tuple(prefix_sums(s, f, reverse=not pack) for s, f in zip(sums, first, strict=True))

    def before(self) -> Sequence[Tensor | None]:
        """Return the sums before each segment."""
        return self.sums(self.key, self.value, self.pack_key, self.pack_key, self.first(), True)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        output, end = self.value.new_empty(self.value.shape), self.empty_sums()
        self.launch(_forward_kernel, *self.tokens, *self.options, *self.before(), output, *end, strided=self.tokens)
        return output, *end


class ScanTiles(NamedTuple):
    """A configuration of the scans: their largest tiles (tokens of a chunk, columns of the sum) and warps."""

    chunk: int
    columns: int
    warps: int


class Scans(CausalCall):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self.mask is not None:
            self.key, self.value = (x.masked_fill(~self.mask[:, :, None, None], 0.0) for x in (self.key, self.value))

    def empty(self, dtype: torch.dtype) -> Tensor:
        """Return an empty `[B, T, H, L]`, stored as `[B, H, T, L]`."""
        size = (self.batch, self.heads, self.length, self.packed_rows)
        return torch.empty(size, dtype=dtype, device=self.device).transpose(1, 2)

    def pack(self, grad: Tensor | None = None) -> Tensor:
        """Return pack weights, or the gradients of their scores."""
        constants = {"SIZE": self.size, "ELU": self.elu, "PRECISION": self.precision, "BK": block_of(self.size)}
        inputs, chunk = (self.pack_key, self.pack_query), 16 if self.dtype == torch.float32 else 64
        options = (self.mask, self.pack_mask, self.seed)
        return self._run(_pack_kernel, chunk, 8, *inputs, *options, grad, strided=inputs, **constants)

    def weigh(self, scores: Tensor, grad: Tensor | None = None) -> Tensor:
        """Return the unpack weights of scores, or the gradients of the scores."""
        return self._run(_softmax_kernel, 16, 4, scores, self.count, self.pack_mask, self.seed, grad)

    def _run(
        self, kernel: Any, chunk: int, warps: int, *tensors: Tensor | None, strided: Sequence[Tensor] = (),
        **constants: Any,
    ) -> Tensor:  # fmt: skip
        """Launch a kernel over chunks of tokens, with the strides of the tensors `strided`; return its output."""
        output, numbers = self.empty(self.kind), (self.scale, *self.dropping, *strides(*strided, number=3))
        triton_launch.launch(
            kernel, (self.batch * self.heads * cdiv(self.length, chunk),),
            *tensors, output, *numbers, self.length, self.heads,
            L=self.packed_rows, C=chunk, BL=block_of(self.packed_rows), num_warps=warps, num_stages=1, **constants,
        )  # fmt: skip
        return output

    def scan(
        self, x: Tensor, y: Tensor, z: Tensor, output: Tensor, *, first: Tensor | None = None, ends: bool = False,
        scale: float = 1.0, reverse: bool = False, rate: bool = False, inside: bool = False, add: bool = False,
    ) -> Tensor | None:  # fmt: skip
        """Run `_scan_kernel` into `output`; if `ends`, return the sum over all tokens, else None."""
        n, m = y.shape[3], z.shape[3]
        # A tall sum leaves no registers for large tiles.
        (chunk, columns, warps), full_precision = self.configuration, self.dtype == torch.float32
        if block_of(n) > (64 if full_precision else 128):
            chunk, columns = min(chunk, 32), columns if self.hopper and not full_precision else 16
        columns = block_of(m, columns)
        blocks = cdiv(m, columns)
        segment = segment_length(self.batch, self.heads * blocks, self.length, chunk, self.device)
        segments = cdiv(self.length, segment)
        numbers = (scale, *strides(x, y, z, output, number=3), self.length, self.heads, segment)
        constants = {
            "REVERSE": reverse, "RATE_INSIDE": inside, "N": n, "M": m, "INNER": self.inner,
            "PRECISION": self.precision, "C": chunk, "BN": block_of(n), "BM": columns,
            "num_warps": warps, "num_stages": 1,
        }  # fmt: skip
        grid, start = (self.batch * self.heads * segments * blocks,), first

        def launch(before: Tensor | None, sums: Tensor | None, **options: bool) -> None:
            tensors = (x, y, z, self.count, before, output, sums)
            triton_launch.launch(_scan_kernel, grid, *tensors, *numbers, **options, **constants)

        if segments > 1:
            start = torch.empty((self.batch, self.heads, segments, n, m), device=self.device)
            launch(None, start, SUMS=True, RATE=False, ADD=False)
            prefix_sums(start, first, reverse)
        end = torch.empty((self.batch, self.heads, n, m), device=self.device) if ends else None
        launch(start, end, SUMS=False, RATE=rate, ADD=add)
        return end

    def configure(self, configuration: ScanTiles) -> None:
        """Divide the scans of the call into programs for this configuration."""
        self.configuration = configuration

    def configurations(self) -> list[ScanTiles]:
        """Return the candidate configurations, the default first."""
        if self.dtype == torch.float32:
            return [ScanTiles(16, 32, 8), ScanTiles(16, 32, 4)]
        default = ScanTiles(64 if self.hopper else 32, 64, 8)
        candidates = [default, default._replace(columns=32), default._replace(warps=4)]
        # On an H200, 4 warps need 0.7 of the time of 8 warps for this shape, although they spill more registers.
        tiles = block_of(max(self.size, self.width)), block_of(self.packed_rows)
        faster = self.hopper and self.dtype == torch.bfloat16 and tiles == (64, 128)
        return candidates[::-1] if faster else candidates

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        packed, scores, output = self.pack(), self.empty(torch.float32), self.value.new_empty(self.value.shape)
        first_key, first_value = self.first()
        options = {"ends": True, "rate": True}
        key_sum = self.scan(self.query, self.key, packed, scores, first=first_key, scale=self.scale, **options)
        value_sum = self.scan(self.weigh(scores), packed, self.value, output, first=first_value, **options)
        assert key_sum is not None and value_sum is not None  # of `ends`
        return output, scaled(key_sum, self.last_rate()), scaled(value_sum, self.last_rate())


def segment_length(batch: int, heads: int, length: int, chunk: int, device: torch.device) -> int:
    """Return the number of tokens per segment, a multiple of the chunk, so that the segments fill the device.

    `heads` is the number of programs per sequence and segment. Four programs per multiprocessor run in two waves; one
    more program would start a third wave.
    """
    processors, programs = triton_launch.processors(device, batch), batch * heads
    segments = 1 if programs >= 2 * processors else max(1, 4 * processors // programs)
    return cdiv(max(cdiv(length, segments), MIN_SEGMENT), chunk) * chunk


def prefix_sums(sums: Tensor, first: Tensor | None, reverse: bool = False) -> Tensor:
    """Overwrite `sums` `[B, H, segments, K, L]` with the sums before (`reverse`: after) each segment; return it."""
    batch, heads, segments, *size = sums.shape
    numbers = size[0] * size[1]
    grid = (batch * heads * cdiv(numbers, 1024),)
    constants = {"REVERSE": reverse, "BLOCK": 1024, "num_warps": 4, "num_stages": 1}
    triton_launch.launch(_prefix_kernel, grid, sums, first, segments, numbers, **constants)
    return sums


def prepare(*arguments: Any) -> Fused | Scans:
    """Convert the operator's arguments to a call of the strategy whose sums fit the registers."""
    query, value, pack_query = arguments[0], arguments[3], arguments[4]
    fits = pack_query.shape[1] <= FUSED_ROWS
    if query.dtype != torch.bfloat16:
        fits = fits and max(query.shape[3], value.shape[3]) <= FUSED_SIZE
    if query.dtype == torch.float32:
        fits = fits and triton_launch.target(query.device).large
    return (Fused if fits else Scans)(*arguments)


def choose(direction: str, call: Fused | Scans, run: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return the result of `run`, the forward or backward pass, with the configuration selected for the call."""

    def configured(configuration: Any) -> Any:
        call.configure(configuration)
        return run()

    kernel = _forward_kernel if isinstance(call, Fused) else _scan_kernel
    heads = f"heads of {block_of(call.size)} and {block_of(call.width)}"
    kind = [
        direction,
        call.dtype,
        heads,
        f"l {block_of(call.packed_rows)}",
        call.dtype == torch.float32 and call.precision,
    ]
    kind += [call.seed is not None and "dropout"]
    sizes = {"heads": call.batch * call.heads, "length": call.length}
    return triton_choice.choose(kernel, kind, sizes, call.configurations(), configured, call.device)


def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result and both means after the last token, in float32."""
    call = prepare(*arguments)
    return choose("forward", call, call.forward)
