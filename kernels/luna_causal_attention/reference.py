"""Luna's causal attention as defined in the paper (section 3.3), with the scales of the original code.

This file is the specification: all faster implementations are tested against it. Shapes: query, pack key, key `[B, T,
H, K]`, value `[B, T, H, V]`, pack query `[B, L, H, K]`. Masks are boolean, True = keep.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..upcast import upcast

ACTIVATIONS = ("softplus", "elu")


class LunaCausalState(NamedTuple):
    """The recurrent state of causal attention, whose size does not depend on the number of tokens.

    `key_mean` `[B, H, K, L]` is the mean of k_j^T a_j and `value_mean` `[B, H, L, V]` the mean of a_j^T v_j, both
    float32 or float64. `count` `[B]` int64 is the number of unmasked tokens of the row.
    """

    key_mean: Tensor
    value_mean: Tensor
    count: Tensor  # type: ignore[assignment]  # of tuple.count


def activate(scores: Tensor, activation: str) -> Tensor:
    """Return log2(1 + 2^s), or elu(s) + 1; both keep their relative precision if s is very negative."""
    if activation == "elu":
        # Not `clamp`, whose gradient at its limit is 0 since torch 2.14: the derivative at 0 is 1.
        return torch.where(scores > 0.0, 0.0, scores).exp() + scores.relu()
    # PyTorch returns s itself above a threshold. A threshold of 40 is exact in float64; the default of 20 is not.
    return nn.functional.softplus(scores, beta=math.log(2.0), threshold=40.0)


def unpack_weights(scores: Tensor, masked: Tensor | None) -> Tensor:
    """Return the softmax over L of `[..., L]`, 0 for masked entries and rows."""
    if masked is None:
        return scores.softmax(dim=-1)
    weights = scores.masked_fill(masked, torch.finfo(scores.dtype).min).softmax(dim=-1)
    return weights.masked_fill(masked, 0.0)


def pack_weights(
    pack_key: Tensor, pack_query: Tensor, mask: Tensor | None, pack_mask: Tensor | None, activation: str,
) -> Tensor:  # fmt: skip
    """Return a_t, `[B, H, T, L]`, 0 for masked tokens and masked rows of P."""
    scale = pack_key.shape[-1] ** -0.5
    weights = activate(torch.einsum("bthk,blhk->bhtl", pack_key, pack_query * scale), activation)
    if mask is not None:
        weights = weights.masked_fill(~mask[:, None, :, None], 0.0)
    if pack_mask is not None:
        weights = weights.masked_fill(~pack_mask[:, None, None], 0.0)
    return weights


def token_count(mask: Tensor | None, query: Tensor, past: Tensor | None) -> Tensor:
    """Return the number of kept tokens up to and including each, `[B, T]`, plus `past` `[B]`."""
    kept = torch.ones(query.shape[:2], dtype=torch.int64, device=query.device) if mask is None else mask
    count = kept.cumsum(dim=1)
    return count if past is None else count + past[:, None]


def attend_with_weights(
    query: Tensor, pack_query: Tensor, pack_key: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    pack_mask: Tensor | None, activation: str, state: LunaCausalState | None, dropout: float = 0.0,
) -> tuple[Tensor, Tensor, LunaCausalState]:  # fmt: skip
    """Compute y_t = w_t (1/t) sum_{j<=t} a_j^T v_j with w_t = softmax(q_t / sqrt(K) (1/t) sum_{j<=t} k_j^T a_j).

    Returns y `[B, T, H, V]`, w `[B, H, T, L]` and the state after the last token, computed in float32 (float64 for
    float64 inputs).
    """
    dtype = query.dtype
    query, pack_query, pack_key, key, value = (upcast(x) for x in (query, pack_query, pack_key, key, value))
    if mask is not None:
        pack_key, key, value = (x.masked_fill(~mask[..., None, None], 0.0) for x in (pack_key, key, value))
    if pack_mask is not None:
        pack_query = pack_query.masked_fill(~pack_mask[..., None, None], 0.0)
    packed = torch.dropout(pack_weights(pack_key, pack_query, mask, pack_mask, activation), dropout, train=True)
    count = token_count(mask, query, None if state is None else state.count)
    key_sum = torch.einsum("bthk,bhtl->bhtkl", key, packed).cumsum(dim=2)
    value_sum = torch.einsum("bhtl,bthv->bhtlv", packed, value).cumsum(dim=2)
    if state is not None:
        past = state.count.to(query.dtype)[:, None, None, None, None]
        key_sum = key_sum + past * state.key_mean.to(query.dtype)[:, :, None]
        value_sum = value_sum + past * state.value_mean.to(query.dtype)[:, :, None]
    # Before the first kept token the sums are 0, and so is the result.
    divisor = count.clamp(min=1).to(query.dtype)[:, None, :, None, None]
    key_mean, value_mean = key_sum / divisor, value_sum / divisor
    scores = torch.einsum("bthk,bhtkl->bhtl", query * query.shape[-1] ** -0.5, key_mean)
    masked = None if pack_mask is None else ~pack_mask[:, None, None]
    weights = torch.dropout(unpack_weights(scores, masked), dropout, train=True)
    output = torch.einsum("bhtl,bhtlv->bthv", weights, value_mean)
    return output.to(dtype), weights, LunaCausalState(key_mean[:, :, -1], value_mean[:, :, -1], count[:, -1])


def attend(*args: Any, **call: Any) -> tuple[Tensor, LunaCausalState]:
    """Return the output and the state of `attend_with_weights`."""
    output, _, state = attend_with_weights(*args, **call)
    return output, state


def step(
    query: Tensor, pack_key: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **rest: Any
) -> tuple[Tensor, LunaCausalState]:
    """Attend with one token: query, pack key, key `[B, H, K]`, value `[B, H, V]`, mask `[B]`; return y `[B, H, V]`.

    `rest` as in `attend_with_weights`.
    """
    query, pack_key, key, value = (x[:, None] for x in (query, pack_key, key, value))
    mask = None if mask is None else mask[:, None]
    output, state = attend(query=query, pack_key=pack_key, key=key, value=value, mask=mask, **rest)
    return output[:, 0], state
