"""Launches of the damped EMA for `aot.py` in the sizes of Mega: 512 or 1024 channels, 16 states, 8 rows of 4096."""

from functools import partial

import torch

from luna_mega.kernels.moving_average import triton_scan, triton_scan_backward, triton_step


def call(
    dtype=torch.bfloat16, channels=512, directions=1, masked=False, stateful=False, varlen=False, skip=True,
    shift=False, batch=8, length=4096, states=16, step=False,
):  # fmt: skip
    def meta(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    parameters = [meta(directions * channels, states) for _ in range(4)]
    weight, state = meta(channels) if skip else None, meta(batch, channels, states)
    if step:
        mask = meta(batch, dtype=torch.bool) if masked else None
        triton_step.damped_step(meta(batch, channels, dtype=dtype), state, *parameters, weight, mask)
        return
    cu_seqlens = meta(batch + 1, dtype=torch.int32) if varlen else None
    x = meta(*((1, batch * length) if varlen else (batch, length)), channels, dtype=dtype)
    mask = meta(*x.shape[:2], dtype=torch.bool) if masked else None
    initial = state if stateful else None
    inputs = (x, mask, weight, *parameters, initial, stateful, shift, cu_seqlens, length)
    *_, coefficients = triton_scan.forward(*inputs)
    triton_scan_backward.backward(x, initial, coefficients, *inputs)


def cases():
    """Yield (name, function) of every case."""
    yield "causal bf16 D=512", call
    yield "causal bf16 D=1024 states", partial(call, channels=1024, stateful=True)
    yield "bidirectional bf16 D=512 mask", partial(call, directions=2, masked=True)
    yield "step bf16 D=1024 mask", partial(call, channels=1024, masked=True, step=True)
    yield "varlen fp32 D=512", partial(call, torch.float32, varlen=True)
    yield "causal fp16 D=512 mask", partial(call, torch.float16, masked=True)
    yield "one of everything", partial(call, batch=1, length=1, channels=1, states=1, stateful=True)
    yield (
        "varlen of one chunk, N=64",
        partial(call, batch=4, length=50, states=64, varlen=True, directions=2, shift=True),
    )


LENGTHS = 4000, 4096, 4009


def of_length(length):
    """Launch kernels that must not be recompiled for another length."""
    call(length=length)
    call(length=length, varlen=True)


def dtypes():
    """Yield (name, function) of cases in other dtypes."""
    for dtype in (torch.float16, torch.float32):
        yield f"bidirectional {dtype} D=512 mask", partial(call, dtype, directions=2, masked=True)
        yield f"step {dtype} D=1024", partial(call, dtype, channels=1024, step=True)


def edges():
    """Yield (name, targets, function).

    No kernel uses shared memory or tensor cores, so one target is sufficient.
    """
    yield "causal bf16 D=200", (120,), partial(call, channels=200)
