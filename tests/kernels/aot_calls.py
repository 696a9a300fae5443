"""Calls for `aot.py` on the meta device, which launch the kernels of forward and backward passes or of one step.

The sizes are those of Mega's recipes and of Megalodon (averages, norm, `gated_attention`), and of a model like RoBERTa
with 12 heads of 64 (Luna).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from luna_mega.kernels.gated_attention import triton_backward as gated_backward, triton_products as gated_forward
from luna_mega.kernels.luna_attention import triton_backward as luna_backward, triton_forward as luna_forward
from luna_mega.kernels.luna_causal_attention import (
    triton_backward as causal_backward,
    triton_forward as causal_forward,
    triton_step as causal_step,
)
from luna_mega.kernels.recurrence import triton_scan, triton_scan_backward, triton_step
from luna_mega.kernels.timestep_norm import torch_backend as norms, triton_kernels

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def empty(*shape, dtype=FP32):
    return torch.empty(shape, dtype=dtype, device="meta")


def luna(
    op, rows, tied=True, masked=True, varlen=False, dropout=0.0, dtype=BF16, size=64, length=4096, precision="tf32x3",
    batch=8,
):  # fmt: skip
    """Launch the kernels of `luna_pack` or `luna_unpack`."""
    tokens, few = (1, batch * length) if varlen else (batch, length), (batch, rows)
    queries, keys = (few, tokens) if op == "luna_pack" else (tokens, few)
    side = ("key" if op == "luna_pack" else "query") if varlen else None
    tensors = (
        empty(*queries, 12, size, dtype=dtype),
        empty(*keys, 12, size, dtype=dtype),
        None if tied else empty(*keys, 12, size, dtype=dtype),
        empty(*keys, dtype=torch.bool) if masked else None,
        empty(batch + 1, dtype=torch.int32) if varlen else None,
        empty(1, dtype=torch.int64) if dropout else None,
    )
    options = side, length if varlen else 0, size**-0.5, dropout, precision if dtype == FP32 else "tf32"
    output = luna_forward.forward(*tensors, *options)
    luna_backward.backward(output[0], *output, *tensors, *options)


def causal(batch, rows, dtype, stateful=False, dropout=0.0, backward=True, size=64, length=4096, step=False):
    """Launch the kernels of `luna_causal_attention`. With 32 sequences, every head is one segment."""
    time = () if step else (length,)
    query, pack_key, key, value = (empty(batch, *time, 12, size, dtype=dtype) for _ in range(4))
    pack_query, count = empty(batch, rows, 12, size, dtype=dtype), empty(batch, *time, dtype=torch.int64)
    mask, state = None, (None, None, None)
    if stateful or step:
        mask = empty(batch, *time, dtype=torch.bool)
        means = (empty(batch, 12, *sizes) for sizes in ((size, rows), (rows, size)))
        state = *means, empty(batch, dtype=torch.int64)
    tokens, options = (query, pack_key, key, value, pack_query), ("softplus", dropout)
    if step:
        causal_step.forward_step(*tokens, mask, None, *state, *options, None)
        return
    options = *options, empty(1, dtype=torch.int64) if dropout else None, "tf32x3"
    outputs = causal_forward.forward(*tokens, count, mask, None, *state, *options)
    if backward:
        grads = outputs if stateful else (outputs[0], None, None)
        causal_backward.backward(*grads, *tokens, count, mask, None, *state, *options)


def average(
    turning=False, dtype=BF16, channels=512, directions=1, masked=False, stateful=False, varlen=False, skip=True,
    shift=False, batch=8, length=4096, states=16, step=False,
):  # fmt: skip
    """Launch the kernels of `damped_ema`, or of `complex_ema` if `turning`."""
    table, pair = (directions * channels, states), (2,) if turning else ()
    parameters = [empty(*table), empty(*table), empty(table[0]) if turning else empty(*table), empty(*table, *pair)]
    weight, state = empty(channels) if skip else None, empty(batch, channels, states, *pair)
    rows = (batch,) if step else (1, batch * length) if varlen else (batch, length)
    x, mask = empty(*rows, channels, dtype=dtype), empty(*rows, dtype=torch.bool) if masked else None
    if step and turning:
        rates, *weights = (empty(*table, 2) for _ in range(3))
        triton_step.step(x, state, rates, None, *weights, weight, mask)
    elif step:
        triton_step.step(x, state, *parameters, weight, mask)
    else:
        cu_seqlens, initial = empty(batch + 1, dtype=torch.int32) if varlen else None, state if stateful else None
        inputs = (x, mask, weight, *parameters, initial, stateful, shift, cu_seqlens, length, True)
        *_, coefficients = triton_scan.forward(*inputs)
        triton_scan_backward.backward(x, initial, coefficients, *inputs)


def norm(dtype=BF16, features=1024, groups=32, masked=False, affine=True, batch=8, length=2048, step=False):
    """Launch the kernels of `timestep_norm`."""
    weight, bias = (empty(features) if affine else None for _ in range(2))
    rows = (batch,) if step else (batch, length)
    x, mask = empty(*rows, features, dtype=dtype), empty(*rows, dtype=torch.bool) if masked else None
    statistics = (empty(batch, groups, dtype=torch.float64) for _ in range(2))
    inputs = (x, weight, bias, mask, empty(batch, dtype=torch.int64), *statistics, groups, 1e-5)
    if step:
        triton_kernels.step(*inputs)
        return
    _, *saved, mean, variance = norms._forward(triton_kernels, *inputs)
    last = (mean, variance) if masked else (None, None)
    norms._backward(triton_kernels, x, *last, *saved, *inputs)


# batch, queries, keys, chunk, Z, V, function, causal, mask, dtype
LRA = (8, 4096, 4096, 128, 64, 256, "laplace", False, True)
ENWIK8 = (4, 8192, 8192, 2048, 128, 1024, "laplace", True, False)
WT103 = (4, 8192, 8192, 1024, 256, 1536, "softmax", True, False)
FULL = (4, 4096, 4096, 4096, 128, 1024, "softmax", False, True)
STEP_ENWIK8 = (8, 1, 1000, 1000, 128, 1024, "laplace", True, True)
STEP_WT103 = (8, 1, 1000, 1000, 256, 1536, "softmax", True, True)
SHAPE = (4, 4096, 4096)


def gated(batch, queries, keys, chunk, size, width, function, causal, masked, dtype=BF16, backward=False, varlen=False):
    """Launch the kernels of the forward or the backward pass of `gated_attention`."""
    bounds = seed = None
    if varlen:
        bounds, seed = empty(batch * keys // chunk + 100, 2, dtype=torch.int32), empty(dtype=torch.int64)
        batch, queries, keys = 1, batch * queries, batch * keys
    shapes = (batch, queries, size), (batch, keys, size), (batch, keys, width)
    tensors = *(empty(*shape, dtype=dtype) for shape in shapes), empty(2 * chunk - 1)
    mask, dropout = empty(batch, keys, dtype=torch.bool) if masked else None, 0.1 if varlen else 0.0
    arguments = *tensors, mask, bounds, function, causal, chunk, keys - queries, dropout, seed, "tf32x3"
    if backward:
        output = empty(batch, queries, width, dtype=dtype)
        gated_backward.backward(output, output, empty(batch, queries), *arguments)
    else:
        gated_forward.forward(*arguments)


def passes(*arguments) -> list[Callable]:
    """Return the forward and the backward pass of `gated_attention`."""
    return [partial(gated, *arguments), partial(gated, *arguments, backward=True)]


def both(name: str, *arguments) -> dict[str, Callable]:
    """Return the forward and the backward pass of `gated_attention` by their names."""
    return dict(zip((name, f"{name} backward"), passes(*arguments), strict=True))


def gated_of_length(length: int) -> None:
    for chunk, is_causal in ((128, False), (length, True)):
        for backward in (False, True):
            gated(4, length, length, chunk, 128, 1024, "softmax", is_causal, True, backward=backward)
    gated(8, 1, length, length, 128, 1024, "laplace", True, True)


turning = partial(average, True, channels=1024, length=2048)
pack, unpack = partial(partial, luna, "luna_pack"), partial(partial, luna, "luna_unpack")


class Launches(NamedTuple):
    """The calls of an op by name.

    `main` is compiled for sm_80 and sm_90, and `edges` (with their targets) for the sizes, dtypes and targets with the
    tightest limits. `further` has other dtypes and the largest sizes; only `--every` compiles it. The calls `of_length`
    must not compile other kernels for another of `lengths`: if rows or masks are loaded in vectors, there are two
    kernels, for multiples of 16 and for other lengths.
    """

    main: dict[str, Callable]
    further: list[partial]
    edges: dict[str, tuple[int, Callable]]
    of_length: list[Callable]
    lengths: tuple[int, ...] = (4000, 4096)


CALLS = {
    "luna_attention": Launches(
        {
            "pack l=16 fp16": pack(16, dtype=FP16),
            "pack l=128": pack(128),
            "pack l=256 varlen": pack(256, masked=False, varlen=True),
            "pack l=128 untied dropout": pack(128, tied=False, dropout=0.1),
            "pack l=128 fp32": pack(128, dtype=FP32),
            "unpack l=128": unpack(128),
            "unpack l=128 varlen": unpack(128, varlen=True),
            "unpack l=16 untied head size 128": unpack(16, tied=False, size=128),
        },
        [
            *(partial(call, dtype=dtype) for dtype in (FP16, FP32) for call in (
                pack(128), pack(256, masked=False, varlen=True), pack(128, tied=False, dropout=0.1), unpack(128),
            )),
            *(partial(call, dtype=dtype, size=128, tied=False) for dtype in (BF16, FP32)  # the largest heads
              for call in (pack(128), unpack(128, dropout=0.1))),
        ],
        {
            "pack l=128 fp32 head size 80": (80, pack(128, dtype=FP32, size=80)),
            "pack l=128 untied fp16 head size 96": (89, pack(128, tied=False, dtype=FP16, size=96)),
            "pack l=128 fp32 ieee head size 128": (90, pack(128, dtype=FP32, size=128, precision="ieee")),
            "unpack l=200 head size 40": (120, unpack(200, size=40)),
        },
        [pack(128), pack(128, varlen=True), unpack(128), unpack(128, varlen=True)],
    ),
    "luna_causal_attention": Launches(
        {
            "l=32 bf16, segments": partial(causal, 8, 32, BF16),
            "l=32 bf16, mask, state, dropout": partial(causal, 32, 32, BF16, stateful=True, dropout=0.1),
            "l=32 fp32": partial(causal, 32, 32, FP32),
            "l=32 fp16": partial(causal, 32, 32, FP16),
            "l=64 bf16": partial(causal, 32, 64, BF16),
            "l=128 bf16": partial(causal, 32, 128, BF16),
            "l=256 bf16": partial(causal, 32, 256, BF16),
            "step, l=256 bf16": partial(causal, 8, 256, BF16, step=True),
        },
        [
            partial(causal, 8, 16, BF16),
            partial(causal, 8, 64, BF16),
            *(partial(causal, 8, 32, dtype, stateful=True, dropout=0.1) for dtype in (BF16, FP16, FP32)),
            *(partial(causal, 8, rows, dtype) for dtype in (FP16, FP32) for rows in (64, 128)),
            *(partial(causal, 8, 128, dtype, step=True) for dtype in (FP16, FP32)),
            # the largest heads, with the rows from which the configuration changes
            *(partial(causal, 32, rows, dtype, size=128) for dtype in (BF16, FP16, FP32) for rows in (32, 64, 128, 256)
              if (rows, dtype) != (256, FP32)),
        ],
        {
            "l=64 fp32, heads of 128": (80, partial(causal, 32, 64, FP32, backward=False, size=128)),
            "l=64 fp16, heads of 128": (90, partial(causal, 32, 64, FP16, backward=False, size=128)),
            "l=256 bf16, heads of 128, dropout": (90, partial(causal, 32, 256, BF16, dropout=0.1, size=128)),
            "l=64 bf16, heads of 80": (120, partial(causal, 32, 64, BF16, size=80, backward=False)),
        },
        [partial(causal, 8, 32, BF16, stateful=True), partial(causal, 8, 128, BF16)],
    ),
    "damped_ema": Launches(
        {
            "causal bf16 D=512": average,
            "causal bf16 D=1024 states": partial(average, channels=1024, stateful=True),
            "bidirectional bf16 D=512 mask": partial(average, directions=2, masked=True),
            "step bf16 D=1024 mask": partial(average, channels=1024, masked=True, step=True),
            "varlen fp32 D=512": partial(average, dtype=FP32, varlen=True),
            "causal fp16 D=512 mask": partial(average, dtype=FP16, masked=True),
            "one of everything": partial(average, batch=1, length=1, channels=1, states=1, stateful=True),
            "varlen of one chunk, N=64": partial(
                average, batch=4, length=50, states=64, varlen=True, directions=2, shift=True
            ),
        },
        [partial(average, dtype=dtype, **rest) for dtype in (FP16, FP32) for rest in (
            {"directions": 2, "masked": True}, {"channels": 1024, "step": True},
        )],
        # No kernel uses shared memory or tensor cores, so one target is sufficient.
        {"causal bf16 D=200": (120, partial(average, channels=200))},
        [average, partial(average, varlen=True)],
        (4000, 4096, 4009),
    ),
    "complex_ema": Launches(
        {
            "bf16 D=1024": turning,
            "bf16 D=4096 states": partial(turning, channels=4096, stateful=True, batch=1),
            "fp32 D=1024 mask": partial(turning, dtype=FP32, masked=True),
            "varlen fp16 D=1024": partial(turning, dtype=FP16, varlen=True),
            "one of everything": partial(turning, batch=1, length=1, channels=1, states=1, stateful=True),
            "bf16 N=32 plain": partial(turning, states=32, skip=False),
            "step bf16 D=1024 mask": partial(turning, masked=True, step=True),
        },
        [partial(turning, dtype=FP16, masked=True), *(partial(turning, dtype=x, step=True) for x in (FP16, FP32))],
        {"bf16 D=200": (120, partial(turning, channels=200))},
        [turning, partial(turning, varlen=True)],
        (4000, 4096, 4009),
    ),
    "timestep_norm": Launches(
        {
            "bf16 D=1024": norm,
            "fp32 D=4096 mask": partial(norm, FP32, features=4096, groups=64, masked=True),
            "fp16 D=1024 plain": partial(norm, FP16, affine=False),
            "bf16 one group of 4096": partial(norm, features=4096, groups=1),
            "step bf16 D=1024": partial(norm, step=True),
            "step fp32 D=4096 mask": partial(norm, FP32, features=4096, groups=64, masked=True, step=True),
        },
        [partial(norm, FP16, masked=True), partial(norm, FP16, step=True)],
        {"fp32 groups of 7": (120, partial(norm, FP32, features=77, groups=11))},
        [norm],
        (4000, 4096, 4009),
    ),
    "gated_attention": Launches(
        both("LRA text bf16", *LRA)
        | {"LRA text fp16": partial(gated, *LRA, FP16)}
        | both("LRA text fp32", *LRA, FP32)
        | {"enwik8 bf16": partial(gated, *ENWIK8)}
        | both("wt103 bf16", *WT103)
        | {
            "full bf16": partial(gated, *FULL),
            "step enwik8 bf16": partial(gated, *STEP_ENWIK8),
            "step wt103 bf16": partial(gated, *STEP_WT103),
            "varlen, dropout, bf16": partial(gated, *LRA, varlen=True),
        },
        [
            *passes(*LRA[:6], "relu2", *LRA[7:]), *passes(*LRA, FP16), *passes(*FULL, FP16), *passes(*FULL, FP32),
            *(partial(gated, *STEP_ENWIK8, dtype) for dtype in (FP16, FP32)),
            *(partial(gated, *STEP_WT103[:4], size, *STEP_WT103[5:], FP32) for size in (128, 256)),
            # the largest sizes of queries and keys of each configuration
            *(call for size in (128, 256) for dtype in (BF16, FP32)
              for shape, rest in (((*SHAPE, 4096), ("softmax", True, True)), (LRA[:4], ("laplace", False, True)))
              for call in passes(*shape, size, 1024, *rest, dtype)),
        ],
        # GPUs with little shared memory, and sizes that are not powers of two
        {
            "wt103 bf16": (120, partial(gated, *WT103)),
            "Z=256 in chunks bf16": (89, partial(gated, *SHAPE, 128, 256, 1536, "softmax", True, False)),
            "Z=40 V=200 bf16": (90, partial(gated, *SHAPE, 128, 40, 200, "laplace", False, True)),
            "Z=40 V=200 bf16 backward": (
                90, partial(gated, *SHAPE, 128, 40, 200, "laplace", False, True, backward=True),
            ),
            "Z=96 V=80 fp32": (80, partial(gated, *SHAPE, 128, 96, 80, "laplace", False, True, FP32)),
            "Z=256 V=256 fp32": (89, partial(gated, *SHAPE, 4096, 256, 256, "softmax", True, True, FP32)),
            "Z=200 V=96 bf16": (120, partial(gated, *SHAPE, 4096, 200, 96, "softmax", False, True)),
        },
        [gated_of_length],
    ),
}  # fmt: skip
