"""Code that the public averages share: limits of Triton, varlen calls, states after some positions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import varlen
from .._custom_operator import has_gradients
from .._dispatch import Arguments, Op, without_autocast
from .._export import forbid_capture, is_exporting
from ..columns import to_end
from ..upcast import upcast_dtype
from .coefficients import Coefficients, powers, times

# Real numbers in the states of a channel that the Triton kernels store in registers: 64 real or 32 complex states.
MOST_NUMBERS = 64


def run_average(
    op: Op, coefficients: Callable[..., Coefficients], backend: str | None, call: Arguments, lengths: Tensor | None,
    cu_seqlens: Tensor | None, max_seqlen: int | None,
) -> Any:  # fmt: skip
    """Return the output of a checked call, and on request the states after the first `lengths` `[B]` positions."""
    if lengths is None:
        output, state = op(backend, call, cu_seqlens, max_seqlen)
        return (output, state) if call["return_state"] else output
    return after_lengths(lambda **call: op(backend, call), coefficients, call, lengths)


def after_lengths(
    run: Callable[..., Any], coefficients: Callable[..., Coefficients], call: Arguments, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output of a call, and the states after the first `lengths` `[B]` positions, which the mask keeps."""
    output, _ = run(**call | {"return_state": False})
    # Masked positions do not decay these states.
    rows = {name: to_end(call[name], lengths) for name in ("x", "mask")}
    _, state = run(**call | rows | {"skip": None, "initial_state": None, "return_state": True})
    initial, dtype = call["initial_state"], upcast_dtype(call["x"], *call["parameters"])
    if initial is None:
        return output, state
    with without_autocast(state.device.type):
        of = coefficients(*(parameter.to(dtype) for parameter in call["parameters"]))
        decays = powers(of.log_decay, of.turn, lengths).permute(3, 0, 1, 2)
        return output, state + times(decays, initial.to(dtype).reshape(decays.shape)).reshape(state.shape)


def run_varlen(
    coefficients: Callable[..., Coefficients], op: Op, run: Callable[..., Any], call: Arguments, cu_seqlens: Tensor,
    max_seqlen: int,
) -> Any:  # fmt: skip
    """Compute a varlen call with a backend that requires padded input, or with states one sequence at a time."""
    if call["initial_state"] is None and not call["return_state"]:
        return op.run_padded(run, call, cu_seqlens, max_seqlen)
    x, mask, parameters = call["x"], call["mask"], call["parameters"]
    forbid_capture(x, "states of varlen sequences in PyTorch", "choose the backend 'triton'")
    if (bounds := varlen.values(cu_seqlens)) is not None:
        return varlen.one_by_one(run, call, bounds, parameters[-1].shape, upcast_dtype(x, *parameters))
    kept = varlen.keep(cu_seqlens, max_seqlen)
    kept = kept if mask is None else varlen.pad(mask, cu_seqlens, max_seqlen)
    padded = call | {"x": varlen.pad(x, cu_seqlens, max_seqlen), "mask": kept}
    output, state = after_lengths(run, coefficients, padded, cu_seqlens.diff())
    return varlen.unpad(output, cu_seqlens, x.shape[1]), state


def unsupported(
    x: Tensor, parameters: tuple[Tensor, ...], truncation: int | None = None, max_seqlen: int | None = None,
    **_: object,
) -> str | None:  # fmt: skip
    """Return the reason why the Triton kernels do not support a call, or None."""
    if (reason := unsupported_truncation(max_seqlen or x.shape[1], truncation)) is not None:
        return reason
    states, most = parameters[-1].shape[1], MOST_NUMBERS // (parameters[-1].dim() - 1)
    too_many = f"{states} states per channel are more than {most}" if states > most else None
    return unsupported_dtype(x, parameters) or too_many


def unsupported_truncation(length: int, truncation: int | None) -> str | None:
    """Return `unsupported` of a truncation that has an effect."""
    # Comparing with the length would restrict an exported program to lengths on one side of it.
    if truncation is not None and (is_exporting() or truncation < length):
        return f"its average has no truncation, and truncation={truncation} is below the length {length}"
    return None


def unsupported_dtype(x: Tensor, parameters: tuple[Tensor, ...], **_: object) -> str | None:
    """Return `unsupported` of a step with any number of states."""
    return "x or a parameter is float64" if upcast_dtype(x, *parameters).itemsize == 8 else None


def complex_step_triton(
    x: Tensor, state: Tensor, coefficients: tuple[Tensor, ...], skip: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return `torch_backend.complex_step`, without gradients."""
    # Imported lazily because Triton decides at import time whether kernels are interpreted.
    from . import triton_ops

    return triton_ops.complex_step(x, state, *coefficients, skip, mask)


def both_directions(
    average: Callable[..., tuple[Tensor, Tensor | None]], x: Tensor, coefficients: Coefficients, skip: Tensor | None,
    mask: Tensor | None, cu_seqlens: Tensor | None = None, **call: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the result of `average`, with the skip of real states and the second direction of complex ones."""
    of, channels = coefficients, x.shape[2]
    bounds = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
    if skip is None if of.turn is None else len(of.log_decay) == channels:
        return average(x, coefficients=of, skip=skip, mask=mask, **call, **bounds)
    wide = x.to(of.log_decay.dtype)  # rounded once, after the sum
    if of.turn is None and skip is not None:
        output, state = average(wide, coefficients=of, skip=None, mask=mask, **call, **bounds)
        kept = wide if mask is None else wide.masked_fill(~mask[..., None], 0.0)
        return torch.addcmul(output, skip, kept).to(x.dtype), state
    first, second = of.rows(slice(channels)), of.rows(slice(channels, None))
    output, _ = average(wide, coefficients=first, skip=skip, mask=mask, **call, **bounds)
    mask, bounds = None if mask is None else mask.flip(1), {n: x.shape[1] - y.flip(0) for n, y in bounds.items()}
    from_end, _ = average(wide.flip(1), coefficients=second, skip=None, mask=mask, **call, **bounds)
    return (output + from_end.flip(1)).to(x.dtype), None


def needs_gradients(
    x: Tensor, state: Tensor, parameters: tuple[Tensor, ...], coefficients: tuple[Tensor, ...] | None,
    skip: Tensor | None, **_: object,
) -> bool:  # fmt: skip
    """Return whether gradients of a step may be required, which the Triton kernels do not compute."""
    return has_gradients((x, state, skip, *parameters, *(coefficients or ())))
