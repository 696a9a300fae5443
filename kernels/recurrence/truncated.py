"""The truncated average of a segment, and its state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._dispatch import without_autocast
from ..alignment import take_columns
from ..upcast import upcast_dtype
from .coefficients import log_decay
from .reference import add_skip


class TruncatedEmaState(NamedTuple):
    """The state of a truncated average: the states of all and of truncated positions, and recent inputs.

    `average` `[B, D, N]` contains the states of all positions, `forgotten` `[B, D, N]` of the positions at least
    `truncation` away, and `inputs` `[B, truncation, D]` the last inputs, which will be truncated next.
    """

    average: Tensor
    forgotten: Tensor
    inputs: Tensor


def truncated(
    run: Callable[..., Any], x: Tensor, parameters: tuple[Tensor, ...], skip: Tensor | None, mask: Tensor | None,
    truncation: int, state: Tensor | TruncatedEmaState | None, lengths: Tensor | None = None,
) -> tuple[Tensor, TruncatedEmaState]:  # fmt: skip
    """Return the average of the last `truncation` inputs; `run` averages all inputs and also returns its state.

    The average of the older inputs is subtracted from the average of all inputs: it is the average `truncation`
    positions earlier, decayed by q^truncation. `lengths` `[B]`: the positions of each row until the state; None = all.
    """
    batch, length, channels = x.shape
    needed = [batch, truncation, channels]
    if state is None:
        before: tuple[Any, ...] = (None, None, x.new_zeros(needed, dtype=upcast_dtype(x, *parameters)))
    elif isinstance(state, TruncatedEmaState) and list(state.inputs.shape) == needed:
        before = state
    else:
        raise ValueError(
            f"damped_ema with truncation={truncation} needs a TruncatedEmaState with inputs {needed}, got "
            f"{list(state.inputs.shape) if isinstance(state, TruncatedEmaState) else type(state).__name__}"
        )
    average_state, forgotten_state, inputs = before
    with without_autocast(x.device.type):
        dtype = upcast_dtype(x, *parameters)
        kept = x.to(dtype) if mask is None else x.to(dtype).masked_fill(~mask[..., None], 0.0)
        recent = torch.cat((inputs, kept), dim=1)
        average, now = run(kept, average_state, parameters)
        *rest, projection = (parameter.to(dtype) for parameter in parameters)
        projection = projection * torch.exp(truncation * log_decay(*rest[:2]))
        late, forgotten = run(recent[:, :length], forgotten_state, (*rest, projection))
        skip = None if skip is None else skip.to(dtype)
        if lengths is None:
            recent = recent[:, length:].clone()  # a copy, so that the older inputs are freed
        else:
            recent = take_columns(recent, lengths[:, None] + torch.arange(truncation, device=x.device))
        state = TruncatedEmaState(now, forgotten, recent)
        return add_skip(average - late, x, skip).to(x.dtype), state
