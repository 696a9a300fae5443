"""Calls that an implementation of the recurrence computes as several simpler ones."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .._dispatch import Arguments
from ..sequences import Sequences
from .coefficients import Coefficients


def both_directions(
    average: Callable[..., tuple[Tensor, Tensor | None]], x: Tensor, coefficients: Coefficients, skip: Tensor | None,
    sequences: Sequences, **call: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Call `average`, and add the linear skip of real states and the second direction of complex states."""
    channels, mask = x.shape[2], sequences.mask
    if skip is None if coefficients.turns is None else len(coefficients.log_decay) == channels:
        return average(x, coefficients, skip, sequences, **call)
    wide = x.to(coefficients.log_decay.dtype)  # rounded only after the sum of both terms
    if coefficients.turns is None and skip is not None:
        output, state = average(wide, coefficients, None, sequences, **call)
        signal = wide if mask is None else wide.masked_fill(~mask[..., None], 0.0)
        return torch.addcmul(output, skip, signal).to(x.dtype), state
    first, second = coefficients.channel_rows(slice(channels)), coefficients.channel_rows(slice(channels, None))
    output, _ = average(wide, first, skip, sequences, **call)
    bounds = None if sequences.bounds is None else x.shape[1] - sequences.bounds.flip(0)
    reversed_order = sequences._replace(mask=None if mask is None else mask.flip(1), bounds=bounds)
    from_end, _ = average(wide.flip(1), second, None, reversed_order, **call)
    return (output + from_end.flip(1)).to(x.dtype), None


def one_by_one(
    run: Callable[..., Any], call: Arguments, bounds: list[int], shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute a varlen call with states one sequence at a time, because padding would decay the states.

    `run` returns the output and the last state. Without `initial_state`, states are initially 0, with this `shape` and
    `dtype`.
    """
    x, mask, initial = call["x"], call["sequences"].mask, call["initial_state"]
    outputs, last_states = [], []
    if initial is None:
        initial = x.new_zeros(len(bounds) - 1, *shape, dtype=dtype)
    for index, (start, end) in enumerate(pairwise(bounds)):
        state = initial[index : index + 1]
        if start < end:
            part = {"x": x[:, start:end], "sequences": Sequences(None if mask is None else mask[:, start:end])}
            output, state = run(**call | part | {"initial_state": state, "return_state": True})
            outputs.append(output)
        last_states.append(state)
    return torch.cat(outputs, 1), torch.cat(last_states)
