"""Argument checks shared by several ops. `op` is the function name in error messages."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._mode import TRANSFORMED, mode
from .sequences import Sequences, check_cu_seqlens
from .upcast import upcast_dtype


def check_mask(op: str, mask: Tensor | None, shape: torch.Size, name: str = "mask") -> None:
    """Raise `ValueError` unless `mask` is None or a bool tensor of this shape."""
    if mask is not None and (mask.dtype != torch.bool or mask.shape != shape):
        raise ValueError(
            f"{op} needs a bool {name} of shape {list(shape)} (True = keep), got {mask.dtype} {list(mask.shape)}"
        )


def check_dropout(op: str, dropout: float) -> None:
    """Raise `ValueError` unless the probability is in [0, 1)."""
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"{op}: dropout must be in [0, 1), got {dropout}")


def check_sequences(
    op: str, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, max_seqlen: int | None, *,
    features: str = "channels", lengths: Tensor | None = None, return_state: bool = False,
    compares_length: bool = False,
) -> Sequences:  # fmt: skip
    """Return the sequences in `[B, T, D]` or, with `cu_seqlens`, `[1, total, D]`.

    Raises:
        ValueError: unless T is at least 1, the mask fits, and `lengths` are `[B]` integers up to T that the call uses;
            `features` is the name of D. Values on a GPU and in programs are not checked.
    """
    if x.dim() != 3 or x.shape[1] < 1:
        raise ValueError(f"{op} needs x [batch, length, {features}] of length 1 or more, got {list(x.shape)}")
    check_mask(op, mask, x.shape[:2])
    if lengths is not None:
        if lengths.shape != x.shape[:1] or lengths.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{op}: lengths must be int32 or int64 [{len(x)}], got {lengths.dtype} {list(lengths.shape)}"
            )
        if mask is None or not return_state or cu_seqlens is not None:
            raise ValueError(f"{op}: lengths need return_state=True and a mask, and no cu_seqlens; omit lengths")
        # Reading the values on a GPU would synchronize the device.
        if type(lengths) is Tensor and lengths.device.type == "cpu" and mode() < TRANSFORMED:
            if ((lengths < 0) | (lengths > x.shape[1])).any():
                raise ValueError(f"{op}: lengths must be from 0 to {x.shape[1]}, got {lengths.tolist()}")
    if cu_seqlens is None:
        if max_seqlen is not None:
            raise ValueError(f"{op}: max_seqlen requires cu_seqlens; omit max_seqlen or pass cu_seqlens")
    elif x.shape[0] != 1:
        raise ValueError(f"{op} needs x [1, total, {features}] with cu_seqlens, got {list(x.shape)}")
    else:
        max_seqlen = check_cu_seqlens(op, cu_seqlens, max_seqlen, x.shape[1], compares_length=compares_length)
    return Sequences(mask, cu_seqlens, max_seqlen, lengths)


def check_position(op: str, x: Tensor, mask: Tensor | None, features: str) -> None:
    """Raise `ValueError` unless x is one position per sequence, `[B, D]`, and the mask fits."""
    if x.dim() != 2:
        raise ValueError(f"{op} needs x [batch, {features}], got {list(x.shape)}")
    check_mask(op, mask, x.shape[:1])


def check_directions(op: str, x: Tensor, parameter: Tensor, name: str, stateful: bool) -> None:
    """Raise `ValueError` unless a parameter has one row per channel of x or, without states, two."""
    channel_rows, channels = len(parameter), x.shape[2]
    if channel_rows == channels:
        return
    if channel_rows != 2 * channels:
        raise ValueError(
            f"{op}: {channel_rows} rows of {name} fit neither {channels} channels (causal) nor twice that "
            "(bidirectional)"
        )
    if stateful:
        raise ValueError(f"{op}: a bidirectional model has no state; omit initial_state and return_state")


def check_average(
    op: str, x: Tensor, parameters: Sequence[Tensor], skip: Tensor | None, state: Tensor | None, sequences: Sequences,
    shape: list[int], coefficients: tuple[Tensor, ...] | None = None,
) -> None:  # fmt: skip
    """Raise `ValueError` unless dtypes, skip, state and the coefficients of a step fit a moving average.

    `shape` is the shape of the states of one sequence.
    """
    tensors = (x, *parameters)
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise ValueError(f"{op} needs floating-point x and parameters, got {[tensor.dtype for tensor in tensors]}")
    if skip is not None and skip.shape != x.shape[-1:]:
        raise ValueError(f"{op} needs a skip of shape {list(x.shape[-1:])}, got {list(skip.shape)}")
    if coefficients is not None:
        dtype = upcast_dtype(x, *parameters)
        if [(tensor.dtype, list(tensor.shape)) for tensor in coefficients] != [(dtype, shape)] * 3:
            kinds = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in coefficients)
            raise ValueError(f"{op} needs three `coefficients` of {dtype} {shape}, got {kinds}; compute them again")
    if state is not None:
        state_shape = [sequences.number(x), *shape]
        if list(state.shape) != state_shape or state.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{op} needs a float32 or float64 state {state_shape}, got {state.dtype} {list(state.shape)}"
            )
