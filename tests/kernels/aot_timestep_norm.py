"""Launches of the norm over time for `aot.py` in the sizes of Megalodon: 1024 and 4096 features, 8 rows of 2048."""

from functools import partial

import torch

from luna_mega.kernels.timestep_norm import torch_backend, triton_kernels


def call(
    dtype=torch.bfloat16, features=1024, groups=32, masked=False, affine=True, batch=8, length=2048, step=False
):  # fmt: skip
    def meta(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    weight, bias = (meta(features) if affine else None for _ in range(2))
    statistics = [meta(batch, groups, dtype=torch.float64) for _ in range(2)]
    count, options = meta(batch, dtype=torch.int64), (groups, 1e-5)
    x = meta(*((batch,) if step else (batch, length)), features, dtype=dtype)
    mask = meta(*x.shape[:-1], dtype=torch.bool) if masked else None
    inputs = (x, weight, bias, mask, count, *statistics, *options)
    if step:
        triton_kernels.step(*inputs)
        return
    _, *saved, mean, variance = torch_backend._forward(triton_kernels, *inputs)
    last = (mean, variance) if masked else (None, None)
    torch_backend._backward(triton_kernels, x, *last, *saved, *inputs)


def cases():
    """Yield (name, function) of every case."""
    yield "bf16 D=1024", call
    yield "fp32 D=4096 mask", partial(call, torch.float32, features=4096, groups=64, masked=True)
    yield "fp16 D=1024 plain", partial(call, torch.float16, affine=False)
    yield "bf16 one group of 4096", partial(call, features=4096, groups=1)
    yield "step bf16 D=1024", partial(call, step=True)
    yield "step fp32 D=4096 mask", partial(call, torch.float32, features=4096, groups=64, masked=True, step=True)


LENGTHS = 4000, 4096, 4009


def of_length(length):
    """Launch kernels that must not be recompiled for another length."""
    call(length=length)


def dtypes():
    """Yield (name, function) of cases in other dtypes."""
    yield "fp16 D=1024 mask", partial(call, torch.float16, masked=True)
    yield "step fp16 D=1024", partial(call, torch.float16, step=True)


def edges():
    """Yield (name, targets, function) for groups whose size is not a power of two."""
    yield "fp32 groups of 7", (120,), partial(call, torch.float32, features=77, groups=11)
