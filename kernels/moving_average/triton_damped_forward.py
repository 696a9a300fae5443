"""Forward pass of the damped EMA in Triton: a scan in registers, in chunks that run in parallel.

A program processes one chunk of one sequence with the states of BLOCK_D channels in a tile `[BLOCK_N, BLOCK_D]`. Two
small kernels compute the states before each chunk: one computes the states at the end of each chunk with zero initial
states, the other carries them from chunk to chunk. The layout of per-state values is `[..., N, D]`.

`tl.multiple_of(d, 1)` hides from the compiler that blocks start at larger multiples. Otherwise a thread would load four
channels of every fourth state at once. With it, a thread holds columns of the tile, and sums over states stay in it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from luna_mega.kernels.common import triton_choice, triton_launch
from luna_mega.kernels.common.triton_launch import cdiv, next_power_of_2

# Minimum length of chunks.
SHORTEST_CHUNK = 64
# States with faster decay are negligible, and a quotient by q must not overflow.
LOWEST_LOG_Q = tl.constexpr(-46.0)
# log q, p beta and eta / sqrt(N) of each direction, `[N, D]` with rows that are R apart.
Rows = list[tuple[Tensor, ...]]


@triton.jit
def _minus_one(log_q):
    """Return exp(log_q) - 1 for log_q > -0.5."""
    series = 1.0 + log_q * (1 / 10)
    for k in tl.static_range(9, 1, -1):
        series = 1.0 + series * log_q * (1 / k)
    return log_q * series


@triton.jit
def decay(log_q, STEPS: tl.constexpr):
    """Return q, and the part of a state that is lost to the rounding of q in STEPS steps.

    If q is close to 1, this error would accumulate over thousands of steps.
    """
    log_q = tl.maximum(log_q, LOWEST_LOG_Q)
    near, slow = _minus_one(log_q), log_q > -0.5
    q = tl.where(slow, 1.0 + near, tl.exp(log_q))
    return q, tl.where(slow, STEPS * (near - (q - 1.0)) / q, 0.0)


@triton.jit
def place(cu_seqlens, length, chunk, chunks, blocks):
    """Return the block of channels, the sequence and the chunk of this program.

    The sequence is given by its index, batch row, first position and length; the chunk by its index, its slot among the
    values stored per chunk, its first position and its length.
    """
    program = tl.program_id(0).to(tl.int64)
    item = program // blocks
    sequence, number = item // chunks, item % chunks
    if cu_seqlens is None:
        slot, row, first, size = item, sequence, sequence * 0, sequence * 0 + length
    else:
        row, first = sequence * 0, tl.load(cu_seqlens + sequence).to(tl.int64)
        size = tl.load(cu_seqlens + sequence + 1).to(tl.int64) - first
        # The slots are distinct: a sequence has at most one chunk more than complete chunks fit into its positions.
        slot = tl.where(chunks == 1, sequence, first // chunk + sequence + number)
    begin = number * chunk
    return program % blocks, sequence, row, first, size, number, slot, begin, tl.minimum(size - begin, chunk)


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
    """Return the position of a step in its chunk; REVERSED: positions after the last one come first."""
    return tl.cdiv(count, UNROLL) * UNROLL - 1 - step if REVERSED else step


@triton.jit(do_not_specialize=["length", "chunks", "slots"])
def _chunk_state_kernel(
    signal, mask,  # [B, T, D], [B, T]
    log_q, weight,  # [N, R]
    ends,  # [directions, 1 or 2 with SLOPE, slots, N, D]
    cu_seqlens, length, chunk, chunks, channels, blocks, width, slots,  # see `Plan`
    stride_b, stride_t, stride_d,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UNROLL: tl.constexpr, FLIPPED: tl.constexpr,
    SLOPE: tl.constexpr,
):  # fmt: skip
    """Write the states at the end of a chunk with zero initial states; SLOPE: also their derivatives with respect to q.

    The program index is `(block of channels, chunk, sequence; direction)`. FLIPPED: direction 0 runs from the end, and
    direction 1 from the start.
    """
    block, sequence, row, first, size, number, slot, begin, count = place(cu_seqlens, length, chunk, chunks, blocks)
    if count <= 0:
        return
    direction = tl.program_id(1).to(tl.int64)
    from_end = (direction == 1) != FLIPPED
    n, d, inside, tile = state_tile(block, channels, N, BLOCK_N, BLOCK_D)
    end = tl.where(inside, count, 0)
    rows = n * width + direction * channels + d[None, :]
    q, correction = decay(tl.load(log_q + rows, tile, other=LOWEST_LOG_Q), UNROLL)
    if weight is not None:
        entry = tl.load(weight + rows, tile, other=0.0)
    state = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    slope = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    values = signal + row * stride_b + (first + begin) * stride_t + d * stride_d
    token = row * length + first + begin
    # From the end, positions after the last come first and keep the states at 0.
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
        state += state * correction
        if SLOPE:
            slope += slope * correction
        for i in tl.static_range(UNROLL):
            if SLOPE:
                slope = slope * q + state
            if weight is not None:
                state = state * q + entry * entering[i]
            else:
                state = state * q + entering[i]
    kept = ends + (direction * (2 if SLOPE else 1) * slots + slot) * channels * N + n * channels + d[None, :]
    tl.store(kept, state, tile)
    if SLOPE:
        tl.store(kept + slots * channels * N, slope, tile)


@triton.jit(do_not_specialize=["length", "chunks", "slots"])
def _state_passing_kernel(
    ends,  # [directions, 1 or 2 with SLOPE, slots, N, D]
    log_q,  # [N, R]
    starts,  # [S, N, D]
    own_blocks, cu_seqlens, length, chunk, chunks, channels, blocks, width, slots,
    N: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, FLIPPED: tl.constexpr, SLOPE: tl.constexpr,
):  # fmt: skip
    """Replace the states at the end of each chunk by the states before it, in its direction.

    The first states are `starts` `[S, N, D]`; their slope is 0. The program index is `(block of states, sequence;
    direction)`.
    """
    program = tl.program_id(0).to(tl.int64)
    block, sequence = program % own_blocks, program // own_blocks
    first_slot, size = sequence_slots(cu_seqlens, sequence, length, chunk, chunks)
    direction = tl.program_id(1).to(tl.int64)
    from_end = (direction == 1) != FLIPPED
    states = channels * N
    place = tl.multiple_of(block * BLOCK + tl.arange(0, BLOCK), 1)
    inside = place < states
    n, d = place // channels, place % channels
    log_q = tl.load(log_q + n * width + direction * channels + d, inside, other=LOWEST_LOG_Q)
    log_q = tl.maximum(log_q, LOWEST_LOG_Q)
    count = tl.maximum(tl.cdiv(size, chunk), 1)
    # From the end, the first chunk may be short.
    steps = tl.where(from_end, size - (count - 1) * chunk, chunk).to(tl.float32)
    if starts is None:
        state = tl.zeros([BLOCK], tl.float32)
    else:
        state = tl.load(starts + sequence * states + place, inside, other=0.0)
    slope = tl.zeros([BLOCK], tl.float32)
    ahead = tl.arange(0, AHEAD)[:, None]
    values = ends + (direction * (2 if SLOPE else 1) * slots + first_slot) * states + place[None, :]
    for start in range(0, count, AHEAD):
        number = tl.where(from_end, count - 1 - start - ahead, start + ahead)
        used = (start + ahead < count) & inside[None, :]
        gained = tl.load(values + number * states, used, other=0.0)
        carried = tl.zeros([AHEAD, BLOCK], tl.float32)
        if SLOPE:
            slope_gained = tl.load(values + (slots + number) * states, used, other=0.0)
            slope_carried = tl.zeros([AHEAD, BLOCK], tl.float32)
        for i in tl.static_range(AHEAD):
            length_before = tl.where(start + i == 0, steps, chunk.to(tl.float32))
            total = log_q * length_before
            lost = tl.where(total > -0.5, _minus_one(total), tl.exp(total) - 1.0)
            carried = tl.where(ahead == i, state[None, :], carried)
            if SLOPE:
                slope_carried = tl.where(ahead == i, slope[None, :], slope_carried)
                slope += slope * lost + state * length_before * tl.exp(total - log_q)
                slope += tl.sum(tl.where(ahead == i, slope_gained, 0.0), 0)
            state += state * lost + tl.sum(tl.where(ahead == i, gained, 0.0), 0)
        tl.store(values + number * states, carried, used)
        if SLOPE:
            tl.store(values + (slots + number) * states, slope_carried, used)


@triton.jit(do_not_specialize=["length", "chunks", "slots"])
def _scan_kernel(
    signal, mask,  # [B, T, D], [B, T]
    log_q, weight_in, weight_out,  # [N, D], rows are `width` apart
    skip,  # [D]
    starts,  # [slots, N, D]
    other, x, output,  # [B, T, D]
    last,  # [S, N, D]
    sums,  # [slots, N, D]
    cu_seqlens, length, chunk, chunks, channels, blocks, width, slots,  # see `Plan`
    stride_b, stride_t, stride_d, x_stride_b, x_stride_t, x_stride_d,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UNROLL: tl.constexpr,
    REVERSED: tl.constexpr, SHIFT: tl.constexpr, SCALED: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Write silu(average + skip signal); the average is one direction of the average of `signal`, plus `other`.

    GRADIENT: `signal` is the gradient of an average, the two weights are exchanged, and the result is the gradient of
    x: masked average + skip signal. `sums` receives the sum of state times x, and `last` the final states.
    """
    block, sequence, row, first, size, number, slot, begin, count = place(cu_seqlens, length, chunk, chunks, blocks)
    if (count <= 0) & (number > 0):
        return
    n, d, inside, tile = state_tile(block, channels, N, BLOCK_N, BLOCK_D)
    end = tl.where(inside, count, 0)
    rows, kept = n * width + d[None, :], n * channels + d[None, :]
    q, correction = decay(tl.load(log_q + rows, tile, other=LOWEST_LOG_Q), UNROLL)
    entry = tl.load(weight_in + rows, tile, other=0.0)
    exit = tl.load(weight_out + rows, tile, other=0.0)
    if not SCALED:
        exit *= entry
    state = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if starts is not None:
        state = tl.load(starts + slot * channels * N + kept, tile, other=0.0)
    if skip is not None:
        skip_weight = tl.load(skip + d, inside, other=0.0)
    if sums is not None:
        total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        inputs = x + row * x_stride_b + (first + begin) * x_stride_t + d * x_stride_d
    values = signal + row * stride_b + (first + begin) * stride_t + d * stride_d
    token = row * length + first + begin
    places = token * channels + d
    for start in range(0, count, UNROLL):
        signals, keeps, others, multiplied = (), (), (), ()
        for i in tl.static_range(UNROLL):
            t = position(start + i, count, UNROLL, REVERSED)
            used = t < end
            signals += (tl.load(values + t * stride_t, used, other=0.0).to(tl.float32),)
            keep = t < count
            if mask is not None:
                keep = tl.load(mask + token + t, keep, other=0)
            keeps += (keep,)
            if other is not None:
                others += (tl.load(other + places + t * channels, used, other=0.0),)
            if sums is not None:
                value = tl.load(inputs + t * x_stride_t, used, other=0.0).to(tl.float32)
                multiplied += (tl.where(keep, value, 0.0),)
        state += state * correction
        for i in tl.static_range(UNROLL):
            t = position(start + i, count, UNROLL, REVERSED)
            entering = signals[i]
            if mask is not None and not GRADIENT:
                entering = tl.where(keeps[i], entering, 0.0)
            if SHIFT:
                average = tl.sum(exit * state, 0)
            if SCALED:
                following = state * q + entry * entering[None, :]
            else:
                following = state * q + entering[None, :]
            if SCALED or last is not None:
                following = tl.where(t < count, following, state)
            state = following
            if not SHIFT:
                average = tl.sum(exit * state, 0)
            if sums is not None:
                total += state * multiplied[i][None, :]
            if other is not None:
                average += others[i]
            if GRADIENT and mask is not None:
                average = tl.where(keeps[i], average, 0.0)
            if skip is not None:
                average += skip_weight * signals[i]
                if not GRADIENT:
                    average *= tl.sigmoid(average)
            tl.store(output + places + t * channels, average.to(output.dtype.element_ty), t < end)
    if last is not None:
        if not SCALED:
            state *= entry
        if (REVERSED and number == 0) or (not REVERSED and begin + chunk >= size):
            tl.store(last + sequence * channels * N + kept, state, tile)
    if sums is not None:
        tl.store(sums + slot * channels * N + kept, total, tile)


