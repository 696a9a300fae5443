"""Megalodon's moving average: `complex_ema` for a sequence or a segment, `complex_ema_step` for one position."""

import torch

from luna_mega.kernels._op import Op
from luna_mega.kernels.checks import check_average, check_lengths, check_position, check_sequences, count_sequences
from luna_mega.kernels.context_parallel import ContextShard
from luna_mega.kernels.moving_average import export, reference, torch_backend
from luna_mega.kernels.moving_average.coefficients import complex_coefficients, complex_ema_coefficients
from luna_mega.kernels.moving_average.wiring import (
    from_coefficients,
    from_parameters,
    make_average,
    state_after,
    unsupported_reason,
)
from luna_mega.kernels.upcast import upcast_dtype

# The limit of the Triton kernels, which store the states of a channel in registers.
MAX_STATES = 32


def _torch(x, **call):
    run = export.average if torch.compiler.is_exporting() else torch_backend.average
    return run(x, **call)


def _triton(x, **call):
    # Imported lazily because Triton decides at import time whether kernels are interpreted.
    from luna_mega.kernels.moving_average import triton_ops

    return triton_ops.complex_ema(x, **call)


def _triton_step(x, state, coefficients, skip, mask):
    from luna_mega.kernels.moving_average import triton_ops

    return triton_ops.complex_step(x, state, coefficients, skip, mask)


def _unsupported(x, parameters, **_):
    return unsupported_reason(x, parameters, MAX_STATES)


def _reference_step(x, state, parameters, coefficients, skip, mask):
    dtype = upcast_dtype(x, *parameters)
    made = reference.complex_coefficients(*(parameter.to(dtype) for parameter in parameters))
    return reference.complex_step(x, state.to(dtype), made, None if skip is None else skip.to(dtype), mask)


EMA = make_average(
    "complex_ema",
    {
        "reference": from_parameters(reference.complex_ema, reference.complex_coefficients),
        "torch": from_parameters(_torch, complex_coefficients),
        "triton": from_parameters(_triton, complex_coefficients),
    },
    complex_coefficients,
    _unsupported,
    state=3,
)
STEP = Op(
    "complex_ema_step",
    {
        "reference": _reference_step,
        "torch": from_coefficients(torch_backend.complex_step, complex_ema_coefficients),
        "triton": from_coefficients(_triton_step, complex_ema_coefficients),
    },
    _unsupported,
    tokens=("x",),
)


