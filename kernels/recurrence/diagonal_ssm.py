"""Diagonal state space models: `diagonal_ssm` for a sequence or a segment, `diagonal_ssm_step` for one position."""

import torch
from torch import Tensor

from .._dispatch import Arguments, without_autocast
from ..checks import check_average, check_directions, check_position, check_sequences
from ..sequences import ALL_TOKENS, Sequences
from ..upcast import as_complex, upcast
from .coefficients import LEAST, coefficients_of_steps, diagonal_coefficients
from .op import Recurrence

METHODS = ("zoh", "bilinear", "none")
DIAGONAL = Recurrence("diagonal_ssm", diagonal_coefficients)
AVERAGE, STEP = DIAGONAL.average(), DIAGONAL.step()


def discretize(
    a: Tensor, step: Tensor, weight: Tensor | None = None, method: str = "zoh"
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Convert dh/dt = a h + x, y = Re sum_n weight_n h_n to the `log_decay`, `phase` and `weight` of `diagonal_ssm`.

    Args:
        a: `[R, N]`, complex or real, with real parts below 0.
        step: `[R]` or `[R, N]`, real: the time between two positions.
        weight: `[R, N]`, the product of B and C; None = 1. If `a` contains one number of each conjugate pair, as in
            S4D, pass 2 B C.
        method: `"zoh"` (zero-order hold), `"bilinear"`, or `"none"`: q = exp(step a) with the given weight, as in DSS.

    Returns:
        (`log_decay`, `phase`, `weight`) in float32, complex64 or wider. `phase` is None if a is real, except for
        `"bilinear"`, which returns a phase of 0 or pi. The weight is complex if there is a phase.

    Raises:
        ValueError: if shapes do not match, or there is no such method.

    Source: Gu et al. 2022, "On the Parameterization and Initialization of Diagonal State Space Models", section 3.
    """
    if method not in METHODS:
        raise ValueError(f"there is no method {method!r} of discretize; choose one of {', '.join(METHODS)}")
    fits = a.dim() == 2 and (step.shape == a.shape or step.shape == a.shape[:1])
    if not fits or weight is not None and weight.shape != a.shape:
        shapes = ", ".join(str(None if x is None else list(x.shape)) for x in (a, step, weight))
        raise ValueError(f"discretize needs a [R, N], a step [R] or [R, N], and a weight [R, N] or None, got {shapes}")
    with without_autocast(a.device.type):
        a, step = _upcast(a), upcast(step if step.dim() == 2 else step[:, None])
        scaled = a * step
        weight = torch.ones_like(scaled) if weight is None else _upcast(weight)
        if method == "bilinear":
            half = 0.5 * scaled
            q, weight = (1.0 + half) / (1.0 - half), weight * step / (1.0 - half)
            log_decay = torch.log(q.abs().clamp(min=LEAST))  # finite if q = 0
            return log_decay, torch.angle(q), weight if weight.is_complex() else weight + 0j
        if method == "zoh":
            weight = weight * torch.expm1(scaled) / a
        if not scaled.is_complex():
            return scaled, None, weight
        return scaled.real, scaled.imag, weight


def _upcast(x: Tensor) -> Tensor:
    return x if x.is_complex() else upcast(x)


def diagonal_ssm(
    x: Tensor,
    log_decay: Tensor,
    phase: Tensor | None,
    weight: Tensor,
    skip: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute a diagonal state space model with N states for every channel: S4D, DSS, and averages of several decays.

    With q = exp(log_decay + i phase), the N states of a channel follow h_t = q h_{t-1} + x_t, and the result is
    y_t = Re sum_n weight_n h_{t,n} + skip x_t.

    Args:
        x: `[B, T, D]`, T at least 1.
        log_decay: `[R, N]`, finite and at most 0. R = D: causal. R = 2 D: bidirectional; rows from D on belong to a
            second model that runs from the end. Both include the position itself.
        phase: `[R, N]`, in radians per position; None = real states.
        weight: product of the input and output weights: `[R, N]`, complex, or its real pairs `[R, N, 2]`
            (`torch.view_as_real`), for which `torch.compile` generates code. Without a phase: `[R, N]`, real.
        skip: `[D]`; None = no skip.
        mask: `[B, T]` bool, True = keep; None = all. Masked positions contribute 0 to the states and the skip. The
            states still decay there.
        initial_state: causal only: the states before the first position, `[B, D, N]`, real or complex as the weight, or
            pairs `[B, D, N, 2]`; float32, float64, complex64 or complex128. None = 0.
        return_state: causal only: also return the states after the last position.
        lengths: as in `damped_ema`.
        cu_seqlens: as in `damped_ema`; states are `[S, D, N]` or `[S, D, N, 2]`.
        max_seqlen: as in `damped_ema`.
        backend: as in `damped_ema`. Triton supports up to 64 real or 32 complex states per channel, and no float64.

    Returns:
        `[B, T, D]` in the dtype of `x`, or (output, states) if `return_state` is set. States are pairs if the weights
        are. States and intermediate values are float32 or complex64, also under autocast, or float64 or complex128 if x
        or a parameter is. Gradients flow through the initial and the returned states.

    Raises:
        ValueError: if shapes or dtypes do not match, states are used with two directions, or the backend does not exist
            or does not support the call.

    Example:
        >>> import torch
        >>> a = torch.complex(torch.full((8, 4), -0.5), torch.pi * torch.arange(4.0).expand(8, 4))
        >>> model = discretize(a, torch.full((8,), 0.01), 2 * torch.randn(8, 4, dtype=torch.complex64))
        >>> x = torch.randn(2, 100, 8)
        >>> first, state = diagonal_ssm(x[:, :60], *model, return_state=True)
        >>> second = diagonal_ssm(x[:, 60:], *model, initial_state=state)
        >>> torch.allclose(torch.cat([first, second], 1), diagonal_ssm(x, *model), atol=1e-4)
        True
    """
    options: Arguments = {"lengths": lengths, "return_state": return_state}
    sequences = check_sequences("diagonal_ssm", x, mask, cu_seqlens, max_seqlen, **options)
    parameters = _parameters("diagonal_ssm", log_decay, phase, weight)
    check_directions("diagonal_ssm", x, log_decay, "log_decay", return_state or initial_state is not None)
    initial_state = _pairs(initial_state)
    _check("diagonal_ssm", x, parameters, skip, initial_state, sequences)
    result = DIAGONAL.run(AVERAGE, backend, x, parameters, skip, sequences, initial_state, return_state)
    return (result[0], _numbers(result[1], weight)) if return_state else result


def diagonal_ssm_step(
    x: Tensor,
    state: Tensor,
    log_decay: Tensor,
    phase: Tensor | None,
    weight: Tensor,
    skip: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    coefficients: tuple[Tensor, ...] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply the causal `diagonal_ssm` to one further position x `[B, D]`; return y `[B, D]` and the next state.

    For arguments and errors, see `diagonal_ssm`; R = D, and `mask` is `[B]`. Masked rows keep their states, and their y
    is undefined. `state` is not modified. `coefficients` are the `diagonal_ssm_coefficients` of the parameters;
    None = computed, which takes most of the time of a step. With the backends `"native"` and `"triton"`, steps whose
    gradients are required run in PyTorch; with `"triton"`, steps of real states do as well.
    """
    check_position("diagonal_ssm_step", x, mask, "channels")
    parameters = _parameters("diagonal_ssm_step", log_decay, phase, weight)
    if log_decay.shape[:1] != x.shape[1:]:
        raise ValueError(
            f"diagonal_ssm_step needs one row of log_decay per channel, got {len(log_decay)} rows for {x.shape[1]} "
            "channels"
        )
    pairs = _pairs(state)
    _check("diagonal_ssm_step", x, parameters, skip, pairs, ALL_TOKENS, coefficients)
    call = {"x": x, "state": pairs, "parameters": parameters, "coefficients": coefficients, "skip": skip, "mask": mask}
    output, state = STEP(backend, call)
    return output, _numbers(state, weight)


def diagonal_ssm_coefficients(
    log_decay: Tensor, phase: Tensor | None, weight: Tensor, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """Return the coefficients that `diagonal_ssm_step` computes from its parameters.

    They are valid until the parameters change: q - 1, 1, and the weight of the state, real `[D, N]`, or real pairs
    `[D, N, 2]` if there is a phase. `dtype`: the dtype of the states, float32 or float64.
    """
    parameters = _parameters("diagonal_ssm_coefficients", log_decay, phase, weight)
    return coefficients_of_steps(diagonal_coefficients, dtype, *parameters)


def _pairs(numbers: Tensor | None) -> Tensor | None:
    """Return complex numbers as real pairs; real tensors are unchanged."""
    return torch.view_as_real(numbers.resolve_conj()) if numbers is not None and numbers.is_complex() else numbers


def _numbers(state: Tensor, weight: Tensor) -> Tensor:
    """Return a state as complex numbers if the weight is complex."""
    return as_complex(state) if weight.is_complex() else state


def _parameters(op: str, log_decay: Tensor, phase: Tensor | None, weight: Tensor) -> tuple[Tensor, ...]:
    """Return log_decay, the phase if there is one, and the weight as real numbers, after checking their shapes."""
    shape, is_complex = log_decay.shape, weight.is_complex()
    if len(shape) != 2:
        raise ValueError(f"{op} needs a log_decay [rows, N], got {list(shape)}")
    if phase is not None and phase.shape != shape:
        raise ValueError(f"{op} needs a phase {list(shape)}, the shape of log_decay, got {list(phase.shape)}")
    if phase is None and (is_complex or weight.shape != shape):
        needed = f"a real weight {list(shape)} if phase is None"
    elif phase is not None and weight.shape != (shape if is_complex else (*shape, 2)):
        needed = f"a complex weight {list(shape)} or real pairs {[*shape, 2]} with a phase"
    else:
        weight = torch.view_as_real(weight.resolve_conj()) if is_complex else weight
        return (log_decay, weight) if phase is None else (log_decay, phase, weight)
    raise ValueError(f"{op} needs {needed}, got {weight.dtype} {list(weight.shape)}")


def _check(
    op: str, x: Tensor, parameters: tuple[Tensor, ...], skip: Tensor | None, state: Tensor | None, sequences: Sequences,
    coefficients: tuple[Tensor, ...] | None = None,
) -> None:  # fmt: skip
    check_average(op, x, parameters, skip, state, sequences, [x.shape[-1], *parameters[-1].shape[1:]], coefficients)
