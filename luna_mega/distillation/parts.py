"""Parts of encoders: a table with one row per family, which names the parts that all models have."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Family:
    """The names of a family's modules."""

    layers: str  # the list of layers, as seen from the model with its head
    layer: Mapping[str, str]  # our name of a part of a layer -> the family's name in the layer
    # Our name of a part outside the layers -> the family's name. `head_...` and `decoder` belong to the
    # language-modeling head, `class_...` to a sequence classifier.
    model: Mapping[str, str]
    # Configuration field with the activation of the feed-forward layers and of the head, or the activation itself
    activation: str = "hidden_act"
    head_activation: str = "hidden_act"
    class_activation: str = "gelu"  # of the classifier's hidden layer
    padded: bool = False  # whether the first position is `padding_idx + 1`, as in fairseq
    # Other heads, by the end of the names of their classes -> the names of their parts, `class_...`
    heads: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def first_position(self, config: PreTrainedConfig) -> int:
        """Return the row of the first token in the position table."""
        return (config.pad_token_id or 0) + 1 if self.padded else 0

    def of(self, model: PreTrainedModel) -> "Family":
        """Return the names of the modules of a model, which depend on its head."""
        head, base = find_head(model), model.base_model_prefix
        if head in self.heads:
            return replace(self, model=dict(self.model) | dict(self.heads[head]))
        if model.base_model is not model:
            return self
        body = {name: path.removeprefix(f"{base}.") for name, path in self.model.items() if path.startswith(f"{base}.")}
        return replace(self, layers=self.layers.removeprefix(f"{base}."), model=body)


def find_head(model: PreTrainedModel | type[PreTrainedModel]) -> str:
    """Return the end of the name of a class with a head, for example `"ForMaskedLM"`; `""` for a class without."""
    match = re.search(r"For[A-Z]\w*$", (model if isinstance(model, type) else type(model)).__name__)
    return match[0] if match else ""


# Heads for tokens and answers of all families, and for options of the families whose pooler is in the body.
_OUTPUTS = {
    "ForTokenClassification": {"class_output": "classifier"},
    "ForQuestionAnswering": {"class_output": "qa_outputs"},
}


def _choices(dense: str) -> dict[str, Mapping[str, str]]:
    return _OUTPUTS | {"ForMultipleChoice": {"class_dense": dense, "class_output": "classifier"}}


def _bert(prefix: str, head: Mapping[str, str], **options: Any) -> Family:
    layer = {
        "query": "attention.self.query", "key": "attention.self.key", "value": "attention.self.value",
        "output": "attention.output.dense", "attention_norm": "attention.output.LayerNorm",
        "fc1": "intermediate.dense", "fc2": "output.dense", "final_norm": "output.LayerNorm",
    }  # fmt: skip
    embeddings = {
        "words": "word_embeddings", "positions": "position_embeddings", "token_types": "token_type_embeddings",
        "embedding_norm": "LayerNorm",
    }  # fmt: skip
    model = {part: f"{prefix}.embeddings.{name}" for part, name in embeddings.items()} | head
    return Family(f"{prefix}.encoder.layer", layer, model, heads=_choices(f"{prefix}.pooler.dense"), **options)


_ROBERTA = _bert(
    "roberta",
    {
        "head_dense": "lm_head.dense", "head_norm": "lm_head.layer_norm", "decoder": "lm_head.decoder",
        "class_dense": "classifier.dense", "class_output": "classifier.out_proj",
    },
    head_activation="gelu",
    class_activation="tanh",
    padded=True,
)  # fmt: skip
_ELECTRA = _bert(
    "electra",
    {
        "embedding_projection": "electra.embeddings_project", "head_dense": "generator_predictions.dense",
        "head_norm": "generator_predictions.LayerNorm", "decoder": "generator_lm_head",
        "class_dense": "classifier.dense", "class_output": "classifier.out_proj",
    },
    head_activation="gelu",
)  # fmt: skip
# Model type -> family.
FAMILIES: dict[str, Family] = {
    "bert": _bert(
        "bert",
        {
            "head_dense": "cls.predictions.transform.dense", "head_norm": "cls.predictions.transform.LayerNorm",
            "decoder": "cls.predictions.decoder", "class_dense": "bert.pooler.dense", "class_output": "classifier",
        },
        class_activation="tanh",
    ),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), _ROBERTA),
    "distilbert": Family(
        "distilbert.transformer.layer",
        {
            "query": "attention.q_lin", "key": "attention.k_lin", "value": "attention.v_lin",
            "output": "attention.out_lin", "attention_norm": "sa_layer_norm",
            "fc1": "ffn.lin1", "fc2": "ffn.lin2", "final_norm": "output_layer_norm",
        },
        {
            "words": "distilbert.embeddings.word_embeddings", "positions": "distilbert.embeddings.position_embeddings",
            "embedding_norm": "distilbert.embeddings.LayerNorm", "head_dense": "vocab_transform",
            "head_norm": "vocab_layer_norm", "decoder": "vocab_projector",
            "class_dense": "pre_classifier", "class_output": "classifier",
        },
        activation="activation",
        head_activation="activation",
        class_activation="relu",
        heads=_choices("pre_classifier"),
    ),
    "electra": replace(_ELECTRA, heads=_choices("sequence_summary.summary")),
}  # fmt: skip
LUNA = Family(
    "luna.encoder.layers",
    {
        "query": "attention.query", "key": "attention.key", "value": "attention.value", "output": "attention.output",
        "attention_norm": "attention_layer_norm", "fc1": "fc1", "fc2": "fc2", "final_norm": "final_layer_norm",
    },
    {
        "words": "luna.embeddings.word_embeddings", "positions": "luna.embeddings.position_embeddings",
        "embedding_norm": "luna.embeddings.layer_norm", "token_types": "luna.embeddings.token_type_embeddings",
        "embedding_projection": "luna.embeddings.projection", "head_dense": "lm_head.dense",
        "head_norm": "lm_head.layer_norm", "decoder": "lm_head.decoder",
        "class_dense": "classifier.dense.0", "class_output": "classifier.out_proj",
    },
    heads=_OUTPUTS,
)  # fmt: skip


class Parts:
    """A model and its parts, by names that do not depend on its family.

    Args:
        model: a model, with or without a head.
        family: names of its parts.
    """

    def __init__(self, model: PreTrainedModel, family: Family):
        self.model, self.config, self.family = model, model.config, family.of(model)

    @property
    def layers(self) -> list[nn.Module]:
        """The layers, first to last."""
        return list(self.model.get_submodule(self.family.layers))

    def path(self, name: str, layer: int | None = None) -> str | None:
        """Return the full name of a part of the model or of a layer; None if the family has none."""
        if layer is None:
            return self.family.model.get(name)
        return f"{self.family.layers}.{layer}.{self.family.layer[name]}"

    def module(self, name: str, layer: int | None = None) -> nn.Module | None:
        """Return a part of the model or of a layer; None if there is none."""
        try:
            return (path := self.path(name, layer)) and self.model.get_submodule(path)
        except AttributeError:  # the head of a classifier, the projection of embeddings that have the layers' width
            return None
