"""The truncated average of a segment, and its state."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from luna_mega.kernels._op import without_autocast
from luna_mega.kernels.gated_attention.columns import take_columns
from luna_mega.kernels.moving_average import reference
from luna_mega.kernels.upcast import upcast_dtype


class TruncatedEmaState(NamedTuple):
    """The state of a truncated average: the states of all and of truncated positions, and recent inputs.

    `average` `[B, D, N]` contains the states of all positions, `forgotten` `[B, D, N]` those of positions at least
    `truncation` away, and `inputs` `[B, truncation, D]` the last inputs, which will be truncated next.
    """

    average: torch.Tensor
    forgotten: torch.Tensor
    inputs: torch.Tensor


def truncated(
    run: Callable,
    x: torch.Tensor,
    parameters: tuple[torch.Tensor, ...],
    skip: torch.Tensor | None,
    mask: torch.Tensor | None,
    truncation: int,
    state: TruncatedEmaState | None,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, TruncatedEmaState]:
    """Return the average of the last `truncation` inputs; `run` averages all inputs and also returns its state.

    The average of the older inputs is subtracted from the average of all inputs: it is the average `truncation`
    positions earlier, decayed by q^truncation. `lengths` `[B]`: the positions of each row until the state; None = all.
    """
    batch, length, channels = x.shape
    if state is None:
        state = TruncatedEmaState(
            None, None, x.new_zeros(batch, truncation, channels, dtype=upcast_dtype(x, *parameters))
        )
    needed = [batch, truncation, channels]
    if not isinstance(state, TruncatedEmaState) or list(state.inputs.shape) != needed:
        raise ValueError(
            f"damped_ema with truncation={truncation} needs a TruncatedEmaState with inputs {needed}, got "
            f"{list(state.inputs.shape) if isinstance(state, TruncatedEmaState) else type(state).__name__}"
        )
    with without_autocast(x.device.type):
        dtype = upcast_dtype(x, *parameters)
        kept = x.to(dtype) if mask is None else x.to(dtype).masked_fill(~mask[..., None], 0.0)
        recent = torch.cat((state.inputs, kept), dim=1)
        average, now = run(kept, state.average, parameters)
        *rest, projection = (parameter.to(dtype) for parameter in parameters)
        projection = projection * torch.exp(truncation * reference.log_decay(*rest[:2]))
        late, forgotten = run(recent[:, :length], state.forgotten, (*rest, projection))
        skip = None if skip is None else skip.to(dtype)
        # A copy, so that the older inputs are freed.
        recent = recent[:, length:].clone() if lengths is None else take_columns(recent, _window(lengths, truncation))
        state = TruncatedEmaState(now, forgotten, recent)
        return reference.finish(average - late, x, skip), state


def _window(start, size):
    """Return the `size` columns from `start` `[B]` on, `[B, size]`."""
    return start[:, None] + torch.arange(size, device=start.device)
