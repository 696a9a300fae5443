"""Position-aware pack: the assignment of tokens to rows, and the weighted mean and the entropy of each row.

This file is the specification: all faster implementations are tested against it. Shapes: states `[B, T, D]`, score, row
and mask `[B, T]`. Masks are boolean, True = keep.
"""

import torch
from torch import Tensor

from luna_mega.kernels.upcast import upcast, upcast_dtype


def assign_rows(score: Tensor, mask: Tensor, rows: int) -> Tensor:
    """Return the row of every token, `[B, T]`; 0 at masked positions.

    A token with weight `w = exp(score)` costs `min(1, lambda w)`, and the costs sum to `rows`. The row of a token is
    the integer part of the middle of its cost, counted from the first token. A text of at most `rows` tokens has one
    row per token.
    """
    result = torch.zeros(mask.shape, dtype=torch.long)
    for sequence, (scores, kept) in enumerate(zip(score.double(), mask, strict=True)):
        count = int(kept.sum())
        assigned = torch.arange(count)
        if count > rows:
            weight = (scores[kept] - scores[kept].max()).clamp(min=-30).exp()
            heaviest = weight.sort(descending=True).values
            # With the k heaviest tokens at cost 1; the first k for which the next token costs at most 1 is correct.
            factors = [(rows - k) / heaviest[k:].sum() for k in range(rows + 1)]
            factor = next(factor for k, factor in enumerate(factors) if factor * heaviest[k] <= 1)
            # Rounded, so that sums of equal costs are exact, and a tie does not depend on the order of the additions.
            cost = (factor * weight).clamp(max=1).float().double()
            assigned = ((cost.cumsum(0) - cost / 2) * rows / cost.sum()).long().clamp(max=rows - 1)
        result[sequence, kept] = assigned
    return result


def segment_pack(
    states: Tensor, score: Tensor, row: Tensor, mask: Tensor | None, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the packed rows `[B, L, D]`, the entropy of their weights and the mask of rows with tokens, `[B, L]` each.

    A row is the mean of its tokens, weighted by the softmax of their scores. A row without tokens is 0, with entropy 0.
    """
    inside = row[:, None] == torch.arange(rows, device=row.device)[:, None]
    if mask is not None:
        inside = inside & mask[:, None]
        states = states.masked_fill(~mask[..., None], 0.0)
    filled = inside.any(dim=-1)
    scores = score[:, None].to(upcast_dtype(states))
    scores = scores.masked_fill(~inside, torch.finfo(scores.dtype).min)
    log_weights = scores.log_softmax(dim=-1).masked_fill(~inside, 0.0)
    weights = log_weights.exp() * inside
    entropy = -(weights * log_weights).sum(dim=-1)
    return (weights @ upcast(states)).to(states.dtype), entropy, filled
