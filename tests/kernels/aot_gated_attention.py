"""Launches of `gated_attention` for `aot.py`: the shapes of Mega's recipes, and one step of decoding."""

import functools

import torch

from luna_mega.kernels.gated_attention import triton_backward, triton_products

# batch, queries, keys, chunk, Z, V, function, causal, mask, dtype
LRA = (8, 4096, 4096, 128, 64, 256, "laplace", False, True)
ENWIK8 = (4, 8192, 8192, 2048, 128, 1024, "laplace", True, False, torch.bfloat16)
WT103 = (4, 8192, 8192, 1024, 256, 1536, "softmax", True, False, torch.bfloat16)
FULL = (4, 4096, 4096, 4096, 128, 1024, "softmax", False, True, torch.bfloat16)
STEP_ENWIK8 = (8, 1, 1000, 1000, 128, 1024, "laplace", True, True, torch.bfloat16)
STEP_WT103 = (8, 1, 1000, 1000, 256, 1536, "softmax", True, True, torch.bfloat16)


def cases():
    for name, *shape in (
        ("LRA text bf16", *LRA, torch.bfloat16),
        ("LRA text fp16", *LRA, torch.float16),
        ("LRA text fp32", *LRA, torch.float32),
        ("enwik8 bf16", *ENWIK8),
        ("wt103 bf16", *WT103),
        ("full bf16", *FULL),
        ("step enwik8 bf16", *STEP_ENWIK8),
        ("step wt103 bf16", *STEP_WT103),
    ):
        yield name, functools.partial(run, *shape)
        if name in ("LRA text bf16", "LRA text fp32", "wt103 bf16"):
            yield f"{name} backward", functools.partial(run, *shape, backward=True)
    yield "varlen, dropout, bf16", functools.partial(run, *LRA, torch.bfloat16, varlen=True)


# The mask is loaded in vectors, so there are two kernels: one for multiples of 16 and one for other lengths.
LENGTHS = 4000, 4096


def of_length(length):
    """Launch kernels that must not be recompiled for another length: chunks, full attention and steps."""
    for batch, chunk, causal in ((4, 128, False), (4, length, True)):
        shape = batch, length, length, chunk, 128, 1024, "softmax", causal, True, torch.bfloat16
        run(*shape)
        run(*shape, backward=True)
    run(8, 1, length, length, 128, 1024, "laplace", True, True, torch.bfloat16)


def dtypes():
    """Yield (name, function) of cases with other dtypes and functions."""
    relu2 = *LRA[:6], "relu2", *LRA[7:]
    for backward in (False, True):
        words = " backward" if backward else ""
        yield f"relu2 bf16{words}", functools.partial(run, *relu2, torch.bfloat16, backward=backward)
        yield f"LRA text fp16{words}", functools.partial(run, *LRA, torch.float16, backward=backward)
        for dtype in (torch.float16, torch.float32):
            yield f"full {dtype}{words}", functools.partial(run, *FULL[:-1], dtype, backward=backward)
    for dtype in (torch.float16, torch.float32):
        yield f"step enwik8 {dtype}", functools.partial(run, *STEP_ENWIK8[:-1], dtype)
    # The largest sizes of queries and keys of each configuration.
    for size in (128, 256):
        for dtype in (torch.bfloat16, torch.float32):
            full = functools.partial(run, 4, 4096, 4096, 4096, size, 1024, "softmax", True, True, dtype)
            yield f"Z={size} {dtype}", full
            yield f"Z={size} {dtype} backward", functools.partial(full, backward=True)
            chunks = functools.partial(run, *LRA[:4], size, 1024, "laplace", False, True, dtype)
            yield f"Z={size} in chunks {dtype}", chunks
            yield f"Z={size} in chunks {dtype} backward", functools.partial(chunks, backward=True)
        yield f"step Z={size} fp32", functools.partial(run, *STEP_WT103[:4], size, *STEP_WT103[5:-1], torch.float32)


def edges():
    """Yield (name, targets, function): GPUs with little shared memory, and sizes that are not powers of two."""
    bfloat16, shape = torch.bfloat16, (4, 4096, 4096)
    yield "wt103 bf16", (120,), functools.partial(run, *WT103)
    yield (
        "Z=256 in chunks bf16",
        (89,),
        functools.partial(run, *shape, 128, 256, 1536, "softmax", True, False, bfloat16),
    )
    odd = functools.partial(run, *shape, 128, 40, 200, "laplace", False, True, bfloat16)
    yield "Z=40 V=200 bf16", (90,), odd
    yield "Z=40 V=200 bf16 backward", (90,), functools.partial(odd, backward=True)
    odd = functools.partial(run, *shape, 128, 96, 80, "laplace", False, True, torch.float32)
    yield "Z=96 V=80 fp32", (80,), odd
    yield (
        "Z=256 V=256 fp32",
        (89,),
        functools.partial(run, *shape, 4096, 256, 256, "softmax", True, True, torch.float32),
    )
    yield "Z=200 V=96 bf16", (120,), functools.partial(run, *shape, 4096, 200, 96, "softmax", False, True, bfloat16)


def run(
    batch, queries, keys, chunk, size, width, function, causal, masked, dtype, backward=False, varlen=False
):  # fmt: skip
    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    bounds = seed = None
    if varlen:
        bounds, seed = empty(batch * keys // chunk + 100, 2, dtype=torch.int32), empty(dtype=torch.int64)
        batch, queries, keys = 1, batch * queries, batch * keys
    query, key, value = empty(batch, queries, size), empty(batch, keys, size), empty(batch, keys, width)
    bias = empty(2 * chunk - 1, dtype=torch.float32)
    mask = empty(batch, keys, dtype=torch.bool) if masked else None
    offset, dropout = keys - queries, 0.1 if varlen else 0.0
    arguments = query, key, value, bias, mask, bounds, function, causal, chunk, offset, dropout, seed, "tf32x3"
    output = empty(batch, queries, width)
    if backward:
        lse = empty(batch, queries, dtype=torch.float32)
        return triton_backward.backward(output, output, lse, *arguments)
    return triton_products.forward(*arguments)
