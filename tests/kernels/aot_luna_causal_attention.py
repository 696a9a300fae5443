"""Launches of `luna_causal_attention` for `aot.py`."""

import functools

import torch

from luna_mega.kernels.luna_causal_attention import triton_backward, triton_forward, triton_step

LENGTH, SIZE = 4096, 64


def inputs(batch, heads, rows, dtype, stateful, length=LENGTH, size=SIZE):
    """Return query, pack_key, key, value, pack_query, count, mask, pack_mask, and the state (two means and count)."""
    tokens = [torch.empty(batch, length, heads, size, dtype=dtype, device="meta") for _ in range(4)]
    pack_query = torch.empty(batch, rows, heads, size, dtype=dtype, device="meta")
    count = torch.empty(batch, length, dtype=torch.int64, device="meta")
    mask = torch.empty(batch, length, dtype=torch.bool, device="meta") if stateful else None
    state = (None, None, None)
    if stateful:
        means = (torch.empty(batch, heads, *size, device="meta") for size in ((size, rows), (rows, size)))
        state = (*means, count[:, 0])
    return *tokens, pack_query, count, mask, None, *state


def both(batch, rows, dtype, stateful=False, dropout=0.0, backward=True, size=SIZE, length=LENGTH):
    arguments = inputs(batch, 12, rows, dtype, stateful, length, size)
    seed = torch.empty(1, dtype=torch.int64, device="meta") if dropout else None
    options = ("softplus", dropout, seed, "tf32x3")
    outputs = triton_forward.forward(*arguments, *options)
    grads = outputs if stateful else (outputs[0], None, None)
    if backward:
        triton_backward.backward(*grads, *arguments, *options)


def step(batch, rows, dtype):
    query, pack_key, key, value, pack_query, _, mask, pack_mask, *state = inputs(batch, 12, rows, dtype, True, 1)
    tokens = (x[:, 0] for x in (query, pack_key, key, value))
    triton_step.forward_step(*tokens, pack_query, mask[:, 0], pack_mask, *state, "softplus", 0.0, None)


def cases():
    """Yield (name, function without arguments). With 32 sequences, every head is one segment."""
    bfloat16 = torch.bfloat16
    yield "l=32 bf16, segments", functools.partial(both, 8, 32, bfloat16)
    yield "l=32 bf16, mask, state, dropout", functools.partial(both, 32, 32, bfloat16, stateful=True, dropout=0.1)
    yield "l=32 fp32", functools.partial(both, 32, 32, torch.float32)
    yield "l=32 fp16", functools.partial(both, 32, 32, torch.float16)
    yield "l=64 bf16", functools.partial(both, 32, 64, bfloat16)
    yield "l=128 bf16", functools.partial(both, 32, 128, bfloat16)
    yield "l=256 bf16", functools.partial(both, 32, 256, bfloat16)
    yield "step, l=256 bf16", functools.partial(step, 8, 256, bfloat16)


# The mask is loaded in vectors, so there are two kernels: one for multiples of 16 and one for other lengths.
LENGTHS = 4000, 4096


def of_length(length):
    """Launch kernels that must not be recompiled for another length."""
    both(8, 32, torch.bfloat16, stateful=True, length=length)
    both(8, 128, torch.bfloat16, length=length)


def dtypes():
    """Yield (name, function) of cases with other dtypes and numbers of rows.

    With 8 sequences, a head has several segments.
    """
    bfloat16, float16, float32 = torch.bfloat16, torch.float16, torch.float32
    yield "l=16 bf16", functools.partial(both, 8, 16, bfloat16)
    yield "l=64 bf16, segments", functools.partial(both, 8, 64, bfloat16)
    for dtype in (bfloat16, float16, float32):
        yield f"l=32 {dtype}, mask, state, dropout", functools.partial(both, 8, 32, dtype, stateful=True, dropout=0.1)
    for dtype in (float16, float32):
        yield f"l=64 {dtype}", functools.partial(both, 8, 64, dtype)
        yield f"l=128 {dtype}", functools.partial(both, 8, 128, dtype)
        yield f"step, l=128 {dtype}", functools.partial(step, 8, 128, dtype)
    # The largest heads, with the rows from which the configuration changes.
    for dtype in (bfloat16, float16, float32):
        for rows in (32, 64, 128, 256) if dtype != float32 else (32, 64, 128):
            yield f"l={rows} {dtype}, heads of 128", functools.partial(both, 32, rows, dtype, size=128)


def edges():
    """Yield (name, targets, function) for the widest heads and the largest P."""
    wide = functools.partial(both, 32, size=128)
    yield "l=64 fp32, heads of 128", (80,), functools.partial(wide, 64, torch.float32, backward=False)
    yield "l=64 fp16, heads of 128", (90,), functools.partial(wide, 64, torch.float16, backward=False)
    yield "l=256 bf16, heads of 128, dropout", (90,), functools.partial(wide, 256, torch.bfloat16, dropout=0.1)
    yield "l=64 bf16, heads of 80", (120,), functools.partial(both, 32, 64, torch.bfloat16, size=80, backward=False)
