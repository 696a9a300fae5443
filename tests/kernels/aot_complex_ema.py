"""Launches of the complex average for `aot.py` in the sizes of Megalodon: 1024 channels, 16 states, 8 rows of 2048."""

from functools import partial

import torch

from luna_mega.kernels.moving_average import triton_scan, triton_scan_backward, triton_step


def call(
    dtype=torch.bfloat16, channels=1024, masked=False, stateful=False, varlen=False, skip=True, batch=8, length=2048,
    states=16, step=False,
):  # fmt: skip
    def meta(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    weight, state = meta(channels) if skip else None, meta(batch, channels, states, 2)
    if step:
        x, mask = meta(batch, channels, dtype=dtype), meta(batch, dtype=torch.bool) if masked else None
        maps = (meta(channels, states, 2) for _ in range(3))
        triton_step.complex_step(x, state, *maps, weight, mask)
        return
    cu_seqlens = meta(batch + 1, dtype=torch.int32) if varlen else None
    x = meta(*((1, batch * length) if varlen else (batch, length)), channels, dtype=dtype)
    mask = meta(*x.shape[:2], dtype=torch.bool) if masked else None
    initial = state if stateful else None
    parameters = (meta(channels, states), meta(channels, states), meta(channels), meta(channels, states, 2))
    inputs = (x, mask, weight, *parameters, initial, stateful, False, cu_seqlens, length)
    *_, coefficients = triton_scan.forward(*inputs)
    triton_scan_backward.backward(x, initial, coefficients, *inputs)


def cases():
    """Yield (name, function) of every case."""
    yield "bf16 D=1024", call
    yield "bf16 D=4096 states", partial(call, channels=4096, stateful=True, batch=1)
    yield "fp32 D=1024 mask", partial(call, torch.float32, masked=True)
    yield "varlen fp16 D=1024", partial(call, torch.float16, varlen=True)
    yield "one of everything", partial(call, batch=1, length=1, channels=1, states=1, stateful=True)
    yield "bf16 N=32 plain", partial(call, states=32, skip=False)
    yield "step bf16 D=1024 mask", partial(call, masked=True, step=True)


LENGTHS = 4000, 4096, 4009


def of_length(length):
    """Launch kernels that must not be recompiled for another length."""
    call(length=length)
    call(length=length, varlen=True)


def dtypes():
    """Yield (name, function) of cases in other dtypes."""
    yield "fp16 D=1024 mask", partial(call, torch.float16, masked=True)
    for dtype in (torch.float16, torch.float32):
        yield f"step {dtype} D=1024", partial(call, dtype, step=True)


def edges():
    """Yield (name, targets, function).

    No kernel uses shared memory or tensor cores, so one target is sufficient.
    """
    yield "bf16 D=200", (120,), partial(call, channels=200)
