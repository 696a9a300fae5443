"""The averages and their steps on CPUs in C (`native.c`), in float32 and bfloat16; `README.md` explains the algorithm.

The library is a part of the installed package if a C compiler was available. ctypes checks nothing, so `_call` is the
only function that passes addresses: it checks every tensor, and its arguments keep them alive during the call.
"""

import ctypes
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import varlen
from .._custom_operator import has_gradients, is_plain, no_second_derivative, register
from .._export import is_exporting, is_transformed
from ..upcast import upcast_dtype
from . import export
from .coefficients import Coefficients
from .torch_backend import flops
from .wiring import both_directions, unsupported_truncation

INPUTS = (
    "Tensor x, Tensor? mask, Tensor? skip, Tensor log_decay, Tensor? turn, Tensor weight_in, Tensor weight_out, "
    "Tensor? initial, Tensor? cu_seqlens, bool shift, bool silu, bool return_state"
)
# Numbers of states, at all positions, from which on a second thread is worth the 20 us of its start.
MANY_NUMBERS = 1 << 21

AVERAGE_POINTERS = (
    "x gradient out mask bounds q in weight skip initial final grad_final grad_initial grad_decay grad_phase grad_in "
    "grad_weight grad_skip"
).split()
STEP_POINTERS = "x before out after mask change in weight skip".split()


class _Average(ctypes.Structure):
    """`Call` of native.c."""

    _fields_ = [(name, ctypes.c_void_p) for name in AVERAGE_POINTERS] + [
        *((name, ctypes.c_int64) for name in ("sequences", "length", "channels", "states")),
        *((name, ctypes.c_int32) for name in ("parts", "directions", "shift", "silu", "half", "threads")),
    ]


class _Step(ctypes.Structure):
    """`Step` of native.c."""

    _fields_ = [(name, ctypes.c_void_p) for name in STEP_POINTERS] + [
        *((name, ctypes.c_int64) for name in ("sequences", "channels", "numbers")),
        *((name, ctypes.c_int32) for name in ("parts", "silu", "half")),
    ]


def load(path: Path) -> tuple[ctypes.CDLL | None, str]:
    """Return the library, or None and the reason."""
    if not path.exists():
        return None, "it was not built; install a C compiler, and this package again"
    try:
        library = ctypes.CDLL(str(path))
        sizes = library.moving_average_sizes(0), library.moving_average_sizes(1)
    except (OSError, AttributeError) as error:  # damaged, of another platform, or another library
        return None, f"it cannot be loaded ({error}); install this package again"
    if sizes != (ctypes.sizeof(_Average), ctypes.sizeof(_Step)):
        return None, "it is of another version; install this package again"
    return library, ""


library, _reason = load(Path(__file__).with_name("_native.so"))


def missing() -> str | None:
    """Return the reason why there is no library, or None."""
    return None if library is not None else f"no C library: {_reason}"


missing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def unsupported(
    x: Tensor | None = None, parameters: tuple[Tensor, ...] = (), truncation: int | None = None, **_: object
) -> str | None:
    """Return the reason why the library does not support a call, or None; without x, only whether there is one."""
    if (reason := missing()) is not None or x is None:
        return reason
    if is_exporting():
        return "exported programs must not depend on this package"
    if is_transformed():
        return "transforms of torch.func and forward mode require operators of PyTorch"
    if upcast_dtype(x, *parameters) == torch.float64:
        return "x or a parameter is float64"
    return unsupported_truncation(x.shape[1], truncation)


