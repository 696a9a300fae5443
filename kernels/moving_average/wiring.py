"""Backends of both averages: coefficients from parameters, padding-free batches with states, shards."""

from collections.abc import Callable

import torch

from luna_mega.kernels import varlen
from luna_mega.kernels._op import Op, for_ranks, without_autocast
from luna_mega.kernels.gated_attention.columns import to_end
from luna_mega.kernels.moving_average import sharded
from luna_mega.kernels.moving_average.coefficients import powers, times
from luna_mega.kernels.upcast import upcast_dtype


def make_average(
    name: str, backends: dict[str, Callable], coefficients: Callable, unsupported: Callable, state: int
) -> Op:
    """Return the `Op` of an average of sequences.

    Args:
        name: Name of the public function.
        backends: The functions that compute a call, which take `parameters`, by the name of the backend.
        coefficients: Returns the `Coefficients` of the parameters.
        unsupported: Returns the reason why Triton kernels cannot compute a call, else None.
        state: Index of a parameter that has the shape of a state.
    """

    def one_by_one(run, call, cu_seqlens, max_seqlen):
        if call["initial_state"] is None and not call["return_state"]:
            return op.run_padded(run, call, cu_seqlens, max_seqlen)
        x, parameters = call["x"], call["parameters"]
        return varlen.one_by_one(run, call, cu_seqlens, parameters[state].shape, upcast_dtype(x, *parameters))

    def on_ranks(run, shard, **call):
        return sharded.average(run, shard, name, coefficients, **call)

    op = Op(name, backends, unsupported, tokens=("x",), run_varlen=one_by_one, on_ranks=for_ranks(on_ranks, backends))
    return op


def from_parameters(run: Callable, coefficients: Callable) -> Callable:
    """Return a function that takes parameters and calls `run` with the coefficients, in float32 or float64."""

    def run_parameters(x, parameters, **rest):
        dtype = upcast_dtype(x, *parameters)
        made = coefficients(*(parameter.to(dtype) for parameter in parameters))
        for name in ("skip", "state", "initial_state"):
            if rest.get(name) is not None:
                rest[name] = rest[name].to(dtype)
        return run(x, coefficients=made, **rest)

    return run_parameters


def from_coefficients(run: Callable, compute: Callable) -> Callable:
    """Return a step that computes the coefficients if the call has none."""

    def run_step(x, parameters, coefficients, skip, state, mask):
        dtype = upcast_dtype(x, *parameters)
        if coefficients is None:
            coefficients = compute(*parameters, dtype=dtype)
        return run(x, state.to(dtype), coefficients, None if skip is None else skip.to(dtype), mask)

    return run_step


def state_after(op: Op, coefficients: Callable, backend: str | None, call: dict, lengths: torch.Tensor) -> torch.Tensor:
    """Return the states after the first `lengths` `[B]` positions of each row, without decay at dropped positions."""
    rows = {name: to_end(call[name], lengths) for name in ("x", "mask")}
    _, state = op(backend, call | rows | {"skip": None, "initial_state": None, "return_state": True})
    initial, dtype = call["initial_state"], upcast_dtype(call["x"], *call["parameters"])
    if initial is None:
        return state
    with without_autocast(state.device.type):
        of = coefficients(*(parameter.to(dtype) for parameter in call["parameters"]))
        decays = powers(of.log_decay, of.turn, lengths).permute(3, 0, 1, 2)
        return state + times(decays, initial.to(dtype).reshape(decays.shape)).reshape(state.shape)


def unsupported_reason(x: torch.Tensor, parameters: tuple[torch.Tensor, ...], most: int) -> str | None:
    """Return the reason why Triton kernels for up to `most` states per channel cannot compute a call, else None."""
    if upcast_dtype(x, *parameters) == torch.float64:
        return "x or a parameter is float64"
    states = parameters[0].shape[1]
    return f"{states} states per channel are more than {most}" if states > most else None
