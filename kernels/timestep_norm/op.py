"""Megalodon's norm over time: `timestep_norm` over a sequence or a segment, `timestep_norm_step` over one position."""

import torch

from luna_mega.kernels._op import Op, for_ranks
from luna_mega.kernels.checks import check_position, check_sequences, count_sequences
from luna_mega.kernels.context_parallel import ContextShard
from luna_mega.kernels.timestep_norm import reference, sharded, torch_backend
from luna_mega.kernels.timestep_norm.reference import TimestepNormState, empty_state


def _triton(x, groups, **call):
    # Imported where it is needed: the import decides whether kernels are interpreted.
    from luna_mega.kernels.timestep_norm import triton_ops

    return triton_ops.timestep_norm(x, groups, **call)


def _triton_step(x, state, groups, weight, bias, eps, mask):
    from luna_mega.kernels.timestep_norm import triton_ops

    return triton_ops.step(x, state, groups, weight, bias, eps, mask)


def _unsupported(x, weight, bias, **_):
    if torch.float64 in {tensor.dtype for tensor in (x, weight, bias) if tensor is not None}:
        return "x or a parameter is float64"
    return None


_BACKENDS = {"reference": reference.timestep_norm, "torch": torch_backend.timestep_norm, "triton": _triton}
NORM = Op(
    "timestep_norm", _BACKENDS, _unsupported, tokens=("x",), native=(), on_ranks=for_ranks(sharded.norm, _BACKENDS)
)
STEP = Op(
    "timestep_norm_step",
    {"reference": reference.step, "torch": torch_backend.step, "triton": _triton_step},
    _unsupported,
    tokens=("x",),
)


def timestep_norm(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    mask: torch.Tensor | None = None,
    initial_state: TimestepNormState | None = None,
    return_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    shard: ContextShard | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, TimestepNormState]:
    """Normalize every group of features by mean and variance of all positions so far (Megalodon section 3.3).

    The D features of a position are G groups of neighbours. M_t and S_t are mean and variance of all features of a
    group at the positions up to t, t included, and y_t = (x_t - M_t) / sqrt(S_t + eps) * weight + bias.

    The statistics are float64 from the means and variances of single positions on, for every dtype of x, and so is the
    state. One position after the other gives the result of one call to 1e-5 after a million positions: in float32 the
    step of the mean, 1 / t of a distance, would be rounded away. They are a small part of the work, 2 G numbers for D.

    Args:
        x: `[B, T, D]`, T at least 1.
        groups: G, a divisor of D.
        weight, bias: `[D]`; None = 1 and 0.
        eps: is added to the variance.
        mask: `[B, T]` bool, True = keep; None = all. At other positions y is 0, and the statistics stand still.
        initial_state: the statistics before the first position, means and variances in float64 or float32; None = none.
            With a count of 0 its mean and variance count for nothing.
        return_state: return the statistics of all positions as well.
        cu_seqlens: `[S + 1]` int32 or int64: x is S sequences laid end to end, `[1, total, D]`, the mask `[1, total]`,
            sequence s is `[cu_seqlens[s], cu_seqlens[s+1])`; states are then of S sequences, and each sequence has the
            same result as alone.
        max_seqlen: length of the longest sequence; None = read from `cu_seqlens`, which waits for the device.
        shard: x and the mask are this process's part of longer sequences, and the result is the norm of the whole at
            these positions; the processes exchange their statistics, 2 G + 1 numbers for each sequence. None = x is
            all. Without states and `cu_seqlens`.
        backend: one of `"auto"`, `"reference"`, `"torch"`, `"triton"`; None = as `luna_mega.kernels.api.use_backend`
            and `LUNA_MEGA_BACKEND` say. Triton has no kernels for float64. Ragged sequences are filled up.

    Returns:
        `[B, T, D]` in the dtype of `x`; with `return_state` (that, a `TimestepNormState`). Gradients flow through mean
        and variance of both states.

    Raises:
        ValueError: shapes or dtypes do not fit together, or the backend does not exist or cannot run the call.

    Example:
        >>> import torch
        >>> x = torch.randn(2, 100, 8)
        >>> first, state = timestep_norm(x[:, :60], 4, return_state=True)
        >>> second = timestep_norm(x[:, 60:], 4, initial_state=state)
        >>> torch.allclose(torch.cat([first, second], 1), timestep_norm(x, 4), atol=1e-5)
        True
    """
    check_sequences("timestep_norm", x, mask, "features")
    NORM.refuse_beside(shard, initial_state=initial_state, return_state=return_state, cu_seqlens=cu_seqlens)
    sequences, max_seqlen = count_sequences("timestep_norm", x, cu_seqlens, max_seqlen, "features")
    _check("timestep_norm", x, groups, weight, bias)
    call = {
        "x": x,
        "groups": groups,
        "weight": weight,
        "bias": bias,
        "eps": eps,
        "mask": mask,
        "initial_state": _checked_state("timestep_norm", x, groups, initial_state, sequences),
    }
    output, state = NORM(backend, call, cu_seqlens, max_seqlen, shard=shard)
    return (output, state) if return_state else output


def timestep_norm_step(
    x: torch.Tensor,
    state: TimestepNormState | None,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    mask: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, TimestepNormState]:
    """Continue `timestep_norm` by one position x `[B, D]`: return y `[B, D]` and the next state.

    Arguments and errors as in `timestep_norm`, with `mask` `[B]`. The given state is not changed.
    """
    check_position("timestep_norm_step", x, mask, "features")
    _check("timestep_norm_step", x, groups, weight, bias)
    state = _checked_state("timestep_norm_step", x, groups, state, x.shape[0])
    call = {"x": x, "state": state, "groups": groups, "weight": weight, "bias": bias, "eps": eps, "mask": mask}
    return STEP(backend, call)


def _check(op, x, groups, weight, bias):
    features = x.shape[-1]
    if groups < 1 or features % groups:
        raise ValueError(f"{op}: {groups} groups do not divide {features} features")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != (features,):
            raise ValueError(f"{op} needs a {name} of shape {[features]}, got {list(tensor.shape)}")
    if not all(tensor.is_floating_point() for tensor in (x, weight, bias) if tensor is not None):
        raise ValueError(f"{op} needs floating-point x, weight and bias")


def _checked_state(op, x, groups, state, sequences):
    """Return the state in float64, without what a count of 0 leaves behind."""
    if state is None:
        return empty_state(x, groups, sequences)
    count, *rest = state
    shapes, needed = [list(tensor.shape) for tensor in state], [[sequences], [sequences, groups], [sequences, groups]]
    if (
        shapes != needed
        or count.is_floating_point()
        or not all(t.dtype in (torch.float32, torch.float64) for t in rest)
    ):
        raise ValueError(
            f"{op} needs a state of an integer count and float32 or float64 mean and variance {needed}, got "
            f"{[t.dtype for t in state]} {shapes}"
        )
    none = count[:, None] == 0
    return TimestepNormState(count.long(), *(tensor.double().masked_fill(none, 0.0) for tensor in rest))