def average(
    x: Tensor, coefficients: Coefficients, skip: Tensor | None = None, mask: Tensor | None = None, shift: bool = False,
    truncation: int | None = None, initial_state: Tensor | None = None, return_state: bool = False,
    cu_seqlens: Tensor | None = None, max_seqlen: int | None = None, silu: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the average of all sequences, plus skip times the masked x; the final states only on request.

    With `silu`, return silu of the average plus skip times x without the mask.
    """
    kept = x if x.dtype == torch.bfloat16 else x.float()
    output, state = operator(kept, mask, skip, *coefficients, initial_state, cu_seqlens, shift, silu, return_state)
    return output if output.dtype == x.dtype else output.to(x.dtype), state if return_state else None


def step(
    x: Tensor, state: Tensor, coefficients: tuple[Tensor, ...], skip: Tensor | None, mask: Tensor | None,
    silu: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the result of one position x `[B, D]` and the next states, without gradients; `silu` as in `average`."""
    change, weight_in, weight_out = (tensor.contiguous() for tensor in coefficients)
    kept = (x if x.dtype == torch.bfloat16 else x.float()).contiguous()
    state = state.contiguous()
    output, after = torch.empty_like(kept), torch.empty_like(state)
    (batch, channels), shape = x.shape, change.shape
    of_row, of_state = (batch, channels), (batch, *shape)
    _call(
        "step",
        _Step(sequences=batch, channels=channels, numbers=change.numel() // max(channels, 1), parts=len(shape) - 1,
              silu=silu, half=kept.dtype == torch.bfloat16),
        x=(kept, kept.dtype, of_row),
        before=(state, torch.float32, of_state),
        out=(output, kept.dtype, of_row),
        after=(after, torch.float32, of_state),
        mask=(None if mask is None else mask.contiguous(), torch.bool, (batch,)),
        change=(change, torch.float32, shape),
        **{"in": (weight_in, torch.float32, shape)},
        weight=(weight_out, torch.float32, shape),
        skip=(None if skip is None else skip.contiguous(), torch.float32, (channels,)),
    )  # fmt: skip
    return output if output.dtype == x.dtype else output.to(x.dtype), after


def steps_directly(x: Tensor, state: Tensor, **call: Any) -> bool:
    """Return whether `step` can compute a call: no gradients, transforms, programs or tensors without memory."""
    tensors = [x, state, call["skip"], call["mask"], *call["parameters"], *(call["coefficients"] or ())]
    return is_plain(tensors) and not has_gradients(tensors)


def _call(function: str, structure: ctypes.Structure, **tensors: tuple[Tensor | None, torch.dtype, Any]) -> None:
    """Run a function of the library with addresses of tensors, given with their dtypes and shapes.

    Raises:
        ValueError: if a tensor is not contiguous in the memory of the CPU, with this dtype and shape.
        MemoryError: if there is not enough memory.
    """
    for name, (tensor, dtype, shape) in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype != dtype or tensor.shape != shape or tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(
                f"moving_average needs a contiguous {name} of {dtype} {list(shape)} on the CPU, got {tensor.dtype} "
                f"{list(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
            )
        setattr(structure, name, tensor.data_ptr())
    if getattr(library, f"moving_average_{function}")(ctypes.byref(structure)):
        raise MemoryError(f"moving_average_{function}: not enough memory")


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _run(
    function: str, x: Tensor, mask: Tensor | None, skip: Tensor | None, of: Coefficients, initial: Tensor | None,
    cu_seqlens: Tensor | None, shift: bool, silu: bool, **results: Tensor | None,
) -> None:  # fmt: skip
    """Run the forward or the backward pass; `results` and the gradients of outputs have the names of native.c."""
    (rows, states), channels = of.log_decay.shape, x.shape[-1]
    x, mask, skip, weight_in, weight_out, initial = _contiguous(x, mask, skip, *of[2:], initial)  # type: ignore[assignment]
    bounds = None if cu_seqlens is None else cu_seqlens.to(torch.int64).contiguous()
    sequences, length = x.shape[:2] if bounds is None else (len(bounds) - 1, 0)
    decay = torch.exp(of.log_decay.double()).contiguous()
    if of.turn is not None:
        decay = torch.view_as_real(torch.polar(decay, of.turn * (2 * math.pi))).contiguous()
    numbers, single = x.numel() * states * of.parts, torch.float32
    of_rows = (rows, states)
    of_states = (sequences, channels, *weight_out.shape[1:])
    kinds: dict[str, tuple[torch.dtype, Any]] = {
        "gradient": (x.dtype, x.shape),
        "out": (x.dtype, x.shape),
        "final": (single, of_states),
        "grad_final": (single, of_states),
        "grad_initial": (single, of_states),
        "grad_decay": (single, of_rows),
        "grad_phase": (single, of_rows),
        "grad_in": (single, of_rows),
        "grad_weight": (single, (*of_rows, *weight_out.shape[2:])),
        "grad_skip": (single, (channels,)),
    }
    _call(
        function,
        _Average(
            sequences=sequences, length=length, channels=channels, states=states, parts=of.parts,
            directions=rows // max(channels, 1), shift=shift, silu=silu, half=x.dtype == torch.bfloat16,
            threads=torch.get_num_threads() if numbers >= MANY_NUMBERS else 1,
        ),
        x=(x, x.dtype, x.shape),
        mask=(mask, torch.bool, x.shape[:2]),
        bounds=(bounds, torch.int64, (sequences + 1,)),
        q=(decay, torch.float64, (*of_rows, *weight_out.shape[2:])),
        **{"in": (weight_in, single, of_rows)},
        weight=(weight_out, single, (*of_rows, *weight_out.shape[2:])),
        skip=(skip, single, (channels,)),
        initial=(initial, single, of_states),
        **{name: (tensor, *kinds[name]) for name, tensor in results.items()},
    )  # fmt: skip


def _forward(
    x: Tensor, mask: Tensor | None, skip: Tensor | None, log_decay: Tensor, turn: Tensor | None, weight_in: Tensor,
    weight_out: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None, shift: bool, silu: bool, return_state: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    output, state = _forward_fake(x, weight_out, cu_seqlens, return_state)
    of = Coefficients(log_decay, turn, weight_in, weight_out)
    final = state if return_state else None
    _run("forward", x, mask, skip, of, initial, cu_seqlens, shift, silu, out=output, final=final)
    return output, state


def _forward_fake(
    x: Tensor, weight_out: Tensor, cu_seqlens: Tensor | None, return_state: bool, **_: object
) -> tuple[Tensor, Tensor]:
    sequences = len(x) if cu_seqlens is None else len(cu_seqlens) - 1
    shape = (sequences, x.shape[-1], *weight_out.shape[1:]) if return_state else (0,)
    return x.new_empty(x.shape), weight_out.new_empty(shape)


def _backward(
    gradient: Tensor, grad_final: Tensor | None, x: Tensor, mask: Tensor | None, skip: Tensor | None, log_decay: Tensor,
    turn: Tensor | None, weight_in: Tensor, weight_out: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None,
    shift: bool, silu: bool, return_state: bool,
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of x, skip, the coefficients and initial; None for arguments that are None."""
    of = Coefficients(log_decay, turn, weight_in, weight_out)
    grads = [None if y is None else y.new_empty(y.shape) for y in (x, skip, log_decay, weight_in, weight_out, initial)]
    grad_x, grad_skip, grad_decay, grad_in, grad_weight, grad_initial = grads
    grad_phase = None if turn is None else log_decay.new_empty(log_decay.shape)
    gradient, grad_final = _contiguous(gradient, grad_final if return_state else None)  # type: ignore[assignment]
    _run(
        "backward", x, mask, skip, of, initial, cu_seqlens, shift, silu, gradient=gradient, out=grad_x,
        grad_final=grad_final, grad_initial=grad_initial, grad_decay=grad_decay, grad_phase=grad_phase, grad_in=grad_in,
        grad_weight=grad_weight, grad_skip=grad_skip,
    )  # fmt: skip
    grad_turn = None if grad_phase is None else grad_phase.double() * (2 * math.pi)
    return [grad_x, grad_skip, grad_decay, grad_turn, grad_in, grad_weight, grad_initial]


def _parts(
    x: Tensor, mask: Tensor | None, skip: Tensor | None, log_decay: Tensor, turn: Tensor | None, weight_in: Tensor,
    weight_out: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None, shift: bool, silu: bool, return_state: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the outputs of `operator`, computed with operators of PyTorch."""
    of = Coefficients(log_decay, turn, weight_in, weight_out)

    def run(**call: Any) -> tuple[Tensor, Tensor | None]:
        call |= {"coefficients": of, "skip": skip, "shift": shift}
        return export.average(**call) if silu else both_directions(export.average, **call)

    call = {"x": x, "mask": mask, "initial_state": initial, "return_state": return_state}
    if cu_seqlens is None:
        return run(**call)
    bounds = varlen.values(cu_seqlens)
    if bounds is None:
        raise no_second_derivative("moving_average", " of varlen sequences without values")
    if len(log_decay) > x.shape[-1]:
        pairs = zip(bounds[:-1], bounds[1:], strict=True)
        parts = [slice(start, end) for start, end in pairs if start < end]
        runs = [run(**call | {"x": x[:, i], "mask": None if mask is None else mask[:, i]})[0] for i in parts]
        return torch.cat(runs, 1), None
    return varlen.one_by_one(run, call, bounds, weight_out.shape[1:], weight_out.dtype)


def _flops(x: Tensor, log_decay: Tensor, turn: Tensor | None, **_: object) -> tuple[int, int]:
    return flops(x.shape[0] * x.shape[1] * log_decay.numel(), turn is not None)


operator = register(
    "moving_average_native",
    INPUTS,
    "(Tensor, Tensor)",
    _forward,
    _forward_fake,
    _backward,
    flops=_flops,
    differentiable=("x", "skip", "log_decay", "turn", "weight_in", "weight_out", "initial"),
    gradients={0: (), 1: ("skip", "weight_out")},
    parts=_parts,
)
