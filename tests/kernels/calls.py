"""Calls of every op, for checks on a GPU, of fakes, edges and derivatives.

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


class Sizes(NamedTuple):
    """Numbers of sequences, of positions, of heads and their features, of rows of P, and of channels and states."""

    batch: int
    length: int
    heads: int = 1
    size: int = 16
    rows: int = 8
    channels: int = 16
    states: int = 16
    groups: int = 2
    width: int = 32


class Call(NamedTuple):
    """A call of an op: float64 tensors that are exact in bfloat16, and a function of the tensors and of options."""

    leaves: dict[str, torch.Tensor]
    run: Callable[..., tuple[torch.Tensor, ...]]
    gradients: bool = True


def calls(n: int, toy: bool) -> Iterator[tuple[str, Callable[[], Call]]]:
    """Yield (name, function that returns the call) of the calls for GPUs at length n; `toy` selects small sizes."""
    for name in GPU_CALLS:
        sizes = Sizes(1, n) if toy else Sizes(2, n, 3, 64, 40, 96, 16, 8, 192)
        yield name, partial(CALLS[name], sizes)


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


def _randoms(**shapes):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).bfloat16().double() for name, shape in shapes.items()}


def _rows(tokens, masked=False, padding_free=False):
    """Return the options of a mask or of two varlen sequences for tokens `[B, T, ...]`.

    The mask drops 0 tokens at the start of the first row, and up to T // 8 at the start of the last.
    """
    (batch, length), device = tokens.shape[:2], tokens.device
    if padding_free:
        bounds = torch.tensor([0, length // 3, length], dtype=torch.int32, device=device)
        return {"cu_seqlens": bounds, "max_seqlen": length - length // 3}
    first = torch.arange(batch, device=device)[:, None] * (length // 8) // max(batch - 1, 1)
    return {"mask": torch.arange(length, device=device) >= first} if masked else {}


def _count(x):
    return torch.full(x.shape[:1], 7, device=x.device)


def _tuple(result):
    return result if isinstance(result, tuple) else (result,)


def _luna(s, op="luna_attention", masked=False, tied=False, padding_free=False, size=None):
    batch, rest = 1 if padding_free else s.batch, (s.heads, s.size if size is None or s.size == 16 else size)
    lengths = {"query": s.length, "rows": s.rows, "context": s.length} | ({} if tied else {"value": s.length})
    leaves = _randoms(**{name: (batch, length, *rest) for name, length in lengths.items()})
    used = {"luna_pack": ("rows", "context", "value"), "luna_unpack": ("query", "rows")}.get(op, leaves)

    def run(query=None, rows=None, context=None, value=None, **options):
        value = context if value is None else value
        tokens = query if context is None else context
        options = {"cu_seqlens": None} | options | _rows(tokens, masked, padding_free)
        mask = options.pop("mask", None)
        rows = rows.expand(2, -1, -1, -1) if padding_free else rows
        if op == "luna_pack":
            return (api.luna_pack(rows, context, value, mask, **options),)
        if op == "luna_unpack":
            return (api.luna_unpack(query, rows, rows if tied else rows / 2, **options),)
        return api.luna_attention(query, rows, context, value, lambda y: (y, y), context_mask=mask, **options)

    return Call({name: leaves[name] for name in used if name in leaves}, run)


def _causal(s, rows=None, step=False, masked=False, stateful=False, activation="softplus"):
    rows = rows if rows and (rows > 64 or s.size > 16) else s.rows
    length = () if step else (s.length,)
    shapes = {"query": (s.batch, *length, s.heads, s.size), "pack_query": (s.batch, rows, s.heads, s.size)}
    shapes |= dict.fromkeys(("pack_key", "context"), shapes["query"])
    leaves = _randoms(**shapes)
    if stateful:
        means = _randoms(key_mean=(s.batch, s.heads, s.size, rows), value_mean=(s.batch, s.heads, rows, s.size))
        leaves |= {name: mean.abs() for name, mean in means.items()}
    op = api.luna_causal_attention_step if step else api.luna_causal_attention

    def run(query, pack_query, pack_key, context, key_mean=None, value_mean=None, **options):
        state = api.LunaCausalState(key_mean, value_mean, _count(key_mean)) if stateful else None
        options |= {} if step else {"return_state": True} | _rows(query, masked)
        output, state = op(query, pack_query, pack_key, context, context, state=state, activation=activation, **options)
        return output, state.key_mean, state.value_mean

    return Call(leaves, run, gradients=not step)


def _parameters(s, kind, rows):
    """Return parameters whose decays are as slow as those of a trained model."""
    names = ("input_logit", "damping_logit")
    shape, pairs = (rows, s.states), (rows, s.states, 2)
    if kind.startswith("diagonal_ssm"):
        shapes = {"weight": shape} if "real" in kind else {"phase": shape, "weight": pairs}
        leaves = _randoms(log_decay=shape, **shapes)
        leaves["log_decay"] = -(0.25 * leaves["log_decay"].abs() + 0.01).bfloat16().double()
    else:
        first = {"phase_logit": rows} if kind == "complex_ema" else {"expansion": shape}
        leaves = _randoms(**dict.fromkeys(names, shape), **first, projection=pairs if kind == "complex_ema" else shape)
        leaves |= {name: (0.5 * leaves[name]).bfloat16().double() for name in names}
    return leaves | _randoms(skip=s.channels)


def _average(s, kind, step=False, directions=1, masked=False, stateful=False, padding_free=False, **fixed):
    batch = 1 if padding_free else s.batch
    leaves = _randoms(x=(batch, s.channels) if step else (batch, s.length, s.channels))
    leaves |= _parameters(s, kind, directions * s.channels)
    pair = () if kind in ("damped_ema", "diagonal_ssm real") else (2,)
    leaves |= _randoms(state=(batch, s.channels, s.states, *pair)) if stateful or step else {}
    op = getattr(api, kind.partition(" ")[0] + ("_step" if step else ""))

    def run(x, state=None, **rest):
        rest |= fixed | ({"phase": None} if kind == "diagonal_ssm real" else {})
        if step:
            return op(x, state, **rest)
        rest |= _rows(x, masked, padding_free)
        return _tuple(op(x, initial_state=state, **({"return_state": stateful} | rest)))

    return Call(leaves, run, gradients=not step)


def _norm(s, step=False, masked=False, stateful=False):
    leaves = _randoms(x=(s.batch, *(() if step else (s.length,)), s.channels), weight=s.channels, bias=s.channels)
    if stateful:
        leaves |= _randoms(mean=(s.batch, s.groups), variance=(s.batch, s.groups))
        leaves["variance"] = (leaves["variance"].abs() + 1).bfloat16().double()

    def run(x, weight, bias, mean=None, variance=None, **options):
        state = api.TimestepNormState(_count(mean), mean, variance) if stateful else None
        if step:
            output, state = api.timestep_norm_step(x, state, s.groups, weight, bias, **options)
            return output, state.mean, state.variance
        options |= {"initial_state": state, "return_state": True} | _rows(x, masked)
        output, state = api.timestep_norm(x, s.groups, weight, bias, **options)
        return output, state.mean, state.variance

    return Call(leaves, run)


def _gated(s, step=False, chunk=None, masked=False, padding_free=False, row_offset=None, **fixed):
    batch, positions = 1 if padding_free else s.batch, chunk or max(s.length, 1)
    leaves = _randoms(query=(batch, *(() if step else (s.length,)), s.size), key=(batch, s.length, s.size))
    # Mega's scores are small, because its queries and keys are scaled by parameters that are initialized near zero.
    leaves["query"] = (0.25 * leaves["query"]).bfloat16().double()
    leaves |= _randoms(value=(batch, s.length, s.width), bias=2 * positions - 1)
    op = api.gated_attention_step if step else api.gated_attention

    def run(query, **rest):
        key = rest["key"]
        rest |= fixed | {"chunk_size": chunk} | _rows(key, masked, padding_free)
        if row_offset is not None:
            rest["mask"] = torch.arange(key.shape[1], device=key.device).expand(key.shape[0], -1) >= row_offset
            rest["row_offset"] = torch.full((key.shape[0],), row_offset, device=key.device)
        return (op(query, **rest),)

    return Call(leaves, run, gradients=not step)


# The first call of each op of `GPU_CALLS` is captured and compiled.
GPU_CALLS = {
    "luna_attention masked, tied": partial(_luna, masked=True, tied=True),
    "luna_attention padding_free": partial(_luna, padding_free=True),
    "luna_attention size=128, tied": partial(_luna, size=128, tied=True),
    "luna_causal_attention masked, stateful": partial(_causal, masked=True, stateful=True, rows=32),
    "luna_causal_attention rows=80": partial(_causal, rows=80),
    "luna_causal_attention rows=40, elu": partial(_causal, rows=40, activation="elu"),
    "damped_ema stateful": partial(_average, kind="damped_ema", stateful=True),
    "damped_ema directions=2, masked": partial(_average, kind="damped_ema", directions=2, masked=True),
    "damped_ema padding_free": partial(_average, kind="damped_ema", padding_free=True),
    "gated_attention masked": partial(_gated, masked=True),
    "gated_attention laplace, chunks, causal": partial(_gated, function="laplace", chunk=64, causal=True),
    "gated_attention relu2, chunks, padding_free": partial(_gated, function="relu2", chunk=64, padding_free=True),
    "complex_ema stateful": partial(_average, kind="complex_ema", stateful=True),
    "complex_ema masked": partial(_average, kind="complex_ema", masked=True),
    "complex_ema padding_free": partial(_average, kind="complex_ema", padding_free=True),
    "diagonal_ssm stateful": partial(_average, kind="diagonal_ssm", stateful=True),
    "diagonal_ssm directions=2, masked": partial(_average, kind="diagonal_ssm", directions=2, masked=True),
    "diagonal_ssm padding_free": partial(_average, kind="diagonal_ssm", padding_free=True),
    "timestep_norm stateful": partial(_norm, stateful=True),
    "timestep_norm masked": partial(_norm, masked=True),
    "luna_causal_attention_step": partial(_causal, step=True, stateful=True),
    "damped_ema_step": partial(_average, kind="damped_ema", step=True),
    "diagonal_ssm_step": partial(_average, kind="diagonal_ssm", step=True),
    "gated_attention_step": partial(_gated, step=True, function="softmax"),
}
CALLS = GPU_CALLS | {
    "luna_pack masked": partial(_luna, op="luna_pack", masked=True, tied=True),
    "luna_unpack": partial(_luna, op="luna_unpack"),
    "luna_unpack tied": partial(_luna, op="luna_unpack", tied=True),
    "gated_attention short chunks": partial(_gated, function="laplace", causal=True, chunk=8),
    "gated_attention row_offset": partial(_gated, function="relu2", row_offset=2),
    "damped_ema masked, stateful": partial(_average, kind="damped_ema", masked=True, stateful=True),
    "damped_ema directions=2, shifted": partial(_average, kind="damped_ema", directions=2, shift=True),
    "damped_ema truncated": partial(_average, kind="damped_ema", truncation=5),
    "complex_ema masked, stateful": partial(_average, kind="complex_ema", masked=True, stateful=True),
    "complex_ema_step": partial(_average, kind="complex_ema", step=True),
    "diagonal_ssm masked, stateful": partial(_average, kind="diagonal_ssm", masked=True, stateful=True),
    "diagonal_ssm real": partial(_average, kind="diagonal_ssm real", masked=True, stateful=True),
    "diagonal_ssm real, directions=2": partial(_average, kind="diagonal_ssm real", directions=2),
    "diagonal_ssm_step real": partial(_average, kind="diagonal_ssm real", step=True),
    "timestep_norm masked, stateful": partial(_norm, masked=True, stateful=True),
    "timestep_norm_step": partial(_norm, step=True, stateful=True),
    "timestep_norm_step first": partial(_norm, step=True),
}  # fmt: skip


AVERAGES = [name for name, make in CALLS.items() if make.func is _average]
ON_NATIVE = [name for name in AVERAGES if "truncated" not in name]


def main() -> None:
    for name, make in calls(33, toy=False):
        for dtype in (torch.bfloat16, torch.float32):
            results(make(), torch.device("cuda"), dtype, "triton")
            torch.cuda.synchronize()
        print(name, flush=True)


if __name__ == "__main__":
    main()
