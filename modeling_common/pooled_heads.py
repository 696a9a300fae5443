"""Generic heads for sequences: classification, pairs and options, see `heads.py`."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils import ModelOutput, TransformersKwargs, can_return_tuple

from luna_mega.modeling_common.heads import Head, recorded
from luna_mega.modeling_common.inputs import read_sequences
from luna_mega.modeling_common.label_checks import validate_choice, validate_pooled
from luna_mega.modeling_common.masks import read_mask
from luna_mega.modeling_common.pooling import LOCAL, Reductions
from luna_mega.modeling_common.sharding import find_reductions


class ClassificationHead(nn.Module):
    """dropout, then (dense, activation, dropout) x `classifier_num_layers`, then the output layer."""

    def __init__(self, config: PreTrainedConfig, input_size: int, num_labels: int):
        super().__init__()
        sizes = [input_size] + [config.classifier_hidden_size] * config.classifier_num_layers
        self.name_layers([nn.Linear(*pair) for pair in pairwise(sizes)])
        self.activation = ACT2FN[config.classifier_activation]
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.out_proj = nn.Linear(sizes[-1], num_labels, bias=config.classifier_bias)

    def name_layers(self, layers: list[nn.Linear]):
        """Give the dense layers the names that they have in checkpoints."""
        self.dense = nn.ModuleList(layers)

    def dense_layers(self) -> Iterable[nn.Linear]:
        """Return the dense layers in their order."""
        return self.dense

    def forward(self, features: torch.Tensor, reductions: Reductions = LOCAL) -> torch.Tensor:
        """Return logits `[B, num_labels]` for features `[B, ...]` of whole sequences."""
        features = reductions.dropout(self.dropout, features)
        for dense in self.dense_layers():
            features = reductions.dropout(self.dropout, self.activation(dense(features)))
        return self.out_proj(features)


class PooledHead(Head):
    """Base of the heads for sequences. The class provides `summarize`, from outputs to `[B, d]`."""

    # The losses of these heads are means over the batch; Trainer divides them by the accumulation steps.
    accepts_loss_kwargs = False
    head_class: type[ClassificationHead] = ClassificationHead

    def make_head(self, config: PreTrainedConfig):
        self.classifier = self.head_class(config, *self.head_sizes(config))

    def head_sizes(self, config: PreTrainedConfig) -> tuple[int, int]:
        """Return the number of features that the classifier reads, and of its scores."""
        return config.hidden_size, config.num_labels

    def summarize(
        self, outputs: ModelOutput, mask: torch.Tensor | None, reductions: Reductions = LOCAL
    ) -> torch.Tensor:
        """Return the representation of sequences `[B, d]`; `mask` is `[B, T]` bool, True = keep, None = all."""
        raise NotImplementedError

    def pool(
        self, inputs: dict[str, Any], drop_first_token: bool = False, **kwargs
    ) -> tuple[torch.Tensor, ModelOutput, Reductions]:
        """Return the sentence representation `[B, d]`, the outputs of the body, and the context-parallel shards.

        `inputs` and `kwargs` are the arguments of the body. Raises `ValueError` for a padding-free batch: a row has one
        label.
        """
        others = inputs | kwargs
        mask = others.pop("attention_mask", None)
        given = {name: others.pop(name, None) for name in ("input_ids", "inputs_embeds", "input_values")}
        name = type(self).__name__
        mask, given = read_sequences(self.base_model, name, mask, given, others, drop_first_token)
        given = {key: value for key, value in given.items() if value is not None}
        outputs = self.base_model(attention_mask=mask, **given, **others)
        reductions = find_reductions(others, outputs.last_hidden_state)
        return self.summarize(outputs, mask, reductions), outputs, reductions

    def make_output(self, logits: torch.Tensor, outputs: ModelOutput, labels: torch.Tensor | None) -> ModelOutput:
        """Return the output with the logits `[B, num_labels]` and their loss."""
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return self.output_class(loss=loss, logits=logits, **recorded(outputs))


class GenericForSequenceClassification(PooledHead):
    """Classification or regression of sequences."""

    def classify(self, inputs: dict[str, Any], labels: torch.Tensor | None, **kwargs) -> ModelOutput:
        """Return the output for the `inputs` of the body, with logits `[B, num_labels]`."""
        if labels is not None:
            validate_pooled(self.config, inputs, labels, kwargs)
        features, outputs, reductions = self.pool(inputs, **kwargs)
        return self.make_output(self.classifier(features, reductions), outputs, labels)


class GenericForMultipleChoice(PooledHead):
    """A score for each of several options."""

    needs_tokens = True

    def head_sizes(self, config: PreTrainedConfig) -> tuple[int, int]:
        return config.hidden_size, 1

    def choose(self, inputs: dict[str, torch.Tensor | None], labels: torch.Tensor | None, **kwargs) -> ModelOutput:
        """Return the output for C options `[B, C, ...]` of the inputs of the body, with logits `[B, C]`."""
        if labels is not None:
            validate_choice(inputs, labels, kwargs)
        options, inputs = flatten_options(**inputs)
        features, outputs, reductions = self.pool(inputs, **kwargs)
        return self.output_class(**choose_option(self.score_options(features, reductions), options, outputs, labels))

    def score_options(self, features: torch.Tensor, reductions: Reductions) -> torch.Tensor:
        """Return the scores `[B C, 1]` of options."""
        return self.classifier(features, reductions)


def pair_features(config: PreTrainedConfig, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the features of two sequences, `[B, d]` each, by `config.pair_features`."""
    if len(first) != len(second):
        raise ValueError(f"the first input has {len(first)} sequences and the second {len(second)}; give pairs")
    if config.pair_features == "concat":
        return torch.cat([second, first], dim=-1)
    return torch.cat([first, second, first * second, first - second], dim=-1)


