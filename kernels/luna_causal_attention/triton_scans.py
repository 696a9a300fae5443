"""Kernels of causal Luna attention in two scans, for L above 64: each keeps a slice of one sum in registers.

Pack weights, unpack weights and the gradients of both are in memory, `[B, H, T, L]`.
"""

import torch
import triton
import triton.language as tl

from luna_mega.kernels import _triton
from luna_mega.kernels._triton import dot
from luna_mega.kernels.luna_causal_attention.triton_common import (
    activate,
    block,
    inner,
    load_kept,
    load_rate,
    load_rows,
    load_used,
    pack_dropout,
    pack_scores,
    per_row,
    prefix_sums,
    segment_length,
    slope,
    softmax,
    store_rows,
    strides,
    unpack_dropout,
)


@triton.jit
def _pack_kernel(
    PK, PQ, MASK, PACK_MASK, SEED, DA, A, scale, dropout, pk_b, pk_t, pk_h, pq_b, pq_l, pq_h, T, H,
    SIZE: tl.constexpr, L: tl.constexpr, ELU: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Pack weights of C tokens; where their gradients DA are given, the gradients of their scores."""
    chunks = tl.cdiv(T, C)
    head = (tl.program_id(0) // chunks).to(tl.int64)
    b, h = head // H, head % H
    t = tl.program_id(0) % chunks * C + tl.arange(0, C)
    ok = t < T
    kept = load_kept(MASK, b, t, ok, T)
    t = t.to(tl.int64)
    used = load_used(PACK_MASK, b, L, BL)
    pack_query = load_rows(PQ + b * pq_b + h * pq_h, pq_l, tl.arange(0, BL), used, SIZE, BK)
    pack_key = load_rows(PK + b * pk_b + h * pk_h, pk_t, t, kept, SIZE, BK)
    scores = pack_scores(pack_key, pack_query, scale, PRECISION)
    if DA is None:
        x = activate(scores, ELU)
    else:
        x = slope(scores, ELU) * load_rows(DA + head * T * L, L, t, ok, L, BL) * scale
    if SEED is not None:
        x *= pack_dropout(SEED, head, t, dropout, L, BL)
    store_rows(A + head * T * L, L, t, ok, tl.where(used[None, :], x, 0.0), L, BL)


@triton.jit
def _softmax_kernel(
    SCORES, COUNT, PACK_MASK, SEED, DW, OUT, scale, dropout, T, H,
    L: tl.constexpr, C: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Unpack weights of C tokens; where their gradients DW are given, the gradients of their scores."""
    chunks = tl.cdiv(T, C)
    head = (tl.program_id(0) // chunks).to(tl.int64)
    b = head // H
    t = tl.program_id(0) % chunks * C + tl.arange(0, C)
    ok = t < T
    used = load_used(PACK_MASK, b, L, BL)
    x = softmax(load_rows(SCORES + head * T * L, L, t.to(tl.int64), ok, L, BL), used)
    factor = tl.full([C, BL], 1.0, tl.float32)
    if SEED is not None:
        factor = unpack_dropout(SEED, head, t, dropout, L, BL)
    if DW is None:
        x *= factor
    else:
        dw = load_rows(DW + head * T * L, L, t.to(tl.int64), ok, L, BL) * factor
        rate = load_rate(COUNT, b, t, ok, T) * scale
        x *= (dw - tl.sum(x * dw, 1)[:, None]) * rate[:, None]
    store_rows(OUT + head * T * L, L, t.to(tl.int64), ok, x, L, BL)


@triton.jit
def _scan_kernel(
    X, Y, Z, COUNT, START, F, END, scale,
    x_b, x_t, x_h, y_b, y_t, y_h, z_b, z_t, z_h, f_b, f_t, f_h, T, H, S,
    SUMS: tl.constexpr, REVERSE: tl.constexpr, RATE: tl.constexpr, RATE_INSIDE: tl.constexpr, ADD: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """F_t = X_t sum_{j<=t} Y_j^T Z_j, for BM columns of Z `[T, M]`; REVERSE: sum_{j>=t}.

    RATE: times scale / t; RATE_INSIDE: Z_j / j (in counts of tokens); ADD: F is added to what it was. END: the sum over
    all tokens; SUMS: nothing but the sum over every segment.
    """
    segments, blocks = tl.cdiv(T, S), tl.cdiv(M, BM)
    segment = tl.program_id(0) // blocks % segments
    head = (tl.program_id(0) // blocks // segments).to(tl.int64)
    b, h = head // H, head % H
    column = tl.program_id(0) % blocks * BM
    place = (head * segments + segment) * N * M
    rows, columns = tl.arange(0, BN)[:, None], (column + tl.arange(0, BM))[None, :]
    inside = (rows < N) & (columns < M)
    state = tl.zeros([BN, BM], tl.float32)
    if START is not None:
        state += tl.load(START + place + rows * M + columns, mask=inside, other=0.0)
    r = tl.arange(0, C)
    chunks = tl.cdiv(tl.minimum(S, T - segment * S), C)
    for i in range(0, chunks):
        chunk = chunks - 1 - i if REVERSE else i
        t = segment * S + chunk * C + r
        ok = t < T
        rate = load_rate(COUNT, b, t, ok, T)
        t = t.to(tl.int64)
        y = load_rows(Y + b * y_b + h * y_h, y_t, t, ok, N, BN)
        tile = t[:, None] * z_t + columns
        z = tl.load(Z + b * z_b + h * z_h + tile, mask=ok[:, None] & (columns < M), other=0.0)
        if RATE_INSIDE:
            z = z.to(tl.float32) * rate[:, None]
        z = z.to(INNER)
        if not SUMS:
            x = load_rows(X + b * x_b + h * x_h, x_t, t, ok, N, BN)
            past = r[:, None] <= r[None, :] if REVERSE else r[:, None] >= r[None, :]
            products = tl.where(past, dot(x.to(INNER), tl.trans(y.to(INNER)), None, PRECISION), 0.0)
            f = dot(products.to(INNER), z, None, PRECISION)
            f = dot(x.to(tl.float32), state, f, PRECISION)
            if RATE:
                f *= rate[:, None] * scale
            place_f = F + b * f_b + h * f_h + t[:, None] * f_t + columns
            if ADD:
                f += tl.load(place_f, mask=ok[:, None] & (columns < M), other=0.0)
            tl.store(place_f, f.to(F.dtype.element_ty), mask=ok[:, None] & (columns < M))
        state = dot(tl.trans(y.to(INNER)), z, state, PRECISION)
    if SUMS:
        tl.store(END + place + rows * M + columns, state, mask=inside)
    elif END is not None:
        if segment == (0 if REVERSE else segments - 1):
            tl.store(END + head * N * M + rows * M + columns, state, mask=inside)


class Scans:
    """One call, as `triton_fused.Fused`."""

    def __init__(self, tokens, pack_query, count, masks, state, activation, dropout, seed, precision):
        query, pack_key, key, value = tokens
        self.mask, self.pack_mask = masks
        if self.mask is not None:
            key, value = (x.masked_fill(~self.mask[:, :, None, None], 0.0) for x in (key, value))
        self.query, self.pack_key, self.key, self.value, self.pack_query = query, pack_key, key, value, pack_query
        self.count, self.state, self.dropout, self.seed = count, state, dropout, seed
        self.batch, self.length, self.heads, self.size = query.shape
        self.rows, self.width = pack_query.shape[1], value.shape[3]
        self.device, self.dtype, self.scale = query.device, query.dtype, self.size**-0.5
        self.kind = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        self.precision = precision if self.dtype == torch.float32 else "tf32"
        self.elu = activation == "elu"

    def empty(self, dtype):
        """`[B, T, H, L]`, stored as `[B, H, T, L]`."""
        size = (self.batch, self.heads, self.length, self.rows)
        return torch.empty(size, dtype=dtype, device=self.device).transpose(1, 2)

    def pack(self, grad=None):
        """Pack weights, or the gradients of their scores."""
        output = self.empty(self.kind)
        numbers = (self.scale, self.dropout, *strides(self.pack_key), *strides(self.pack_query))
        inputs = (self.pack_key, self.pack_query, self.mask, self.pack_mask, self.seed, grad, output)
        grid = (self.batch * self.heads * triton.cdiv(self.length, 64),)
        _triton.launch(
            _pack_kernel, grid, *inputs, *numbers, self.length, self.heads,
            SIZE=self.size, L=self.rows, ELU=self.elu, PRECISION=self.precision,
            C=64, BK=block(self.size), BL=block(self.rows), num_warps=8, num_stages=1,
        )  # fmt: skip
        return output

    def weigh(self, scores, grad=None):
        """Unpack weights of scores, or the gradients of the scores."""
        output = self.empty(self.kind)
        inputs = (scores, self.count, self.pack_mask, self.seed, grad, output)
        grid = (self.batch * self.heads * triton.cdiv(self.length, 16),)
        _triton.launch(
            _softmax_kernel, grid, *inputs, self.scale, self.dropout, self.length, self.heads,
            L=self.rows, C=16, BL=block(self.rows), num_warps=4, num_stages=1,
        )  # fmt: skip
        return output

    def scan(
        self, x, y, z, output, *, first=None, ends=False, scale=1.0, reverse=False, rate=False, inside=False, add=False
    ):
        """`_scan_kernel` into `output`; returns the sum behind all tokens (before them: `reverse`) if `ends`."""
        n, m = y.shape[3], z.shape[3]
        chunk, columns, warps = configuration(self.device, self.dtype, n, m)
        blocks = triton.cdiv(m, columns)
        segment = segment_length(self.batch * self.heads * blocks, self.length, chunk, self.device)
        segments = triton.cdiv(self.length, segment)
        numbers = [scale, *(s for tensor in (x, y, z, output) for s in strides(tensor))]
        numbers += [self.length, self.heads, segment]
        constants = {
            "REVERSE": reverse, "RATE_INSIDE": inside, "N": n, "M": m, "INNER": inner(self.dtype),
            "PRECISION": self.precision, "C": chunk, "BN": block(n), "BM": columns, "num_warps": warps, "num_stages": 1,
        }  # fmt: skip
        grid, start = (self.batch * self.heads * segments * blocks,), first
        if segments > 1:
            start = torch.empty((self.batch, self.heads, segments, n, m), device=self.device)
            tensors = (x, y, z, self.count, None, output, start)
            _triton.launch(_scan_kernel, grid, *tensors, *numbers, SUMS=True, RATE=False, ADD=False, **constants)
            prefix_sums(start, first, reverse)
        end = torch.empty((self.batch, self.heads, n, m), device=self.device) if ends else None
        tensors = (x, y, z, self.count, start, output, end)
        _triton.launch(_scan_kernel, grid, *tensors, *numbers, SUMS=False, RATE=rate, ADD=add, **constants)
        return end

    def first(self):
        """Both sums before the first token."""
        *means, seen = self.state
        return (None, None) if seen is None else tuple(per_row(mean, seen) for mean in means)

    def forward(self):
        packed, scores, output = self.pack(), self.empty(torch.float32), self.value.new_empty(self.value.shape)
        first_key, first_value = self.first()
        options = {"ends": True, "rate": True}
        key_sum = self.scan(self.query, self.key, packed, scores, first=first_key, scale=self.scale, **options)
        value_sum = self.scan(self.weigh(scores), packed, self.value, output, first=first_value, **options)
        last_rate = self.count[:, -1].clamp(min=1).float().reciprocal()
        return output, per_row(key_sum, last_rate), per_row(value_sum, last_rate)

    def backward(self, grad_output, *grad_means):
        first_key, first_value = self.first()
        last_rate = self.count[:, -1].clamp(min=1).float().reciprocal()
        after_key, after_value = (None if x is None else per_row(x, last_rate) for x in grad_means)
        packed, scores, grad = self.pack(), self.empty(torch.float32), self.empty(torch.float32)
        query, key, value = self.query, self.key, self.value
        options = {"first": first_key, "scale": self.scale, "rate": True}
        self.scan(query, key, packed, scores, **options)
        self.scan(grad_output, value, packed, grad, first=transpose(first_value), rate=True)
        weights, grad_scores = self.weigh(scores), self.weigh(scores, grad)
        grad_query, grad_key, grad_value = (x.new_empty(x.shape) for x in (query, key, value))
        self.scan(grad_scores, packed, key, grad_query, first=transpose(first_key))
        options = {"reverse": True, "ends": self.state[2] is not None}
        end_value = self.scan(packed, weights, grad_output, grad_value, first=after_value, inside=True, **options)
        self.scan(value, grad_output, weights, grad, first=transpose(after_value), reverse=True, inside=True)
        self.scan(key, query, grad_scores, grad, first=after_key, reverse=True, add=True)
        end_key = self.scan(packed, grad_scores, query, grad_key, first=transpose(after_key), **options)
        grad = self.pack(grad).transpose(1, 2)
        pack_query, pack_key = (x.transpose(1, 2).to(self.kind) for x in (self.pack_query, self.pack_key))
        if self.mask is not None:
            masked = ~self.mask[:, :, None, None]
            pack_key = pack_key.masked_fill(masked.transpose(1, 2), 0.0)
            grad_key, grad_value = (x.masked_fill_(masked, 0.0) for x in (grad_key, grad_value))
        if self.pack_mask is not None:
            pack_query = pack_query.masked_fill(~self.pack_mask[:, None, :, None], 0.0)
        of_pack = (x.transpose(1, 2).to(self.dtype).contiguous() for x in (grad @ pack_query, grad.mT @ pack_key))
        grad_pack_key, grad_pack_query = of_pack
        return [grad_query, grad_pack_key, grad_key, grad_value, grad_pack_query], (transpose(end_key), end_value)


def transpose(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.mT.contiguous()


def configuration(device: torch.device, dtype: torch.dtype, n: int, m: int) -> tuple[int, int, int]:
    """Tokens of a chunk, columns of the sum in registers, warps: what leaves the kernel in registers."""
    hopper, wide = _triton.target(device).capability >= (9, 0), block(n) > 128
    if dtype == torch.float32:
        return 16, min(32, block(m)), 8
    return 64 if hopper and not wide else 32, min(64 if hopper or not wide else 32, block(m)), 8
