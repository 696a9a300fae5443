"""Generic heads: constructors, `forward` and losses of the classes with a head, for all families.

The body is the model without a head. A class of a family lists a generic head before the family's `PreTrainedModel`,
and implements the layers that differ. The inherited `forward` has the positional arguments of BERT, and passes `kwargs`
to the body and the loss. Causal models implement `forward` with the arguments of the family, and call `predict_next`.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Unpack

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_outputs import MaskedLMOutput, QuestionAnsweringModelOutput, TokenClassifierOutput
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from luna_mega.kernels.for_models import forbid_capture, upcast
from luna_mega.modeling_common.arguments import HeadKwargs
from luna_mega.modeling_common.base import ModelMixin
from luna_mega.modeling_common.labels import (
    check_ids,
    check_span,
    check_token_labels,
    given_input,
    ignore_dropped,
    ignore_dropped_columns,
    keep_positions,
    next_tokens,
)
from luna_mega.modeling_common.outputs import CACHE, BodyOutput, kept_positions
from luna_mega.modeling_common.padding_free import find_starts

logger = logging.get_logger(__name__)


def checked_loss(compute: Callable[[], Any], labels: torch.Tensor, count: int) -> Any:
    """Return `compute()`, the loss of `labels`; raise `ValueError` if a label is none of `count` ids."""
    try:
        return compute()
    except IndexError:  # only on a CPU: checking before would make a GPU wait
        check_ids("labels", labels, count)
        raise


class Head(ModelMixin):
    """Base of the generic heads: the body under its name in checkpoints, then the layers of the head.

    Classes of a family set `output_class`, the class of the outputs.
    """

    output_class: Any
    lm_head: nn.Module
    needs_tokens = False  # whether `config.input_type` must be "tokens"
    # The loss in transformers, which would derive it from the name of the class, also of a user's subclass.
    loss_kind: ClassVar[str]

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.loss_type = self.loss_kind
        if self.needs_tokens:
            self.require_tokens()
        self.check_config(config)
        setattr(self, self.base_model_prefix, self.body_class(config, **self.body_options))
        self.make_head(config)
        self.post_init()

    def check_config(self, config: Any) -> None:
        """Raise `ValueError` for a configuration that this class does not support."""

    def make_head(self, config: Any) -> None:
        """Make the layers of the head."""
        raise NotImplementedError

    def run_body(self, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        """Return the outputs of the body for the `inputs` that are given, and keyword arguments of the body."""
        arguments = {name: x for name, x in inputs.items() if x is not None} | {**options}
        if self.config.is_decoder and CACHE not in self.output_class.__dataclass_fields__:
            arguments.setdefault("use_cache", False)  # a cache, which no output contains, disables `unpad_inputs`
        return self.base_model(**arguments, return_dict=True)

    def carried_over(self, outputs: BodyOutput) -> dict[str, Any]:
        """Return the fields of `output_class` that the outputs of the body have: cache, states, attention weights."""
        fields = self.output_class.__dataclass_fields__  # torch.compile does not support dataclasses.fields
        return {name: value for name, value in outputs.items() if name in fields}


class LMHead(Head):
    """Base of the language models, whose output layer is `lm_head` unless `score_tokens` is overridden."""

    needs_tokens = True
    output_layer = "lm_head"  # the layer with a row for every token

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the output layer."""
        return self.get_submodule(self.output_layer)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the output layer."""
        self.set_submodule(self.output_layer, new_embeddings)

    def score_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return logits for states `[..., d]`."""
        return self.lm_head(hidden_states)


