"""Code that both public averages share: backends, checks, varlen calls with states, states after some positions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import varlen
from .._custom_operator import has_gradients
from .._dispatch import Arguments, Op, without_autocast
from .._export import in_parts, is_exporting
from ..checks import check_lengths, check_sequences, count_sequences
from ..columns import to_end
from ..upcast import upcast_dtype
from . import export, torch_backend
from .coefficients import powers, times

# Real numbers in the states of a channel that the Triton kernels store in registers: 64 real or 32 complex states.
MOST_NUMBERS = 64


def make_average(
    name: str, reference: Callable[..., Any], coefficients: Callable[..., Any], check: Callable[..., None], *,
    state: int, plain: Callable[..., Any] | None = None, triton: Callable[..., Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Return the function that computes an average of sequences.

    Its arguments are the name of a backend, the call, and `lengths`, `cu_seqlens` and `max_seqlen`.

    Args:
        name: name of the public function.
        reference: computes a call, including the coefficients.
        coefficients: returns the `Coefficients` of the parameters.
        check: raises errors for (name, x, parameters, skip, state, number of sequences).
        state: index of a parameter that has the shape of a state.
        plain: computes a call from `coefficients` in PyTorch; None = `average_torch`.
        triton: computes a call from the parameters; None = `triton_ops.average`.
    """

    def run_varlen(run: Callable[..., Any], call: Arguments, cu_seqlens: Tensor, max_seqlen: int) -> Any:
        if call["initial_state"] is None and not call["return_state"]:
            return op.run_padded(run, call, cu_seqlens, max_seqlen)
        x, parameters = call["x"], call["parameters"]
        return varlen.one_by_one(run, call, cu_seqlens, parameters[state].shape, upcast_dtype(x, *parameters))

    def average(
        backend: str | None, call: Arguments, lengths: Tensor | None, cu_seqlens: Tensor | None, max_seqlen: int | None
    ) -> Any:
        sequences, max_seqlen = count_sequences(name, call["x"], cu_seqlens, max_seqlen, "channels")
        check(name, call["x"], call["parameters"], call["skip"], call["initial_state"], sequences)
        return_state = call["return_state"]
        output, state = op(backend, call | {"return_state": return_state and lengths is None}, cu_seqlens, max_seqlen)
        if lengths is not None:
            state = state_after(backend, call, lengths)
        return (output, state) if return_state else output

    def state_after(backend: str | None, call: Arguments, lengths: Tensor) -> Tensor:
        """Return the states after the first `lengths` `[B]` positions, without decay at masked positions."""
        rows = {name: to_end(call[name], lengths) for name in ("x", "mask")}
        _, state = op(backend, call | rows | {"skip": None, "initial_state": None, "return_state": True})
        initial, dtype = call["initial_state"], upcast_dtype(call["x"], *call["parameters"])
        if initial is None:
            return state
        with without_autocast(state.device.type):
            of = coefficients(*(parameter.to(dtype) for parameter in call["parameters"]))
            decays = powers(of.log_decay, of.turn, lengths).permute(3, 0, 1, 2)
            return state + times(decays, initial.to(dtype).reshape(decays.shape)).reshape(state.shape)

    def unsupported(
        x: Tensor, parameters: tuple[Tensor, ...], truncation: int | None = None, max_seqlen: int | None = None,
        **_: object,
    ) -> str | None:  # fmt: skip
        # Comparing with the length would restrict an exported program to lengths on one side of it.
        length = max_seqlen or x.shape[1]
        if truncation is not None and (is_exporting() or truncation < length):
            return f"its average has no truncation, and truncation={truncation} is below the length {length}"
        return _unsupported(x, parameters, MOST_NUMBERS)

    plain, triton = with_coefficients(plain or average_torch, coefficients), triton or _average_triton
    backends = {"reference": reference, "torch": plain, "triton": triton}
    op = Op(name, backends, unsupported, tokens=("x",), run_varlen=run_varlen)
    return average


def make_step(
    name: str, reference: Callable[..., Any], plain: Callable[..., Any], triton: Callable[..., Any],
    numbers: float = MOST_NUMBERS,
) -> Op:  # fmt: skip
    """Return the `Op` of a step; `plain`, the PyTorch backend, computes the gradients, which `triton` does not.

    `numbers` is the limit of `triton`, as `MOST_NUMBERS`.
    """

    def run(**call: Any) -> tuple[Tensor, Tensor]:
        tensors = (call["x"], call["state"], call["skip"], *call["parameters"], *(call["coefficients"] or ()))
        result: tuple[Tensor, Tensor] = (plain if has_gradients(tensors) else triton)(**call)
        return result

    def unsupported(x: Tensor, parameters: tuple[Tensor, ...], **_: object) -> str | None:
        return _unsupported(x, parameters, numbers)

    return Op(name, {"reference": reference, "torch": plain, "triton": run}, unsupported, tokens=("x",))


def average_torch(x: Tensor, **call: Any) -> tuple[Tensor, Tensor | None]:
    """Compute a call from the `coefficients` in PyTorch."""
    run = export.average if in_parts() else torch_backend.average
    return run(x, **call)


def _average_triton(**call: Any) -> tuple[Tensor, Tensor | None]:
    # Imported lazily because Triton decides at import time whether kernels are interpreted.
    from . import triton_ops

    return triton_ops.average(**call)


def with_coefficients(run: Callable[..., Any], compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `run` with coefficients instead of parameters, in float32 or float64.

    `compute` returns the coefficients of the parameters. A step may get them from an earlier call.
    """

    def run_call(x: Tensor, parameters: tuple[Tensor, ...], coefficients: Any = None, **rest: Any) -> Any:
        dtype = upcast_dtype(x, *parameters)
        if coefficients is None:
            coefficients = compute(*(parameter.to(dtype) for parameter in parameters))
        for name in ("skip", "state", "initial_state"):
            if (value := rest.get(name)) is not None and value.dtype != dtype:  # `to` takes time in any case
                rest[name] = value.to(dtype)
        return run(x, coefficients=coefficients, **rest)

    return run_call


def check_call(
    op: str, x: Tensor, mask: Tensor | None, return_state: bool, lengths: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """Raise `ValueError` for arguments that do not match each other."""
    check_sequences(op, x, mask, "channels")
    check_lengths(op, lengths, x, mask, return_state, cu_seqlens)


def _unsupported(x: Tensor, parameters: tuple[Tensor, ...], numbers: float) -> str | None:
    if upcast_dtype(x, *parameters) == torch.float64:
        return "x or a parameter is float64"
    states = parameters[-1].shape[1]
    most = numbers // (parameters[-1].dim() - 1)
    return f"{states} states per channel are more than {most:g}" if states > most else None
