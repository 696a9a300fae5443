"""Launches of the position-aware pack for `aot.py`: widths of BERT-like encoders, 8 rows of 2048 tokens."""

from functools import partial

import torch

from luna_mega.kernels.segment_pack import triton_kernels


def call(dtype=torch.bfloat16, width=768, masked=False, batch=8, length=2048, rows=128):
    def meta(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    tokens = batch * length
    states, kept = meta(tokens, width, dtype=dtype), meta(tokens, dtype=torch.bool) if masked else None
    inputs = states, meta(tokens), kept, meta(batch * rows + 1, dtype=torch.int64)
    results = triton_kernels.forward(*inputs)
    triton_kernels.backward(*results[:2], *results, *inputs)


def cases():
    """Yield (name, function) of every case."""
    yield "bf16 D=768", call
    yield "bf16 D=384 mask", partial(call, width=384, masked=True)
    yield "fp32 D=768 mask", partial(call, torch.float32, masked=True)
    yield "fp16 D=64", partial(call, torch.float16, width=64)


LENGTHS = 4000, 4096, 4009


def of_length(length):
    """Launch kernels that must not be recompiled for another length."""
    call(length=length)


def dtypes():
    """Yield (name, function) of cases in other dtypes."""
    yield "fp16 D=384 mask", partial(call, torch.float16, width=384, masked=True)


def edges():
    """Yield (name, targets, function) for a width that is not a multiple of a vector."""
    yield "fp32 D=77", (120,), partial(call, torch.float32, width=77, masked=True)
