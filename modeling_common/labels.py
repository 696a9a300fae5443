"""Labels of the heads: decoder inputs, the target of each position, and ignored positions.

Labels at masked positions are ignored, so that a loss equals the loss of the sequence without padding.
"""

import torch
from torch import nn

IGNORED = -100


def shift_right(labels: torch.Tensor, start: int, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return decoder inputs for labels, and the bool mask of those that are no padding, `[B, T]` each.

    The input is the previous label, or `start` before the first one. Labels of -100 are padding on either side or
    between the others; their inputs are `pad`, except that the last label is also the input of the position after it.
    """
    counted = labels != IGNORED
    columns = torch.arange(labels.shape[1], device=labels.device)
    last = torch.where(counted, columns, -1).cummax(dim=1).values
    previous = nn.functional.pad(last[:, :-1], (1, 0), value=-1)
    inputs = labels.gather(1, previous.clamp(min=0)).masked_fill(previous < 0, start)
    kept = counted | ((previous == columns - 1) & (columns > last[:, -1:]) & (previous >= 0))
    kept[:, 0] |= ~counted.any(dim=1)
    return inputs.masked_fill(~kept, pad), kept


def keep_positions(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """Return the last `logits_to_keep` positions of `[B, T, ...]` (0 = all), or the positions of these indices."""
    if isinstance(logits_to_keep, int):
        return hidden_states if logits_to_keep == 0 else hidden_states[:, -logits_to_keep:]
    return hidden_states[:, logits_to_keep]


def count_kept(labels: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return `labels` `[B, T]` with -100 at positions that the bool `mask` drops; None = all positions are kept."""
    return labels if mask is None else labels.masked_fill(~mask, IGNORED)


def count_columns(columns: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return `columns` `[B]` with T, which a loss ignores, in place of columns that the bool `mask` `[B, T]` drops."""
    if mask is None:
        return columns
    length = mask.shape[1]
    kept = nn.functional.pad(mask, (0, 1)).gather(1, columns.clamp(0, length)[:, None])[:, 0]
    return columns.masked_fill(~kept, length)


def next_tokens(
    labels: torch.Tensor | None,
    shift_labels: torch.Tensor | None,
    mask: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return the token `[B, T]` that each position of a language model predicts, -100 = none; None without labels.

    Args:
        labels: `[B, T]`, the tokens at the positions. The target of a position is the next one that `mask` keeps.
        shift_labels: `[B, T]`, the targets themselves. They take precedence over `labels`.
        mask: `[B, T]` bool, True = keep; None = all. Positions that it drops predict nothing and are not predicted.
        starts: `[B, T]` bool, True = the first token of a sequence of a padding-free batch; it is not predicted.
    """
    if shift_labels is not None:
        return count_kept(shift_labels, mask).contiguous()
    if labels is None:
        return None
    sequence = None if starts is None else starts.cumsum(dim=1)
    if mask is None:
        targets = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if sequence is not None:
            targets = targets.masked_fill(nn.functional.pad(sequence.diff(dim=1) > 0, (0, 1)), IGNORED)
        return targets.contiguous()
    following = _next_kept(mask)
    targets = nn.functional.pad(labels, (0, 1), value=IGNORED).gather(1, following)
    if sequence is not None:
        later = nn.functional.pad(sequence, (0, 1), value=-1).gather(1, following)
        targets = targets.masked_fill(later != sequence, IGNORED)
    return count_kept(targets, mask).contiguous()


def _next_kept(mask: torch.Tensor) -> torch.Tensor:
    """Return for each position the column of the next unmasked position of `mask` `[B, T]`; T after the last one."""
    columns = torch.arange(mask.shape[1] + 1, device=mask.device)
    # The column after the last one is a tensor: torch.compile would specialize on a Python number.
    kept = torch.where(nn.functional.pad(mask, (0, 1)), columns, columns[-1:]).flip(1).cummin(dim=1).values.flip(1)
    return kept[:, 1:]
