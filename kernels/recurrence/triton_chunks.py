"""The states before each chunk in Triton, for the scans of both passes, and functions that their kernels share.

`chunk_state_kernel` computes the states at the end of each chunk with zero initial states, and `state_passing_kernel`
carries the states from chunk to chunk. States are `[..., P, N, D]` with P = COMPONENTS real numbers per state.

`tl.multiple_of(d, 1)` hides from the compiler that blocks start at larger multiples. Without it, the layout would
spread the states of a channel over several threads, and every sum over states would need a shuffle.
"""

import triton
import triton.language as tl

from .triton_numbers import add, add_scaled, load, select, store, times, zeros

# Lower bound of log q, because a quotient by q must not overflow. States with faster decay are negligible.
LOWEST_LOG_Q = tl.constexpr(-46.0)
PI = tl.constexpr(3.141592653589793)


@triton.jit
def _minus_one(log_q):
    """Return exp(log_q) - 1 for log_q > -0.5."""
    series = 1.0 + log_q * (1 / 10)
    for k in tl.static_range(9, 1, -1):
        series = 1.0 + series * log_q * (1 / k)
    return log_q * series


@triton.jit
def _turned_minus_one(turns):
    """Return the real and imaginary parts of exp(2 pi i turns) - 1."""
    half = (turns - tl.floor(turns + 0.5)) * PI
    square = half * half
    sine, cosine = 1.0, 1.0
    for k in tl.static_range(7, 0, -1):
        sine = 1.0 - sine * square * (1 / (2 * k * (2 * k + 1)))
        cosine = 1.0 - cosine * square * (1 / (2 * k * (2 * k - 1)))
    sine *= half
    return -2.0 * sine * sine, 2.0 * sine * cosine


@triton.jit
def _decay(log_q, STEPS: tl.constexpr):
    """Return q, and the part of a state that is lost to the rounding of q in STEPS steps.

    If q is close to 1, the rounding error would accumulate over thousands of steps.
    """
    log_q = tl.maximum(log_q, LOWEST_LOG_Q)
    near, slow = _minus_one(log_q), log_q > -0.5
    q = tl.where(slow, 1.0 + near, tl.exp(log_q))
    return q, tl.where(slow, STEPS * (near - (q - 1.0)) / q, 0.0)


