"""Families of transformers: the names of the parts that models have in common, one row per family."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

ATTENTION = ("query", "key", "value", "output")


@dataclass(frozen=True)
class Family:
    """The names of a family's modules.

    Args:
        layers: the list of layers, as seen from the model with its head.
        layer: our name of a part of a layer -> the family's name in the layer. `query`, `key` and `value` may be one
            fused module. The layers of a family without `fc1` cannot be copied.
        model: our name of a part outside the layers -> the family's name. `head_...` and `decoder` belong to the
            language-modeling head, `class_...` to a sequence classifier.
        heads: other heads, by the end of the names of their classes -> the names of their parts, `class_...`.
        entry: names of the first module of the head; the first existing name is used.
        activation, head_activation: configuration field that contains the activation of the feed-forward layers and
            of the head, or the activation itself; None = the head has no corresponding layer.
        class_activation: activation of the classifier's hidden layer, None = ours differs from it.
        pre_norm: norms are before attention and feed-forward layer, else after them; Luna and Mega have a field for it.
        is_decoder: the family is causal.
    """

    layers: str
    layer: Mapping[str, str]
    model: Mapping[str, str]
    entry: tuple[str, ...]
    activation: str = "hidden_act"
    head_activation: str | None = None
    class_activation: str | None = None
    pre_norm: bool = False
    is_decoder: bool = False
    heads: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def of(self, model: PreTrainedModel) -> "Family":
        """Return the names of the modules of a model, which depend on its head."""
        head, base = find_head(model), model.base_model_prefix
        if head in self.heads:
            return replace(self, model=dict(self.model) | dict(self.heads[head]))
        if model.base_model is not model:
            return self
        body = {name: path.removeprefix(f"{base}.") for name, path in self.model.items() if path.startswith(f"{base}.")}
        return replace(self, layers=self.layers.removeprefix(f"{base}."), model=body)


def find_head(model: PreTrainedModel) -> str:
    """Return the end of the name of a class with a head, for example `"ForMaskedLM"`; `""` for a class without."""
    match = re.search(r"(For[A-Z]\w*|LMHeadModel)$", type(model).__name__)
    return match[1] if match else ""


# Heads for tokens and answers of all families, and for options of the families whose pooler is in the body.
_OUTPUTS = {
    "ForTokenClassification": {"class_output": "classifier"},
    "ForQuestionAnswering": {"class_output": "qa_outputs"},
}


def _choices(dense: str) -> dict[str, Mapping[str, str]]:
    return _OUTPUTS | {"ForMultipleChoice": {"class_dense": dense, "class_output": "classifier"}}


def _bert(prefix: str, head: Mapping[str, str], entry: str, head_activation: str) -> Family:
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
    return Family(
        f"{prefix}.encoder.layer",
        layer,
        model,
        (entry,),
        head_activation=head_activation,
        class_activation="tanh",
        heads=_choices(f"{prefix}.pooler.dense"),
    )


def _luna(stack: str, head: Mapping[str, str], entry: str, is_decoder: bool) -> Family:
    layer = {name: f"attention.{name}" for name in ATTENTION} | {
        "attention_norm": "attention_layer_norm", "fc1": "fc1", "fc2": "fc2", "final_norm": "final_layer_norm",
    }  # fmt: skip
    model = {
        "words": "luna.embeddings.word_embeddings", "positions": "luna.embeddings.position_embeddings",
        "embedding_norm": "luna.embeddings.layer_norm", "last_norm": f"luna.{stack}.layer_norm",
        "token_types": "luna.embeddings.token_type_embeddings", "embedding_projection": "luna.embeddings.projection",
    }  # fmt: skip
    activation = None if is_decoder else "hidden_act"
    return Family(
        f"luna.{stack}.layers",
        layer,
        model | head,
        (entry,),
        head_activation=activation,
        is_decoder=is_decoder,
        heads=_OUTPUTS,
    )


def _mega(head: Mapping[str, str], entry: str, is_decoder: bool) -> Family:
    layer = {
        "attention_norm": "mega_layer.norm.norm", "fc1": "nffn.fc1", "fc2": "nffn.fc2", "final_norm": "nffn.norm.norm",
    }  # fmt: skip
    model = {
        "words": "mega.embedding_layer.word_embeddings", "token_types": "mega.embedding_layer.token_type_embeddings",
        "embedding_norm": "mega.embedding_norm.norm", "last_norm": "mega.final_norm.norm",
    }  # fmt: skip
    return Family("mega.layers", layer, model | head, ("dense", entry), "activation", is_decoder=is_decoder)


_BERT = _bert(
    "bert",
    {
        "head_dense": "cls.predictions.transform.dense", "head_norm": "cls.predictions.transform.LayerNorm",
        "decoder": "cls.predictions.decoder", "class_dense": "bert.pooler.dense", "class_output": "classifier",
    },
    "cls.predictions.transform.dense",
    "hidden_act",
)  # fmt: skip
_ROBERTA = _bert(
    "roberta",
    {
        "head_dense": "lm_head.dense", "head_norm": "lm_head.layer_norm", "decoder": "lm_head.decoder",
        "class_dense": "classifier.dense", "class_output": "classifier.out_proj",
    },
    "lm_head.dense",
    "gelu",
)  # fmt: skip
_DISTILBERT = Family(
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
    ("vocab_transform",),
    activation="activation",
    head_activation="activation",
    class_activation="relu",
    heads=_choices("pre_classifier"),
)  # fmt: skip
_ELECTRA = _bert(
    "electra",
    {
        "embedding_projection": "electra.embeddings_project", "head_dense": "generator_predictions.dense",
        "head_norm": "generator_predictions.LayerNorm", "decoder": "generator_lm_head",
        "class_dense": "classifier.dense", "class_output": "classifier.out_proj",
    },
    "generator_predictions.dense",
    "gelu",
)  # fmt: skip
_ELECTRA = replace(_ELECTRA, class_activation="gelu", heads=_choices("sequence_summary.summary"))
_MODERNBERT = Family(
    "model.layers",
    {"output": "attn.Wo"},
    {
        "words": "model.embeddings.tok_embeddings", "embedding_norm": "model.embeddings.norm",
        "last_norm": "model.final_norm", "head_dense": "head.dense", "head_norm": "head.norm", "decoder": "decoder",
    },
    ("head.dense",),
    activation="hidden_activation",
    head_activation="classifier_activation",
    pre_norm=True,
)  # fmt: skip
_GPT2 = Family(
    "transformer.h",
    dict.fromkeys(("query", "key", "value"), "attn.c_attn") | {
        "output": "attn.c_proj", "attention_norm": "ln_1", "fc1": "mlp.c_fc", "fc2": "mlp.c_proj", "final_norm": "ln_2",
    },
    {
        "words": "transformer.wte", "positions": "transformer.wpe", "last_norm": "transformer.ln_f",
        "decoder": "lm_head",
    },
    ("lm_head",),
    activation="activation_function",
    pre_norm=True,
    is_decoder=True,
)  # fmt: skip
_LLAMA = Family(
    "model.layers",
    {"output": "self_attn.o_proj"},
    {"words": "model.embed_tokens", "last_norm": "model.norm", "decoder": "lm_head"},
    ("lm_head",),
    pre_norm=True,
    is_decoder=True,
)
_LUNA_HEAD = {"head_dense": "lm_head.dense", "head_norm": "lm_head.layer_norm", "decoder": "lm_head.decoder"}
_CLASSIFIER = {"class_dense": "classifier.dense.0", "class_output": "classifier.out_proj"}
# Model type -> family; a decoder of a type that has encoders too is under "<type> decoder".
FAMILIES: dict[str, Family] = {
    "bert": _BERT,
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), _ROBERTA),
    "distilbert": _DISTILBERT,
    "electra": _ELECTRA,
    "modernbert": _MODERNBERT,
    "gpt2": _GPT2,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3"), _LLAMA),
    "luna": _luna("encoder", _LUNA_HEAD | _CLASSIFIER, "lm_head.dense", is_decoder=False),
    "luna decoder": _luna("decoder", {"decoder": "lm_head"}, "lm_head", is_decoder=True),
    "mega": _mega(
        {"head_dense": "dense", "decoder": "mlm_head"} | _CLASSIFIER | {"class_dense": "classifier.dense"},
        "mlm_head",
        is_decoder=False,
    ),
    "mega decoder": _mega({"decoder": "lm_head"}, "lm_head", is_decoder=True),
}


def find_family(config: PreTrainedConfig) -> Family | None:
    """Return the family of a configuration, None if there is none."""
    is_decoder = getattr(config, "is_decoder", False) and not getattr(FAMILIES.get(config.model_type), "is_decoder", 0)
    return FAMILIES.get(f"{config.model_type} decoder" if is_decoder else config.model_type)


class Parts:
    """A model and its parts, by names that do not depend on its family.

    Args:
        model: a model with its head.
        family: names of its parts.
    """

    def __init__(self, model: PreTrainedModel, family: Family):
        self.model, self.config, self.family = model, model.config, family.of(model)

    @property
    def layers(self) -> list[nn.Module]:
        """The layers, first to last."""
        return list(self.model.get_submodule(self.family.layers))

    @property
    def pre_norm(self) -> bool:
        """Whether norms are before attention and feed-forward layer."""
        config = self.config
        return getattr(config, "pre_norm", getattr(config, "normalize_before_ffn", self.family.pre_norm))

    @property
    def activation(self) -> str:
        """The activation of the feed-forward layers."""
        return getattr(self.config, self.family.activation)

    @property
    def head_activation(self) -> str | None:
        """The activation of the head of a language model; None if the head has no corresponding layer."""
        name = self.family.head_activation
        return name and getattr(self.config, name, name)

    @property
    def is_classifier(self) -> bool:
        """Whether the model classifies sequences."""
        return type(self.model).__name__.endswith("ForSequenceClassification")

    def path(self, name: str, layer: int | None = None) -> str | None:
        """Return the full name of a part of the model or of a layer; None if there is none."""
        if layer is None:
            return self.family.model.get(name)
        name = self.family.layer.get(name)
        return name and f"{self.family.layers}.{layer}.{name}"

    def module(self, name: str, layer: int | None = None) -> nn.Module | None:
        """Return a part of the model or of a layer; None if there is none."""
        path = self.path(name, layer)
        return path and self._find(path)

    def positions(self) -> torch.Tensor | None:
        """Return the learned positions `[n, d]`, the first token's first; None = the model has none."""
        module = self.module("positions")
        if module is None:
            return None
        # As in fairseq, the first token uses the row after the padding row.
        first = 0 if module.padding_idx is None else module.padding_idx + 1
        return module.weight.detach()[first:]

    def tensors(self, name: str, layer: int | None = None) -> dict[str, torch.Tensor]:
        """Return weight and bias of a part in the layout of `nn.Linear`; empty if there is no such part."""
        module = self.module(name, layer)
        if module is None:
            return {}
        tensors = {key: tensor.detach() for key, tensor in module.named_parameters(recurse=False)}
        if isinstance(module, Conv1D):
            tensors["weight"] = tensors["weight"].T
        fused = [part for part, path in self.family.layer.items() if path == self.family.layer.get(name)]
        if layer is not None and len(fused) > 1:
            tensors = {key: tensor.chunk(len(fused))[fused.index(name)] for key, tensor in tensors.items()}
        return tensors

    @contextmanager
    def logits_at(self, places: torch.Tensor | None) -> Iterator[None]:
        """Make the language-modeling head compute logits `[M, vocab_size]` only at the M True places of `[B, T]`.

        With large vocabularies, M rows need less memory than B T rows. None = the head is unchanged.
        """
        handle = None
        if places is not None:
            entry = next(module for name in self.family.entry if (module := self._find(name)) is not None)
            handle = entry.register_forward_pre_hook(lambda module, args: (args[0][places],))
        try:
            yield
        finally:
            if handle is not None:
                handle.remove()

    def _find(self, path: str) -> nn.Module | None:
        try:
            return self.model.get_submodule(path)
        except AttributeError:  # the head of a classifier, a norm that one layer lacks
            return None