class Configuration(NamedTuple):
    """The number of single-warp programs per multiprocessor for a pass, and the positions that are loaded together."""

    programs: int
    unroll: int


CONFIGURATIONS = tuple(Configuration(*numbers) for numbers in ((8, 8), (4, 8), (16, 8), (8, 4), (8, 16)))


class Plan(NamedTuple):
    """The division of a call into programs. `slots` store values per chunk; varlen calls leave some unused."""

    cu_seqlens: Tensor | None
    sequences: int
    length: int
    channels: int
    directions: int
    states: int
    shift: bool
    block: int
    chunk: int
    chunks: int
    slots: int
    unroll: int

    @property
    def blocks(self) -> int:
        return cdiv(self.channels, self.block)

    @property
    def programs(self) -> int:
        return self.blocks * self.chunks * self.sequences

    @property
    def sizes(self) -> tuple[Any, ...]:
        """Return the arguments of every kernel of the scan, from `cu_seqlens` to `slots`.

        Positions of a batch row and of a chunk, chunks of a sequence, channels and their blocks, rows R of parameters.
        """
        width = self.directions * self.channels
        return self.cu_seqlens, self.length, self.chunk, self.chunks, self.channels, self.blocks, width, self.slots

    def launch(self, kernel: Any, *arguments: Any, directions: int = 1, **constants: Any) -> None:
        """Launch a kernel with one warp per chunk and block of channels."""
        tile = {"N": self.states, "BLOCK_N": next_power_of_2(self.states), "BLOCK_D": self.block}
        constants = {**tile, "UNROLL": self.unroll, "num_warps": 1, "num_stages": 1, **constants}
        triton_launch.launch(kernel, (self.programs, directions), *arguments, **constants)

    def pass_states(
        self, kernel: Any, ends: Tensor, rates: Tensor, initial: Tensor | None, *, directions: int = 1, **constants: Any
    ) -> None:
        """Launch the kernel that replaces the states at the end of each chunk by the states before it."""
        blocks = cdiv(self.states * self.channels, 128)
        constants = {"N": self.states, "BLOCK": 128, "num_warps": 4, "num_stages": 1, **constants}
        grid = (blocks * self.sequences, directions)
        triton_launch.launch(kernel, grid, ends, rates, initial, blocks, *self.sizes, **constants)


