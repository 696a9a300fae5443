"""The averages and their steps on CPUs in C (`native.c`), in float32 and bfloat16; `README.md` explains the algorithm.

The library is a part of the installed package if a C compiler was available. ctypes checks nothing, so `_call` is the
only function that passes addresses: it checks every tensor, and its arguments keep the tensors alive during the call.
"""

import ctypes
import math
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._custom_operator import has_gradients, is_plain, no_second_derivative, register
from .._mode import EXPORTED, TRANSFORMED, mode
from ..sequences import ALL_TOKENS, Sequences, values
from ..upcast import upcast_dtype
from . import formula
from .coefficients import Coefficients, damped_formula
from .split import both_directions, one_by_one
from .torch_backend import flops

VERSION = 1  # of native.c
# A second thread takes 20 us to start, so it is used from this number of states at all positions.
MANY_NUMBERS = 1 << 21

AVERAGE_POINTERS = (
    "x gradient out mask bounds q in weight skip initial final grad_final grad_initial grad_decay grad_radians grad_in "
    "grad_weight grad_skip"
).split()
DAMPED_POINTERS = (
    "input damping expansion projection q in weight grad_log grad_in grad_weight grad_input grad_damping "
    "grad_expansion grad_projection"
).split()
STEP_POINTERS = "x before out after mask change in weight skip".split()


class _Average(ctypes.Structure):
    """`Call` of native.c."""

    _fields_ = [(name, ctypes.c_void_p) for name in AVERAGE_POINTERS] + [
        *((name, ctypes.c_int64) for name in ("sequences", "length", "channels", "states")),
        *((name, ctypes.c_int32) for name in ("components", "directions", "shift", "silu", "half", "threads")),
    ]


class _Step(ctypes.Structure):
    """`Step` of native.c."""

    _fields_ = [(name, ctypes.c_void_p) for name in STEP_POINTERS] + [
        *((name, ctypes.c_int64) for name in ("sequences", "channels", "numbers")),
        *((name, ctypes.c_int32) for name in ("components", "silu", "half")),
    ]


class _Damped(ctypes.Structure):
    """`Damped` of native.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in DAMPED_POINTERS),
        ("count", ctypes.c_int64),
        ("scale", ctypes.c_float),
    ]


def _is_truncated(path: Path) -> bool:
    """Return whether a library of Linux is incomplete; loading an incomplete library ends the process with SIGBUS."""
    with path.open("rb") as file:
        header = file.read(64).ljust(64, b"\0")
    offset, size, count = struct.unpack_from("<40xQ10xHH", header)  # the section table is last in the file
    return header.startswith(b"\x7fELF\x02\x01") and path.stat().st_size < offset + size * count


def load(path: Path) -> tuple[ctypes.CDLL | None, str]:
    """Return the library and "", or None and the reason why the library cannot be used."""
    if not path.exists():
        return None, "it was not built; install a C compiler, and this package again"
    try:
        if _is_truncated(path):
            return None, "it is incomplete; install this package again"
        library = ctypes.CDLL(str(path))
        sizes = [library.moving_average_sizes(index) for index in range(3)] + [library.moving_average_version()]
    except (OSError, AttributeError) as error:  # damaged, of another platform, or another library
        return None, f"it cannot be loaded ({error}); install this package again"
    if sizes != [ctypes.sizeof(structure) for structure in (_Average, _Step, _Damped)] + [VERSION]:
        return None, "it is of another version; install this package again"
    return library, ""


library, _reason = load(Path(__file__).with_name("_native.so"))


def missing() -> str | None:
    """Return the reason why the library cannot be used, or None."""
    return None if library is not None else f"no C library: {_reason}"


missing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def unsupported(
    x: Tensor | None = None, parameters: tuple[Tensor, ...] = (), truncation: int | None = None, **_: object
) -> str | None:
    """Return the reason why the library does not support a call, or None; without x, the result of `missing`."""
    if (reason := missing()) is not None or x is None:
        return reason
    if mode() == EXPORTED:
        return "exported programs must not depend on this package"
    if mode() == TRANSFORMED:
        return "transforms of torch.func and forward mode require operators of PyTorch"
    if upcast_dtype(x, *parameters) == torch.float64:
        return "x or a parameter is float64"
    return None if truncation is None else unsupported_truncation(x.shape[1], truncation)


def unsupported_truncation(length: int, truncation: int) -> str | None:
    """Return the reason why a truncation is not supported, or None if the truncation has no effect."""
    # A comparison with the length would restrict an exported program to lengths on one side of the truncation.
    if mode() == EXPORTED or truncation < length:
        return f"its average has no truncation, and truncation={truncation} is below the length {length}"
    return None


def average(
    x: Tensor, coefficients: Coefficients | tuple[Tensor, ...], skip: Tensor | None = None,
    sequences: Sequences = ALL_TOKENS,
    shift: bool = False, truncation: int | None = None, initial_state: Tensor | None = None, return_state: bool = False,
    *, silu: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the average of all sequences, plus skip times the masked x; the final states only on request.

    With `silu`, return silu of the average plus skip times x without the mask. `coefficients` that are not
    `Coefficients` are the four parameters of `damped_ema`.
    """
    signal = x if x.dtype == torch.bfloat16 else x.float()
    options = initial_state, sequences.bounds, shift, silu, return_state, not isinstance(coefficients, Coefficients)
    output, state = operator(signal, sequences.mask, skip, *coefficients, *options)
    return output if output.dtype == x.dtype else output.to(x.dtype), state if return_state else None


