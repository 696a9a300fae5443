"""Division of a moving average in Triton into programs, chunks and blocks of channels."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common import triton_choice, triton_launch
from ..common.triton_launch import next_power_of_2

# Minimum length of chunks.
SHORTEST_CHUNK = 64


class Configuration(NamedTuple):
    """The number of single-warp programs per multiprocessor for a pass, and the positions that are loaded together."""

    programs: int
    unroll: int


CONFIGURATIONS = tuple(Configuration(*numbers) for numbers in ((8, 8), (4, 8), (16, 8), (8, 4), (8, 16)))


class Plan(NamedTuple):
    """The division of a call into programs. `slots` store values per chunk; varlen calls leave some unused.

    `tile` are constants of every kernel, and `sizes` the arguments of every kernel from `cu_seqlens` to `slots`:
    positions of a batch row and of a chunk, chunks of a sequence, channels, blocks of channels, rows R of parameters.
    """

    cu_seqlens: Tensor | None
    sequences: int
    length: int
    channels: int
    directions: int
    states: int
    components: int
    shift: bool
    block: int
    chunk: int
    chunks: int
    slots: int
    unroll: int
    tile: dict[str, int]
    sizes: tuple[Any, ...]

    def state_shape(self, *shape: int) -> tuple[int, ...]:
        """Return the shape of states, `[*shape, P, N, D]`."""
        return *shape, *(() if self.components == 1 else (self.components,)), self.states, self.channels

    def each_direction(self, values: Tensor) -> Sequence[Tensor]:
        """Return the values `[directions, ...]` of each direction, without an operator if there is only one."""
        return [values] if self.directions == 1 else values.unbind()

    def launch(self, kernel: Any, *arguments: Any, directions: int = 1, **constants: Any) -> None:
        """Launch a kernel with one warp per chunk and block of channels."""
        constants = {**self.tile, "UNROLL": self.unroll, "num_warps": 1, "num_stages": 1, **constants}
        blocks = -(-self.channels // self.block)
        grid = (blocks * self.chunks * self.sequences, directions)
        triton_launch.launch(kernel, grid, *arguments, **constants)


def make_plan(
    configuration: Configuration, x: Tensor, parameters: Sequence[Tensor], shift: bool, cu_seqlens: Tensor | None,
    max_seqlen: int,
) -> Plan:  # fmt: skip
    """Return the division of a call into programs for one configuration."""
    (batch, length, channels), (channel_rows, states) = x.shape, parameters[0].shape
    components = parameters[3].dim() - 1
    sequences, longest = (batch, length) if cu_seqlens is None else (len(cu_seqlens) - 1, max_seqlen)
    # 16 real or 8 complex states per thread.
    block_n = 1 << (states - 1).bit_length()
    block = min(32, 512 // components // block_n)
    programs = configuration.programs * triton_launch.processors(x.device, sequences)
    blocks = -(-channels // block)
    # A deterministic division must not depend on the total number of tokens, which other sequences change.
    tokens = sequences * longest if torch.are_deterministic_algorithms_enabled() else batch * length
    if 8 * sequences * blocks >= 7 * programs and sequences * longest <= 2 * tokens:
        # Enough sequences of similar lengths to fill the GPU: one chunk per sequence, which saves a pass over x.
        chunk = max(SHORTEST_CHUNK, next_power_of_2(max(longest, 1)))
    else:
        # The registers fit more programs of complex states, so chunks are shorter.
        chunk = max(SHORTEST_CHUNK, 1 << (max(tokens * blocks // (components * programs), 1).bit_length() - 1))
    chunks = -(-max(longest, 1) // chunk)
    slots = sequences * chunks if cu_seqlens is None or chunks == 1 else length // chunk + sequences
    return Plan(
        cu_seqlens, sequences, length, channels, channel_rows // max(channels, 1), states, components, shift, block,
        chunk, chunks, slots, configuration.unroll,
        tile={"N": states, "BLOCK_N": block_n, "BLOCK_D": block, "COMPONENTS": components},
        sizes=(cu_seqlens, length, chunk, chunks, channels, blocks, channel_rows, slots),
    )  # fmt: skip


def choose(
    kernel: Any, run: Callable[[Plan], Any], x: Tensor, parameters: Sequence[Tensor], shift: bool,
    cu_seqlens: Tensor | None, max_seqlen: int,
) -> Any:  # fmt: skip
    """Return the result of `run` for the plan of the selected configuration."""
    (batch, length, channels), (channel_rows, states) = x.shape, parameters[0].shape
    sequences, longest = (batch, length) if cu_seqlens is None else (len(cu_seqlens) - 1, max_seqlen)
    kind = [x.dtype, f"{states} states", channel_rows > channels and "bidirectional"]
    kind += [cu_seqlens is not None and "varlen"]
    sizes = {"sequences": sequences, "length": longest, "channels": channels}
    return triton_choice.choose(
        kernel, kind, sizes, CONFIGURATIONS,
        lambda c: run(make_plan(c, x, parameters, shift, cu_seqlens, max_seqlen)), x.device,
    )  # fmt: skip
