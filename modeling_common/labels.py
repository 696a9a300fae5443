"""Labels of the models that write: what a target begins with, which logits they meet, and the tokens to predict."""

import torch
from torch import nn

from luna_mega.kernels.context_parallel import ContextShard, all_gather


def shift_right(labels: torch.LongTensor, start: int, pad: int, shard: ContextShard | None = None) -> torch.LongTensor:
    """Return decoder inputs `[B, T]` for labels `[B, T]`: one place to the right, with `start` before the first label.

    -100 is padding on either side of the labels, and becomes `pad`. With a shard the labels are the part of this rank.
    """
    is_label = labels != -100
    first = is_label.int().argmax(dim=1, keepdim=True)
    shifted = nn.functional.pad(labels[:, :-1], (1, 0), value=pad)
    if shard is None:
        return shifted.masked_fill(shifted == -100, pad).scatter(1, first, start)
    has_any, lasts = all_gather(torch.stack([is_label.any(dim=1).long(), labels[:, -1]]), shard).unbind(dim=1)
    if shard.rank > 0:
        shifted[:, 0] = lasts[shard.rank - 1]
    shifted = shifted.masked_fill(shifted == -100, pad)
    begins_here = (has_any.argmax(dim=0) == shard.rank)[:, None]
    return torch.where(begins_here, shifted.scatter(1, first, start), shifted)


def keep_positions(
    hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor, cp_group: object | None = None
) -> torch.Tensor:
    """Return the last `logits_to_keep` positions of `[B, T, d]` (0: all), or those of the indices `logits_to_keep`."""
    if cp_group is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
        raise ValueError("with cp_group every position gets logits: leave logits_to_keep out")
    return hidden_states[:, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep]


def check_labels(labels: torch.Tensor, hidden_states: torch.Tensor):
    """Refuse labels that are not `[B, T]` for the kept `hidden_states` `[B, T, d]`."""
    shape = hidden_states.shape[:2]
    if labels.shape != shape:
        raise ValueError(
            f"labels must have the shape {list(shape)} of the positions, with logits_to_keep of those kept, got "
            f"{list(labels.shape)}"
        )


def next_tokens(
    labels: torch.LongTensor | None,
    shift_labels: torch.LongTensor | None,
    hidden_states: torch.Tensor,
    shard: ContextShard | None = None,
) -> torch.LongTensor | None:
    """Return the token `[B, T]` that follows each position of a language model, -100 = not counted, or None.

    Args:
        labels: the tokens at the positions themselves.
        shift_labels: the tokens that follow, which win over `labels`.
        hidden_states: `[B, T, d]` at the positions.
        shard: of the sequences this rank has a part, whose last token is followed by the first one of the next rank.
    """
    given = labels if shift_labels is None else shift_labels
    if given is None:
        return None
    check_labels(given, hidden_states)
    if shift_labels is None:
        firsts = None if shard is None else all_gather(labels[:, 0], shard)
        given = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        if shard is not None and shard.rank + 1 < shard.size:
            given[:, -1] = firsts[shard.rank + 1]
    return given.contiguous()
