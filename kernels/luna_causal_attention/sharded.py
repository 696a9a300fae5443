"""Context-parallel causal attention: computes the state before a rank's shard.

The two sums are independent of each other. The pack weights, two products and one exchange therefore determine the
state before each shard, from which any backend continues.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from luna_mega.kernels.context_parallel import ContextShard
from luna_mega.kernels.luna_causal_attention import reference
from luna_mega.kernels.luna_causal_attention.reference import LunaCausalState


def attend(run: Callable[..., Any], shard: ContextShard, **call: Any) -> Any:
    """Compute the attention of this rank's tokens, continuing from the state after the previous ranks' tokens."""
    return run(**call | {"state": _state_before(shard, **call)})


def _state_before(
    shard: ContextShard, query: Tensor, pack_query: Tensor, pack_key: Tensor, key: Tensor, value: Tensor,
    mask: Tensor | None, pack_mask: Tensor | None, activation: str, state: None, dropout: float,
) -> LunaCausalState:  # fmt: skip
    """Return the state after the tokens of previous ranks; the ranks exchange the sums over their tokens."""
    # The weights of all tokens are as large as L / K keys, so the backward pass recomputes them.
    key_sum, value_sum = checkpoint(
        _sums, pack_query, pack_key, key, value, mask, pack_mask, activation, dropout, use_reentrant=False
    )
    count = reference.token_count(mask, query, None)[:, -1]
    counts = shard.all_gather(count)[: shard.rank].sum(dim=0)
    sums = shard.all_gather(torch.cat([key_sum.flatten(2), value_sum.flatten(2)], dim=2))[: shard.rank].sum(dim=0)
    sizes = key_sum[0, 0].numel(), value_sum[0, 0].numel()
    means = (sums / counts.clamp(min=1)[:, None, None]).split(sizes, dim=2)
    return LunaCausalState(means[0].view_as(key_sum), means[1].view_as(value_sum), counts)


def _sums(*tokens: Any) -> tuple[Tensor, Tensor]:
    """Return the sums of k_t^T a_t `[B, H, K, L]` and of a_t^T v_t `[B, H, L, V]` over the tokens."""
    key, value, packed = reference.pack_tokens(*tokens)
    return torch.einsum("bthk,bhtl->bhkl", key, packed), torch.einsum("bhtl,bthv->bhlv", packed, value)
