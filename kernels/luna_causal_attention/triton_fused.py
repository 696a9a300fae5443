"""Kernels of causal Luna attention that keep both sums in registers, for L up to 64.

The tokens of a head are divided into segments, one program each, which walks its segment in chunks of C tokens. What
stands before a segment comes from `_sums_kernel` and `_prefix_kernel`. Sums of `a^T value` are transposed in
registers, `[V, L]`, so that tiles have 64 rows.
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
    straight,
    strides,
    transposed,
    unpack_dropout,
)


@triton.jit
def _weigh(
    q, k, a, sum_k, rate, used, SEED, head, t, dropout, INNER: tl.constexpr, PRECISION: tl.constexpr, L: tl.constexpr,
    BL: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Unpack weights of a chunk `[C, BL]`, and what dropout multiplies them by."""
    r = tl.arange(0, C)
    similarity = tl.where(r[:, None] >= r[None, :], dot(q, tl.trans(k), None, PRECISION), 0.0)
    scores = dot(similarity.to(INNER), a, None, PRECISION)
    scores = dot(q.to(tl.float32), sum_k, scores, PRECISION) * rate[:, None]
    weights = softmax(scores, used)
    factor = tl.full([C, BL], 1.0, tl.float32)
    if SEED is not None:
        factor = unpack_dropout(SEED, head, t, dropout, L, BL)
    return weights, factor


