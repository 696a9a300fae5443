"""Labels of the heads: their checks, which run before the body, targets of positions, and ignored positions.

Labels at masked positions are ignored, so that a loss equals the loss of the sequence without padding.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig

from luna_mega.modeling_common.masks import can_look

IGNORED = -100


def shift_right(labels: torch.Tensor, start: int, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return decoder inputs for labels, and the bool mask of the inputs that are not padding, `[B, T]` each.

    The input of a label is the previous label; of the first label it is `start`, which is kept even if it equals `pad`.
    Positions with label -100 are padding with input `pad`. Only the position after the last label gets that label as
    input, so that the end token is predicted there.
    """
    is_label = labels != IGNORED
    columns = torch.arange(labels.shape[1], device=labels.device)
    last = torch.where(is_label, columns, -1).cummax(dim=1).values
    previous = nn.functional.pad(last[:, :-1], (1, 0), value=-1)
    inputs = labels.gather(1, previous.clamp(min=0)).masked_fill(previous < 0, start)
    kept = is_label | ((previous == columns - 1) & (columns > last[:, -1:]) & (previous >= 0))
    kept[:, 0] |= ~is_label.any(dim=1)
    return inputs.masked_fill(~kept, pad), kept


def keep_positions(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """Return the last `logits_to_keep` positions of `[B, T, ...]` (0 = all), or the positions of these indices."""
    if isinstance(logits_to_keep, int):
        return hidden_states if logits_to_keep == 0 else hidden_states[:, -logits_to_keep:]
    return hidden_states[:, logits_to_keep]


def ignore_dropped(labels: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return `labels` `[B, T]` with -100 at positions that the bool `mask` drops; None = all positions are kept."""
    return labels if mask is None else labels.masked_fill(~mask, IGNORED)


def ignore_dropped_columns(columns: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
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
        labels: `[B, T]`, the tokens at the positions. The target of a position is the next token that `mask` keeps.
        shift_labels: `[B, T]`, the targets themselves. They take precedence over `labels`.
        mask: `[B, T]` bool, True = keep; None = all. Positions that it drops predict nothing and are not predicted.
        starts: `[B, T]` bool, True = the first token of a sequence of a padding-free batch; it is not predicted.
    """
    if shift_labels is not None:
        return ignore_dropped(shift_labels, mask).contiguous()
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
        next_sequence = nn.functional.pad(sequence, (0, 1), value=-1).gather(1, following)
        targets = targets.masked_fill(next_sequence != sequence, IGNORED)
    return ignore_dropped(targets, mask).contiguous()


def _next_kept(mask: torch.Tensor) -> torch.Tensor:
    """Return for each position the column of the next unmasked position of `mask` `[B, T]`; T after the last one."""
    columns = torch.arange(mask.shape[1] + 1, device=mask.device)
    # `columns[-1:]` instead of the number T, on which torch.compile would specialize.
    kept = torch.where(nn.functional.pad(mask, (0, 1)), columns, columns[-1:]).flip(1).cummin(dim=1).values.flip(1)
    return kept[:, 1:]


def check_labels(name: str, labels: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise `ValueError` unless `labels` are integers of this shape."""
    if tuple(labels.shape) != tuple(shape):
        positions = " of the positions (with `logits_to_keep`, of those kept)" if len(shape) == 2 else ""
        raise ValueError(f"`{name}` must have the shape {list(shape)}{positions}, got {list(labels.shape)}")
    if labels.dtype not in (torch.int64, torch.uint8):
        raise ValueError(f"`{name}` must be ids or indices, integers of dtype torch.int64, got {labels.dtype}")


def check_ids(name: str, labels: torch.Tensor, count: int) -> None:
    """Raise `ValueError` for labels that are neither -100 nor one of `count` ids."""
    if not can_look(labels):
        return
    first, last = (x.item() for x in labels.masked_fill(labels == IGNORED, 0).aminmax())
    if first < 0 or last >= count:
        raise ValueError(
            f"`{name}` are from {first} to {last}, but must be ids from 0 to {count - 1}, or {IGNORED} to ignore a "
            "position; correct them, or set `num_labels` of a classifier"
        )


def check_pooled_labels(config: Any, labels: torch.Tensor, batch: int) -> None:
    """Raise `ValueError` for labels of B sequences that transformers' loss would flatten or broadcast."""
    kind, count, floats = config.problem_type, config.num_labels, labels.is_floating_point()
    is_regression = kind == "regression" or (kind is None and count == 1)
    is_class = not is_regression and (kind == "single_label_classification" or (kind is None and not floats))
    flat = is_class or (is_regression and count == 1)
    shapes: list[tuple[int, ...]] = [(batch,), (batch, 1)] if flat else [(batch, count)]
    # For other integers, transformers would choose another loss, and write it to the configuration.
    if tuple(labels.shape) in shapes and (is_regression or (labels.dtype == torch.int64 if is_class else floats)):
        return
    shape, meaning = shapes[0], "numbers" if is_regression else "0.0 or 1.0 for each class"
    if not is_regression and kind != "multi_label_classification":
        shape, meaning = (batch,), f"class ids from 0 to {count - 1} (torch.int64)"
    fix = "" if is_regression else "; for regression, set num_labels=1 or problem_type='regression'"
    raise ValueError(
        f"`labels` must have the shape {list(shape)} and be {meaning}, for problem_type={kind!r} and "
        f"num_labels={count}, got {labels.dtype} of shape {list(labels.shape)}{fix}"
    )


def given_input(inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the first of the tokens, embeddings or values that is given."""
    values = (inputs.get(name) for name in ("input_ids", "inputs_embeds", "input_values"))
    return next((x for x in values if x is not None), None)


def check_token_labels(
    inputs: torch.Tensor | None, logits_to_keep: int | torch.Tensor = 0, **labels: torch.Tensor
) -> None:
    """Raise `ValueError` unless labels, passed by name, have the shape `[B, T]` of the positions with logits."""
    if inputs is None or inputs.dim() < 2:
        return  # the body raises the error
    for name, value in labels.items():
        check_labels(name, value, keep_positions(inputs, logits_to_keep).shape[:2])


def check_span(
    start_positions: torch.Tensor | None, end_positions: torch.Tensor | None, inputs: torch.Tensor | None
) -> None:
    """Raise `ValueError` for a start of an answer without an end, and for other labels than columns `[B]`."""
    if inputs is None or inputs.dim() < 2 or (start_positions is None and end_positions is None):
        return
    if start_positions is None or end_positions is None:
        name = "end_positions" if end_positions is None else "start_positions"
        raise ValueError(f"`{name}` is missing; pass `start_positions` and `end_positions`, or neither")
    for name, value in {"start_positions": start_positions, "end_positions": end_positions}.items():
        check_labels(name, value[:, 0] if value.shape[1:] == (1,) else value, inputs.shape[:1])


def check_labels_of(config: PreTrainedConfig | None, labels: torch.Tensor, inputs: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless labels fit the B sequences of `inputs`; `config` None = B sets of options."""
    main_input = given_input(inputs)
    if main_input is None:
        return  # the body raises the error
    if config is None:
        check_labels("labels", labels, main_input.shape[:1])
    else:
        check_pooled_labels(config, labels, len(main_input))


def check_pairs(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless there are as many second inputs as first ones."""
    one, other = given_input(first), given_input(second)
    if one is None or other is None:
        return  # the body raises the error
    if one.shape[0] != other.shape[0]:  # len() would fix the batch size of an exported program
        raise ValueError(f"there are {len(one)} first inputs, but {len(other)} second inputs; pass a pair of each")
