"""Trained transformers as teachers: their requirements, and the states that they return."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from luna_mega.distillation.families import FAMILIES, Family, Parts, find_family, find_head
from luna_mega.hub.folder import position_limit


@dataclass
class Observed:
    """States of a teacher of N layers for one batch.

    Args:
        states: N + 1 tensors `[B, T, d]`, the input of each layer and the output of the last one, before a last norm.
        attended: N tensors `[B, T, d]`, the output of the attention of each layer.
    """

    states: list[torch.Tensor] = field(default_factory=list)
    attended: list[torch.Tensor] = field(default_factory=list)


class Teacher(Parts):
    """A trained transformer, with names for its parts that do not depend on its family.

    It is not a module, so optimizers, DDP and checkpoints of the student do not include it. Move it with
    `teacher.model.to(device)`. To keep it in half precision, call `teacher.model.to(torch.bfloat16)` after its weights
    have been copied.

    Args:
        model: a masked or causal language model, or a sequence classifier, of one of `FAMILIES`. It is set to
            evaluation mode and not modified.
        window: number of positions of the independent windows in which a language model processes longer inputs;
            None = inputs that are too long raise an error.

    Raises:
        ValueError: If the model cannot be a teacher.
    """

    heads: tuple[str, ...] = ("ForMaskedLM", "ForCausalLM", "LMHeadModel", "ForSequenceClassification")

    def __init__(self, model: PreTrainedModel, window: int | None = None):
        if find_head(model) not in self.heads:
            raise ValueError(
                f"a {type(model).__name__} has no head to distill; use a masked or causal language model, or a "
                "sequence classifier"
            )
        super().__init__(model.eval(), self.check(model.config))
        self.window = window
        if self.family.is_decoder and self.is_classifier:
            raise ValueError(
                f"{type(model).__name__} classifies with a decoder, but only encoders are supported as classifiers; "
                "use a fine-tuned encoder"
            )
        if window is not None and (self.is_classifier or window < 1):
            raise ValueError(f"window={window} requires a language model and at least 1 position; omit it")
        broken = [name for name, tensor in model.named_parameters() if not torch.isfinite(tensor).all()]
        if broken:
            raise ValueError(
                f"the teacher's weights are not finite in {len(broken)} tensors ({broken[0]}, ...); use another "
                "checkpoint"
            )

    @staticmethod
    def check(config: PreTrainedConfig) -> Family:
        """Return the family of a teacher's configuration; raise `ValueError` if it is not supported."""
        return check_teacher(config)

    @staticmethod
    def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
        """Return the class of the model of a folder with this configuration."""
        classes = MODEL_FOR_CAUSAL_LM_MAPPING if check_teacher(config).is_decoder else MODEL_FOR_MASKED_LM_MAPPING
        if str((config.architectures or [""])[0]).endswith("ForSequenceClassification"):
            classes = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        return classes[type(config)]

    @property
    def max_length(self) -> int | None:
        """The length limit of the teacher's inputs; None = unlimited."""
        if self.config.model_type in ("luna", "mega"):
            return position_limit(self.config)
        module = self.module("positions")
        return self.config.max_position_embeddings if module is None else len(self.positions())

    def inputs(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the teacher's inputs of a batch `[B, T]`, in windows `[B * windows, window]` if `window` is set.

        Raises:
            ValueError: If batch or window exceed the length limit of the teacher.
        """
        length = batch["input_ids"].shape[1]
        size = length if self.window is None or self.is_classifier else min(length, self.window)
        if self.max_length is not None and size > self.max_length:
            raise ValueError(
                f"the batch has {length} positions and the teacher supports {self.max_length}; truncate it, use "
                f"windows for a language model (teacher.window = {self.max_length}), or only train on labels (share=0)"
            )
        inputs = inputs_of(batch, token_types="token_type_ids" in batch and bool(self.tensors("token_types")))
        inputs = {name: self.cut(tensor) for name, tensor in inputs.items()}
        module = self.module("positions")
        if module is not None and module.padding_idx is None and self.config.model_type != "luna":
            # By default, positions include padding, so the states would depend on the padding side.
            inputs["position_ids"] = positions_of(inputs["attention_mask"])
        return inputs

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `[B, T]` as windows `[B * windows, window]`; the last one is padded with zeros."""
        length = tensor.shape[1]
        if self.window is None or self.is_classifier or length <= self.window:
            return tensor
        return functional.pad(tensor, (0, -length % self.window)).unflatten(1, (-1, self.window)).flatten(0, 1)

    @contextmanager
    def observe(self) -> Iterator[Observed]:
        """Record the states and attention outputs of the teacher's calls within the block."""
        observed, hooks, layers = Observed(), [], self.layers

        def keep_input(module, args, kwargs):
            observed.states.append(args[0] if args else kwargs["hidden_states"])

        def keep_last(module, args, output):
            observed.states.append(output[0] if isinstance(output, tuple) else output)

        for layer in layers:
            hooks.append(layer.register_forward_pre_hook(keep_input, with_kwargs=True))
            if "output" in self.family.layer:
                output = layer.get_submodule(self.family.layer["output"])
                hooks.append(output.register_forward_hook(lambda module, args, out: observed.attended.append(out)))
        hooks.append(layers[-1].register_forward_hook(keep_last))
        try:
            yield observed
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def show(self, batch: dict[str, Any]) -> Observed:
        """Return states and attention outputs for a batch with `input_ids` `[B, T]`; at padding they are 0."""
        inputs, (count, length) = self.inputs(batch), batch["input_ids"].shape
        nowhere = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)  # no logits are required
        with self.observe() as observed, self.logits_at(None if self.is_classifier else nowhere):
            self.model(**inputs)
        padding = inputs["attention_mask"][..., None] == 0

        def join(states: torch.Tensor) -> torch.Tensor:
            return states.masked_fill(padding, 0.0).unflatten(0, (count, -1)).flatten(1, 2)[:, :length]

        return Observed(*([join(states) for states in kept] for kept in (observed.states, observed.attended)))

    @torch.no_grad()
    def logits(self, batch: dict[str, Any], places: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits `[M, vocab_size]` at the True places of `[B, T]`, or a classifier's `[B, num_labels]`."""
        with self.logits_at(None if places is None else self.cut(places)):
            return self.model(**self.inputs(batch)).logits


def inputs_of(batch: dict[str, Any], token_types: bool) -> dict[str, torch.Tensor]:
    """Return tokens and mask of a batch, and its token types if `token_types` is set.

    Without a mask every token is kept, because the padding token may be the end-of-text token of the teacher.
    """
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids) if mask is None else mask}
    return inputs | ({"token_type_ids": batch["token_type_ids"]} if token_types else {})


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    """Return the index of every kept token in its sequence `[B, T]`; undefined at padding."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def check_teacher(config: PreTrainedConfig, types: Iterable[str] = FAMILIES) -> Family:
    """Return the family of a teacher's configuration.

    Args:
        config: the configuration.
        types: supported model types, for the error messages.

    Raises:
        ValueError: If a model of this configuration cannot be a teacher.
    """
    family, kind = find_family(config), config.model_type
    known = ", ".join(name for name in types if " " not in name)
    positions = getattr(config, "position_embedding_type", None)
    if config.is_encoder_decoder:
        raise ValueError(f"{kind} is an encoder-decoder and cannot be a teacher; supported are {known}")
    bias = getattr(config, "relative_attention", False) or hasattr(config, "relative_attention_num_buckets")
    if bias or (positions or "").startswith("relative"):
        raise ValueError(
            f"the teacher ({kind}) has relative position biases, which students do not support; use one of {known}"
        )
    tokens = getattr(config, "input_type", "tokens") == "tokens"
    if family is None or not tokens:
        case = " of other inputs than tokens" if not tokens else " as a decoder" if kind in FAMILIES else ""
        raise ValueError(f"{kind}{case} cannot be a teacher; supported are {known}")
    return family
