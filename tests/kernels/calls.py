"""The table of calls: how to make the inputs of every operator, the call, its definition, and what it supports.

`OPERATORS` has one row per operator, for the contract (`contract.py`). `GPU_CALLS` are fixed calls, for `make gpu`.

    PYTHONPATH=. compute-sanitizer --tool memcheck python tests/kernels/calls.py

runs each of them once on the GPU, with few tokens.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from luna_mega.kernels import api
from tests.kernels import loops

# Tensors of tokens `[B, T, ...]`, of states, and all that have one row per sequence if sequences are varlen.
TOKENS = {"query", "context", "value", "x", "pack_key", "key"}
STATES = {"state", "key_mean", "value_mean", "mean", "variance"}
OF_SEQUENCES = {"rows", "pack_query", "pack_mask", "count", *STATES}
# These tensors are never narrower than float32.
WIDE = {"bias", *STATES}


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
    """A call of an op: float64 tensors that are exact in bfloat16, a function of these and of options, its definition.

    Both functions return the output and the tensors of the state. The definition also supports a `mask`, a `pack_mask`
    and a `count`, but no other options.
    """

    leaves: dict[str, torch.Tensor]
    run: Callable[..., tuple[torch.Tensor, ...]]
    gradients: bool = True
    loop: Callable[..., tuple[torch.Tensor, ...]] | None = None


def calls(n: int, toy: bool) -> Iterator[tuple[str, Callable[[], Call]]]:
    """Yield (name, function that returns the call) of the calls for GPUs at length n; `toy` selects small sizes."""
    for name in GPU_CALLS:
        sizes = Sizes(1, n) if toy else Sizes(2, n, 3, 64, 40, 96, 16, 8, 192)
        yield name, partial(GPU_CALLS[name], sizes)


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

    def run(query=None, rows=None, context=None, value=None, pack_mask=None, **options):
        value = context if value is None else value
        tokens = query if context is None else context
        options = {"cu_seqlens": None} | _rows(tokens, masked, padding_free) | options
        mask = options.pop("mask", None)
        rows = rows.expand(2, -1, -1, -1) if padding_free else rows
        if op == "luna_pack":
            return (api.luna_pack(rows, context, value, mask, **options),)
        if op == "luna_unpack":
            return (api.luna_unpack(query, rows, rows if tied else rows / 2, pack_mask, **options),)
        options |= {"context_mask": mask, "pack_mask": pack_mask}
        return api.luna_attention(query, rows, context, value, lambda y: (y, y), **options)

    def loop(query=None, rows=None, context=None, value=None, mask=None, pack_mask=None):
        if op == "luna_unpack":
            return (loops.attention(query, rows, rows if tied else rows / 2, pack_mask),)
        packed = loops.attention(rows, context, context if value is None else value, mask)
        return (packed,) if op == "luna_pack" else (loops.attention(query, packed, packed, pack_mask), packed)

    return Call({name: leaves[name] for name in used if name in leaves}, run, loop=loop)


def _causal(s, rows=None, step=False, masked=False, stateful=False, tied=True, activation="softplus"):
    rows = rows if rows and (rows > 64 or s.size > 16) else s.rows
    length = () if step else (s.length,)
    shapes = {"query": (s.batch, *length, s.heads, s.size), "pack_query": (s.batch, rows, s.heads, s.size)}
    shapes |= dict.fromkeys(("pack_key", "context"), shapes["query"])
    shapes |= {} if tied else {"value": (s.batch, *length, s.heads, s.size + 1)}
    leaves = _randoms(**shapes)
    if stateful:
        width = s.size if tied else s.size + 1
        means = _randoms(key_mean=(s.batch, s.heads, s.size, rows), value_mean=(s.batch, s.heads, rows, width))
        leaves |= {name: mean.abs() for name, mean in means.items()}
    op = api.luna_causal_attention_step if step else api.luna_causal_attention

    def run(query, pack_query, pack_key, context, value=None, key_mean=None, value_mean=None, count=None, **options):
        state = None
        if key_mean is not None:
            state = api.LunaCausalState(key_mean, value_mean, _count(key_mean) if count is None else count)
        options = ({} if step else {"return_state": True} | _rows(query, masked)) | options
        value = context if value is None else value
        output, state = op(query, pack_query, pack_key, context, value, state=state, activation=activation, **options)
        return output, state.key_mean, state.value_mean

    def loop(query, pack_query, pack_key, context, value=None, key_mean=None, count=None, **rest):
        tokens = [x[:, None] if step else x for x in (query, pack_key, context, context if value is None else value)]
        if key_mean is not None:
            rest |= {"key_mean": key_mean, "count": _count(key_mean) if count is None else count}
        rest["mask"] = rest["mask"][:, None] if step and rest.get("mask") is not None else rest.get("mask")
        output, *means = loops.luna_causal_attention(tokens[0], pack_query, *tokens[1:], activation, **rest)[:3]
        return output[:, 0] if step else output, *means

    return Call(leaves, run, gradients=not step, loop=loop)


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


def _average(
    s, kind, step=False, directions=1, masked=False, stateful=False, padding_free=False, complex=False, **fixed
):  # fmt: skip
    batch = 1 if padding_free else s.batch
    leaves = _randoms(x=(batch, s.channels) if step else (batch, s.length, s.channels))
    leaves |= _parameters(s, kind, directions * s.channels)
    pair = () if kind in ("damped_ema", "diagonal_ssm real") else (2,)
    leaves |= _randoms(state=(batch, s.channels, s.states, *pair)) if stateful or step else {}
    name = kind.partition(" ")[0]
    op, no_phase = getattr(api, name + ("_step" if step else "")), {"phase": None} if "real" in kind else {}

    def run(x, state=None, **rest):
        rest = fixed | no_phase | rest
        if complex and rest["weight"].dtype in (torch.float64, torch.float32):  # there is no complex bfloat16
            rest["weight"] = torch.complex(*rest["weight"].unbind(-1))
            state = None if state is None else torch.complex(*state.unbind(-1))
        if step:
            results = op(x, state, **rest)
        else:
            rest = {"return_state": stateful} | _rows(x, masked, padding_free) | rest
            results = _tuple(op(x, initial_state=state, **rest))
        return tuple(torch.view_as_real(y) if y.is_complex() else y for y in results)

    def loop(x, state=None, mask=None, **rest):
        rest |= {name: value or None for name, value in fixed.items()}
        x = x[:, None] if step else x
        output, after = getattr(loops, name)(x, mask=None if step else mask, state=state, **rest)
        if not step:
            return output, after
        kept = torch.ones(len(x), dtype=torch.bool) if mask is None else mask
        return output[:, 0], torch.where(kept.view(-1, *[1] * (after.dim() - 1)), after, state)

    return Call(leaves, run, gradients=not step, loop=loop)


def _norm(s, step=False, masked=False, stateful=False):
    leaves = _randoms(x=(s.batch, *(() if step else (s.length,)), s.channels), weight=s.channels, bias=s.channels)
    if stateful:
        leaves |= _randoms(mean=(s.batch, s.groups), variance=(s.batch, s.groups))
        leaves["variance"] = (leaves["variance"].abs() + 1).bfloat16().double()

    def run(x, weight=None, bias=None, mean=None, variance=None, count=None, **options):
        state = None
        if mean is not None:
            state = api.TimestepNormState(_count(mean) if count is None else count, mean, variance)
        if step:
            output, state = api.timestep_norm_step(x, state, s.groups, weight, bias, **options)
            return output, state.mean, state.variance
        options = {"initial_state": state, "return_state": True} | _rows(x, masked) | options
        output, state = api.timestep_norm(x, s.groups, weight, bias, **options)
        return output, state.mean, state.variance

    def loop(x, weight=None, bias=None, mean=None, count=None, mask=None, **rest):
        if mean is not None:
            rest |= {"mean": mean, "count": _count(mean) if count is None else count}
        x, mask = x[:, None] if step else x, mask[:, None] if step and mask is not None else mask
        output, _, *statistics = loops.timestep_norm(x, s.groups, weight, bias, mask, **rest)
        return output[:, 0] if step else output, *statistics

    return Call(leaves, run, loop=loop)


def _gated(s, step=False, chunk=None, masked=False, padding_free=False, place=None, **fixed):
    batch, queries, by_row = 1 if padding_free else s.batch, s.length, False
    if place is not None:  # more or fewer queries than keys, from a column on that may differ between rows
        offset = min(3, s.length) * ("offset" in place)
        queries = s.length - offset if fixed["causal"] else 2 * s.length + 1 if place == "more" else s.length // 2
        by_row = "rows" in place and not fixed["causal"]
        fixed |= {"offset": offset}
        chunk = 4 if fixed["causal"] and place == "offset, chunks" else None
    positions = chunk or max(s.length, queries + 3, 1)
    leaves = _randoms(query=(batch, *(() if step else (queries,)), s.size), key=(batch, s.length, s.size))
    # Mega's scores are small, because its queries and keys are scaled by parameters that are initialized near zero.
    leaves["query"] = (0.25 * leaves["query"]).bfloat16().double()
    leaves |= _randoms(value=(batch, s.length, s.width), bias=2 * positions - 1)
    op = api.gated_attention_step if step else api.gated_attention

    def run(query, **rest):
        key = rest["key"]
        rest = fixed | {"chunk_size": chunk} | _rows(key, masked, padding_free) | rest
        if not by_row:
            return (op(query, **rest),)
        rest, padding = of_rows(query, rest)
        return (op(query, **rest).masked_fill(padding, 0.0),)

    def of_rows(query, rest):
        """Return the options for an offset per row, and the queries that are padding; the first keys are masked."""
        rows = torch.tensor([-1, 2, 0], device=query.device)[: s.batch, None]
        kept = torch.arange(s.length, device=query.device) >= rows
        mask = kept if rest.get("mask") is None else kept & rest["mask"]
        padding = torch.arange(queries, device=query.device) < -rows
        return rest | {"mask": mask, "row_offset": rows[:, 0]}, padding[..., None]

    def loop(query, **rest):
        rest = fixed | {"chunk_size": chunk} | rest
        if step:
            rest |= {"causal": True, "offset": rest["key"].shape[1] - 1}
        if by_row:
            rest, padding = of_rows(query, rest)
            return (loops.gated_attention(query, **rest)[0].masked_fill(padding, 0.0),)
        output = loops.gated_attention(query[:, None] if step else query, **rest)[0]
        return (output[:, 0] if step else output,)

    return Call(leaves, run, gradients=not step, loop=loop)


class Operator(NamedTuple):
    """The options, layouts and inputs of an operator.

    Args:
        make: function of `Sizes`, of options and of `stateful`, which returns a call.
        choices: options that change what the operator computes, and their values, the simplest one first.
        layouts: how sequences may be stored (`contract.py`).
        stateful: whether calls may have a state.
        optional: leaves that may be omitted.
        options: further tensors of calls.
    """

    make: Callable[..., Call]
    choices: dict[str, tuple[Any, ...]] = {}
    layouts: tuple[str, ...] = ("dense", "mask", "varlen")
    stateful: bool = False
    optional: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


LUNA = {"tied": (False, True)}
BOTH, COMPLEX = {"directions": (1, 2)}, {"complex": (False, True)}
GATED = {"function": ("softmax", "laplace", "relu2"), "chunk": (None, 8, 5), "causal": (False, True)}
STEP = {"layouts": ("dense", "mask"), "optional": ("skip",)}
OPERATORS = {
    "luna_pack": Operator(partial(_luna, op="luna_pack"), LUNA),
    "luna_unpack": Operator(
        partial(_luna, op="luna_unpack"), LUNA, layouts=("dense", "varlen"), options=("pack_mask",)
    ),
    "luna_attention": Operator(_luna, LUNA, options=("pack_mask",)),
    "luna_causal_attention": Operator(
        _causal, {"activation": ("softplus", "elu"), "tied": (True, False)}, stateful=True, options=("pack_mask",)
    ),
    "luna_causal_attention_step": Operator(
        partial(_causal, step=True), {"activation": ("softplus", "elu"), "tied": (True, False)}, ("dense", "mask"),
        stateful=True, options=("pack_mask",),
    ),
    "damped_ema": Operator(
        partial(_average, kind="damped_ema"), BOTH | {"shift": (False, True), "truncation": (None, 5)},
        ("dense", "mask", "varlen", "lengths"), stateful=True, optional=("skip",),
    ),
    "complex_ema": Operator(
        partial(_average, kind="complex_ema"), {}, ("dense", "mask", "varlen", "lengths"), True, ("skip",)
    ),
    "diagonal_ssm": Operator(
        partial(_average, kind="diagonal_ssm"), BOTH | COMPLEX, ("dense", "mask", "varlen", "lengths"), True, ("skip",)
    ),
    "diagonal_ssm real": Operator(
        partial(_average, kind="diagonal_ssm real"), BOTH, ("dense", "mask", "varlen", "lengths"), True, ("skip",)
    ),
    "damped_ema_step": Operator(partial(_average, kind="damped_ema", step=True), **STEP),
    "complex_ema_step": Operator(partial(_average, kind="complex_ema", step=True), **STEP),
    "diagonal_ssm_step": Operator(partial(_average, kind="diagonal_ssm", step=True), COMPLEX, **STEP),
    "diagonal_ssm_step real": Operator(partial(_average, kind="diagonal_ssm real", step=True), **STEP),
    "timestep_norm": Operator(_norm, stateful=True, optional=("weight", "bias")),
    "timestep_norm_step": Operator(
        partial(_norm, step=True), {}, ("dense", "mask"), stateful=True, optional=("weight", "bias")
    ),
    "gated_attention": Operator(_gated, GATED, ("dense", "mask", "varlen", "left"), optional=("bias",)),
    "gated_attention to other keys": Operator(
        _gated, {"function": GATED["function"], "causal": (False, True),
                 "place": ("more", "offset", "rows", "offset, chunks")},
        ("dense", "mask"), optional=("bias",),
    ),
    "gated_attention_step": Operator(
        partial(_gated, step=True), {"function": GATED["function"], "chunk": GATED["chunk"]}, ("dense", "mask"),
        optional=("bias",),
    ),
}  # fmt: skip


# Options of the calls for GPUs; the first call of each op is captured and compiled.
GPU_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "luna_attention": [{"masked": True, "tied": True}, {"padding_free": True}, {"size": 128, "tied": True}],
    "luna_causal_attention": [
        {"masked": True, "stateful": True, "rows": 32}, {"rows": 80}, {"rows": 40, "activation": "elu"},
    ],
    "damped_ema": [{"stateful": True}, {"directions": 2, "masked": True}, {"padding_free": True}],
    "complex_ema": [{"stateful": True}, {"masked": True}, {"padding_free": True}],
    "diagonal_ssm": [{"stateful": True}, {"directions": 2, "masked": True}, {"padding_free": True}],
    "timestep_norm": [{"stateful": True}, {"masked": True}],
    "gated_attention": [
        {"masked": True}, {"function": "laplace", "chunk": 64, "causal": True},
        {"function": "relu2", "chunk": 64, "padding_free": True},
    ],
    "luna_causal_attention_step": [{"stateful": True}],
    "damped_ema_step": [{}],
    "diagonal_ssm_step": [{}],
    "gated_attention_step": [{"function": "softmax"}],
}  # fmt: skip
GPU_CALLS = {
    " ".join((name, *(f"{key}={value}" for key, value in options.items()))): partial(OPERATORS[name].make, **options)
    for name, several in GPU_OPTIONS.items() for options in several
}  # fmt: skip


def main() -> None:
    for name, make in calls(33, toy=False):
        for dtype in (torch.bfloat16, torch.float32):
            results(make(), torch.device("cuda"), dtype, "triton")
            torch.cuda.synchronize()
        print(name, flush=True)


if __name__ == "__main__":
    main()
