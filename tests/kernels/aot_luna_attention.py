"""Launches of pack and unpack for `aot.py`: a RoBERTa-size encoder, 12 heads of 64, 8 sequences of 4096 tokens."""

from functools import partial

import torch

from luna_mega.kernels.luna_attention import triton_backward, triton_forward

BATCH, TOKENS, HEADS, HEAD_SIZE = 8, 4096, 12, 64


def _run(op, rows, tied=True, masked=True, varlen=False, dropout=0.0, dtype=torch.bfloat16, head_size=None,
         length=TOKENS, precision="tf32x3"):  # fmt: skip
    """Run the forward and backward passes of `op` ("pack" or "unpack") on the meta device."""

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    rest = HEADS, head_size or HEAD_SIZE
    tokens, few = (1, BATCH * length) if varlen else (BATCH, length), (BATCH, rows)
    queries, keys = (few, tokens) if op == "pack" else (tokens, few)
    side = ("key" if op == "pack" else "query") if varlen else None
    tensors = (
        empty(*queries, *rest),
        empty(*keys, *rest),
        None if tied else empty(*keys, *rest),
        empty(*keys, dtype=torch.bool) if masked else None,
        empty(BATCH + 1, dtype=torch.int32) if varlen else None,
        empty(1, dtype=torch.int64) if dropout else None,
    )
    precision = precision if dtype == torch.float32 else "tf32"
    options = side, length if varlen else 0, rest[1] ** -0.5, dropout, precision
    output = triton_forward.forward(*tensors, *options)
    triton_backward.backward(output[0], *output, *tensors, *options)


def cases():
    yield "pack l=16 fp16", partial(_run, "pack", 16, dtype=torch.float16)
    yield "pack l=128", partial(_run, "pack", 128)
    yield "pack l=256 varlen", partial(_run, "pack", 256, masked=False, varlen=True)
    yield "pack l=128 untied dropout", partial(_run, "pack", 128, tied=False, dropout=0.1)
    yield "pack l=128 fp32", partial(_run, "pack", 128, dtype=torch.float32)
    yield "unpack l=128", partial(_run, "unpack", 128)
    yield "unpack l=128 varlen", partial(_run, "unpack", 128, varlen=True)
    yield "unpack l=16 untied head size 128", partial(_run, "unpack", 16, tied=False, head_size=128)


# Rows of float32 start at multiples of the length, so there are two kernels: for multiples of 16 and for others.
LENGTHS = 4000, 4096


def of_length(length):
    """Launch kernels that must not be recompiled for another length."""
    for op in ("pack", "unpack"):
        _run(op, 128, length=length)
        _run(op, 128, varlen=True, length=length)


def dtypes():
    """Yield (name, function) of cases in other dtypes."""
    for name, dtype in (("fp16", torch.float16), ("fp32", torch.float32)):
        yield f"pack l=128 {name}", partial(_run, "pack", 128, dtype=dtype)
        yield f"pack l=256 varlen {name}", partial(_run, "pack", 256, masked=False, varlen=True, dtype=dtype)
        yield f"pack l=128 untied dropout {name}", partial(_run, "pack", 128, tied=False, dropout=0.1, dtype=dtype)
        yield f"unpack l=128 {name}", partial(_run, "unpack", 128, dtype=dtype)
    for dtype in (torch.bfloat16, torch.float32):  # the largest heads
        wide = partial(_run, dtype=dtype, head_size=128, tied=False)
        yield f"pack l=128 {dtype} head size 128", partial(wide, "pack", 128)
        yield f"unpack l=128 {dtype} head size 128 dropout", partial(wide, "unpack", 128, dropout=0.1)


def edges():
    """Yield (name, targets, function): heads smaller than a tile, on the targets with the least shared memory."""
    fp32, fp16 = torch.float32, torch.float16
    yield "pack l=128 fp32 head size 80", (80,), partial(_run, "pack", 128, dtype=fp32, head_size=80)
    yield "pack l=128 untied fp16 head size 96", (89,), partial(_run, "pack", 128, tied=False, dtype=fp16, head_size=96)
    yield (
        "pack l=128 fp32 ieee head size 128",
        (90,),
        partial(_run, "pack", 128, dtype=fp32, head_size=128, precision="ieee"),
    )
    yield "unpack l=200 head size 40", (120,), partial(_run, "unpack", 200, head_size=40)
