"""Megalodon's moving average: `complex_ema` for a sequence or a segment, `complex_ema_step` for one position."""

from torch import Tensor

from .._dispatch import Arguments
from ..checks import check_average, check_position, check_sequences
from ..sequences import ALL_TOKENS, Sequences
from .coefficients import complex_coefficients
from .op import Recurrence

COMPLEX = Recurrence("complex_ema", complex_coefficients, fused=("triton",))
AVERAGE, STEP = COMPLEX.average(), COMPLEX.step()


def complex_ema(
    x: Tensor,
    input_logit: Tensor,
    damping_logit: Tensor,
    phase_logit: Tensor,
    projection: Tensor,
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
    """Compute the complex exponential moving average of every channel (Megalodon section 3.1, as in its code).

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
        mask: as in `damped_ema`, but masked positions also contribute 0 to the skip.
        initial_state: `[B, D, N, 2]` float32 or float64, real and imaginary part: the states before the first
            position; None = 0.
        return_state: also return the states after the last position.
        lengths: as in `damped_ema`.
        cu_seqlens: as in `damped_ema`; states are `[S, D, N, 2]`.
        max_seqlen: as in `damped_ema`.
        backend: as in `damped_ema`. Triton supports up to 32 states per channel.

    Returns:
        `[B, T, D]` in the dtype of `x`, or (output, states `[B, D, N, 2]`) if `return_state` is set. States and
        intermediate values are float32, also under autocast, or float64 if x or a parameter is float64. Gradients flow
        through the initial and the returned states.

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
    options: Arguments = {"lengths": lengths, "return_state": return_state}
    sequences = check_sequences("complex_ema", x, mask, cu_seqlens, max_seqlen, **options)
    parameters = (input_logit, damping_logit, phase_logit, projection)
    _check("complex_ema", x, parameters, skip, initial_state, sequences)
    return COMPLEX.run(AVERAGE, backend, x, parameters, skip, sequences, initial_state, return_state)


def complex_ema_step(
    x: Tensor,
    state: Tensor,
    input_logit: Tensor,
    damping_logit: Tensor,
    phase_logit: Tensor,
    projection: Tensor,
    skip: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    coefficients: tuple[Tensor, ...] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply `complex_ema` to one further position x `[B, D]`; return y `[B, D]` and the next state `[B, D, N, 2]`.

    For arguments and errors, see `complex_ema`; `mask` is `[B]`. Masked rows keep their states, and their y is
    undefined. `state` is not modified. `coefficients` are the `complex_ema_coefficients` of the four parameters;
    None = computed, which takes most of the time of a step. With the backends `"native"` and `"triton"`, steps whose
    gradients are required run in PyTorch.
    """
    check_position("complex_ema_step", x, mask, "channels")
    parameters = (input_logit, damping_logit, phase_logit, projection)
    _check("complex_ema_step", x, parameters, skip, state, ALL_TOKENS, coefficients)
    call = {"x": x, "state": state, "parameters": parameters, "coefficients": coefficients, "skip": skip, "mask": mask}
    return STEP(backend, call)


def _check(
    op: str, x: Tensor, parameters: tuple[Tensor, ...], skip: Tensor | None, state: Tensor | None, sequences: Sequences,
    coefficients: tuple[Tensor, ...] | None = None,
) -> None:  # fmt: skip
    channels, states = x.shape[-1], parameters[0].shape[-1]
    shapes = [list(parameter.shape) for parameter in parameters]
    if shapes != [[channels, states], [channels, states], [channels], [channels, states, 2]]:
        raise ValueError(
            f"{op} needs for {channels} channels two logits [{channels}, N], a phase_logit [{channels}] and a "
            f"projection [{channels}, N, 2], got {shapes}"
        )
    check_average(op, x, parameters, skip, state, sequences, [channels, states, 2], coefficients)
