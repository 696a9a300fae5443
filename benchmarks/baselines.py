"""What the ops are measured against: the sequence of operations of the original code."""

import torch


def original_luna_attention(
    query: torch.Tensor,
    pack_query: torch.Tensor,
    context_key: torch.Tensor,
    context_value: torch.Tensor,
    project,
    *,
    context_mask: torch.Tensor | None = None,
    pack_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`luna_attention` as fairseq-apollo's `LunarMultiheadAttention` computes it, with the weights in memory."""
    packed = _attend(pack_query, context_key, context_value, context_mask, upcast=False)
    key, value = project(packed)
    return _attend(query, key, value, pack_mask, upcast=True), packed


def _attend(query, key, value, mask, upcast):
    batch, length, heads, size = query.shape
    query, key, value = (x.transpose(1, 2).reshape(batch * heads, -1, size) for x in (query * size**-0.5, key, value))
    scores = torch.bmm(query, key.transpose(1, 2))
    if mask is not None:
        scores = scores.view(batch, heads, length, -1).masked_fill(~mask[:, None, None], float("-inf"))
        scores = scores.view(batch * heads, length, -1)
    dtype = torch.promote_types(scores.dtype, torch.float32) if upcast else None
    weights = torch.softmax(scores, dim=-1, dtype=dtype).to(value.dtype)
    return torch.bmm(weights, value).view(batch, heads, length, size).transpose(1, 2)
