"""Megalodon's timestep norm: `timestep_norm` for a sequence or a segment, `timestep_norm_step` for one position."""

from typing import Any

import torch
from torch import Tensor

from .._dispatch import Op
from ..checks import check_position, check_sequences
from ..sequences import in_rows
from . import reference, torch_backend
from .reference import TimestepNormState, empty_state


def _triton(**call: Any) -> tuple[Tensor, TimestepNormState]:
    # Imported lazily because Triton decides at import time whether kernels are interpreted.
    from . import triton_ops

    return torch_backend.timestep_norm(**call, run=triton_ops.operator)


def _triton_step(**call: Any) -> tuple[Tensor, TimestepNormState]:
    from . import triton_ops

    return triton_ops.step(**call)


def _unsupported(x: Tensor, weight: Tensor | None, bias: Tensor | None, **_: object) -> str | None:
    if torch.float64 in {tensor.dtype for tensor in (x, weight, bias) if tensor is not None}:
        return "x or a parameter is float64"
    return None


NORM = Op(
    "timestep_norm",
    {
        "reference": in_rows(reference.timestep_norm, "x"),
        "torch": in_rows(torch_backend.timestep_norm, "x"),
        "triton": in_rows(_triton, "x"),
    },
    _unsupported,
)
STEP = Op(
    "timestep_norm_step",
    {"reference": reference.step, "torch": torch_backend.step, "triton": _triton_step},
    _unsupported,
)


def timestep_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    mask: Tensor | None = None,
    initial_state: TimestepNormState | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, TimestepNormState]:
    """Normalize every group of features by mean and variance of all positions so far (Megalodon section 3.2).

    The D features of a position are divided into G groups of adjacent features. M_t and S_t are the mean and variance
    of all features of a group at the positions up to and including t: y_t = (x_t - M_t) / sqrt(S_t + eps) * weight +
    bias.

    Statistics and state are float64 for every dtype of x. Stepwise evaluation matches a single call to 1e-5 after a
    million positions; in float32, the update of the mean by 1 / t of a distance would be rounded away. The extra cost
    is small because there are only 2 G statistics for D features.

    Args:
        x: `[B, T, D]`, T at least 1.
        groups: G, a divisor of D.
        weight: `[D]`; None = 1.
        bias: `[D]`; None = 0.
        eps: value added to the variance.
        mask: `[B, T]` bool, True = keep; None = all. At masked positions y is 0 and the statistics do not change.
        initial_state: the statistics before the first position, with mean and variance in float64 or float32; None =
            no earlier positions. If the count is 0, mean and variance are ignored.
        return_state: also return the statistics of all positions.
        cu_seqlens: `[S + 1]` int32 or int64, for S varlen sequences: x is `[1, total, D]`, the mask `[1, total]`, and
            sequence s is `[cu_seqlens[s], cu_seqlens[s+1])`. States have S rows. Each result equals the result of a
            separate call.
        max_seqlen: length of the longest sequence; None = computed from `cu_seqlens`, which synchronizes the device.
        backend: one of `"auto"`, `"reference"`, `"torch"`, `"triton"`; None = the setting of
            `use_backend` or `LUNA_MEGA_BACKEND`. Triton does not support float64. Varlen
            sequences are padded.

    Returns:
        `[B, T, D]` in the dtype of `x`, or (output, `TimestepNormState`) if `return_state` is set. Gradients flow
        through mean and variance of both states.

    Raises:
        ValueError: if shapes or dtypes do not match, or the backend does not exist or does not support the call.

    Example:
        >>> import torch
        >>> x = torch.randn(2, 100, 8)
        >>> first, state = timestep_norm(x[:, :60], 4, return_state=True)
        >>> second = timestep_norm(x[:, 60:], 4, initial_state=state)
        >>> torch.allclose(torch.cat([first, second], 1), timestep_norm(x, 4), atol=1e-5)
        True
    """
    sequences = check_sequences("timestep_norm", x, mask, cu_seqlens, max_seqlen, features="features")
    _check("timestep_norm", x, groups, weight, bias)
    initial_state = _checked_state("timestep_norm", x, groups, initial_state, sequences.number(x))
    call = {"x": x, "groups": groups, "weight": weight, "bias": bias, "eps": eps, "sequences": sequences}
    output, state = NORM(backend, call | {"initial_state": initial_state})
    return (output, state) if return_state else output


def timestep_norm_step(
    x: Tensor,
    state: TimestepNormState | None,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    mask: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, TimestepNormState]:
    """Apply `timestep_norm` to one further position x `[B, D]`; return y `[B, D]` and the next state.

    For arguments and errors, see `timestep_norm`; `mask` is `[B]`. The given state is not modified.
    """
    check_position("timestep_norm_step", x, mask, "features")
    _check("timestep_norm_step", x, groups, weight, bias)
    state = _checked_state("timestep_norm_step", x, groups, state, x.shape[0])
    call = {"x": x, "state": state, "groups": groups, "weight": weight, "bias": bias, "eps": eps, "mask": mask}
    return STEP(backend, call)


def _check(op: str, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None) -> None:
    features = x.shape[-1]
    if groups < 1 or features % groups:
        raise ValueError(f"{op}: {groups} groups do not divide {features} features; choose a divisor")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != (features,):
            raise ValueError(f"{op} needs a {name} of shape {[features]}, got {list(tensor.shape)}")
    if not all(tensor.is_floating_point() for tensor in (x, weight, bias) if tensor is not None):
        raise ValueError(f"{op} needs floating-point x, weight and bias")


def _checked_state(
    op: str, x: Tensor, groups: int, state: TimestepNormState | None, sequences: int
) -> TimestepNormState:
    """Return the state in float64; where the count is 0, mean and variance are set to 0."""
    if state is None:
        return empty_state(x, groups, sequences)
    count, *rest = state
    shapes, needed = [list(tensor.shape) for tensor in state], [[sequences], [sequences, groups], [sequences, groups]]
    if shapes != needed or count.is_floating_point() or not {x.dtype for x in rest} <= {torch.float32, torch.float64}:
        raise ValueError(
            f"{op} needs a state of an integer count and float32 or float64 mean and variance {needed}, got "
            f"{[t.dtype for t in state]} {shapes}"
        )
    none = count[:, None] == 0
    return TimestepNormState(count.long(), *(tensor.double().masked_fill(none, 0.0) for tensor in rest))
