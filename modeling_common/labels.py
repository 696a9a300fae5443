"""Labels of the models that write: what a target begins with, which logits they meet, and the tokens to predict."""

import torch

from luna_mega.modeling_common.sequence_parts import WHOLE, Parts


def shift_right(labels: torch.LongTensor, start: int, pad: int, parts: Parts = WHOLE) -> torch.LongTensor:
    """Return decoder inputs `[B, T]` for labels `[B, T]`: one place to the right, with `start` before the first label.

    -100 is padding on either side of the labels, and becomes `pad`. `parts` belong to the sequences of the labels.
    """
    shifted = parts.previous(labels, pad)
    return parts.begin(shifted.masked_fill(shifted == -100, pad), labels != -100, start)


def keep_positions(
    hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor, parts: Parts = WHOLE
) -> torch.Tensor:
    """Return the last `logits_to_keep` positions of `[B, T, d]` (0: all), or those of the indices `logits_to_keep`."""
    if not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
        parts.refuse("with cp_group every position gets logits: leave logits_to_keep out")
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
    parts: Parts = WHOLE,
) -> torch.LongTensor | None:
    """Return the token `[B, T]` that follows each position of a language model, -100 = not counted, or None.

    Args:
        labels: the tokens at the positions themselves.
        shift_labels: the tokens that follow, which win over `labels`.
        hidden_states: `[B, T, d]` at the positions.
        parts: the parts of the sequences; the last token of one is followed by the first of the next.
    """
    given = labels if shift_labels is None else shift_labels
    if given is None:
        return None
    check_labels(given, hidden_states)
    if shift_labels is None:
        given = parts.following(labels, -100)
    return given.contiguous()
