"""Check the labels of a head before the body runs."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers.configuration_utils import PreTrainedConfig

from luna_mega.modeling_common.labels import IGNORED, keep_positions
from luna_mega.modeling_common.masks import can_look

INPUTS = ("input_ids", "inputs_embeds", "input_values")


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
    shapes: list[tuple[int, ...]] = (
        [(batch,), (batch, 1)] if is_class or (is_regression and count == 1) else [(batch, count)]
    )
    fits = tuple(labels.shape) in shapes
    if fits and (is_regression or floats != is_class):
        return
    meaning = f"class ids from 0 to {count - 1} (torch.int64)"
    fix = "; for regression, set num_labels=1 or problem_type='regression'"
    if is_regression:
        meaning, fix = "numbers", ""
    elif is_class or kind is None:
        shapes = [(batch,)]
    else:
        meaning = "0.0 or 1.0 for each class"
    raise ValueError(
        f"`labels` must have the shape {list(shapes[0])} and be {meaning}, for problem_type={kind!r} and "
        f"num_labels={count}, got {labels.dtype} of shape {list(labels.shape)}{fix}"
    )


def given_input(*inputs: torch.Tensor | None) -> torch.Tensor | None:
    """Return the first of the tokens, embeddings or values that is given."""
    return next((x for x in inputs if x is not None), None)


def check_token_labels(
    *inputs: torch.Tensor | None, logits_to_keep: int | torch.Tensor = 0, **labels: torch.Tensor | None
) -> None:
    """Raise `ValueError` for labels, by name, of another shape than the positions `[B, T]` that have logits."""
    given = given_input(*inputs)
    if given is None or given.dim() < 2:
        return  # the body raises the error
    for name, value in labels.items():
        if value is not None:
            check_labels(name, value, keep_positions(given, logits_to_keep).shape[:2])


def check_next_labels(
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    labels: torch.Tensor | None,
    shift_labels: torch.Tensor | None,
    logits_to_keep: int | torch.Tensor,
) -> None:
    """Raise `ValueError` if the labels of a causal language model do not have the shape of its positions."""
    used = {"labels": labels} if shift_labels is None else {"shift_labels": shift_labels}
    check_token_labels(input_ids, inputs_embeds, logits_to_keep=logits_to_keep, **used)


def check_span(
    start_positions: torch.Tensor | None, end_positions: torch.Tensor | None, *inputs: torch.Tensor | None
) -> None:
    """Raise `ValueError` for a start of an answer without an end, and for other labels than columns `[B]`."""
    given = given_input(*inputs)
    if given is None or given.dim() < 2 or (start_positions is None and end_positions is None):
        return
    if start_positions is None or end_positions is None:
        name = "end_positions" if end_positions is None else "start_positions"
        raise ValueError(f"`{name}` is missing; pass `start_positions` and `end_positions`, or neither")
    for name, value in {"start_positions": start_positions, "end_positions": end_positions}.items():
        check_labels(name, value[:, 0] if value.shape[1:] == (1,) else value, given.shape[:1])


def validate_pooled(config: PreTrainedConfig | None, labels: torch.Tensor, inputs: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless labels and `inputs` have equal numbers of sequences (`config` None: of options)."""
    given = given_input(*map(inputs.get, INPUTS))
    if given is None:
        return  # the body raises the error
    if config is None:
        check_labels("labels", labels, given.shape[:1])
    else:
        check_pooled_labels(config, labels, len(given))


def validate_pairs(config: PreTrainedConfig, first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether the second inputs are candidates `[B, C, ...]`; raise `ValueError` unless they fit the first."""
    one, other = (given_input(*map(inputs.get, INPUTS)) for inputs in (first, second))
    if one is None or other is None:
        return False  # the body raises the error
    candidates = other.dim() == 3 + (other is second["inputs_embeds"]) and other is not second["input_values"]
    if candidates and config.num_labels != 1:
        raise ValueError(
            "the second inputs are candidates [B, C, ...], which have one score each; set num_labels=1, got "
            f"{config.num_labels}"
        )
    if one.shape[0] != other.shape[0]:
        raise ValueError(
            f"there are {len(one)} first inputs, but {len(other)} second inputs or sets of candidates; pass the "
            "same number of both"
        )
    return candidates