def step(
    x: Tensor, state: Tensor, coefficients: tuple[Tensor, ...], skip: Tensor | None, mask: Tensor | None, silu: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the result of one position x `[B, D]` and the next states, without gradients; `silu` as in `average`."""
    signal = x if x.dtype == torch.bfloat16 else x.float()
    signal, state, change, weight_in, weight_out, mask, skip = _contiguous(signal, state, *coefficients, mask, skip)
    output, after = torch.empty_like(signal), torch.empty_like(state)
    (batch, channels), shape = x.shape, change.shape
    x_shape, state_shape = (batch, channels), (batch, *shape)
    _call(
        "step",
        _Step(sequences=batch, channels=channels, numbers=change.numel() // max(channels, 1), components=len(shape) - 1,
              silu=silu, half=signal.dtype == torch.bfloat16),
        x=(signal, signal.dtype, x_shape),
        before=(state, torch.float32, state_shape),
        out=(output, signal.dtype, x_shape),
        after=(after, torch.float32, state_shape),
        mask=(mask, torch.bool, (batch,)),
        change=(change, torch.float32, shape),
        **{"in": (weight_in, torch.float32, shape)},
        weight=(weight_out, torch.float32, shape),
        skip=(skip, torch.float32, (channels,)),
    )  # fmt: skip
    return output if output.dtype == x.dtype else output.to(x.dtype), after


def steps_directly(x: Tensor, state: Tensor, **call: Any) -> bool:
    """Return whether `step` can compute a call: no gradients, transforms, programs or tensors without memory."""
    tensors = [x, state, call["skip"], call["mask"], *call["parameters"], *(call["coefficients"] or ())]
    return is_plain(tensors) and not has_gradients(tensors)


def _call(function: str, structure: ctypes.Structure, **tensors: tuple[Tensor | None, torch.dtype, Any]) -> None:
    """Call a function of the library with the addresses of tensors, after checking their dtypes and shapes.

    Raises:
        ValueError: if a tensor is not contiguous on the CPU, or has another dtype or shape.
        MemoryError: if there is not enough memory.
    """
    for name, (tensor, dtype, shape) in tensors.items():
        if tensor is None:
            continue
        plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_neg()
        if tensor.dtype != dtype or tensor.shape != shape or not plain:
            raise ValueError(
                f"moving_average needs a contiguous {name} of {dtype} {list(shape)} on the CPU, got {tensor.dtype} "
                f"{list(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
            )
        setattr(structure, name, tensor.data_ptr())
    if getattr(library, f"moving_average_{function}")(ctypes.byref(structure)):
        raise MemoryError(f"moving_average_{function}: not enough memory")


def _contiguous(*tensors: Tensor | None) -> list[Any]:
    """Return contiguous tensors; views whose memory contains negated values (`is_neg`) are copied."""
    return [None if tensor is None else tensor.resolve_neg().contiguous() for tensor in tensors]


def _coefficients(first: Tensor, second: Tensor | None, third: Tensor, weight_out: Tensor, fused: bool) -> list[Tensor]:
    """Return q in float64, p and w, contiguous, from the inputs of `operator`."""
    if fused:
        return _damped_coefficients(*_contiguous(first, second, third, weight_out))
    decay = torch.exp(first.double())
    if second is not None:
        decay = torch.view_as_real(torch.polar(decay, second * (2 * math.pi)))
    return _contiguous(decay, third, weight_out)


def _damped_coefficients(*parameters: Tensor) -> list[Tensor]:
    """Return q in float64, p and w of Mega's parameters."""
    decay, shape = torch.empty_like(parameters[0], dtype=torch.float64), parameters[0].shape
    weight_in, weight_out = map(torch.empty_like, parameters[:2])
    weights = {"in": (weight_in, torch.float32, shape), "weight": (weight_out, torch.float32, shape)}
    _damped(parameters, q=(decay, torch.float64, shape), **weights)
    return [decay, weight_in, weight_out]


def _damped_gradients(parameters: Sequence[Tensor], *gradients: Tensor) -> list[Tensor]:
    """Return the gradients of Mega's parameters from those of log q, p and w."""
    results = [torch.empty_like(parameter) for parameter in parameters]
    names, tensors = DAMPED_POINTERS[7:], (*gradients, *results)
    _damped(parameters, **{name: (x, torch.float32, x.shape) for name, x in zip(names, tensors, strict=True)})
    return results


def _damped(parameters: Sequence[Tensor], **results: tuple[Tensor, torch.dtype, Any]) -> None:
    shape, single = parameters[0].shape, torch.float32
    input_logit, damping_logit, expansion, projection = parameters
    _call(
        "damped",
        _Damped(count=shape.numel(), scale=shape[1] ** -0.5),
        input=(input_logit, single, shape),
        damping=(damping_logit, single, shape),
        expansion=(expansion, single, shape),
        projection=(projection, single, shape),
        **results,
    )


def _run(
    function: str, x: Tensor, mask: Tensor | None, skip: Tensor | None, coefficients: Sequence[Tensor],
    initial: Tensor | None, cu_seqlens: Tensor | None, shift: bool, silu: bool, **results: Tensor | None,
) -> None:  # fmt: skip
    """Run the forward or the backward pass; `results` and the gradients of outputs have the names of native.c."""
    q, weight_in, weight_out = coefficients
    (channel_rows, states), channels, components = weight_in.shape, x.shape[-1], weight_out.dim() - 1
    x, mask, skip, initial = _contiguous(x, mask, skip, initial)
    bounds = None if cu_seqlens is None else cu_seqlens.to(torch.int64).contiguous()
    sequences, length = x.shape[:2] if bounds is None else (len(bounds) - 1, 0)
    half, single = torch.bfloat16, torch.float32
    kind = half if x.dtype == half else single
    if channel_rows not in (channels, 2 * channels):
        raise ValueError(f"moving_average has {channels} channels, but {channel_rows} rows of coefficients")
    real_shape, number_shape, state_shape = (
        weight_in.shape,
        weight_out.shape,
        (sequences, channels, *weight_out.shape[1:]),
    )
    kinds: dict[str, tuple[torch.dtype, Any]] = {
        "gradient": (kind, x.shape),
        "out": (kind, x.shape),
        "final": (single, state_shape),
        "grad_final": (single, state_shape),
        "grad_initial": (single, state_shape),
        "grad_decay": (single, real_shape),
        "grad_radians": (single, real_shape),
        "grad_in": (single, real_shape),
        "grad_weight": (single, number_shape),
        "grad_skip": (single, (channels,)),
    }
    _call(
        function,
        _Average(
            sequences=sequences, length=length, channels=channels, states=states, components=components,
            directions=channel_rows // max(channels, 1), shift=shift, silu=silu, half=kind == half,
            threads=torch.get_num_threads() if x.numel() * states * components >= MANY_NUMBERS else 1,
        ),
        x=(x, kind, x.shape),
        mask=(mask, torch.bool, x.shape[:2]),
        bounds=(bounds, torch.int64, (sequences + 1,)),
        q=(q, torch.float64, number_shape),
        **{"in": (weight_in, single, real_shape)},
        weight=(weight_out, single, number_shape),
        skip=(skip, single, (channels,)),
        initial=(initial, single, state_shape),
        **{name: (tensor, *kinds[name]) for name, tensor in results.items()},
    )  # fmt: skip


def _empty_outputs(
    x: Tensor, weight_out: Tensor, cu_seqlens: Tensor | None, return_state: bool, **_: object
) -> tuple[Tensor, Tensor]:
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1  # `len` would specialize a program
    shape = (sequences, x.shape[-1], *weight_out.shape[1:]) if return_state else (0,)
    return x.new_empty(x.shape), weight_out.new_empty(shape)


def _forward(
    x: Tensor, mask: Tensor | None, skip: Tensor | None, first: Tensor, second: Tensor | None, third: Tensor,
    weight_out: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None, shift: bool, silu: bool, return_state: bool,
    fused: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    coefficients = _coefficients(first, second, third, weight_out, fused)
    output, state = _empty_outputs(x, coefficients[2], cu_seqlens, return_state)
    final = state if return_state else None
    _run("forward", x, mask, skip, coefficients, initial, cu_seqlens, shift, silu, out=output, final=final)
    return output, state


def _backward(
    gradient: Tensor, grad_final: Tensor | None, x: Tensor, mask: Tensor | None, skip: Tensor | None, first: Tensor,
    second: Tensor | None, third: Tensor, weight_out: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None,
    shift: bool, silu: bool, return_state: bool, fused: bool,
) -> list[Tensor | None]:  # fmt: skip
    coefficients = _coefficients(first, second, third, weight_out, fused)
    _, p, w = coefficients
    like = (x, skip, p, p if w.dim() == 3 else None, p, w, initial)
    grads: list[Any] = [None if y is None else y.new_empty(y.shape) for y in like]
    names = ("out", "grad_skip", "grad_decay", "grad_radians", "grad_in", "grad_weight", "grad_initial")
    gradient, grad_final = _contiguous(gradient, grad_final if return_state else None)
    results = dict(zip(names, grads, strict=True), gradient=gradient, grad_final=grad_final)
    _run("backward", x, mask, skip, coefficients, initial, cu_seqlens, shift, silu, **results)
    grad_x, grad_skip, grad_log, grad_radians, grad_in, grad_weight, grad_initial = grads
    if fused:
        parameters = _contiguous(first, second, third, weight_out)
        return [grad_x, grad_skip, *_damped_gradients(parameters, grad_log, grad_in, grad_weight), grad_initial]
    grad_turns = None if grad_radians is None else grad_radians.double() * (2 * math.pi)
    return [grad_x, grad_skip, grad_log, grad_turns, grad_in, grad_weight, grad_initial]


def _formula(
    x: Tensor, mask: Tensor | None, skip: Tensor | None, first: Tensor, second: Tensor | None, third: Tensor,
    weight_out: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None, shift: bool, silu: bool, return_state: bool,
    fused: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the outputs of `operator`, computed with operators of PyTorch."""
    coefficients = Coefficients(first, second, third, weight_out)
    if fused:
        assert second is not None
        log_decay, p, w = damped_formula(first, second, third, weight_out)
        coefficients = Coefficients(log_decay, None, p, w)

    def run(**call: Any) -> tuple[Tensor, Tensor | None]:
        call |= {"coefficients": coefficients, "skip": skip, "shift": shift}
        return formula.average(**call) if silu else both_directions(formula.average, **call)

    call = {"x": x, "sequences": Sequences(mask), "initial_state": initial, "return_state": return_state}
    if cu_seqlens is None:
        return run(**call)
    bounds = values(cu_seqlens)
    if bounds is None:
        raise no_second_derivative("moving_average", " of varlen sequences without values")
    if len(coefficients.log_decay) == x.shape[-1]:
        return one_by_one(run, call, bounds, weight_out.shape, weight_out.dtype)
    slices = [slice(*pair) for pair in pairwise(bounds) if pair[0] < pair[1]]
    masks = [Sequences(None if mask is None else mask[:, i]) for i in slices]
    runs = [run(**call | {"x": x[:, i], "sequences": kept})[0] for i, kept in zip(slices, masks, strict=True)]
    return torch.cat(runs, 1), None


# `first` to `weight_out` are `Coefficients` or, if `fused`, the parameters of `damped_ema`: the computation of
# coefficients in PyTorch takes as long as the average of a short sequence.
operator = register(
    "moving_average_native",
    "Tensor x, Tensor? mask, Tensor? skip, Tensor first, Tensor? second, Tensor third, Tensor weight_out, "
    "Tensor? initial, Tensor? cu_seqlens, bool shift, bool silu, bool return_state, bool fused",
    "(Tensor, Tensor)",
    _forward,
    _empty_outputs,
    _backward,
    flops=lambda x, first, weight_out, **_: flops(x.shape[:2].numel() * first.numel(), weight_out.dim() == 3),
    differentiable=("x", "skip", "first", "second", "third", "weight_out", "initial"),
    gradients={0: (), 1: ("skip", "weight_out")},
    formula=_formula,
)
