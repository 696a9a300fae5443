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
    """The state of a truncated average: the states of all inputs and of truncated inputs, and the other inputs.

    `average` `[B, D, N]` contains the states after all inputs, `inputs` `[B, truncation, D]` the last inputs, which
    will be truncated next, and `forgotten` `[B, D, N]` the states before the last inputs.
    """

    average: Tensor
    forgotten: Tensor
    inputs: Tensor


def truncated(
    run: Callable[..., Any], x: Tensor, parameters: tuple[Tensor, ...], skip: Tensor | None, mask: Tensor | None,
    truncation: int, state: Tensor | TruncatedEmaState | None, lengths: Tensor | None = None,
) -> tuple[Tensor, TruncatedEmaState]:  # fmt: skip
    """Return the average of the last `truncation` inputs; `run` averages all inputs and also returns its state.

    The average of older inputs is the average `truncation` positions earlier, decayed by q^truncation. It is subtracted
    from the average of all inputs. The state is returned after `lengths` `[B]` positions of each row; None = all.
    """
    batch, length, channels = x.shape
    inputs_shape = [batch, truncation, channels]
    if state is None:
        before: tuple[Any, ...] = (None, None, x.new_zeros(inputs_shape, dtype=upcast_dtype(x, *parameters)))
    elif isinstance(state, TruncatedEmaState) and list(state.inputs.shape) == inputs_shape:
        before = state
    else:
        raise ValueError(
            f"damped_ema with truncation={truncation} needs a TruncatedEmaState with inputs {inputs_shape}, got "
            f"{list(state.inputs.shape) if isinstance(state, TruncatedEmaState) else type(state).__name__}"
        )
    average_state, forgotten_state, inputs = before
    with without_autocast(x.device.type):
        dtype = upcast_dtype(x, *parameters)
        signal = x.to(dtype) if mask is None else x.to(dtype).masked_fill(~mask[..., None], 0.0)
        recent = torch.cat((inputs, signal), dim=1)
        average, final_state = run(signal, average_state, parameters)
        *rest, projection = (parameter.to(dtype) for parameter in parameters)
        projection = projection * torch.exp(truncation * log_decay(*rest[:2]))
        old_average, forgotten = run(recent[:, :length], forgotten_state, (*rest, projection))
        skip = None if skip is None else skip.to(dtype)
        if lengths is None:
            recent = recent[:, length:].clone()  # a copy, so that the older inputs are freed
        else:
            recent = take_columns(recent, lengths[:, None] + torch.arange(truncation, device=x.device))
        state = TruncatedEmaState(final_state, forgotten, recent)
        return add_skip(average - old_average, x, skip).to(x.dtype), state
