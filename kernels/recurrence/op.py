"""The operators of the recurrence h_t = q h_{t-1} + p x_t, y_t = Re sum_n w_n h_{t,n}.

Each operator computes the coefficients q, p and w from other parameters.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._custom_operator import has_gradients
from .._dispatch import Arguments, Op, without_autocast
from .._mode import forbid_capture
from ..alignment import to_end
from ..sequences import ALL_TOKENS, Sequences, values
from ..upcast import upcast_dtype
from . import native, reference, torch_backend
from .coefficients import Coefficients, powers, step_coefficients, times, with_coefficients
from .split import both_directions, one_by_one

# The Triton kernels store the states of a channel in registers: 64 real numbers, so 64 real or 32 complex states.
MOST_NUMBERS = 64


class Recurrence(NamedTuple):
    """One public operator and its step.

    Args:
        name: its name.
        coefficients: maps its parameters to `Coefficients`.
        silu: the result is silu(y + skip x), where the skip uses x without the mask; else y + skip x.
        fused: the backends that start from the parameters, because they compute the coefficients themselves.
    """

    name: str
    coefficients: Callable[..., Coefficients]
    silu: bool = False
    fused: tuple[str, ...] = ()

    def average(self) -> Op:
        """Return the operator of sequences.

        A call has x, parameters, skip, sequences, shift, truncation, initial_state and return_state.
        """
        backends: dict[str, Callable[..., Any]] = {
            "reference": partial(self._in_rows, partial(self._run, partial(reference.average, silu=self.silu))),
            "torch": partial(self._in_rows, partial(self._run, self._in_torch)),
            "native": self._run_native,
            "triton": self._run_triton,
        }
        return Op(self.name, backends, unsupported, native_unsupported=native.unsupported)

    def step(self) -> Op:
        """Return the operator of one position; a call has x, state, parameters, coefficients, skip and mask."""
        backends: dict[str, Callable[..., Any]] = {
            "reference": partial(self._run_step, reference.step),
            "torch": partial(self._run_step, torch_backend.step),
            "native": self._run_native_step,
            "triton": self._run_triton_step,
        }
        limits = unsupported_dtype if "triton_step" in self.fused else unsupported
        return Op(f"{self.name}_step", backends, limits, native_unsupported=native.unsupported)

    def _run(self, run: Callable[..., Any], **call: Any) -> tuple[Tensor, Tensor | None]:
        return run(**with_coefficients(self.coefficients, **call))

    def _in_torch(self, **call: Any) -> tuple[Tensor, Tensor | None]:
        return torch_backend.average(**call) if self.silu else both_directions(torch_backend.average, **call)

    def _in_rows(self, run: Callable[..., tuple[Tensor, Tensor | None]], **call: Any) -> tuple[Tensor, Tensor | None]:
        """Run a call. Varlen sequences are padded or, if there are states, processed one at a time."""
        sequences: Sequences = call["sequences"]
        if sequences.bounds is None:
            return run(**call)
        x, parameters = call["x"], call["parameters"]
        stateful = call["initial_state"] is not None or call["return_state"]
        if stateful:
            forbid_capture(x, "states of varlen sequences in PyTorch", "choose the backend 'triton'")
            if (bounds := values(sequences.bounds)) is not None:
                return one_by_one(run, call, bounds, parameters[-1].shape, upcast_dtype(x, *parameters))
        padded = call | {"x": sequences.pad(x), "sequences": sequences.padded()}
        lengths = sequences.bounds.diff()
        output, state = self._after_lengths(run, padded, lengths) if stateful else run(**padded)
        return sequences.unpad(output, x.shape[1]), state

    def _run_native(self, **call: Any) -> tuple[Tensor, Tensor | None]:
        call = with_coefficients(None if "native" in self.fused else self.coefficients, **call)
        return native.average(**call, silu=self.silu and call["skip"] is not None)

    def _run_triton(self, **call: Any) -> tuple[Tensor, Tensor | None]:
        # Imported lazily because Triton decides at import time whether kernels are interpreted.
        from . import triton_ops

        if "triton" in self.fused:
            return triton_ops.average(coefficients=call.pop("parameters"), **call)
        return both_directions(triton_ops.average, **with_coefficients(self.coefficients, **call))

    def _run_step(self, run: Callable[..., Any], **call: Any) -> tuple[Tensor, Tensor]:
        return run(**with_coefficients(self._step_coefficients, **call), silu=self.silu)

    def _step_coefficients(self, *parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return step_coefficients(self.coefficients(*parameters))

    def _run_native_step(self, **call: Any) -> tuple[Tensor, Tensor]:
        if not native.steps_directly(**call):
            return self._run_step(torch_backend.step, **call)
        return native.step(
            **with_coefficients(self._step_coefficients, **call), silu=self.silu and call["skip"] is not None
        )

    def _run_triton_step(self, **call: Any) -> tuple[Tensor, Tensor]:
        tensors = (call["x"], call["state"], call["skip"], *call["parameters"], *(call["coefficients"] or ()))
        is_real = call["parameters"][-1].dim() == 2
        if has_gradients(tensors) or (is_real and not self.silu):
            return self._run_step(torch_backend.step, **call)
        from . import triton_ops

        if "triton_step" not in self.fused:
            return triton_ops.step(**with_coefficients(self._step_coefficients, **call))
        return triton_ops.step(call["x"], call["state"].float(), call["parameters"], call["skip"], call["mask"])

    def run(
        self, op: Op, backend: str | None, x: Tensor, parameters: tuple[Tensor, ...], skip: Tensor | None,
        sequences: Sequences, initial_state: Any, return_state: bool, shift: bool = False,
        truncation: int | None = None,
    ) -> Any:  # fmt: skip
        """Return the output of a checked call, and with `return_state` the states, as a tuple."""
        call: Arguments = {"x": x, "parameters": parameters, "skip": skip, "sequences": sequences, "shift": shift}
        call |= {"truncation": truncation, "initial_state": initial_state, "return_state": return_state}
        if sequences.lengths is not None:
            return self._after_lengths(lambda **call: op(backend, call), call, sequences.lengths)
        output, state = op(backend, call)
        return (output, state) if return_state else output

    def _after_lengths(self, run: Callable[..., Any], call: Arguments, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of a call, and the states after `lengths` `[B]` positions; the mask drops later ones."""
        sequences = call["sequences"]._replace(lengths=None)
        output, _ = run(**call | {"sequences": sequences, "return_state": False})
        # Align the sequences to the end: dropped positions before the first token leave the zero state unchanged.
        aligned = {"x": to_end(call["x"], lengths), "sequences": Sequences(to_end(sequences.mask, lengths))}
        _, state = run(**call | aligned | {"skip": None, "initial_state": None, "return_state": True})
        initial, dtype = call["initial_state"], upcast_dtype(call["x"], *call["parameters"])
        if initial is None:
            return output, state
        with without_autocast(state.device.type):
            coefficients = self.coefficients(*(parameter.to(dtype) for parameter in call["parameters"]))
            decays = powers(coefficients.log_decay, coefficients.turns, lengths).permute(3, 0, 1, 2)
            return output, state + times(decays, initial.to(dtype).reshape(decays.shape)).reshape(state.shape)


def unsupported(
    x: Tensor, parameters: tuple[Tensor, ...], truncation: int | None = None, sequences: Sequences = ALL_TOKENS,
    skip: Tensor | None = None, **_: object,
) -> str | None:  # fmt: skip
    """Return the reason why the Triton kernels do not support a call, or None."""
    if truncation is not None:
        reason = native.unsupported_truncation(sequences.longest or x.shape[1], truncation)
        if reason is not None:
            return reason
    states, most = parameters[-1].shape[1], MOST_NUMBERS // (parameters[-1].dim() - 1)
    too_many = f"{states} states per channel are more than {most}" if states > most else None
    return unsupported_dtype(x, parameters, skip) or too_many


def unsupported_dtype(
    x: Tensor, parameters: tuple[Tensor, ...], skip: Tensor | None = None, **_: object
) -> str | None:  # fmt: skip
    """Return the reason why the Triton kernels do not support the dtypes of a call, or None."""
    dtypes = [y.dtype for y in (x, *parameters, skip) if y is not None]
    return "x, the skip or a parameter is float64" if torch.float64 in dtypes else None
