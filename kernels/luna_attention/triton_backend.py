"""Pack and unpack attention as Triton kernels: a registered operator with its own backward."""

import torch

from luna_mega.kernels import _dispatch
from luna_mega.kernels.luna_attention import triton_backward, triton_forward


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    dropout: float,
    cu_seqlens: torch.Tensor | None = None,
    packed: str | None = None,
    max_seqlen: int = 0,
) -> torch.Tensor:
    """`reference.attend` without the weights, by the kernels whatever the sizes.

    Shapes `[B, T, H, K]`, mask `[B, M]`. With `cu_seqlens` the side that `packed` names, `"query"` or `"key"`, is `[1,
    total, H, K]` (a mask of keys `[1, total]`), and the other side has a row of the batch for every sequence.
    """
    seed = torch.randint(2**63 - 1, (1,), device=query.device) if dropout > 0.0 else None
    precision = _dispatch.float32_precision() if query.dtype == torch.float32 else "tf32"
    value = None if key is value else value
    return torch.ops.luna_mega.luna_attention_triton(
        query, key, value, mask, cu_seqlens, seed, packed, max_seqlen, scale, dropout, precision
    )[0]


@torch.library.custom_op("luna_mega::luna_attention_triton", mutates_args=())
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    seed: torch.Tensor | None,
    packed: str | None,
    max_seqlen: int,
    scale: float,
    dropout: float,
    precision: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return triton_forward.forward(
        query, key, value, mask, cu_seqlens, seed, packed, max_seqlen, scale, dropout, precision
    )


@_attend.register_fake
def _(query, key, value, mask, cu_seqlens, seed, packed, max_seqlen, scale, dropout, precision):
    batch, length, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty((batch, heads, length), dtype=torch.float32)


@torch.library.custom_op("luna_mega::luna_attention_triton_backward", mutates_args=())
def _attend_backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    seed: torch.Tensor | None,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    packed: str | None,
    max_seqlen: int,
    scale: float,
    dropout: float,
    precision: str,
) -> list[torch.Tensor]:
    return triton_backward.backward(
        grad_output, query, key, value, mask, cu_seqlens, seed, output, log_sum_exp, packed, max_seqlen, scale,
        dropout, precision,
    )  # fmt: skip


@_attend_backward.register_fake
def _(grad_output, query, key, value, *_):
    return [x.new_empty(x.shape) for x in (query, key, value) if x is not None]


def _save_for_backward(ctx, inputs, output):
    *tensors, ctx.packed, ctx.max_seqlen, ctx.scale, ctx.dropout, ctx.precision = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, grad_output, grad_log_sum_exp):
    gradients = torch.ops.luna_mega.luna_attention_triton_backward(
        grad_output, *ctx.saved_tensors, ctx.packed, ctx.max_seqlen, ctx.scale, ctx.dropout, ctx.precision
    )
    return (*gradients, *(None,) * (11 - len(gradients)))


_attend.register_autograd(_backward, setup_context=_save_for_backward)