def make_plan(
    configuration: Configuration, x: Tensor, size: Sequence[int], shift: bool, cu_seqlens: Tensor | None,
    max_seqlen: int,
) -> Plan:  # fmt: skip
    """Return the division of a call into programs for one configuration; `size` is (N, R)."""
    batch, length, channels = x.shape
    states, width = size
    sequences, longest = (batch, length) if cu_seqlens is None else (len(cu_seqlens) - 1, max_seqlen)
    block = min(32, 512 // next_power_of_2(states))  # 16 states per thread
    programs = configuration.programs * triton_launch.processors(x.device, sequences)
    blocks = cdiv(channels, block)
    # The total number of tokens depends on the batch, also per sequence.
    tokens = sequences * longest if torch.are_deterministic_algorithms_enabled() else batch * length
    if 2 * sequences * blocks >= programs and sequences * longest <= 2 * tokens:
        # Many sequences of similar lengths are not divided: the states before chunks cost one more pass over x.
        chunk = max(SHORTEST_CHUNK, next_power_of_2(max(longest, 1)))
    else:
        chunk = max(SHORTEST_CHUNK, 1 << (max(tokens * blocks // programs, 1).bit_length() - 1))
    chunks = cdiv(max(longest, 1), chunk)
    slots = sequences * chunks if cu_seqlens is None or chunks == 1 else length // chunk + sequences
    return Plan(
        cu_seqlens, sequences, length, channels, width // max(channels, 1), states, shift, block, chunk, chunks, slots,
        configuration.unroll,
    )  # fmt: skip


def choose(
    kernel: Any, run: Callable[[Plan], Any], x: Tensor, size: Sequence[int], shift: bool, cu_seqlens: Tensor | None,
    max_seqlen: int,
) -> Any:  # fmt: skip
    """Return the result of `run` for the plan of the selected configuration; `size` is (N, R)."""
    (batch, length, channels), (states, width) = x.shape, size
    sequences, longest = (batch, length) if cu_seqlens is None else (len(cu_seqlens) - 1, max_seqlen)
    kind = [x.dtype, f"{states} states", width > channels and "bidirectional", cu_seqlens is not None and "varlen"]
    sizes = {"sequences": sequences, "length": longest, "channels": channels}
    return triton_choice.choose(
        kernel, kind, sizes, CONFIGURATIONS,
        lambda c: run(make_plan(c, x, size, shift, cu_seqlens, max_seqlen)), x.device,
    )  # fmt: skip


def of_directions(coefficients: Tensor, channels: int) -> Rows:
    """Return the coefficients of each direction from those of all, `[3, N, R]`."""
    if coefficients.shape[2] == channels:
        return [coefficients.unbind()]
    return [half.unbind() for half in coefficients.split(channels, 2)]


def states_before(
    plan: Plan, signal: Tensor, mask: Tensor | None, coefficients: Rows, scaled: bool, initial: Tensor | None,
    *, flipped: bool = False, slope: bool = False,
) -> Sequence[Tensor | None]:  # fmt: skip
    """Return the states of each direction before every chunk, `[slots, N, D]`; with slopes `[2, slots, N, D]`.

    `scaled`: the signal is multiplied by the weight of the input. With one chunk per sequence the states are `initial`.
    """
    log_q, weight, _ = coefficients[0]  # the kernels add the place of direction 1
    if plan.chunks == 1:
        return [initial] * plan.directions
    ends = log_q.new_empty(plan.directions, *(2,) * slope, plan.slots, plan.states, plan.channels)
    options = {"directions": plan.directions, "FLIPPED": flipped, "SLOPE": slope}
    inputs = (signal, mask, log_q, weight if scaled else None, ends, *plan.sizes, *signal.stride())
    plan.launch(_chunk_state_kernel, *inputs, **options)
    plan.pass_states(_state_passing_kernel, ends, log_q, initial, **options, AHEAD=8)
    return ends.unbind()


def scan(
    plan: Plan, direction: int, signal: Tensor, mask: Tensor | None, coefficients: Rows,
    starts: Sequence[Tensor | None], output: Tensor, *, scaled: bool = False, skip: Tensor | None = None,
    other: Tensor | None = None, last: Tensor | None = None, x: Tensor | None = None, sums: Tensor | None = None,
    gradient: bool = False,
) -> Tensor:  # fmt: skip
    """Write one direction of the average of `signal` into `output`, as `_scan_kernel` does, and return it."""
    plan.launch(
        _scan_kernel,
        *(signal, mask, *coefficients[direction], skip),
        *(starts[direction], other, x, output, last, sums, *plan.sizes),
        *(*signal.stride(), *((0, 0, 0) if x is None else x.stride())),
        REVERSED=(direction == 1) != gradient,
        SHIFT=plan.shift and direction == 1,
        SCALED=scaled,
        GRADIENT=gradient,
    )
    return output


def forward(
    x: Tensor, mask: Tensor | None, skip: Tensor | None, coefficients: Tensor, initial_state: Tensor | None,
    return_state: bool, shift: bool, cu_seqlens: Tensor | None, max_seqlen: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the result and the final states `[S, N, D]`, empty unless requested."""
    rows, scaled = of_directions(coefficients, x.shape[2]), initial_state is not None

    def run(plan: Plan) -> tuple[Tensor, Tensor]:
        last = coefficients.new_empty((plan.sequences, plan.states, plan.channels) if return_state else 0)
        starts, other = states_before(plan, x, mask, rows, scaled, initial_state), None
        if plan.directions == 2:
            # In float32 until the other direction is added.
            other = scan(plan, 1, x, mask, rows, starts, coefficients.new_empty(x.shape))
        output, end = x.new_empty(x.shape), last if return_state else None
        scan(plan, 0, x, mask, rows, starts, output, scaled=scaled, skip=skip, other=other, last=end)
        return output, last

    return choose(_scan_kernel, run, x, coefficients.shape[1:], shift, cu_seqlens, max_seqlen)
