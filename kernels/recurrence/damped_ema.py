"""Mega's moving average: `damped_ema` for a sequence or a segment, `damped_ema_step` for one position."""

from typing import Any

import torch
from torch import Tensor

from .._dispatch import Arguments
from ..checks import check_average, check_directions, check_mask, check_sequences
from ..sequences import ALL_TOKENS, Sequences
from .coefficients import damped_coefficients
from .op import Recurrence
from .reference import keep_states
from .truncated import TruncatedEmaState, truncated

DAMPED = Recurrence("damped_ema", damped_coefficients, silu=True, fused=("native", "triton", "triton_step"))
AVERAGE, STEP = DAMPED.average(), DAMPED.step()


def damped_ema(
    x: Tensor,
    input_logit: Tensor,
    damping_logit: Tensor,
    expansion: Tensor,
    projection: Tensor,
    skip: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    shift: bool = False,
    truncation: int | None = None,
    initial_state: Tensor | TruncatedEmaState | None = None,
    return_state: bool = False,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor | TruncatedEmaState]:
    """Compute the damped multi-dimensional exponential moving average of every channel (Mega section 3.1).

    With p = sigmoid(input_logit) and q = 1 - p sigmoid(damping_logit), the N states of a channel follow
    h_t = q h_{t-1} + p expansion x_t, and the result is y_t = sum_n projection_n / sqrt(N) h_{t,n}.

    Args:
        x: `[B, T, D]`, T at least 1.
        input_logit: `[R, N]`; logit of the paper's alpha. R = D: causal. R = 2 D: bidirectional; rows from D on belong
            to the average from the end.
        damping_logit: `[R, N]`; logit of the paper's delta.
        expansion: `[R, N]`; beta of the paper.
        projection: `[R, N]`; eta of the paper.
        skip: `[D]`; if given, the result is silu(y + skip x), otherwise y.
        mask: `[B, T]` bool, True = keep; None = all. Masked positions contribute 0 to the average (the states still
            decay there). The skip also uses x at masked positions, with 0 instead of infinity and NaN.
        shift: bidirectional only. The average from the end starts at the next position, so that every position is
            included once; otherwise the position itself is included in both directions.
        truncation: exclude inputs that are at least this many positions away; None or below 1: no truncation.
        initial_state: `[B, D, N]` float32 or float64, causal only: the states before the first position; None = 0. With
            a truncation it is a `TruncatedEmaState` returned by an earlier call.
        return_state: causal only: also return the states after the last position.
        lengths: `[B]` int32 or int64, from 0 to T: return the states after this many positions of each row. The mask
            must drop all later positions. None = T.
        cu_seqlens: `[S + 1]` int32 or int64, for S varlen sequences: x is `[1, total, D]`, the mask `[1, total]`, and
            sequence s is `[cu_seqlens[s], cu_seqlens[s+1])`. States are `[S, D, N]`. Each result equals the
            result of a separate call.
        max_seqlen: length of the longest sequence; None = computed from `cu_seqlens`, which synchronizes the device.
            Compiled programs with `truncation` require `max_seqlen`.
        backend: one of `"auto"`, `"reference"`, `"torch"`, `"native"` (the C library on CPUs), `"triton"`; None = the
            setting of `use_backend` or `LUNA_MEGA_BACKEND`. `"triton"` supports up to 64 states per channel. `"triton"`
            and `"native"` support neither truncation nor float64. `"reference"` and `"torch"` pad varlen sequences, or
            process them sequentially if there are states.

    Returns:
        `[B, T, D]` in the dtype of `x`, or (output, states `[B, D, N]`) if `return_state` is set. States and
        intermediate values are float32, also under autocast, or float64 if x or a parameter is float64. Gradients flow
        through the initial and the returned states.

    Raises:
        ValueError: if shapes or dtypes do not match, `shift` is set without a second direction, states are used with
            two directions, or the backend does not exist or does not support the call.

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
    options: Arguments = {"lengths": lengths, "return_state": return_state}
    options["compares_length"] = truncation is not None
    sequences = check_sequences("damped_ema", x, mask, cu_seqlens, max_seqlen, **options)
    stateful = return_state or initial_state is not None
    check_directions("damped_ema", x, input_logit, "parameters", stateful)
    if shift and len(input_logit) == x.shape[2]:
        raise ValueError("damped_ema: shift=True needs two directions, but these parameters are causal; omit shift")
    if truncation is None and isinstance(initial_state, TruncatedEmaState):
        raise ValueError("damped_ema: initial_state is a TruncatedEmaState; pass its truncation too")
    if mask is not None and skip is not None:
        x = torch.where(mask[..., None], x, x.nan_to_num(0.0, 0.0, 0.0))  # the skip uses x at masked positions
    parameters = (input_logit, damping_logit, expansion, projection)
    if truncation is not None and stateful:
        if cu_seqlens is not None:
            raise ValueError(
                "damped_ema: truncation with states does not support cu_seqlens; omit truncation or cu_seqlens"
            )

        def run_again(x: Tensor, state: Tensor | None, parameters: tuple[Tensor, ...]) -> Any:
            row_mask = None if lengths is None else mask
            again: Arguments = {"initial_state": state, "return_state": True, "lengths": lengths, "backend": backend}
            return damped_ema(x, *parameters, mask=row_mask, **again)

        output, state = truncated(run_again, x, parameters, skip, mask, truncation, initial_state, lengths)
        return (output, state) if return_state else output
    _check("damped_ema", x, parameters, skip, initial_state, sequences)
    return DAMPED.run(AVERAGE, backend, x, parameters, skip, sequences, initial_state, return_state, shift, truncation)


def damped_ema_step(
    x: Tensor,
    state: Tensor | TruncatedEmaState,
    input_logit: Tensor,
    damping_logit: Tensor,
    expansion: Tensor,
    projection: Tensor,
    skip: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    coefficients: tuple[Tensor, ...] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | TruncatedEmaState]:
    """Apply the causal `damped_ema` to one further position x `[B, D]`; return y `[B, D]` and the state `[B, D, N]`.

    For arguments and errors, see `damped_ema`; R = D, and `mask` is `[B]`. Masked rows keep their states, and
    their y is undefined. `state` is not modified. A `TruncatedEmaState` truncates at the length of its inputs, and does
    not support `coefficients`. `coefficients` are the `ema_coefficients` of the four parameters; None = computed, which
    takes half of the time of a step. With the backends `"native"` and `"triton"`, steps whose gradients are required
    run in PyTorch.
    """
    if x.dim() != 2 or input_logit.shape[:1] != x.shape[1:]:
        raise ValueError(
            f"damped_ema_step needs x [batch, channels] and one row of parameters per channel, got {list(x.shape)} and "
            f"{list(input_logit.shape)}"
        )
    check_mask("damped_ema_step", mask, x.shape[:1])
    parameters = (input_logit, damping_logit, expansion, projection)
    if isinstance(state, TruncatedEmaState):
        if coefficients is not None:
            raise ValueError("damped_ema_step: `coefficients` do not apply to a `TruncatedEmaState`; omit them")

        def run_again(x: Tensor, state: Tensor, parameters: tuple[Tensor, ...]) -> tuple[Tensor, Any]:
            output, after = damped_ema_step(x[:, 0], state, *parameters, backend=backend)
            return output[:, None], after

        column = None if mask is None else mask[:, None]
        signal = x if mask is None else x.masked_fill(~mask[:, None], 0.0)
        output, after = truncated(run_again, signal[:, None], parameters, skip, column, state.inputs.shape[1], state)
        pairs = zip(after, state, strict=True)
        return output[:, 0], TruncatedEmaState(*(keep_states(*pair, mask) for pair in pairs))
    _check("damped_ema_step", x, parameters, skip, state, ALL_TOKENS, coefficients)
    call = {"x": x, "state": state, "parameters": parameters, "coefficients": coefficients, "skip": skip, "mask": mask}
    return STEP(backend, call)


def _check(
    op: str, x: Tensor, parameters: tuple[Tensor, ...], skip: Tensor | None, state: Any, sequences: Sequences,
    coefficients: tuple[Tensor, ...] | None = None,
) -> None:  # fmt: skip
    input_logit, damping_logit, expansion, projection = parameters
    if input_logit.dim() != 2 or not input_logit.shape == damping_logit.shape == expansion.shape == projection.shape:
        raise ValueError(
            f"{op} needs input_logit, damping_logit, expansion and projection of one shape [rows, N], got "
            f"{[list(parameter.shape) for parameter in parameters]}"
        )
    check_average(op, x, parameters, skip, state, sequences, [x.shape[-1], input_logit.shape[1]], coefficients)
