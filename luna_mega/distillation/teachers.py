"""Trained encoders as teachers: their requirements, and their inputs and outputs."""

from typing import Any

import torch
import transformers
from torch import nn
from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel

from luna_mega.distillation.originals import check_original
from luna_mega.distillation.parts import FAMILIES, Family, Parts, find_head
from luna_mega.errors import ConversionError

HEADS = (
    "",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)


class Teacher(Parts):
    """A trained encoder with absolute positions, with any head of `LunaFor...` or without a head.

    Args:
        model: the model. It is set to evaluation mode and not modified.

    Raises:
        ValueError: The model is not supported; the message names the models that are.
    """

    def __init__(self, model: nn.Module):
        model = check_original(model)
        family, head, config = check_teacher(model.config), find_head(model), model.config
        if head not in HEADS:
            raise ValueError(
                f"{type(model).__name__} has a head that Luna does not have; pass `model.base_model`, or a model with "
                f"one of the heads {', '.join(filter(None, HEADS))}"
            )
        super().__init__(model.eval(), family)
        broken = [name for name, tensor in model.named_parameters() if not torch.isfinite(tensor).all()]
        if broken:
            raise ValueError(
                f"the teacher's weights are not finite in {len(broken)} tensors ({broken[0]}, ...); use another "
                "checkpoint"
            )
        self.activation = getattr(config, family.activation)
        head_activation = getattr(config, family.head_activation, family.head_activation)
        if head == "ForMaskedLM" and head_activation != self.activation:
            raise ValueError(
                f"the head of the teacher ({config.model_type}) has the activation {head_activation!r}, but its "
                f"layers have {self.activation!r}, and Luna has one for both; pass `model.base_model`"
            )
        summary = [getattr(config, f"summary_{name}", None) for name in ("type", "use_proj", "activation")]
        if head == "ForMultipleChoice" and config.model_type == "electra" and summary != ["first", True, "gelu"]:
            raise ValueError(
                f"the teacher (electra) summarizes options by {summary[0]!r} and {summary[2]!r}; only summary_type="
                "'first' with a projection and 'gelu' is supported"
            )

    @property
    def first_position(self) -> int:
        """The row of the first token in the position table."""
        return self.family.first_position(self.config)

    @property
    def max_length(self) -> int:
        """The number of positions of the teacher."""
        return self.config.max_position_embeddings - self.first_position

    def inputs(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the teacher's inputs of a batch `[B, T]` or, for multiple choice, `[B, options, T]`.

        Without a mask every token is kept.
        """
        ids = batch["input_ids"]
        inputs = {"input_ids": ids, "attention_mask": batch.get("attention_mask", torch.ones_like(ids))}
        if "token_type_ids" in batch and self.module("token_types") is not None:
            inputs["token_type_ids"] = batch["token_type_ids"]
        if not self.family.padded:
            # By default, positions include padding, so the states would depend on the padding side. DistilBERT does
            # not reshape `position_ids`, and the others accept them as `[B * options, T]`.
            mask = inputs["attention_mask"].long().flatten(0, -2)
            inputs["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
        return inputs


def check_teacher(config: PreTrainedConfig) -> Family:
    """Return the family of a teacher's configuration.

    Raises:
        ValueError: If a model of this configuration cannot be a teacher.
    """
    kind, known = config.model_type, f"supported are {', '.join(FAMILIES)}"
    if config.is_encoder_decoder:
        raise ValueError(f"{kind} is an encoder-decoder and cannot be a teacher; {known}")
    bias = getattr(config, "relative_attention", False) or hasattr(config, "relative_attention_num_buckets")
    if bias or (getattr(config, "position_embedding_type", None) or "").startswith("relative"):
        raise ValueError(f"the teacher ({kind}) has relative position biases, which Luna does not have; {known}")
    if kind not in FAMILIES:
        raise ValueError(
            f"the teacher ({kind}) does not have the layers and learned positions of BERT, so an exact conversion is "
            f"impossible; {known}"
        )
    if getattr(config, "is_decoder", False):
        raise ValueError(f"{kind} as a decoder cannot be a teacher; set is_decoder=False")
    return FAMILIES[kind]


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class of the model of a folder with this configuration."""
    bare = MODEL_MAPPING[type(config)]
    name = str((config.architectures or [bare.__name__])[0])
    named = bare if name == bare.__name__ else getattr(transformers, name, None)
    if not isinstance(named, type) or named is not bare and not name.endswith(tuple(filter(None, HEADS))):
        raise ConversionError(
            f"the teacher is a {name}, whose head Luna does not have; for the encoder only, save "
            "AutoModel.from_pretrained(...) with its tokenizer, or set num_labels to fine-tune a new classifier"
        )
    return named
