"""Pooling of sequences, and the generic heads that use it: classification, pairs and options, see `heads.py`.

Masks are bool `[B, T]`, True = keep; None = all.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Unpack, cast

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import MultipleChoiceModelOutput, SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from luna_mega.kernels.for_models import take_columns, upcast, upcast_dtype
from luna_mega.modeling_common.arguments import HeadKwargs, check_input
from luna_mega.modeling_common.heads import Head, checked_loss
from luna_mega.modeling_common.inputs import read_token_types
from luna_mega.modeling_common.labels import check_labels_of, check_pairs, given_input
from luna_mega.modeling_common.masks import find_mask, to_bool_mask
from luna_mega.modeling_common.outputs import BodyOutput, kept_positions
from luna_mega.modeling_common.padding_free import find_starts


def first_position(mask: torch.Tensor) -> torch.Tensor:
    """Return the position of the first token that the mask keeps, `[B]`: with padding on the left it is not 0."""
    return mask.int().argmax(dim=1)


def first_token(states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the first position of `[B, T, d]` that the mask keeps, `[B, d]`."""
    return states[:, 0] if mask is None else take_columns(states, first_position(mask)[:, None])[:, 0]


def last_token(states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the last position of `[B, T, d]` that the mask keeps, `[B, d]`; the last of all if it keeps none."""
    if mask is None:
        return states[:, -1]
    position = states.shape[1] - 1 - first_position(mask.flip(1))
    return take_columns(states, position[:, None])[:, 0]


def without_first(states: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return `[B, T, ...]` without the first position that the mask keeps, `[B, T - 1, ...]`."""
    if states is None or mask is None:
        return states if states is None else states[:, 1:]
    index = torch.arange(mask.shape[1] - 1, device=mask.device)
    return take_columns(states, index + (index >= first_position(mask)[:, None]).long())


def masked_mean(states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the mean over the rows of `[B, T, d]` that the mask `[B or 1, T]` keeps; 0 if it keeps none.

    Half-precision states are summed in float32: half precision cannot represent the sums of long sequences.
    """
    if mask is None:
        return states.mean(dim=1, dtype=upcast_dtype(states)).to(states.dtype)
    kept = states.masked_fill(~mask[..., None], 0.0).sum(dim=1, dtype=upcast_dtype(states))
    return (kept / mask.sum(dim=1, keepdim=True).clamp(min=1)).to(states.dtype)


class ClassificationHead(nn.Module):
    """Dropout, `classifier_num_layers` times a linear layer, activation and dropout, then the output layer."""

    def __init__(self, config: Any, input_size: int, num_labels: int):
        super().__init__()
        sizes = [input_size] + [config.classifier_hidden_size] * config.classifier_num_layers
        self.name_layers([nn.Linear(*pair) for pair in pairwise(sizes)])
        self.activation = ACT2FN[config.classifier_activation]
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.out_proj = nn.Linear(sizes[-1], num_labels, bias=config.classifier_bias)

    def name_layers(self, layers: list[nn.Linear]) -> None:
        """Register the linear layers under their names in checkpoints."""
        self.dense: Any = nn.ModuleList(layers)

    def dense_layers(self) -> Iterable[nn.Module]:
        """Return the linear layers in their order."""
        return self.dense

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return logits `[B, num_labels]` for features `[B, ...]` of sequences."""
        features = self.dropout(features)
        for dense in self.dense_layers():
            features = self.dropout(self.activation(dense(features)))
        return self.out_proj(features)


POOLINGS = {"cls": first_token, "last": last_token, "mean": masked_mean}


class PooledHead(Head):
    """Base of the heads that pool the states of each sequence by `config.pooling`."""

    loss_kind = "ForSequenceClassification"
    # The losses of these heads are means over the batch; Trainer divides them by the accumulation steps.
    accepts_loss_kwargs = False
    head_class: type[ClassificationHead] = ClassificationHead

    def check_config(self, config: Any) -> None:
        if config.is_decoder and config.pooling not in ("last", "mean"):
            raise ValueError(
                f"{type(self).__name__} with is_decoder=True does not support pooling={config.pooling!r}, because only "
                "the last token depends on all others; set pooling to 'last' or 'mean'"
            )

    def make_head(self, config: Any) -> None:
        self.classifier = self.head_class(config, *self.head_sizes(config))

    def head_sizes(self, config: Any) -> tuple[int, int]:
        """Return the number of features and of scores of the classifier."""
        return config.hidden_size, config.num_labels

    def summarize(self, outputs: Any) -> torch.Tensor:
        """Return the representation of sequences `[B, d]`."""
        return POOLINGS[self.config.pooling](outputs.last_hidden_state, kept_positions(outputs))

    def pool(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        input_values: torch.Tensor | None = None,
        drop_first_token: bool = False,
        **others: Any,
    ) -> tuple[torch.Tensor, BodyOutput]:
        """Return the representation of sequences `[B, d]`, and the outputs of the body.

        The arguments are those of the body. `drop_first_token` removes the first token of each sequence.

        Raises:
            ValueError: The batch is padding-free, but a row has one label; or `position_ids` with `drop_first_token`.
        """
        inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "input_values": input_values}
        body: Any = self.base_model
        if drop_first_token:
            if others.get("position_ids") is not None:
                raise ValueError("`position_ids` are not supported with `drop_first_token=True`; omit them")
            check_input(body, attention_mask, inputs)
            mask = to_bool_mask("attention_mask", attention_mask)
            if mask is None and input_ids is not None:
                mask = find_mask(input_ids, self.config)
            if (types := others.get("token_type_ids")) is not None:
                batch, length = cast(torch.Tensor, given_input(inputs)).shape[:2]
                others["token_type_ids"] = without_first(read_token_types(body, types, (batch, length), mask), mask)
            inputs = {key: without_first(value, mask) for key, value in inputs.items()}
            attention_mask = without_first(mask, mask)
        outputs = self.run_body(inputs | others, {"attention_mask": attention_mask})
        if find_starts(outputs.last_hidden_state.shape[:2], {"attention_mask": attention_mask, **others}) is not None:
            raise ValueError(f"{type(self).__name__} does not support padding-free batches; pad the batch")
        return self.summarize(outputs), outputs

    def make_output(self, logits: torch.Tensor, outputs: BodyOutput, labels: torch.Tensor | None) -> Any:
        """Return the output with the logits `[B, num_labels]` and their loss."""
        loss = None
        if labels is not None:
            config: Any = self.config
            options = {"labels": labels, "pooled_logits": upcast(logits), "config": config}
            loss = checked_loss(lambda: self.loss_function(**options), labels, config.num_labels)
        return self.output_class(loss=loss, logits=logits, **self.carried_over(outputs))


class GenericForSequenceClassification(PooledHead):
    """Classification or regression of sequences."""

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        *,
        input_values: torch.FloatTensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[HeadKwargs],
    ) -> SequenceClassifierOutput:
        """Classify the inputs of the body's `forward`.

        `labels`: `[B]` class ids, or numbers for regression. `logits`: `[B, num_labels]`.
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "input_values": input_values,
        }
        if labels is not None:
            check_labels_of(self.config, labels, inputs)
        drops = getattr(self.config, "drop_first_token", False)
        features, outputs = self.pool(**inputs, drop_first_token=drops, **kwargs)
        return self.make_output(self.classifier(features), outputs, labels)


class GenericForMultipleChoice(PooledHead):
    """A score for each of several options."""

    needs_tokens = True

    def head_sizes(self, config: Any) -> tuple[int, int]:
        return config.hidden_size, 1

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        *,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[HeadKwargs],
    ) -> MultipleChoiceModelOutput:
        """Score C options, `[B, C, T]`; `labels` `[B]` are the right options, and `logits` are `[B, C]`."""
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        if labels is not None:
            check_labels_of(None, labels, inputs)
        shape, flat = flatten_options(**inputs)
        features, outputs = self.pool(**flat, **kwargs)
        # `view(-1, C)` would exclude a batch of 1 from an exported program.
        logits, loss = self.score_options(features).view(shape), None
        if labels is not None:
            loss = checked_loss(lambda: nn.functional.cross_entropy(upcast(logits), labels), labels, shape[1])
        return self.output_class(loss=loss, logits=logits, **self.carried_over(outputs))

    def score_options(self, features: torch.Tensor) -> torch.Tensor:
        """Return the scores `[B C, 1]` of options."""
        return self.classifier(features)


def pair_features(config: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the features of two sequences, `[B, d]` each, by `config.pair_features`."""
    if config.pair_features == "concat":
        return torch.cat([second, first], dim=-1)
    return torch.cat([first, second, first * second, first - second], dim=-1)


