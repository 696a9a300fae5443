"""Launches of `luna_causal_attention` for `aot.py`."""

import functools

import torch

from luna_mega.kernels.luna_causal_attention import triton_backward, triton_forward, triton_step

LENGTH, SIZE = 4096, 64


def inputs(batch, heads, rows, dtype, stateful, length=LENGTH):
    """Return query, pack_key, key, value, pack_query, count, mask, pack_mask, both means, count of the state."""
    tokens = [torch.empty(batch, length, heads, SIZE, dtype=dtype, device="meta") for _ in range(4)]
    pack_query = torch.empty(batch, rows, heads, SIZE, dtype=dtype, device="meta")
    count = torch.empty(batch, length, dtype=torch.int64, device="meta")
    mask = torch.empty(batch, length, dtype=torch.bool, device="meta") if stateful else None
    state = (None, None, None)
    if stateful:
        means = (torch.empty(batch, heads, *size, device="meta") for size in ((SIZE, rows), (rows, SIZE)))
        state = (*means, count[:, 0])
    return *tokens, pack_query, count, mask, None, *state


def both(batch, rows, dtype, stateful=False, dropout=0.0, backward=True):
    arguments = inputs(batch, 12, rows, dtype, stateful)
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
    """Yield (name, function without arguments). With 32 sequences every head is one segment."""
    bfloat16 = torch.bfloat16
    yield "l=32 bf16, segments", functools.partial(both, 8, 32, bfloat16)
    yield "l=32 bf16, mask, state, dropout", functools.partial(both, 32, 32, bfloat16, stateful=True, dropout=0.1)
    yield "l=32 fp32", functools.partial(both, 32, 32, torch.float32)
    yield "l=32 fp16", functools.partial(both, 32, 32, torch.float16)
    yield "l=64 bf16", functools.partial(both, 32, 64, bfloat16)
    yield "l=128 bf16", functools.partial(both, 32, 128, bfloat16, backward=False)
    yield "l=256 bf16", functools.partial(both, 32, 256, bfloat16)
    yield "step, l=256 bf16", functools.partial(step, 8, 256, bfloat16)
