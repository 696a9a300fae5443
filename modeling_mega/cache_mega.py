"""Memory of a Mega decoder between calls: `MegaCache`, of constant size where attention is in chunks.

A decoder with cross-attention has a `MegaSeq2SeqCache`, which keeps the keys and values of the source as well.
"""

import torch

from luna_mega.modeling_common.cache import StateCache, StateLayer, StateSeq2SeqCache


class MegaCacheLayer(StateLayer):
    """The memory of one block over the last W positions of B sequences.

    `average` `[B, D, N]`: states of the moving average. `keys` `[B, W, Z]`, `values` `[B, W, V]`, `mask` `[B, W]`: what
    attention can still reach, all positions or, with chunks, the last `chunk_size - 1`. `position` `[B]`: positions
    from a sequence's first token to the end, 0 = it has had none yet. With a truncated moving average also `inputs`
    `[B, truncation, D]`, the last of its inputs, and `forgotten` `[B, D, N]`, the states of those before.
    """

    fields = ("average", "keys", "values", "mask", "position", "inputs", "forgotten")

    def extend(
        self, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Add the keys, values and mask of T positions, and keep the last `window` of all (None: all).

        Returns keys, values and mask of the W positions before and the T new ones, and the position `[B]` of the first
        of these in its sequence: below 0 where padding precedes the first token.
        """
        length, first = mask.shape[1], mask.int().argmax(dim=1)
        begun = torch.zeros_like(first) if self.position is None else self.position
        start = torch.where(begun > 0, begun, -first)
        position = torch.where((begun > 0) | mask.any(dim=1), start + length, 0)
        if self.keys is not None:
            start = start - self.keys.shape[1]
            keys, values, mask = (
                torch.cat(pair, dim=1) for pair in ((self.keys, keys), (self.values, values), (self.mask, mask))
            )
        kept = (keys, values, mask) if window is None else _last(window, keys, values, mask)
        self.store(length, position=position, **dict(zip(("keys", "values", "mask"), kept, strict=True)))
        return keys, values, mask, start


def _last(count: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return the last `count` positions of tensors `[B, T, ...]`, all of them where there are fewer."""
    length = tensors[0].shape[1]
    if torch.compiler.is_exporting():
        # A number that the program computes: it takes caches that still grow and those that do not.
        kept = torch.full((), length).clamp(max=count).item()
        torch._check(kept >= 0)
        position = torch.arange(kept, device=tensors[0].device) + length - kept
        return [x[:, position] for x in tensors]
    cut = max(length - count, 0)
    # A copy, so that what is cut off is freed.
    return [x[:, cut:].clone() if cut else x for x in tensors]


class MegaCrossCacheLayer(StateLayer):
    """The source in one block, computed once: `keys` `[B, S, Z]`, `values` `[B, S, D]`, `mask` `[B, S]` (None: all)."""

    fields = ("keys", "values", "mask")

    def get_seq_length(self) -> int:
        """Return S, 0 before the source has come."""
        return 0 if self.keys is None else self.keys.shape[1]


class MegaCache(StateCache):
    """The `past_key_values` of a Mega decoder without cross-attention."""

    layer_class = MegaCacheLayer


class MegaCrossCache(StateCache):
    """The source of a Mega decoder with cross-attention."""

    layer_class = MegaCrossCacheLayer


class MegaSeq2SeqCache(StateSeq2SeqCache):
    """The `past_key_values` of a Mega decoder with cross-attention: a `MegaCache` and a `MegaCrossCache`."""

    target_class, source_class = MegaCache, MegaCrossCache


__all__ = ["MegaCache", "MegaCrossCache", "MegaSeq2SeqCache"]