@triton.jit
def place(cu_seqlens, length, chunk, chunks, blocks):
    """Return the block of channels, the sequence and the chunk of this program.

    The sequence is given by its index, batch index, first position and length; the chunk by its index, its slot among
    the values stored per chunk, its first position and its length.
    """
    program = tl.program_id(0).to(tl.int64)
    item = program // blocks
    sequence, number = item // chunks, item % chunks
    if cu_seqlens is None:
        slot, batch, first, size = item, sequence, sequence * 0, sequence * 0 + length
    else:
        batch, first = sequence * 0, tl.load(cu_seqlens + sequence).to(tl.int64)
        size = tl.load(cu_seqlens + sequence + 1).to(tl.int64) - first
        # The slots are distinct, because a sequence of n positions has at most n // chunk + 1 chunks.
        slot = tl.where(chunks == 1, sequence, first // chunk + sequence + number)
    begin = number * chunk
    return program % blocks, sequence, batch, first, size, number, slot, begin, tl.minimum(size - begin, chunk)


@triton.jit
def sequence_slots(cu_seqlens, sequence, length, chunk, chunks):
    """Return the first slot of a sequence among the values stored per chunk, and its length."""
    if cu_seqlens is None:
        return sequence * chunks, sequence * 0 + length
    else:
        first = tl.load(cu_seqlens + sequence).to(tl.int64)
        return first // chunk + sequence, tl.load(cu_seqlens + sequence + 1).to(tl.int64) - first


@triton.jit
def state_tile(block, channels, N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the states and channels of a block, a mask of existing channels, and a mask of existing states."""
    n, d = tl.arange(0, BLOCK_N)[:, None], tl.multiple_of(block * BLOCK_D + tl.arange(0, BLOCK_D), 1)
    inside = d < channels
    return n, d, inside, (n < N) & inside[None, :]


@triton.jit
def position(step, count, UNROLL: tl.constexpr, REVERSED: tl.constexpr):
    """Return the position of a step in its chunk; REVERSED: from the end, with padding to UNROLL steps first."""
    return tl.cdiv(count, UNROLL) * UNROLL - 1 - step if REVERSED else step


@triton.jit
def decayed_positions(count, is_last):
    """Return the number of positions of a chunk at which a scan from the end decays the given states.

    The given states are gradients of the states after the last position of a sequence, which does not decay them.
    """
    return tl.where(is_last, count - 1, count)


@triton.jit
def load_rate(rates, rate_places, states, tile, STEPS: tl.constexpr, COMPONENTS: tl.constexpr):
    """Return q, and the part of a state that is lost to rounding of q in STEPS steps; see `triton_scan.ByDirection`."""
    if COMPONENTS == 1:
        q, lost = _decay(tl.load(rates + rate_places, tile, other=LOWEST_LOG_Q), STEPS)
        return (q,), (lost,)
    else:
        lost = load(rates + 2 * states, rate_places, states, tile, COMPONENTS)
        return load(rates, rate_places, states, tile, COMPONENTS), (lost[0] * STEPS, lost[1] * STEPS)


@triton.jit
def _load_chunk_rate(rates, rate_places, states, tile, chunk, COMPONENTS: tl.constexpr):
    """Return q^C - 1 and C q^(C-1) for C = `chunk` positions; a complex average needs a power of two.

    `rates` are described at `triton_scan.ByDirection`.
    """
    if COMPONENTS == 2:
        rates += 4 * states
    log_q = tl.maximum(tl.load(rates + rate_places, tile, other=LOWEST_LOG_Q), LOWEST_LOG_Q)
    steps = chunk.to(tl.float32)
    total = log_q * steps
    change = tl.where(total > -0.5, _minus_one(total), tl.exp(total) - 1.0)
    slope = steps * tl.exp(total - log_q)
    if COMPONENTS == 1:
        return (change,), (slope,)
    else:
        step_turns, rest = load(rates + states, rate_places, states, tile, COMPONENTS)
        # The first product is exact, because the number of positions is a power of two.
        turns = step_turns * steps
        turns = turns - tl.floor(turns + 0.5) + rest * steps
        turned, turned_less = _turned_minus_one(turns), _turned_minus_one(turns - step_turns - rest)
        # (1 + a) (1 + b) - 1 = a (1 + b) + b
        change = change * (1.0 + turned[0]) + turned[0], (1.0 + change) * turned[1]
        return change, (slope * (1.0 + turned_less[0]), slope * turned_less[1])


@triton.jit(do_not_specialize=["length", "chunks", "slots"])
def chunk_state_kernel(
    signal, mask,  # [B, T, D], [B, T]
    rates, weight,  # see `triton_scan.ByDirection`
    starts,  # [S, P, N, D]
    ends,  # [directions, 1 or 2 with SLOPE, slots, P, N, D]
    cu_seqlens, length, chunk, chunks, channels, blocks, channel_rows, slots,  # see `Plan`
    stride_b, stride_t, stride_d,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, COMPONENTS: tl.constexpr, UNROLL: tl.constexpr,
    FLIPPED: tl.constexpr, SLOPE: tl.constexpr,
):  # fmt: skip
    """Write the states at the end of a chunk; SLOPE: also their derivatives with respect to q.

    The states before the chunk are 0, or `starts` before the first chunk of a complex average. The program index is
    `(block of channels, chunk, sequence; direction)`. FLIPPED: `signal` is a gradient; direction 0 runs from the end,
    and direction 1 from the beginning.
    """
    block, sequence, batch, first, size, number, slot, begin, count = place(cu_seqlens, length, chunk, chunks, blocks)
    if count <= 0:
        return
    direction = tl.program_id(1).to(tl.int64) if COMPONENTS == 1 else 0  # a complex average has one direction
    from_end = (direction == 1) != FLIPPED
    n, d, inside, tile = state_tile(block, channels, N, BLOCK_N, BLOCK_D)
    states, end = channels * N, tl.where(inside, count, 0)
    rate_places = n * channel_rows + direction * channels + d[None, :]
    state_places = rate_places if COMPONENTS == 2 else n * channels + d[None, :]  # if equal, one saves registers
    state, slope = zeros([BLOCK_N, BLOCK_D], COMPONENTS), zeros([BLOCK_N, BLOCK_D], COMPONENTS)
    if starts is not None:
        is_first = begin + chunk >= size if FLIPPED else number == 0
        if is_first:
            state = load(starts + sequence * COMPONENTS * states, state_places, states, tile, COMPONENTS)
        decayed = decayed_positions(count, is_first)
    q, lost = load_rate(rates, rate_places, states, tile, UNROLL, COMPONENTS)
    entry = None
    if weight is not None:
        entry = load(weight, rate_places, states, tile, COMPONENTS if FLIPPED else 1)
    values = signal + batch * stride_b + (first + begin) * stride_t + d * stride_d
    token = batch * length + first + begin
    # A scan from the end begins with padding to UNROLL steps.
    start_at = tl.where(from_end, tl.cdiv(count, UNROLL) * UNROLL - 1, 0)
    step = tl.where(from_end, -1, 1)
    for start in range(0, count, UNROLL):
        entering = ()
        for i in tl.static_range(UNROLL):
            t = start_at + (start + i) * step
            value = tl.load(values + t * stride_t, t < end, other=0.0).to(tl.float32)
            if mask is not None:
                value = tl.where(tl.load(mask + token + t, t < count, other=0), value, 0.0)
            entering += (value[None, :],)
        state = add(state, times(state, lost))
        if SLOPE:
            slope = add(slope, times(slope, lost))
        for i in tl.static_range(UNROLL):
            if SLOPE:
                slope = add(times(slope, q), state)
            following = times(state, q)
            if FLIPPED and starts is not None:
                following = select(start_at + (start + i) * step < decayed, following, state)
            state = add_scaled(following, entry, entering[i])
    own = direction * (2 if SLOPE else 1) * slots + slot
    store(ends + own * COMPONENTS * states, state_places, states, tile, state)
    if SLOPE:
        store(ends + (own + slots) * COMPONENTS * states, state_places, states, tile, slope)


@triton.jit
def _select_row(is_row, number):
    """Return one row `[1, columns]` of a number."""
    if len(number) == 1:
        return (tl.sum(tl.where(is_row, number[0], 0.0), 0, keep_dims=True),)
    else:
        real, imaginary = tl.where(is_row, number[0], 0.0), tl.where(is_row, number[1], 0.0)
        return tl.sum(real, 0, keep_dims=True), tl.sum(imaginary, 0, keep_dims=True)


@triton.jit(do_not_specialize=["length", "chunks", "slots"])
def state_passing_kernel(
    ends,  # [directions, 1 or 2 with SLOPE, slots, P, N, D]
    rates,  # see `triton_scan.ByDirection`
    starts,  # [S, P, N, D]
    own_blocks, cu_seqlens, length, chunk, chunks, channels, blocks, channel_rows, slots,
    N: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, COMPONENTS: tl.constexpr, FLIPPED: tl.constexpr,
    SLOPE: tl.constexpr,
):  # fmt: skip
    """Replace the states at the end of each chunk by the states before it, in its direction.

    The program index is `(block of states, sequence; direction)`.
    """
    program = tl.program_id(0).to(tl.int64)
    block, sequence = program % own_blocks, program // own_blocks
    first_slot, size = sequence_slots(cu_seqlens, sequence, length, chunk, chunks)
    direction = tl.program_id(1).to(tl.int64) if COMPONENTS == 1 else 0  # a complex average has one direction
    from_end = (direction == 1) != FLIPPED
    states = channels * N
    place = tl.multiple_of(block * BLOCK + tl.arange(0, BLOCK), 1)[None, :]
    inside = place < states
    rate_places = place // channels * channel_rows + direction * channels + place % channels
    change, slope_change = _load_chunk_rate(rates, rate_places, states, inside, chunk, COMPONENTS)
    count = tl.maximum(tl.cdiv(size, chunk), 1)
    state, slope = zeros([1, BLOCK], COMPONENTS), zeros([1, BLOCK], COMPONENTS)
    if starts is not None:
        state = load(starts + sequence * COMPONENTS * states, place, states, inside, COMPONENTS)
        # If FLIPPED, `starts` are gradients of the states after the last position, which does not decay them.
        first_steps = size - (count - 1) * chunk - 1 if FLIPPED else chunk
        first_change, _ = _load_chunk_rate(rates, rate_places, states, inside, first_steps, COMPONENTS)
    ahead = tl.arange(0, AHEAD)[:, None]
    own = direction * (2 if SLOPE else 1) * slots + first_slot
    for start in range(0, count, AHEAD):
        number = own + tl.where(from_end, count - 1 - start - ahead, start + ahead)
        used = (start + ahead < count) & inside
        values = ends + number * COMPONENTS * states
        gained, carried = load(values, place, states, used, COMPONENTS), zeros([AHEAD, BLOCK], COMPONENTS)
        if SLOPE:
            slopes = ends + (number + slots) * COMPONENTS * states
            slope_gained = load(slopes, place, states, used, COMPONENTS)
            slope_carried = zeros([AHEAD, BLOCK], COMPONENTS)
        for i in tl.static_range(AHEAD):
            carried = select(ahead == i, state, carried)
            own_change = change
            if starts is not None and COMPONENTS == 1:
                own_change = select(start + i == 0, first_change, change)
            elif starts is not None:  # the end of the first chunk includes `starts`
                state = select(start + i > 0, state, zeros([1, BLOCK], COMPONENTS))
            if SLOPE:
                slope_carried = select(ahead == i, slope, slope_carried)
                moved = add(times(slope, own_change), times(state, slope_change))
                slope = add(add(slope, moved), _select_row(ahead == i, slope_gained))
            state = add(state, add(times(state, own_change), _select_row(ahead == i, gained)))
        store(values, place, states, used, carried)
        if SLOPE:
            store(slopes, place, states, used, slope_carried)
