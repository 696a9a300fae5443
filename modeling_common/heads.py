"""Heads of both models: how they compute logits and losses from the outputs of the model without a head.

The classes of each model have the arguments and the output types, where these differ; most methods here return the
fields of an output.
"""

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

from luna_mega.modeling_common.inputs import read_sequences, refuse_together
from luna_mega.modeling_common.labels import (
    check_labels,
    check_pooled_labels,
    count_kept,
    keep_positions,
    next_tokens,
)
from luna_mega.modeling_common.layout import find_starts
from luna_mega.modeling_common.masks import drop_if_full, find_mask, read_mask
from luna_mega.modeling_common.sequence_parts import WHOLE, Pair, Parts, find_parts

_RECORDED = ("hidden_states", "attentions", "packed_hidden_states", "packed_attentions")


def recorded(outputs: ModelOutput) -> dict[str, tuple[torch.Tensor, ...] | None]:
    """Return the states and weights that were recorded of every layer on request."""
    return {name: getattr(outputs, name) for name in _RECORDED if hasattr(outputs, name)}


def carried_over(outputs: ModelOutput, output_class: type[ModelOutput]) -> dict[str, Any]:
    """Return the fields of `output_class` that the outputs of the model without a head have: cache, states, weights."""
    fields = output_class.__dataclass_fields__  # torch.compile does not take dataclasses.fields
    return {name: value for name, value in outputs.items() if name in fields}


def given_input(inputs: dict[str, Any]) -> torch.Tensor | None:
    """Return the tokens, embeddings or values among the arguments of a `forward`."""
    names = ("input_ids", "inputs_embeds", "input_values")
    return next((inputs[name] for name in names if inputs.get(name) is not None), None)


def validate_labels(
    inputs: dict[str, Any],
    labels: dict[str, torch.Tensor | None],
    logits_to_keep: int | torch.Tensor = 0,
    cp_group: Any = None,
) -> None:
    """Raise `ValueError` for labels, by name, of another shape than the positions `[B, T]` that have logits."""
    given = given_input(inputs)
    if given is None or given.dim() < 2:
        return  # the body raises the error
    with refuse_together(cp_group, given.device):
        kept = keep_positions(given, logits_to_keep)
        for name, value in labels.items():
            check_labels(name, value, kept.shape[:2])


def find_kept(config: PreTrainedConfig, inputs: dict[str, Any], length: int) -> torch.Tensor | None:
    """Return the bool mask `[B, T]` by which the body has read the last T positions of `inputs`; None = all."""
    mask, tokens = inputs.get("attention_mask"), inputs.get("input_ids")
    if mask is not None:
        return drop_if_full(read_mask("attention_mask", mask[:, -length:]))
    return None if tokens is None else drop_if_full(find_mask(tokens, config))


class TokenHead:
    """Base of the heads with outputs for every position. `output_class`: the class of the outputs."""

    output_class: type[ModelOutput]

    def read_labels(
        self, inputs: dict[str, Any], labels: torch.LongTensor | None, outputs: ModelOutput, options: dict[str, Any]
    ) -> tuple[torch.LongTensor | None, Parts]:
        """Return the labels that count, and the context-parallel shards; removes `cp_group` from `options`."""
        if labels is None:
            return None, WHOLE
        mask = find_kept(self.config, inputs, labels.shape[1])
        return count_kept(labels, mask).contiguous(), find_parts(options, outputs.last_hidden_state)


class MaskedLMMixin(TokenHead):
    """The masked language model. The class has `score_tokens`, from states `[..., d]` to logits."""

    def predict_tokens(self, inputs: dict[str, Any], labels: torch.LongTensor | None, **kwargs) -> ModelOutput:
        """Return the output for the `inputs` of the body; the other arguments are those of `forward`.

        The logits are `[B, T, vocab_size]`, with `sparse_prediction` and labels `[M, vocab_size]`.
        """
        validate_labels(inputs, {"labels": labels}, cp_group=kwargs.get("cp_group"))
        outputs = self.base_model(**inputs, **kwargs)
        hidden_states, loss = outputs.last_hidden_state, None
        labels, parts = self.read_labels(inputs, labels, outputs, kwargs)
        if labels is not None and self.config.sparse_prediction:
            predicted = labels != -100
            hidden_states, labels = hidden_states[predicted], labels[predicted]
        logits = self.score_tokens(hidden_states)
        if labels is not None:
            arguments = {"logits": logits, "labels": labels, "vocab_size": self.config.vocab_size}
            loss = parts.mean_loss(self.loss_function, labels, **arguments, **kwargs)
        return self.output_class(loss=loss, logits=logits, **recorded(outputs))


