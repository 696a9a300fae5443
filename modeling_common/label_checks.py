"""Check the labels of a head before the body runs."""

from typing import Any

import torch
from transformers.configuration_utils import PreTrainedConfig

from luna_mega.modeling_common.labels import keep_positions


def check_labels(name: str, labels: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise `ValueError` unless `labels` has this shape."""
    if tuple(labels.shape) != tuple(shape):
        raise ValueError(
            f"`{name}` must have the shape {list(shape)} of the positions (with `logits_to_keep`, of those kept), got "
            f"{list(labels.shape)}"
        )


def check_pooled_labels(config: PreTrainedConfig, labels: torch.Tensor, batch: int) -> None:
    """Raise `ValueError` for labels of B sequences that transformers' loss would flatten or broadcast."""
    kind, count = config.problem_type, config.num_labels
    integers = not (labels.is_floating_point() or labels.dtype == torch.bool)
    one_each = count == 1 if kind in ("regression", None) else kind == "single_label_classification"
    one_each = one_each or (kind is None and integers)
    shapes = [(batch,), (batch, 1)] if one_each else [(batch, count)]
    if tuple(labels.shape) not in shapes:
        raise ValueError(
            f"`labels` must have the shape {list(shapes[0])} (problem_type={kind!r}, num_labels={count}), got "
            f"{list(labels.shape)}"
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
    kept = keep_positions(given, logits_to_keep)
    for name, value in labels.items():
        if value is not None:
            check_labels(name, value, kept.shape[:2])


def check_next_labels(
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    labels: torch.Tensor | None,
    shift_labels: torch.Tensor | None,
    logits_to_keep: int | torch.Tensor,
) -> None:
    """Raise `ValueError` if the labels of a causal language model do not have the shape of its positions."""
    if shift_labels is not None:
        check_token_labels(input_ids, inputs_embeds, logits_to_keep=logits_to_keep, shift_labels=shift_labels)
    elif labels is not None:
        check_token_labels(input_ids, inputs_embeds, logits_to_keep=logits_to_keep, labels=labels)


def check_span(
    start_positions: torch.Tensor | None, end_positions: torch.Tensor | None, *inputs: torch.Tensor | None
) -> None:
    """Raise `ValueError` for a start of an answer without an end, and for another shape than `[B]`."""
    given = given_input(*inputs)
    if given is None or given.dim() < 2 or (start_positions is None and end_positions is None):
        return
    if start_positions is None or end_positions is None:
        name = "end_positions" if end_positions is None else "start_positions"
        raise ValueError(f"`{name}` is missing; pass `start_positions` and `end_positions`, or neither")
    for name, value in {"start_positions": start_positions, "end_positions": end_positions}.items():
        if value.shape not in ((len(given),), (len(given), 1)):
            raise ValueError(f"`{name}` must have the shape [{len(given)}], got {list(value.shape)}")


def validate_pooled(config: PreTrainedConfig | None, labels: torch.Tensor, *inputs: torch.Tensor | None) -> None:
    """Raise `ValueError` unless labels and `inputs` have equal numbers of sequences (`config` None: of options)."""
    given = given_input(*inputs)
    if given is None:
        return  # the body raises the error
    if config is None:
        check_labels("labels", labels, given.shape[:1])
    else:
        check_pooled_labels(config, labels, len(given))


def validate_pairs(config: PreTrainedConfig, first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether the second inputs are candidates `[B, C, ...]`; raise `ValueError` unless they fit the first."""
    names = ("input_ids", "inputs_embeds", "input_values")
    one, other = (given_input(*map(inputs.get, names)) for inputs in (first, second))
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