@triton.jit
def _sums_kernel(
    X, Z, Y, W, PQ, COUNT, MASK, PACK_MASK, SEED, SUM_X, SUM_Z,
    scale, dropout, x_b, x_t, x_h, z_b, z_t, z_h, y_b, y_t, y_h, w_b, w_t, w_h, pq_b, pq_l, pq_h, T, H, S,
    PACK: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, L: tl.constexpr,
    ELU: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Of every segment sum x_t^T y_t, `[K, L]`, and sum w_t^T z_t, `[L, V]`.

    PACK: x, z are key and value, y = w the pack weights, Y pack_key. Else z is divided by t.
    """
    segments = tl.cdiv(T, S)
    segment = tl.program_id(0) % segments
    head = (tl.program_id(0) // segments).to(tl.int64)
    b, h = head // H, head % H
    X += b * x_b + h * x_h
    Z += b * z_b + h * z_h
    Y += b * y_b + h * y_h
    sum_x = tl.zeros([BK, BL], tl.float32)
    sum_z = tl.zeros([BV, BL], tl.float32)
    if PACK:
        used = load_used(PACK_MASK, b, L, BL)
        rows = tl.arange(0, BL)
        pack_query = load_rows(PQ + b * pq_b + h * pq_h, pq_l, rows, used, SIZE, BK)
    for start in range(segment * S, tl.minimum(segment * S + S, T), C):
        t = start + tl.arange(0, C)
        ok = t < T
        kept = ok
        if PACK:
            kept = load_kept(MASK, b, t, ok, T)
        t = t.to(tl.int64)
        x = load_rows(X, x_t, t, kept, SIZE, BK)
        z = load_rows(Z, z_t, t, kept, WIDTH, BV)
        if PACK:
            pack_key = load_rows(Y, y_t, t, kept, SIZE, BK)
            y = tl.where(used[None, :], activate(pack_scores(pack_key, pack_query, scale, PRECISION), ELU), 0.0)
            if SEED is not None:
                y *= pack_dropout(SEED, head, t, dropout, L, BL)
            y = y.to(INNER)
            w = y
        else:
            z = z.to(tl.float32) * load_rate(COUNT, b, t, ok, T)[:, None]
            y = load_rows(Y, y_t, t, ok, L, BL)
            w = load_rows(W + b * w_b + h * w_h, w_t, t, ok, L, BL)
        sum_x = dot(tl.trans(x.to(INNER)), y, sum_x, PRECISION)
        sum_z = dot(tl.trans(z.to(INNER)), w, sum_z, PRECISION)
    place = head * segments + segment
    offsets, mask = straight(SIZE, L, BK, BL)
    tl.store(SUM_X + place * SIZE * L + offsets, sum_x, mask=mask)
    offsets, mask = transposed(WIDTH, L, BV, BL)
    tl.store(SUM_Z + place * WIDTH * L + offsets, sum_z, mask=mask)


@triton.jit
def _forward_kernel(
    Q, PK, K, V, PQ, COUNT, MASK, PACK_MASK, SEED, START_K, START_V, Y, END_K, END_V,
    scale, dropout, q_b, q_t, q_h, pk_b, pk_t, pk_h, k_b, k_t, k_h, v_b, v_t, v_h, pq_b, pq_l, pq_h, T, H, S,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, L: tl.constexpr,
    ELU: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Y, and the means behind the last token from the last segment."""
    segments = tl.cdiv(T, S)
    segment = tl.program_id(0) % segments
    head = (tl.program_id(0) // segments).to(tl.int64)
    b, h = head // H, head % H
    K += b * k_b + h * k_h
    V += b * v_b + h * v_h
    PK += b * pk_b + h * pk_h
    key_offsets, key_mask = straight(SIZE, L, BK, BL)
    value_offsets, value_mask = transposed(WIDTH, L, BV, BL)
    sum_k = tl.zeros([BK, BL], tl.float32)
    sum_v = tl.zeros([BV, BL], tl.float32)
    if START_K is not None:
        place = head * segments + segment
        sum_k += tl.load(START_K + place * SIZE * L + key_offsets, mask=key_mask, other=0.0)
        sum_v += tl.load(START_V + place * WIDTH * L + value_offsets, mask=value_mask, other=0.0)
    used = load_used(PACK_MASK, b, L, BL)
    pack_query = load_rows(PQ + b * pq_b + h * pq_h, pq_l, tl.arange(0, BL), used, SIZE, BK)
    r = tl.arange(0, C)
    for start in range(segment * S, tl.minimum(segment * S + S, T), C):
        t = start + r
        ok = t < T
        kept = load_kept(MASK, b, t, ok, T)
        rate = load_rate(COUNT, b, t, ok, T)
        t = t.to(tl.int64)
        pack_key = load_rows(PK, pk_t, t, kept, SIZE, BK)
        a = tl.where(used[None, :], activate(pack_scores(pack_key, pack_query, scale, PRECISION), ELU), 0.0)
        if SEED is not None:
            a *= pack_dropout(SEED, head, t, dropout, L, BL)
        a = a.to(INNER)
        q = load_rows(Q + b * q_b + h * q_h, q_t, t, ok, SIZE, BK)
        k = load_rows(K, k_t, t, kept, SIZE, BK)
        w, factor = _weigh(q, k, a, sum_k, rate * scale, used, SEED, head, t, dropout, INNER, PRECISION, L, BL, C)
        w *= factor
        sum_k = dot(tl.trans(k.to(INNER)), a, sum_k, PRECISION)
        v = load_rows(V, v_t, t, kept, WIDTH, BV).to(INNER)
        blend = tl.where(r[:, None] >= r[None, :], dot(w.to(INNER), tl.trans(a), None, PRECISION), 0.0)
        y = dot(blend.to(INNER), v, None, PRECISION)
        y = dot(w, tl.trans(sum_v), y, PRECISION) * rate[:, None]
        store_rows(Y + (b * T * H + h) * WIDTH, H * WIDTH, t, ok, y, WIDTH, BV)
        sum_v = dot(tl.trans(v), a, sum_v, PRECISION)
    if segment == segments - 1:
        rate = 1.0 / tl.maximum(tl.load(COUNT + b * T + T - 1), 1).to(tl.float32)
        tl.store(END_K + head * SIZE * L + key_offsets, sum_k * rate, mask=key_mask)
        tl.store(END_V + head * WIDTH * L + value_offsets, sum_v * rate, mask=value_mask)


@triton.jit
def _backward_query_kernel(
    Q, PK, K, V, PQ, DO, COUNT, MASK, PACK_MASK, SEED, START_K, START_V, DQ, W, DU,
    scale, dropout, q_b, q_t, q_h, pk_b, pk_t, pk_h, k_b, k_t, k_h, v_b, v_t, v_h, pq_b, pq_l, pq_h, do_b, do_t, do_h,
    T, H, S,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, L: tl.constexpr,
    ELU: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Forward in time: the gradient of query; unpack weights W and the gradients DU of their scores, `[B, H, T, L]`."""
    segments = tl.cdiv(T, S)
    segment = tl.program_id(0) % segments
    head = (tl.program_id(0) // segments).to(tl.int64)
    b, h = head // H, head % H
    K += b * k_b + h * k_h
    V += b * v_b + h * v_h
    PK += b * pk_b + h * pk_h
    sum_k = tl.zeros([BK, BL], tl.float32)
    sum_v = tl.zeros([BV, BL], tl.float32)
    if START_K is not None:
        place = head * segments + segment
        offsets, mask = straight(SIZE, L, BK, BL)
        sum_k += tl.load(START_K + place * SIZE * L + offsets, mask=mask, other=0.0)
        offsets, mask = transposed(WIDTH, L, BV, BL)
        sum_v += tl.load(START_V + place * WIDTH * L + offsets, mask=mask, other=0.0)
    used = load_used(PACK_MASK, b, L, BL)
    pack_query = load_rows(PQ + b * pq_b + h * pq_h, pq_l, tl.arange(0, BL), used, SIZE, BK)
    r = tl.arange(0, C)
    for start in range(segment * S, tl.minimum(segment * S + S, T), C):
        t = start + r
        ok = t < T
        kept = load_kept(MASK, b, t, ok, T)
        rate = load_rate(COUNT, b, t, ok, T)
        t = t.to(tl.int64)
        pack_key = load_rows(PK, pk_t, t, kept, SIZE, BK)
        a = tl.where(used[None, :], activate(pack_scores(pack_key, pack_query, scale, PRECISION), ELU), 0.0)
        if SEED is not None:
            a *= pack_dropout(SEED, head, t, dropout, L, BL)
        a = a.to(INNER)
        q = load_rows(Q + b * q_b + h * q_h, q_t, t, ok, SIZE, BK)
        k = load_rows(K, k_t, t, kept, SIZE, BK)
        w, factor = _weigh(q, k, a, sum_k, rate * scale, used, SEED, head, t, dropout, INNER, PRECISION, L, BL, C)
        store_rows(W + head * T * L, L, t, ok, w * factor, L, BL)
        v = load_rows(V, v_t, t, kept, WIDTH, BV)
        do = load_rows(DO + b * do_b + h * do_h, do_t, t, ok, WIDTH, BV)
        d_blend = tl.where(r[:, None] >= r[None, :], dot(do, tl.trans(v), None, PRECISION), 0.0)
        dw = dot((d_blend * rate[:, None]).to(INNER), a, None, PRECISION)
        dw = dot(do.to(tl.float32) * rate[:, None], sum_v, dw, PRECISION) * factor
        du = w * (dw - tl.sum(w * dw, 1)[:, None]) * (rate * scale)[:, None]
        store_rows(DU + head * T * L, L, t, ok, du, L, BL)
        d_similarity = tl.where(r[:, None] >= r[None, :], dot(du.to(INNER), tl.trans(a), None, PRECISION), 0.0)
        k = k.to(INNER)
        dq = dot(d_similarity.to(INNER), k, None, PRECISION)
        dq = dot(du, tl.trans(sum_k), dq, PRECISION)
        store_rows(DQ + (b * T * H + h) * SIZE, H * SIZE, t, ok, dq, SIZE, BK)
        sum_k = dot(tl.trans(k), a, sum_k, PRECISION)
        sum_v = dot(tl.trans(v.to(INNER)), a, sum_v, PRECISION)


@triton.jit
def _backward_key_kernel(
    X, Y, PK, Z, PQ, COUNT, MASK, PACK_MASK, SEED, AFTER, DY, DA, DPK, DPQ, FIRST,
    scale, dropout, x_b, x_t, x_h, y_b, y_t, y_h, pk_b, pk_t, pk_h, z_b, z_t, z_h, pq_b, pq_l, pq_h, T, H, S,
    KEYS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, L: tl.constexpr,
    ELU: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Against time, the gradients of value, KEYS: of key, and after those of value: both the same sum over the tokens
    from j on, which stands in `sums` for those behind the chunk,

        dy_j = a_j sum z_t^T x_t      da_j = y_j sum x_t^T z_t

    with x the gradient of the result / t, y value, z unpack weights; KEYS: x query, y key, z the gradient of scores.
    DA carries da from the first launch to the second, which makes of it the gradients of pack_key and, as far as it is
    from this segment, of pack_query, `[B, H, segments, L, K]`. FIRST: the gradient of the sum before the first token.
    """
    segments = tl.cdiv(T, S)
    segment = tl.program_id(0) % segments
    head = (tl.program_id(0) // segments).to(tl.int64)
    place = head * segments + segment
    b, h = head // H, head % H
    N: tl.constexpr = SIZE if KEYS else WIDTH
    BN: tl.constexpr = BK if KEYS else BV
    if KEYS:
        offsets, inside = straight(SIZE, L, BK, BL)
    else:
        offsets, inside = transposed(WIDTH, L, BV, BL)
    sums = tl.zeros([BN, BL], tl.float32)
    if AFTER is not None:
        sums += tl.load(AFTER + place * N * L + offsets, mask=inside, other=0.0)
    used = load_used(PACK_MASK, b, L, BL)
    pack_query = load_rows(PQ + b * pq_b + h * pq_h, pq_l, tl.arange(0, BL), used, SIZE, BK)
    if KEYS:
        d_pack_query = tl.zeros([BK, BL], tl.float32)
    r = tl.arange(0, C)
    later = r[None, :] >= r[:, None]
    chunks = tl.cdiv(tl.minimum(S, T - segment * S), C)
    for i in range(0, chunks):
        t = segment * S + (chunks - 1 - i) * C + r
        ok = t < T
        kept = load_kept(MASK, b, t, ok, T)
        x = load_rows(X + b * x_b + h * x_h, x_t, t.to(tl.int64), ok, N, BN)
        if not KEYS:
            x = x.to(tl.float32) * load_rate(COUNT, b, t, ok, T)[:, None]
        x = x.to(INNER)
        t = t.to(tl.int64)
        y = load_rows(Y + b * y_b + h * y_h, y_t, t, kept, N, BN)
        z = load_rows(Z + b * z_b + h * z_h, z_t, t, ok, L, BL)
        products = tl.where(later, dot(y.to(INNER), tl.trans(x), None, PRECISION), 0.0)
        da = dot(products.to(INNER), z, None, PRECISION)
        da = dot(y.to(tl.float32), sums, da, PRECISION)
        if not KEYS:
            store_rows(DA + head * T * L, L, t, ok, da, L, BL)
        pack_key = load_rows(PK + b * pk_b + h * pk_h, pk_t, t, kept, SIZE, BK)
        scores = pack_scores(pack_key, pack_query, scale, PRECISION)
        a = tl.where(used[None, :], activate(scores, ELU), 0.0)
        if SEED is not None:
            factor = pack_dropout(SEED, head, t, dropout, L, BL)
            a *= factor
        if KEYS:
            da += load_rows(DA + head * T * L, L, t, ok, L, BL)
            if SEED is not None:
                da *= factor
            ds = tl.where(used[None, :], da * slope(scores, ELU) * scale, 0.0).to(INNER)
            d_pack_key = dot(ds, pack_query.to(INNER), None, PRECISION)
            store_rows(DPK + (b * T * H + h) * SIZE, H * SIZE, t, ok, d_pack_key, SIZE, BK)
            d_pack_query = dot(tl.trans(pack_key.to(INNER)), ds, d_pack_query, PRECISION)
        products = tl.where(later, dot(a.to(INNER), tl.trans(z), None, PRECISION), 0.0)
        dy = dot(products.to(INNER), x, None, PRECISION)
        dy = dot(a, tl.trans(sums), dy, PRECISION)
        store_rows(DY + (b * T * H + h) * N, H * N, t, ok, tl.where(kept[:, None], dy, 0.0), N, BN)
        sums = dot(tl.trans(x), z, sums, PRECISION)
    if segment == 0 and FIRST is not None:
        tl.store(FIRST + head * N * L + offsets, sums, mask=inside)
    if KEYS:
        offsets, inside = transposed(SIZE, L, BK, BL)
        tl.store(DPQ + place * SIZE * L + offsets, d_pack_query, mask=inside)


class Fused:
    """One call: its inputs, how it is divided, and what the kernels are told about both."""

    def __init__(self, tokens, pack_query, count, masks, state, activation, dropout, seed, precision):
        self.tokens, self.pack_query, self.count, self.masks, self.state = tokens, pack_query, count, masks, state
        self.query, self.pack_key, self.key, self.value = tokens
        self.batch, self.length, self.heads, self.size = self.query.shape
        self.rows, self.width, self.dropout, self.seed = pack_query.shape[1], self.value.shape[3], dropout, seed
        device, dtype = self.query.device, self.query.dtype
        chunk, warps = configuration(device, dtype, max(self.size, self.width), self.rows)
        self.segment = segment_length(self.batch * self.heads, self.length, chunk, device)
        self.segments = triton.cdiv(self.length, self.segment)
        self.scale = self.size**-0.5
        self.constants = {
            "SIZE": self.size, "WIDTH": self.width, "L": self.rows, "ELU": activation == "elu", "INNER": inner(dtype),
            "PRECISION": precision if dtype == torch.float32 else "tf32", "C": chunk,
            "BK": block(self.size), "BV": block(self.width), "BL": block(self.rows),
            "num_warps": warps, "num_stages": 1,
        }  # fmt: skip

    def launch(self, kernel, *tensors, of: tuple[torch.Tensor, ...], **constants):
        """`of`: the tensors whose strides the kernel takes."""
        numbers = (self.scale, self.dropout, *(s for x in of for s in strides(x)))
        grid = (self.batch * self.heads * self.segments,)
        sizes = (self.length, self.heads, self.segment)
        _triton.launch(kernel, grid, *tensors, *numbers, *sizes, **self.constants, **constants)

    def empty_sums(self, *leading: int) -> tuple[torch.Tensor, torch.Tensor]:
        leading = (self.batch, self.heads, *leading)
        sizes = (self.size, self.rows), (self.rows, self.width)
        return tuple(self.query.new_empty((*leading, *size), dtype=torch.float32) for size in sizes)

    def sums(self, x, z, y, w, first, pack: bool):
        """What is before each segment (`pack`), or behind it; `first`: before or behind all of them."""
        if self.segments == 1:
            return first
        sums = self.empty_sums(self.segments)
        inputs = (x, z, y, w, self.pack_query, self.count, *self.masks, self.seed)
        self.launch(_sums_kernel, *inputs, *sums, of=(x, z, y, w, self.pack_query), PACK=pack)
        return tuple(prefix_sums(s, f, reverse=not pack) for s, f in zip(sums, first, strict=True))

    def before(self):
        """The sums before each segment."""
        *means, seen = self.state
        first = (None, None) if seen is None else tuple(per_row(mean, seen) for mean in means)
        return self.sums(self.key, self.value, self.pack_key, self.pack_key, first, True)

    def forward(self):
        """The result, and both means behind the last token."""
        output, end = self.value.new_empty(self.value.shape), self.empty_sums()
        inputs = (*self.tokens, self.pack_query, self.count, *self.masks, self.seed)
        self.launch(_forward_kernel, *inputs, *self.before(), output, *end, of=(*self.tokens, self.pack_query))
        return output, *end

    def backward(self, grad_output, *grad_means):
        """Gradients of query, pack_key, key, value, pack_query, and of both means."""
        grads = [x.new_empty(x.shape) for x in self.tokens]
        inputs = (*self.tokens, self.pack_query, grad_output)
        of, options = inputs, (self.count, *self.masks, self.seed)
        kind = torch.bfloat16 if self.query.dtype == torch.bfloat16 else torch.float32
        weights, grad_scores = self.query.new_empty((2, self.batch, self.heads, self.length, self.rows), dtype=kind)
        outputs = (grads[0], weights, grad_scores)
        self.launch(_backward_query_kernel, *inputs, *options, *self.before(), *outputs, of=of)
        last_rate = self.count[:, -1].clamp(min=1).float().reciprocal()
        last = tuple(None if grad is None else per_row(grad, last_rate) for grad in grad_means)
        grad_scores, weights = grad_scores.transpose(1, 2), weights.transpose(1, 2)
        after = self.sums(self.query, grad_output, grad_scores, weights, last, False)
        first = (None, None) if self.state[2] is None else self.empty_sums()
        grad_packed = torch.empty_like(weights, dtype=torch.float32)
        of_pack_query = grad_packed.new_empty((self.batch, self.heads, self.segments, self.rows, self.size))
        last = (grad_packed, grads[1], of_pack_query)
        for keys, x, y, z, sums, grad, end in (
            (False, grad_output, self.value, weights, after[1], grads[3], first[1]),
            (True, self.query, self.key, grad_scores, after[0], grads[2], first[0]),
        ):
            inputs = (x, y, self.pack_key, z, self.pack_query)
            self.launch(_backward_key_kernel, *inputs, *options, sums, grad, *last, end, of=inputs, KEYS=keys)
        grads.append(of_pack_query.sum(2).transpose(1, 2).to(self.query.dtype))
        return grads, first


def configuration(device: torch.device, dtype: torch.dtype, size: int, rows: int) -> tuple[int, int]:
    """Tokens of a chunk, warps: what leaves the kernels in registers."""
    hopper = _triton.target(device).capability >= (9, 0)
    if dtype == torch.float32:
        return 16, 8
    if block(size) * block(rows) <= 64 * 32:
        return (64, 4) if hopper and dtype == torch.bfloat16 else (32, 4)
    return (32, 8) if hopper else (16, 4)
