"""Mega's moving average: `damped_ema` over a sequence or a segment of one, `damped_ema_step` over one position."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch

from luna_mega.kernels import _dispatch, varlen
from luna_mega.kernels.damped_ema import reference, torch_backend


def _triton(x, coefficients, skip, mask, shift, truncation, initial_state, return_state, cu_seqlens, max_seqlen):
    from luna_mega.kernels.damped_ema import triton_ops

    return triton_ops.damped_ema(
        x, coefficients, skip, mask, shift, initial_state, return_state, cu_seqlens, max_seqlen
    )


def _triton_step(x, state, parameters, skip, mask):
    from luna_mega.kernels.damped_ema import triton_ops

    return triton_ops.step(x, state, parameters, skip, mask)


BACKENDS: dict[str, Callable] = {
    "reference": reference.damped_ema,
    "torch": torch_backend.damped_ema,
    "triton": _triton,
}
STEP_BACKENDS: dict[str, Callable] = {"reference": reference.step, "torch": torch_backend.step, "triton": _triton_step}
# Of the Triton kernels, which hold the states of a channel in registers.
MAX_STATES = 64


class TruncatedEmaState(NamedTuple):
    """What a truncated average keeps of the positions so far: the average of all, less that of what is older.

    average `[B, D, N]`: states of all positions; forgotten `[B, D, N]`: of those that are `truncation` away or more;
    inputs `[B, truncation, D]`: those in between, which will be forgotten next.
    """

    average: torch.Tensor
    forgotten: torch.Tensor
    inputs: torch.Tensor


def damped_ema(
    x: torch.Tensor,
    input_logit: torch.Tensor,
    damping_logit: torch.Tensor,
    expansion: torch.Tensor,
    projection: torch.Tensor,
    skip: torch.Tensor | None = None,
    *,
    mask: torch.Tensor | None = None,
    shift: bool = False,
    truncation: int | None = None,
    initial_state: torch.Tensor | TruncatedEmaState | None = None,
    return_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | TruncatedEmaState]:
    """Damped multi-dimensional exponential moving average of every channel (Mega section 3.1).

    With p = sigmoid(input_logit) and q = 1 - p sigmoid(damping_logit), the N states of a channel follow
    h_t = q h_{t-1} + p expansion x_t, and the result is y_t = sum_n projection_n / sqrt(N) h_{t,n}.

    Args:
        x: `[B, T, D]`, T at least 1.
        input_logit, damping_logit, expansion, projection: `[R, N]`; alpha and delta (as logits), beta and eta of the
            paper. R = D: causal. R = 2 D: bidirectional, rows D and on are the average that runs from the end.
        skip: `[D]`; with it the result is silu(y + skip x), without it y.
        mask: `[B, T]` bool, True = keep; None = all. Other positions enter the average as 0 (the states still decay
            there); the skip sees x as it is.
        shift: bidirectional only. The average from the end starts at the next position, so that a position counts
            once; without it the position itself counts in both directions.
        truncation: the average forgets what is this many positions away or more; None or a number below 1: nothing.
        initial_state: `[B, D, N]` float32 or float64, causal only: the states before the first position; None = 0. With
            a truncation a `TruncatedEmaState`, which an earlier call has returned.
        return_state: causal only: return the states behind the last position as well.
        cu_seqlens: `[S + 1]` int32 or int64: x is S sequences laid end to end, `[1, total, D]`, the mask `[1, total]`,
            sequence s is `[cu_seqlens[s], cu_seqlens[s+1])`; states are then `[S, D, N]`, and each sequence gets what
            it would get alone.
        max_seqlen: the longest of them; None: read from `cu_seqlens`, which waits for the device.
        backend: one of `"auto"`, `"reference"`, `"torch"`, `"triton"`; None = as `luna_mega.kernels.api.use_backend`
            and `LUNA_MEGA_BACKEND` say. Triton has kernels for up to 64 states per channel, without truncation and not
            for float64. The others run packed sequences padded, those with states one after the other.

    Returns:
        `[B, T, D]` in the dtype of `x`; with `return_state` (that, states `[B, D, N]`). States and everything up to
        the result are computed in float32, also under autocast, in float64 where x or a parameter is float64.
        Gradients flow through both states.

    Raises:
        ValueError: shapes or dtypes do not fit together, `shift` without a second direction, states with one, or the
            backend does not exist or cannot run the call.

    Example:
        >>> import torch
        >>> x, parameters = torch.randn(2, 100, 8), [torch.randn(8, 4) for _ in range(4)]
        >>> first, state = damped_ema(x[:, :60], *parameters, return_state=True)
        >>> second = damped_ema(x[:, 60:], *parameters, initial_state=state)
        >>> torch.allclose(torch.cat([first, second], 1), damped_ema(x, *parameters), atol=1e-5)
        True
    """
    if truncation is not None and truncation < 1:
        truncation = None
    _check_sequence(x, input_logit, mask, shift, truncation, initial_state, return_state)
    parameters = (input_logit, damping_logit, expansion, projection)
    if truncation is not None and (return_state or initial_state is not None):
        if cu_seqlens is not None:
            raise ValueError("damped_ema: ragged sequences have no truncated state; leave truncation or cu_seqlens out")

        def run_again(x, state, parameters):
            return damped_ema(x, *parameters, initial_state=state, return_state=True, backend=backend)

        output, state = _truncated(run_again, x, parameters, skip, mask, truncation, initial_state)
        return (output, state) if return_state else output
    sequences, longest = x.shape[:2]
    if cu_seqlens is not None:
        if sequences != 1:
            raise ValueError(f"damped_ema needs x [1, total, channels] with cu_seqlens, got {list(x.shape)}")
        longest = varlen.check("damped_ema", cu_seqlens, max_seqlen, x.shape[1])
        sequences = len(cu_seqlens) - 1
    elif max_seqlen is not None:
        raise ValueError("damped_ema: max_seqlen belongs to cu_seqlens; leave it out")
    _check("damped_ema", x, parameters, skip, initial_state, sequences)
    unsupported = _unsupported(x, parameters, truncation, longest)
    chosen = _dispatch.select("damped_ema", BACKENDS, backend, x.device, unsupported)
    run = BACKENDS[chosen]
    with _dispatch.without_autocast(x.device.type):
        coefficients, skip, initial_state = _full_precision(x, parameters, skip, initial_state)
        arguments = (coefficients, skip, mask, shift, truncation, initial_state, return_state)
        if chosen == "triton":
            output, state = run(x, *arguments, cu_seqlens, longest)
        elif cu_seqlens is None:
            output, state = run(x, *arguments)
        else:
            output, state = _packed(run, x, *arguments, cu_seqlens, longest)
    return (output, state) if return_state else output


def damped_ema_step(
    x: torch.Tensor,
    state: torch.Tensor | TruncatedEmaState,
    input_logit: torch.Tensor,
    damping_logit: torch.Tensor,
    expansion: torch.Tensor,
    projection: torch.Tensor,
    skip: torch.Tensor | None = None,
    *,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | TruncatedEmaState]:
    """One position of the causal `damped_ema`: (y `[B, D]`, next state `[B, D, N]`) of x `[B, D]` and the state before.

    Arguments and errors as there, with R = D and `mask` `[B]`. The state given is not changed. With a
    `TruncatedEmaState` the average is truncated as that says.
    """
    if x.dim() != 2 or input_logit.shape[:1] != x.shape[1:]:
        raise ValueError(
            f"damped_ema_step needs x [batch, channels] and one row of parameters per channel, got {list(x.shape)} and "
            f"{list(input_logit.shape)}"
        )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:1]):
        raise ValueError(f"damped_ema_step needs a bool mask [{len(x)}], got {mask.dtype} {list(mask.shape)}")
    parameters = (input_logit, damping_logit, expansion, projection)
    if isinstance(state, TruncatedEmaState):

        def run_again(x, state, parameters):
            output, state = damped_ema_step(x[:, 0], state, *parameters, backend=backend)
            return output[:, None], state

        mask = None if mask is None else mask[:, None]
        output, state = _truncated(run_again, x[:, None], parameters, skip, mask, state.inputs.shape[1], state)
        return output[:, 0], state
    _check("damped_ema_step", x, parameters, skip, state, len(x))
    unsupported = "x or a parameter is float64" if _dtype(x, parameters) == torch.float64 else None
    chosen = _dispatch.select("damped_ema_step", STEP_BACKENDS, backend, x.device, unsupported)
    run = STEP_BACKENDS[chosen]
    with _dispatch.without_autocast(x.device.type):
        if chosen == "triton":
            return run(x, state.to(torch.float32), parameters, skip, mask)
        coefficients, skip, state = _full_precision(x, parameters, skip, state)
        return run(x, state, coefficients, skip, mask)


def _truncated(run, x, parameters, skip, mask, truncation, state):
    """The average of the last `truncation` inputs by `run`, which returns that of all, and its state.

    From that of all goes what is older: the average of the inputs delayed by `truncation`, decayed by q^truncation.
    """
    batch, length, channels = x.shape
    if state is None:
        state = TruncatedEmaState(None, None, x.new_zeros(batch, truncation, channels, dtype=_dtype(x, parameters)))
    needed = [batch, truncation, channels]
    if not isinstance(state, TruncatedEmaState) or list(state.inputs.shape) != needed:
        raise ValueError(
            f"damped_ema with truncation={truncation} needs a TruncatedEmaState with inputs {needed}, got "
            f"{list(state.inputs.shape) if isinstance(state, TruncatedEmaState) else type(state).__name__}"
        )
    with _dispatch.without_autocast(x.device.type):
        dtype = _dtype(x, parameters)
        kept = x.to(dtype) if mask is None else x.to(dtype).masked_fill(~mask[..., None], 0.0)
        recent = torch.cat((state.inputs, kept), dim=1)
        average, now = run(kept, state.average, parameters)
        *rest, projection = (parameter.to(dtype) for parameter in parameters)
        projection = projection * torch.exp(truncation * reference.log_decay(*rest[:2]))
        late, forgotten = run(recent[:, :length], state.forgotten, (*rest, projection))
        skip = None if skip is None else skip.to(dtype)
        # A copy, so that what is cut off is freed.
        state = TruncatedEmaState(now, forgotten, recent[:, length:].clone())
        return reference.finish(average - late, x, skip), state


def _packed(run, x, coefficients, skip, mask, shift, truncation, initial_state, return_state, cu_seqlens, max_seqlen):
    """Sequences laid end to end, on a backend that knows rows of one length."""
    if initial_state is None and not return_state:
        keep = varlen.keep(cu_seqlens, max_seqlen)
        mask = keep if mask is None else keep & varlen.pad(mask, cu_seqlens, max_seqlen)
        output, _ = run(varlen.pad(x, cu_seqlens, max_seqlen), coefficients, skip, mask, shift, truncation)
        return varlen.unpad(output, cu_seqlens, x.shape[1]), None
    # Padding behind a sequence would decay its states.
    bounds, outputs, states = cu_seqlens.tolist(), [], []
    if initial_state is None:
        initial_state = coefficients[0].new_zeros(len(bounds) - 1, *coefficients[0].shape)
    for index, (start, end) in enumerate(pairwise(bounds)):
        state = initial_state[index : index + 1]
        if start < end:
            part = None if mask is None else mask[:, start:end]
            output, state = run(x[:, start:end], coefficients, skip, part, shift, truncation, state, True)
            outputs.append(output)
        states.append(state)
    return torch.cat(outputs, 1), torch.cat(states)


def _unsupported(x, parameters, truncation, length):
    if _dtype(x, parameters) == torch.float64:
        return "x or a parameter is float64"
    # Comparing with the length would tie an exported program to lengths on one side of it.
    if truncation is not None and (torch.compiler.is_exporting() or truncation < length):
        return f"its average never forgets, and truncation={truncation} is below the length {length}"
    states = parameters[0].shape[1]
    return f"{states} states per channel are more than {MAX_STATES}" if states > MAX_STATES else None


def _dtype(x, parameters):
    dtype = torch.float32
    for tensor in (x, *parameters):
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _full_precision(x, parameters, skip, state):
    dtype = _dtype(x, parameters)
    coefficients = reference.coefficients(*(parameter.to(dtype) for parameter in parameters))
    return coefficients, *(None if tensor is None else tensor.to(dtype) for tensor in (skip, state))


def _check_sequence(x, input_logit, mask, shift, truncation, initial_state, return_state):
    if x.dim() != 3 or x.shape[1] < 1:
        raise ValueError(f"damped_ema needs x [batch, length, channels] of length 1 or more, got {list(x.shape)}")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:2]):
        raise ValueError(
            f"damped_ema needs a bool mask of shape {list(x.shape[:2])} (True = keep), got {mask.dtype} "
            f"{list(mask.shape)}"
        )
    channels, rows = x.shape[2], len(input_logit)
    if rows not in (channels, 2 * channels):
        raise ValueError(
            f"damped_ema: {rows} rows of parameters fit neither {channels} channels (causal) nor twice that "
            "(bidirectional)"
        )
    if shift and rows == channels:
        raise ValueError("damped_ema: shift=True needs two directions, these parameters are causal; leave shift out")
    stateful = return_state or initial_state is not None
    if stateful and rows != channels:
        raise ValueError("damped_ema: a bidirectional average has no state; leave out initial_state and return_state")
    if truncation is None and isinstance(initial_state, TruncatedEmaState):
        raise ValueError("damped_ema: initial_state is a TruncatedEmaState; pass its truncation too")


def _check(op, x, parameters, skip, state, sequences):
    shapes = [list(parameter.shape) for parameter in parameters]
    if parameters[0].dim() != 2 or any(shape != shapes[0] for shape in shapes):
        raise ValueError(
            f"{op} needs input_logit, damping_logit, expansion and projection of one shape [rows, N], got {shapes}"
        )
    if not all(tensor.is_floating_point() for tensor in (x, *parameters)):
        raise ValueError(f"{op} needs floating-point x and parameters, got {[t.dtype for t in (x, *parameters)]}")
    if skip is not None and skip.shape != x.shape[-1:]:
        raise ValueError(f"{op} needs a skip of shape {list(x.shape[-1:])}, got {list(skip.shape)}")
    if state is not None:
        needed = [sequences, x.shape[-1], shapes[0][1]]
        if list(state.shape) != needed or state.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{op} needs a float32 or float64 state {needed}, got {state.dtype} {list(state.shape)}")
