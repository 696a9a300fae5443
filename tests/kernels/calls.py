"""Calls of every kernel for the checks on a GPU. Outputs and gradients are compared with the reference in float64.

    PYTHONPATH=. compute-sanitizer --tool memcheck python tests/kernels/calls.py

runs each call once on the GPU, with few tokens.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from luna_mega.kernels import api

# These tensors are never narrower than float32.
WIDE = {"bias", "state", "key_mean", "value_mean", "mean", "variance"}


class Call(NamedTuple):
    """A call of an op: float64 tensors that are exact in bfloat16, and a function of the tensors and the backend."""

    leaves: dict[str, torch.Tensor]
    run: Callable[..., tuple[torch.Tensor, ...]]
    gradients: bool = True


def calls(n: int, toy: bool) -> Iterator[tuple[str, Callable[[], Call]]]:
    """Yield (name, function that returns the call) of all calls at length n; `toy` selects small sizes."""
    for options in ({"masked": True, "tied": True}, {"padding_free": True}, {"size": 128, "tied": True}):
        yield f"luna_attention {_words(options)}", partial(_luna, n, toy, **options)
    for options in ({"masked": True, "stateful": True}, {"rows": 80}, {"rows": 40, "activation": "elu"}):
        yield f"luna_causal_attention {_words(options)}", partial(_causal, n, toy, **options)
    for options in ({"stateful": True}, {"directions": 2, "masked": True}, {"padding_free": True}):
        yield f"damped_ema {_words(options)}", partial(_ema, n, toy, **options)
    for options in (
        {"function": "softmax", "masked": True},
        {"function": "laplace", "chunk": 64, "causal": True},
        {"function": "relu2", "chunk": 64, "padding_free": True},
    ):
        yield f"gated_attention {_words(options)}", partial(_gated, n, toy, **options)
    for options in ({"stateful": True}, {"masked": True}, {"padding_free": True}):
        yield f"complex_ema {_words(options)}", partial(_complex_ema, n, toy, **options)
    for options in ({"stateful": True}, {"directions": 2, "masked": True}, {"padding_free": True}):
        yield f"diagonal_ssm {_words(options)}", partial(_diagonal, n, toy, **options)
    for options in ({"stateful": True}, {"masked": True}):
        yield f"timestep_norm {_words(options)}", partial(_norm, n, toy, **options)
    yield "luna_causal_attention_step", partial(_causal_step, toy)
    yield "damped_ema_step", partial(_ema_step, toy)
    yield "diagonal_ssm_step", partial(_diagonal_step, toy)
    yield "gated_attention_step", partial(_gated_step, n, toy)


def results(call: Call, device: torch.device, dtype: torch.dtype, backend: str) -> dict[str, torch.Tensor]:
    """Return the outputs of a call and the gradients of all its tensors."""
    wide = torch.promote_types(dtype, torch.float32)
    leaves = {name: x.to(device, wide if name in WIDE else dtype) for name, x in call.leaves.items()}
    if not call.gradients:
        with torch.no_grad():
            return _named("output", call.run(backend=backend, **leaves))
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    outputs = call.run(backend=backend, **leaves)
    generator = torch.Generator().manual_seed(1)
    seeds = [torch.randn(x.shape, generator=generator).bfloat16().to(x.device, x.dtype) for x in outputs]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), seeds)
    of_leaves = {f"gradient of {name}": x for name, x in zip(leaves, gradients, strict=True)}
    return _named("output", outputs) | of_leaves


def _named(name, tensors):
    return {f"{name} {index}": x.detach() for index, x in enumerate(tensors)}


def _words(options):
    flags = (f"{name}={value}" if value is not True else name for name, value in options.items())
    return ", ".join(str(flag).removeprefix("function=") for flag in flags)


def _randoms(**shapes):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).bfloat16().double() for name, shape in shapes.items()}


def _mask(batch, n, device):
    """Return a mask that drops 0 tokens at the start of the first row, and up to n // 8 at the start of the last."""
    return torch.arange(n, device=device) >= torch.linspace(0, n // 8, batch, device=device)[:, None].long()


def _bounds(n, device):
    """Return the bounds of two sequences with n tokens in total, and the length of the longer one."""
    return torch.tensor([0, n // 3, n], dtype=torch.int32, device=device), n - n // 3


def _luna(n, toy, size=64, masked=False, tied=False, padding_free=False):
    batch, heads, rows = (1, 1, 8) if toy else (1 if padding_free else 2, 3, 40)
    size = 16 if toy else size
    shapes = {"query": n, "pack_query": rows, "context": n} | ({} if tied else {"value": n})
    leaves = _randoms(**{name: (batch, length, heads, size) for name, length in shapes.items()})

    def run(query, pack_query, context, value=None, backend=None):
        value, options = context if value is None else value, {"backend": backend}
        if padding_free:
            options["cu_seqlens"], options["max_seqlen"] = _bounds(n, query.device)
        if padding_free:
            pack_query = pack_query.expand(2, -1, -1, -1)
        mask = _mask(batch, n, query.device) if masked else None
        packed = api.luna_pack(pack_query, context, value, mask, **options)
        return api.luna_unpack(query, packed, packed, **options), packed

    return Call(leaves, run)


def _causal(n, toy, rows=32, masked=False, stateful=False, activation="softplus"):
    batch, heads, size = (1, 1, 16) if toy else (2, 2, 64)
    rows = min(rows, 16) if toy and rows <= 64 else rows
    shapes = {"query": (batch, n, heads, size), "pack_query": (batch, rows, heads, size)}
    shapes |= dict.fromkeys(("pack_key", "context"), (batch, n, heads, size))
    leaves = _randoms(**shapes)
    if stateful:
        means = _randoms(key_mean=(batch, heads, size, rows), value_mean=(batch, heads, rows, size))
        leaves |= {name: mean.abs() for name, mean in means.items()}

    def run(query, pack_query, pack_key, context, key_mean=None, value_mean=None, backend=None):
        count = torch.full((batch,), 7, device=query.device)
        state = api.LunaCausalState(key_mean, value_mean, count) if stateful else None
        output, state = api.luna_causal_attention(
            query, pack_query, pack_key, context, context,
            mask=_mask(batch, n, query.device) if masked else None, activation=activation,
            state=state, return_state=True, backend=backend,
        )  # fmt: skip
        return output, state.key_mean, state.value_mean

    return Call(leaves, run)


def _parameters(channels, directions):
    """Return parameters whose logits are small enough for slow decays, as in a trained average."""
    names = ("input_logit", "damping_logit", "expansion", "projection")
    leaves = _randoms(**dict.fromkeys(names, (directions * channels, 16)), skip=(channels,))
    return leaves | {name: (0.5 * leaves[name]).bfloat16().double() for name in names[:2]}


def _ema(n, toy, directions=1, masked=False, stateful=False, padding_free=False):
    batch, channels = (1, 16) if toy else (1 if padding_free else 2, 96)
    leaves = _randoms(x=(batch, n, channels)) | _parameters(channels, directions)
    leaves |= _randoms(state=(batch, channels, 16)) if stateful else {}

    def run(x, state=None, backend=None, **parameters):
        options = {"mask": _mask(batch, n, x.device) if masked else None, "backend": backend}
        if padding_free:
            options["cu_seqlens"], options["max_seqlen"] = _bounds(n, x.device)
        result = api.damped_ema(x, **parameters, initial_state=state, return_state=stateful, **options)
        return result if stateful else (result,)

    return Call(leaves, run)


def _complex_ema(n, toy, masked=False, stateful=False, padding_free=False):
    batch, channels = (1, 16) if toy else (1 if padding_free else 2, 96)
    names = ("input_logit", "damping_logit")
    leaves = _randoms(x=(batch, n, channels), **dict.fromkeys(names, (channels, 16)), phase_logit=(channels,))
    leaves |= _randoms(projection=(channels, 16, 2), skip=(channels,))
    leaves |= {name: (0.5 * leaves[name]).bfloat16().double() for name in names}
    leaves |= _randoms(state=(batch, channels, 16, 2)) if stateful else {}

    def run(x, state=None, backend=None, **parameters):
        options = {"mask": _mask(batch, n, x.device) if masked else None, "backend": backend}
        if padding_free:
            options["cu_seqlens"], options["max_seqlen"] = _bounds(n, x.device)
        result = api.complex_ema(x, **parameters, initial_state=state, return_state=stateful, **options)
        return result if stateful else (result,)

    return Call(leaves, run)


def _turning(channels, directions):
    """Return parameters that decay as slowly as those of a trained model."""
    leaves = _randoms(log_decay=(directions * channels, 16), phase=(directions * channels, 16))
    leaves |= _randoms(weight=(directions * channels, 16, 2), skip=(channels,))
    return leaves | {"log_decay": -(0.25 * leaves["log_decay"].abs() + 0.01).bfloat16().double()}


def _diagonal(n, toy, directions=1, masked=False, stateful=False, padding_free=False):
    batch, channels = (1, 16) if toy else (1 if padding_free else 2, 96)
    leaves = _randoms(x=(batch, n, channels)) | _turning(channels, directions)
    leaves |= _randoms(state=(batch, channels, 16, 2)) if stateful else {}

    def run(x, state=None, backend=None, **parameters):
        options = {"mask": _mask(batch, n, x.device) if masked else None, "backend": backend}
        if padding_free:
            options["cu_seqlens"], options["max_seqlen"] = _bounds(n, x.device)
        result = api.diagonal_ssm(x, **parameters, initial_state=state, return_state=stateful, **options)
        return result if stateful else (result,)

    return Call(leaves, run)


def _norm(n, toy, masked=False, stateful=False):
    batch, channels, groups = (1, 16, 2) if toy else (2, 96, 8)
    leaves = _randoms(x=(batch, n, channels), weight=(channels,), bias=(channels,))
    if stateful:
        leaves |= _randoms(mean=(batch, groups), variance=(batch, groups))
        leaves["variance"] = leaves["variance"].abs()

    def run(x, weight, bias, mean=None, variance=None, backend=None):
        options = {"mask": _mask(batch, n, x.device) if masked else None, "backend": backend}
        if stateful:
            count = torch.full((batch,), 7, device=x.device)
            options |= {"initial_state": api.TimestepNormState(count, mean, variance)}
        output, state = api.timestep_norm(x, groups, weight, bias, return_state=True, **options)
        return output, state.mean, state.variance

    return Call(leaves, run)


def _gated(n, toy, function, chunk=None, causal=False, masked=False, padding_free=False):
    batch, shared, values = (1, 16, 32) if toy else (1 if padding_free else 2, 64, 192)
    positions = n if chunk is None else chunk
    leaves = _randoms(query=(batch, n, shared), key=(batch, n, shared), value=(batch, n, values))
    # Mega's scores are small, because its queries and keys are scaled by parameters that are initialized near zero.
    leaves["query"] = (0.25 * leaves["query"]).bfloat16().double()
    leaves |= _randoms(bias=(2 * positions - 1,))

    def run(query, key, value, bias, backend=None):
        options = {"mask": _mask(batch, n, query.device) if masked else None, "backend": backend}
        if padding_free:
            options["cu_seqlens"], options["max_seqlen"] = _bounds(n, query.device)
        options |= {"function": function, "causal": causal, "chunk_size": chunk}
        return (api.gated_attention(query, key, value, bias, **options),)

    return Call(leaves, run)


def _causal_step(toy):
    batch, heads, size, rows = (1, 1, 16, 8) if toy else (3, 2, 64, 32)
    leaves = _randoms(
        **dict.fromkeys(("query", "pack_key", "key", "value"), (batch, heads, size)),
        pack_query=(batch, rows, heads, size),
    )
    means = _randoms(key_mean=(batch, heads, size, rows), value_mean=(batch, heads, rows, size))
    leaves |= {name: mean.abs() for name, mean in means.items()}

    def run(query, pack_query, pack_key, key, value, key_mean, value_mean, backend=None):
        state = api.LunaCausalState(key_mean, value_mean, torch.full((batch,), 7, device=query.device))
        output, state = api.luna_causal_attention_step(query, pack_query, pack_key, key, value, state, backend=backend)
        return output, state.key_mean, state.value_mean

    return Call(leaves, run, gradients=False)


def _ema_step(toy):
    batch, channels = (1, 16) if toy else (3, 96)
    leaves = _randoms(x=(batch, channels), state=(batch, channels, 16)) | _parameters(channels, 1)

    def run(x, state, backend=None, **parameters):
        return api.damped_ema_step(x, state, **parameters, backend=backend)

    return Call(leaves, run, gradients=False)


def _diagonal_step(toy):
    batch, channels = (1, 16) if toy else (3, 96)
    leaves = _randoms(x=(batch, channels), state=(batch, channels, 16, 2)) | _turning(channels, 1)

    def run(x, state, backend=None, **parameters):
        return api.diagonal_ssm_step(x, state, **parameters, backend=backend)

    return Call(leaves, run, gradients=False)


def _gated_step(n, toy):
    batch, shared, values = (1, 16, 32) if toy else (3, 64, 192)
    leaves = _randoms(query=(batch, shared), key=(batch, n, shared), value=(batch, n, values), bias=(2 * n - 1,))

    def run(query, key, value, bias, backend=None):
        return (api.gated_attention_step(query, key, value, bias, function="softmax", backend=backend),)

    return Call(leaves, run, gradients=False)


def main() -> None:
    for name, make in calls(33, toy=False):
        for dtype in (torch.bfloat16, torch.float32):
            results(make(), torch.device("cuda"), dtype, "triton")
            torch.cuda.synchronize()
        print(name, flush=True)


if __name__ == "__main__":
    main()