def pair_size(config: PreTrainedConfig) -> int:
    """Return the width of `pair_features`."""
    return config.hidden_size * (2 if config.pair_features == "concat" else 4)


class GenericForSequencePairClassification(PooledHead):
    """Classification of pairs of sequences, or the choice among several second ones."""

    output_class = SequenceClassifierOutput
    refused_options: dict[str, str]  # keyword arguments that pairs do not have -> the reason

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.loss_type = "ForSequenceClassification"

    def head_sizes(self, config: PreTrainedConfig) -> tuple[int, int]:
        return pair_size(config), config.num_labels

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        pair_input_ids: torch.LongTensor | None = None,
        pair_attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        pair_inputs_embeds: torch.FloatTensor | None = None,
        input_values: torch.FloatTensor | None = None,
        pair_input_values: torch.FloatTensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """Classify pairs of sequences, `[B, T]` the first and `pair_*` `[B, T']` the second.

        Both are as the model without a head takes them. `labels`: `[B]` class ids, or numbers for regression.
        `logits`: `[B, num_labels]`. Hidden states and attentions are those of the first sequence.

        With `num_labels=1` the second sequences may be C candidates for each first one, `[B, C, T']`, which are scored
        one by one: `logits` are `[B, C]`, `labels` `[B]` the right ones, and the loss is their cross-entropy.
        """
        for name, reason in self.refused_options.items():
            if name in kwargs:
                raise ValueError(f"{reason}; leave {name} out")
        first = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "input_values": input_values}
        second = {
            "input_ids": pair_input_ids,
            "inputs_embeds": pair_inputs_embeds,
            "input_values": pair_input_values,
            "attention_mask": read_mask("pair_attention_mask", pair_attention_mask),
        }
        candidates = _has_candidates(second)
        if labels is not None and candidates:
            validate_choice(second, labels, kwargs)
        elif labels is not None:
            validate_pooled(self.config, first, labels, kwargs)
        drop_first_token = getattr(self.config, "drop_first_token", False)
        one, outputs, reductions = self.pool(first | {"attention_mask": attention_mask}, drop_first_token, **kwargs)
        shared = {name: value for name, value in kwargs.items() if name == "cp_group"}
        if not candidates:
            other, *_ = self.pool(second, **shared)
            return self.make_output(
                self.classifier(pair_features(self.config, one, other), reductions), outputs, labels
            )
        count, flat = self.flatten_candidates(len(one), second)
        other, *_ = self.pool(flat, **shared)
        scores = self.classifier(pair_features(self.config, one.repeat_interleave(count, dim=0), other), reductions)
        return self.output_class(**choose_option(scores, count, outputs, labels))

    def flatten_candidates(
        self, batch: int, inputs: dict[str, torch.Tensor | None]
    ) -> tuple[int, dict[str, torch.Tensor | None]]:
        """Return the number C of candidates for each of B first sequences, and `[B, C, ...]` as `[B C, ...]`."""
        if self.config.num_labels != 1:
            raise ValueError(
                "the second inputs are candidates, [B, C, ...], with one score each: set num_labels=1, "
                f"got {self.config.num_labels}"
            )
        ids, embeds = inputs["input_ids"], inputs["inputs_embeds"]
        if batch != (given := len(embeds if ids is None else ids)):
            raise ValueError(
                f"there are {batch} first sequences, and candidates for {given}: give one set of candidates each"
            )
        names = ("attention_mask", "input_ids", "inputs_embeds")
        return flatten_options(**{name: inputs[name] for name in names})


def _has_candidates(inputs: dict[str, torch.Tensor | None]) -> bool:
    """Return whether inputs are `[B, C, ...]`, and not `[B, ...]`."""
    tokens, embeds = inputs["input_ids"], inputs["inputs_embeds"]
    return (tokens is not None and tokens.dim() == 3) or (embeds is not None and embeds.dim() == 4)


def flatten_options(**inputs: torch.Tensor | None) -> tuple[int, dict[str, torch.Tensor | None]]:
    """Return the number of options C and the inputs `[B, C, ...]` as `[B C, ...]`."""
    given = inputs["input_ids"] if inputs["inputs_embeds"] is None else inputs["inputs_embeds"]
    if given is None or given.dim() < 3:
        shape = None if given is None else list(given.shape)
        raise ValueError(f"multiple choice needs input_ids [B, options, T] (or inputs_embeds), got {shape}")
    flat = {name: None if tensor is None else tensor.flatten(0, 1) for name, tensor in inputs.items()}
    return given.shape[1], flat


def choose_option(scores: torch.Tensor, options: int, outputs: ModelOutput, labels: torch.Tensor | None) -> dict:
    """Return logits `[B, C]` for scores `[B C, 1]`, and the loss."""
    logits = scores.view(-1, options)
    loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
    return {"loss": loss, "logits": logits, **recorded(outputs)}