class GenericForMaskedLM(LMHead):
    """Masked language model."""

    loss_kind = "ForMaskedLM"

    def check_config(self, config: PreTrainedConfig) -> None:
        if config.is_decoder:
            logger.warning(
                f"{type(self).__name__} with is_decoder=True predicts masked tokens from earlier tokens only; set "
                "is_decoder=False to read both sides"
            )

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
    ) -> MaskedLMOutput:
        """Predict tokens from the inputs of the body's `forward`.

        `labels`: `[B, T]` tokens, -100 = not predicted. `logits`: `[B, T, vocab_size]`; in training with
        `sparse_prediction`, `[M, vocab_size]` of the M predicted positions only. In evaluation, Trainer requires
        predictions and labels of the same positions.
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        if labels is not None:
            check_token_labels(given_input(inputs), labels=labels)
        outputs = self.run_body(inputs, kwargs)
        hidden_states, targets, loss = outputs.last_hidden_state, None, None
        if labels is not None:
            targets = ignore_dropped(labels, kept_positions(outputs)).contiguous()
            if self.training and self.config.sparse_prediction:
                forbid_capture(labels, "sparse_prediction, whose size depends on the labels", "set it to False")
                predicted = targets != -100
                hidden_states, targets = hidden_states[predicted], targets[predicted]
        logits = self.score_tokens(hidden_states)
        if targets is not None:
            count = self.config.vocab_size
            values = {"logits": logits, "labels": targets, "vocab_size": count, **kwargs}
            loss = checked_loss(lambda: self.loss_function(**values), targets, count)
        return self.output_class(loss=loss, logits=logits, **self.carried_over(outputs))


class GenericForCausalLM(LMHead):
    """Causal language model."""

    loss_kind = "ForCausalLM"

    def make_head(self, config: Any) -> None:
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def predict_next(
        self,
        labels: torch.Tensor | None,
        logits_to_keep: int | torch.Tensor,
        options: Mapping[str, Any],
        **inputs: Any,
    ) -> Any:
        """Return the output with logits of the positions `logits_to_keep`.

        `options` can contain `shift_labels`, which Trainer would treat as labels if it were a parameter of `forward`.
        """
        options = {**options}
        shift_labels = options.pop("shift_labels", None)
        has_labels = labels is not None or shift_labels is not None
        if has_labels:
            label_args = {"labels": labels} if shift_labels is None else {"shift_labels": shift_labels}
            check_token_labels(given_input(inputs), logits_to_keep, **label_args)
        outputs = self.base_model(**inputs, **options, return_dict=True)
        hidden_states, targets, mask = outputs.last_hidden_state, None, None
        if has_labels or hidden_states.requires_grad:
            mask = kept_positions(outputs)
        if mask is not None and hidden_states.requires_grad:
            # Label smoothing of Trainer adds loss at padding, whose states have no variance. Each norm would multiply
            # their gradient by 1 / sqrt(eps), so they are detached.
            hidden_states = torch.where(mask[..., None], hidden_states, hidden_states.detach())
        hidden_states = keep_positions(hidden_states, logits_to_keep)
        if has_labels:
            starts = find_starts(outputs.last_hidden_state.shape[:2], {**inputs, **options})
            mask, starts = (None if x is None else keep_positions(x, logits_to_keep) for x in (mask, starts))
            targets = next_tokens(labels, shift_labels, mask, starts)
        loss, logits = self.score_next(hidden_states, labels, targets, **options)
        return self.output_class(loss=loss, logits=logits, **self.carried_over(outputs))

    def score_next(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor | None,
        targets: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the loss of states `[B, T, d]` for the next tokens `targets` `[B, T]`, and the logits."""
        logits, loss = self.score_tokens(hidden_states), None
        if targets is not None:
            options = {"logits": logits, "labels": labels, "vocab_size": logits.shape[-1], "shift_labels": targets}
            loss = checked_loss(lambda: self.loss_function(**options, **kwargs), targets, logits.shape[-1])
        return loss, logits


class GenericForTokenClassification(Head):
    """A label for every token."""

    loss_kind = "ForTokenClassification"

    def make_head(self, config: Any) -> None:
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

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
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[HeadKwargs],
    ) -> TokenClassifierOutput:
        """Label the positions of the inputs of the body's `forward`.

        `labels`: `[B, T]`, -100 = not counted. `logits`: `[B, T, num_labels]`.
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
            check_token_labels(given_input(inputs), labels=labels)
        outputs = self.run_body(inputs, kwargs)
        logits, loss = self.classifier(self.dropout(outputs.last_hidden_state)), None
        if labels is not None:
            config: Any = self.config
            targets = ignore_dropped(labels, kept_positions(outputs)).contiguous()
            values = {"logits": logits, "labels": targets, "config": config, **kwargs}
            loss = checked_loss(lambda: self.loss_function(**values), targets, config.num_labels)
        return self.output_class(loss=loss, logits=logits, **self.carried_over(outputs))


class GenericForQuestionAnswering(Head):
    """Start and end of an answer."""

    loss_kind = "ForQuestionAnswering"
    needs_tokens = True

    def make_head(self, config: Any) -> None:
        self.qa_outputs = nn.Linear(config.hidden_size, 2)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        *,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        **kwargs: Unpack[HeadKwargs],
    ) -> QuestionAnsweringModelOutput:
        """Score the positions of the inputs of the body's `forward` as start and end of the answer.

        `start_logits`, `end_logits`: `[B, T]`, the lowest number of the dtype at positions that the mask drops, so that
        no softmax or maximum depends on them. `start_positions`, `end_positions`: `[B]`, the columns of the answer.
        Columns that the mask drops and columns after the end are ignored.
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        check_span(start_positions, end_positions, given_input(inputs))
        outputs = self.run_body(inputs, kwargs)
        scores, loss = self.qa_outputs(outputs.last_hidden_state), None
        mask = kept_positions(outputs)
        if mask is not None:
            scores = scores.masked_fill(~mask[..., None], torch.finfo(scores.dtype).min)
        logits = scores.unbind(dim=-1)
        if start_positions is not None and end_positions is not None:
            if find_starts(scores.shape[:2], {**inputs, **kwargs}) is not None:
                raise ValueError(
                    f"{type(self).__name__} has no loss for a padding-free batch; pad the batch, or omit "
                    "`start_positions` and `end_positions`"
                )
            columns = (ignore_dropped_columns(column.view(-1), mask) for column in (start_positions, end_positions))
            loss = self.loss_function(*(upcast(x) for x in logits), *columns, **kwargs)
        return self.output_class(loss=loss, start_logits=logits[0], end_logits=logits[1], **self.carried_over(outputs))