def pair_size(config: Any) -> int:
    """Return the width of `pair_features`."""
    return config.hidden_size * (2 if config.pair_features == "concat" else 4)


class GenericForSequencePairClassification(PooledHead):
    """Classification of pairs of sequences."""

    output_class = SequenceClassifierOutput
    unsupported_options: dict[str, str] = {}  # keyword arguments of the body -> the reason

    def head_sizes(self, config: Any) -> tuple[int, int]:
        return pair_size(config), config.num_labels

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        *,
        pair_input_ids: torch.LongTensor | None = None,
        pair_attention_mask: torch.Tensor | None = None,
        pair_inputs_embeds: torch.FloatTensor | None = None,
        input_values: torch.FloatTensor | None = None,
        pair_input_values: torch.FloatTensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[HeadKwargs],
    ) -> SequenceClassifierOutput:
        """Classify pairs of sequences, the first `[B, T]` and the second (`pair_*`) `[B, T']`.

        `labels`: `[B]` class ids, or numbers for regression. `logits`: `[B, num_labels]`. Hidden states, attentions
        and `token_type_ids` belong to the first sequence.
        """
        for name, reason in self.unsupported_options.items():
            if name in kwargs:
                raise ValueError(f"{reason}; omit `{name}`")
        first: dict[str, Any] = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "input_values": input_values}
        second: dict[str, Any] = {
            "input_ids": pair_input_ids,
            "inputs_embeds": pair_inputs_embeds,
            "input_values": pair_input_values,
            "attention_mask": to_bool_mask("pair_attention_mask", pair_attention_mask),
        }
        check_pairs(first, second)
        if labels is not None:
            check_labels_of(self.config, labels, first)
        drop_first_token = getattr(self.config, "drop_first_token", False)
        one, outputs = self.pool(**first, attention_mask=attention_mask, drop_first_token=drop_first_token, **kwargs)
        other, _ = self.pool(**second)
        return self.make_output(self.classifier(pair_features(self.config, one, other)), outputs, labels)


def flatten_options(**inputs: torch.Tensor | None) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return B, the number of options C, and the inputs `[B, C, ...]` as `[B C, ...]`."""
    tensor = inputs["input_ids"] if inputs["inputs_embeds"] is None else inputs["inputs_embeds"]
    if tensor is None or tensor.dim() < 3:
        shape = None if tensor is None else list(tensor.shape)
        raise ValueError(f"multiple choice requires input_ids [B, options, T] or inputs_embeds, got {shape}")
    flat = {name: x if x is None or x.dim() < 3 else x.flatten(0, 1) for name, x in inputs.items()}
    return (tensor.shape[0], tensor.shape[1]), flat  # `position_ids` `[T]` are for all rows