def complex_ema(
    x: torch.Tensor,
    input_logit: torch.Tensor,
    damping_logit: torch.Tensor,
    phase_logit: torch.Tensor,
    projection: torch.Tensor,
    skip: torch.Tensor | None = None,
    *,
    mask: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    return_state: bool = False,
    lengths: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    shard: ContextShard | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute the complex exponential moving average of every channel (Megalodon section 3.2, as in its code).

    With p = sigmoid(input_logit) and q_n = (1 - p sigmoid(damping_logit)) exp(2 pi i n sigmoid(phase_logit) / N), n =
    1..N, the N complex states of a channel follow h_t = q h_{t-1} + p x_t, and the result is
    y_t = Re sum_n projection_n / sqrt(N) h_{t,n} + skip x_t.

    Args:
        x: `[B, T, D]`, T at least 1.
        input_logit: `[D, N]`; logit of the paper's alpha.
        damping_logit: `[D, N]`; logit of the paper's delta.
        phase_logit: `[D]`; theta.
        projection: `[D, N, 2]`, real and imaginary part; gamma (eta of the paper).
        skip: `[D]`; omega. None = no skip.
        mask: `[B, T]` bool, True = keep; None = all. Masked positions contribute 0 to the average and the skip; the
            states still decay there.
        initial_state: `[B, D, N, 2]` float32 or float64, real and imaginary part: the states before the first
            position; None = 0.
        return_state: also return the states after the last position.
        lengths: `[B]` integers: the states are returned after this many positions of each row. The mask must drop the
            positions that follow. None = T.
        cu_seqlens: `[S + 1]` int32 or int64, for S varlen sequences: x is `[1, total, D]`, the mask `[1, total]`, and
            sequence s is `[cu_seqlens[s], cu_seqlens[s+1])`. States are `[S, D, N, 2]`. Each result equals that of a
            separate call.
        max_seqlen: length of the longest sequence; None = computed from `cu_seqlens`, which synchronizes the device.
        shard: context-parallel shard; x and the mask are this rank's part of longer sequences. The ranks exchange
            their states, `[B, D, N, 2]`. None = x is complete. Not supported with states or `cu_seqlens`.
        backend: one of `"auto"`, `"reference"`, `"torch"`, `"triton"`; None = the setting of
            `luna_mega.kernels.api.use_backend` or `LUNA_MEGA_BACKEND`. Triton supports up to 32 states per channel, and
            no float64. The other backends pad varlen sequences, or process them sequentially if there are states.

    Returns:
        `[B, T, D]` in the dtype of `x`, or (output, states `[B, D, N, 2]`) if `return_state` is set. States and
        intermediate values are float32, also under autocast, or float64 if x or a parameter is float64. Gradients flow
        through both states.

    Raises:
        ValueError: if shapes or dtypes do not match, or the backend does not exist or does not support the call.

    Example:
        >>> import torch
        >>> x, logits = torch.randn(2, 100, 8), [torch.randn(8, 4), torch.randn(8, 4), torch.randn(8)]
        >>> parameters = [*logits, torch.randn(8, 4, 2)]
        >>> first, state = complex_ema(x[:, :60], *parameters, return_state=True)
        >>> second = complex_ema(x[:, 60:], *parameters, initial_state=state)
        >>> torch.allclose(torch.cat([first, second], 1), complex_ema(x, *parameters), atol=1e-5)
        True
    """
    check_sequences("complex_ema", x, mask, "channels")
    parameters = (input_logit, damping_logit, phase_logit, projection)
    EMA.check_shard_options(shard, initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens)
    check_lengths("complex_ema", lengths, x, mask, return_state, cu_seqlens)
    sequences, max_seqlen = count_sequences("complex_ema", x, cu_seqlens, max_seqlen, "channels")
    _check("complex_ema", x, parameters, skip, initial_state, sequences)
    call = {
        "x": x,
        "parameters": parameters,
        "skip": skip,
        "mask": mask,
        "initial_state": initial_state,
        "return_state": return_state and lengths is None,
    }
    output, state = EMA(backend, call, cu_seqlens, max_seqlen, shard=shard)
    if lengths is not None:
        state = state_after(EMA, complex_coefficients, backend, call, lengths)
    return (output, state) if return_state else output


def complex_ema_step(
    x: torch.Tensor,
    state: torch.Tensor,
    input_logit: torch.Tensor,
    damping_logit: torch.Tensor,
    phase_logit: torch.Tensor,
    projection: torch.Tensor,
    skip: torch.Tensor | None = None,
    *,
    mask: torch.Tensor | None = None,
    coefficients: tuple[torch.Tensor, ...] | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply `complex_ema` to one further position x `[B, D]`; return y `[B, D]` and the next state `[B, D, N, 2]`.

    Arguments and errors are those of `complex_ema`, with `mask` `[B]`. Masked rows keep their states, and their y is
    undefined. The given state is not modified. `coefficients` are the `complex_ema_coefficients` of the four
    parameters; None = computed, which takes most of the time of a step.
    """
    check_position("complex_ema_step", x, mask, "channels")
    parameters = (input_logit, damping_logit, phase_logit, projection)
    _check("complex_ema_step", x, parameters, skip, state, x.shape[0])
    call = {"x": x, "state": state, "parameters": parameters, "coefficients": coefficients, "skip": skip, "mask": mask}
    return STEP(backend, call)


def _check(op, x, parameters, skip, state, sequences):
    channels, states = x.shape[-1], parameters[0].shape[-1]
    shapes = [list(parameter.shape) for parameter in parameters]
    if shapes != [[channels, states], [channels, states], [channels], [channels, states, 2]]:
        raise ValueError(
            f"{op} needs for {channels} channels two logits [{channels}, N], a phase_logit [{channels}] and a "
            f"projection [{channels}, N, 2], got {shapes}"
        )
    check_average(op, x, parameters, skip, state, [sequences, channels, states, 2])