class CausalLMMixin:
    """The language model. The class has `score_tokens`, from states `[..., d]` to logits."""

    output_class: type[ModelOutput]

    def predict_next(
        self,
        inputs: dict[str, Any],
        labels: torch.LongTensor | None,
        logits_to_keep: int | torch.Tensor,
        shift_labels: torch.LongTensor | None = None,
        **kwargs,
    ) -> ModelOutput:
        """Return the output for the `inputs` of the body; the other arguments are those of `forward`.

        `shift_labels` is no parameter of `forward`, because Trainer would treat it as a second label.
        """
        given = {"labels": labels} if shift_labels is None else {"shift_labels": shift_labels}
        validate_labels(inputs, given, logits_to_keep, kwargs.get("cp_group"))
        outputs = self.base_model(**inputs, **kwargs)
        parts = find_parts(kwargs, outputs.last_hidden_state)
        hidden_states, targets = keep_positions(outputs.last_hidden_state, logits_to_keep, parts), None
        if labels is not None or shift_labels is not None:
            mask = find_kept(self.config, inputs, outputs.last_hidden_state.shape[1])
            starts = find_starts(outputs.last_hidden_state.shape[:2], inputs, kwargs)
            mask, starts = (None if x is None else keep_positions(x, logits_to_keep) for x in (mask, starts))
            targets = next_tokens(labels, shift_labels, mask, starts, parts)
        loss, logits = self.score_next(hidden_states, labels, targets, parts, **kwargs)
        return self.output_class(loss=loss, logits=logits, **carried_over(outputs, self.output_class))

    def score_next(
        self,
        hidden_states: torch.Tensor,
        labels: torch.LongTensor | None,
        targets: torch.LongTensor | None,
        parts: Parts,
        **kwargs,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the loss of the kept states `[B, T, d]` against the next tokens `targets` `[B, T]`, and the logits."""
        logits, loss = self.score_tokens(hidden_states), None
        if targets is not None:
            arguments = {"labels": labels, "vocab_size": logits.shape[-1], "shift_labels": targets}
            loss = parts.mean_loss(self.loss_function, targets, logits=logits, **arguments, **kwargs)
        return loss, logits


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

    def forward(self, features: torch.Tensor, parts: Parts = WHOLE) -> torch.Tensor:
        """Return logits `[B, num_labels]` for features `[B, ...]` of whole sequences."""
        features = parts.dropout(self.dropout, features)
        for dense in self.dense_layers():
            features = parts.dropout(self.dropout, self.activation(dense(features)))
        return self.out_proj(features)


class PooledMixin:
    """Classification of sequences. The class has `classifier` and `summarize`, from outputs to `[B, d]`."""

    # The losses of these heads are means over the batch; Trainer divides them by the accumulation steps.
    accepts_loss_kwargs = False
    output_class: type[ModelOutput]

    def pool(
        self, inputs: dict[str, Any], drop_first_token: bool = False, **kwargs
    ) -> tuple[torch.Tensor, ModelOutput, Parts]:
        """Return the sentence representation `[B, d]`, the outputs of the body, and the context-parallel shards.

        `inputs` and `kwargs` are the arguments of the body. Raises `ValueError` for a padding-free batch: a row has one
        label.
        """
        others = inputs | kwargs
        mask = others.pop("attention_mask", None)
        given = {name: others.pop(name, None) for name in ("input_ids", "inputs_embeds", "input_values")}
        spec, name = self.base_model.input_spec, type(self).__name__
        mask, given = read_sequences(spec, name, mask, given, others, drop_first_token)
        given = {key: value for key, value in given.items() if value is not None}
        outputs = self.base_model(attention_mask=mask, **given, **others)
        parts = find_parts(others, outputs.last_hidden_state)
        return self.summarize(outputs, mask, parts), outputs, parts

    def classify(self, inputs: dict[str, Any], labels: torch.Tensor | None, **kwargs) -> ModelOutput:
        """Return the output for the `inputs` of the body, with logits `[B, num_labels]`."""
        self.validate_pooled(inputs, labels, kwargs.get("cp_group"))
        features, outputs, parts = self.pool(inputs, **kwargs)
        return self.make_output(self.classifier(features, parts), outputs, labels)

    def choose(self, inputs: dict[str, torch.Tensor | None], labels: torch.Tensor | None, **kwargs) -> ModelOutput:
        """Return the output for C options `[B, C, ...]` of the inputs of the body, with logits `[B, C]`."""
        validate_choice(inputs, labels, kwargs.get("cp_group"))
        options, inputs = flatten_options(**inputs)
        features, outputs, parts = self.pool(inputs, **kwargs)
        return self.output_class(**choose_option(self.score_options(features, parts), options, outputs, labels))

    def score_options(self, features: torch.Tensor, parts: Parts) -> torch.Tensor:
        """Return the scores `[B C, 1]` of options."""
        return self.classifier(features, parts)

    def validate_pooled(self, inputs: dict[str, Any], labels: torch.Tensor | None, cp_group: Any = None) -> None:
        """Raise `ValueError` for labels of another shape than the sequences of `inputs` have."""
        given = given_input(inputs)
        if given is not None and labels is not None:
            with refuse_together(cp_group, given.device):
                check_pooled_labels(self.config, labels, len(given))

    def make_output(self, logits: torch.Tensor, outputs: ModelOutput, labels: torch.Tensor | None) -> ModelOutput:
        """Return the output with the logits `[B, num_labels]` and their loss."""
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return self.output_class(loss=loss, logits=logits, **recorded(outputs))


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


class PairMixin(PooledMixin):
    """Classification of pairs of sequences, or the choice among several second ones."""

    output_class = SequenceClassifierOutput
    refused_option: tuple[str, str]  # a keyword argument that pairs do not have, and the reason

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
        name, reason = self.refused_option
        if name in kwargs:
            raise ValueError(f"{reason}; leave {name} out")
        first = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "input_values": input_values}
        second = {
            "input_ids": pair_input_ids,
            "inputs_embeds": pair_inputs_embeds,
            "input_values": pair_input_values,
            "attention_mask": read_mask("pair_attention_mask", pair_attention_mask),
        }
        candidates, group = _has_candidates(second), kwargs.get("cp_group")
        if candidates:
            validate_choice(second, labels, group)
        else:
            self.validate_pooled(first, labels, group)
        drop_first_token = getattr(self.config, "drop_first_token", False)
        one, outputs, parts = self.pool(first | {"attention_mask": attention_mask}, drop_first_token, **kwargs)
        shared = {name: value for name, value in kwargs.items() if name == "cp_group"}
        if not candidates:
            other, *_ = self.pool(second, **shared)
            return self.make_output(self.classifier(pair_features(self.config, one, other), parts), outputs, labels)
        count, flat = self.flatten_candidates(len(one), second)
        other, *_ = self.pool(flat, **shared)
        scores = self.classifier(pair_features(self.config, one.repeat_interleave(count, dim=0), other), parts)
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


def validate_choice(inputs: dict[str, torch.Tensor | None], labels: torch.Tensor | None, cp_group: Any = None) -> None:
    """Raise `ValueError` for labels of other options `[B, C, ...]` than those of `inputs`."""
    given = given_input(inputs)
    if given is not None:
        with refuse_together(cp_group, given.device):
            check_labels("labels", labels, given.shape[:1])


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


class TokenMixin(TokenHead):
    """A label for every token. The class has `dropout` and `classifier`."""

    def label_tokens(self, inputs: dict[str, Any], labels: torch.LongTensor | None, **kwargs) -> ModelOutput:
        """Return the output for the `inputs` of the body, with logits `[B, T, num_labels]`."""
        validate_labels(inputs, {"labels": labels}, cp_group=kwargs.get("cp_group"))
        outputs = self.base_model(**inputs, **kwargs)
        labels, parts = self.read_labels(inputs, labels, outputs, kwargs)
        logits, loss = self.classifier(self.dropout(outputs.last_hidden_state)), None
        if labels is not None:
            arguments = {"logits": logits, "labels": labels, "config": self.config}
            loss = parts.mean_loss(self.loss_function, labels, **arguments, **kwargs)
        return self.output_class(loss=loss, logits=logits, **recorded(outputs))


class SpanMixin(TokenHead):
    """Start and end of an answer. The class has `qa_outputs`."""

    def find_span(
        self,
        inputs: dict[str, Any],
        start_positions: torch.LongTensor | None,
        end_positions: torch.LongTensor | None,
        **kwargs,
    ) -> ModelOutput:
        """Return the output for the `inputs` of the body, with logits of start and end `[B, T]`.

        Dropped positions have the lowest score of the dtype, so that no softmax, maximum or loss depends on padding.
        """
        positions = self._read_positions(inputs, start_positions, end_positions, kwargs)
        outputs = self.base_model(**inputs, **kwargs)
        scores, loss = self.qa_outputs(outputs.last_hidden_state), None
        mask = find_kept(self.config, inputs, scores.shape[1])
        if mask is not None:
            scores = scores.masked_fill(~mask[..., None], torch.finfo(scores.dtype).min)
        logits = scores.unbind(dim=-1)
        if positions is not None:
            if find_starts(scores.shape[:2], inputs, kwargs) is not None:
                raise ValueError(
                    f"{type(self).__name__} has no loss for a padding-free batch; pad the batch, or omit "
                    "`start_positions` and `end_positions`"
                )
            parts = find_parts(kwargs, scores)
            loss = parts.position_loss(self.loss_function, logits, positions, mask, **kwargs)
        return self.output_class(loss=loss, start_logits=logits[0], end_logits=logits[1], **recorded(outputs))

    def _read_positions(
        self,
        inputs: dict[str, Any],
        start_positions: torch.LongTensor | None,
        end_positions: torch.LongTensor | None,
        options: dict[str, Any],
    ) -> Pair | None:
        """Return both labels as `[B]`, or None; raise `ValueError` for one without the other or another shape."""
        given = given_input(inputs)
        if given is None or given.dim() < 2 or (start_positions is None and end_positions is None):
            return None
        with refuse_together(options.get("cp_group"), given.device):
            if start_positions is None or end_positions is None:
                name = "end_positions" if end_positions is None else "start_positions"
                raise ValueError(f"`{name}` is missing; pass `start_positions` and `end_positions`, or neither")
            pair = {"start_positions": start_positions, "end_positions": end_positions}
            for name, value in pair.items():
                if value.shape not in ((len(given),), (len(given), 1)):
                    raise ValueError(f"`{name}` must have the shape [{len(given)}], got {list(value.shape)}")
        return start_positions.view(-1), end_positions.view(-1)
