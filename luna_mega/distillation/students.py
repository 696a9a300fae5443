"""Students: Luna and Mega models of a teacher's size, and checks that teacher and student are compatible."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from luna_mega import (
    LunaConfig,
    LunaForCausalLM,
    LunaForMaskedLM,
    LunaForSequenceClassification,
    MegaConfig,
    MegaForCausalLM,
    MegaForMaskedLM,
    MegaForSequenceClassification,
)
from luna_mega.distillation.families import Parts, find_family, find_head
from luna_mega.distillation.teachers import Teacher

_CLASSES = {
    "luna": (LunaForMaskedLM, LunaForCausalLM, LunaForSequenceClassification),
    "mega": (MegaForMaskedLM, MegaForCausalLM, MegaForSequenceClassification),
}
_LONGEST_NEW_TABLE = 4096  # rows of learned positions if the teacher has none and a very large limit
_NEW_GATE = -2.0  # with a bias of 0, the update gates of 30 layers would halve the residual stream 30 times


def student_config(teacher: Teacher, kind: str, **options: Any) -> LunaConfig | MegaConfig:
    """Return the configuration of a student with the sizes and options of the teacher.

    Args:
        teacher: determines vocabulary, width, layers, norms, activations, special tokens and labels.
        kind: `"luna"` or `"mega"`.
        options: fields of `LunaConfig` or `MegaConfig`, which take precedence: `projection_length=256`,
            `max_position_embeddings=4096`, `num_hidden_layers=6`, `use_chunking=True`, `chunk_size=512`, ...

    Raises:
        ValueError: If `kind` is neither, or the fields are inconsistent.
    """
    if kind not in _CLASSES:
        hint = "; no norm or layer of a Megalodon corresponds to one of a transformer" if kind == "megalodon" else ""
        raise ValueError(f"a student is 'luna' or 'mega', got {kind!r}{hint}")
    config = teacher.config
    if config.model_type == kind:
        return type(config)(**config.to_dict() | options)
    pad, bos, eos = (getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos"))
    last = next(iter(eos), None) if isinstance(eos, list) else eos
    fields = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        # Without a padding token, the end-of-text token is used; masks determine the padding.
        "pad_token_id": next((token for token in (pad, last) if token is not None), 0),
        "bos_token_id": bos,
        "eos_token_id": eos,
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        "is_decoder": teacher.family.is_decoder,
    }
    if find_head(teacher.model) not in ("", "ForMaskedLM", "ForCausalLM", "LMHeadModel"):
        fields |= {"id2label": config.id2label, "label2id": config.label2id, "problem_type": config.problem_type}
    if teacher.is_classifier or teacher.family.class_activation:
        fields |= {"classifier_activation": teacher.family.class_activation or "gelu", "classifier_num_layers": 1}
        fields |= {"pooling": getattr(config, "classifier_pooling", "cls"), "classifier_dropout": 0.0}
    fields |= options
    own = _luna_fields(teacher, fields["pad_token_id"]) if kind == "luna" else _mega_fields(teacher)
    return (LunaConfig if kind == "luna" else MegaConfig)(**own | fields)


def _luna_fields(teacher: Teacher, padding: int) -> dict[str, Any]:
    config, positions = teacher.config, teacher.positions()
    names = ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "rms_norm_eps")
    length = min(config.max_position_embeddings, _LONGEST_NEW_TABLE) if positions is None else len(positions)
    padded = positions is not None and teacher.module("positions").padding_idx is not None
    types = len(teacher.tensors("token_types").get("weight", ()))
    return {
        "embedding_size": config.embedding_size if teacher.module("embedding_projection") is not None else None,
        # A single type, as in RoBERTa, is added to the positions.
        "type_vocab_size": types if types > 1 else 0,
        # Luna's table starts after the row of the padding token, which may be one of the last tokens here.
        "first_position": None if padded or padding == 0 else 0,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": _feed_forward_width(teacher),
        "hidden_act": teacher.activation,
        "layer_norm_eps": next((getattr(config, name) for name in names if hasattr(config, name)), 1e-12),
        "max_position_embeddings": length,
        "embedding_norm": teacher.module("embedding_norm") is not None,
        "pre_norm": teacher.pre_norm,
        "tie_key_value": False,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _mega_fields(teacher: Teacher) -> dict[str, Any]:
    config, width = teacher.config, _feed_forward_width(teacher)
    last, types, pre_norm = teacher.module("last_norm"), teacher.tensors("token_types"), teacher.pre_norm
    if teacher.module("embedding_projection") is not None:
        raise ValueError(
            f"the teacher's embeddings are narrower ({config.embedding_size}) than its layers ({config.hidden_size}), "
            "which a Mega student does not support; choose a Luna"
        )
    fields = {
        "intermediate_size": 2 * config.hidden_size,
        "nffn_hidden_size": width,
        "activation": teacher.activation,
        "max_positions": config.max_position_embeddings,
        "normalization_type": "layernorm" if last is None or isinstance(last, nn.LayerNorm) else "rmsnorm",
        "normalize_before_mega": pre_norm,
        "normalize_before_ffn": pre_norm,
        "embedding_norm": teacher.module("embedding_norm") is not None,
        "final_norm": pre_norm,
        "add_lm_hidden_dense_layer": not teacher.family.is_decoder,
        "lm_head_bias": False,
        "add_token_type_embeddings": bool(types),
    }
    if types:
        fields["type_vocab_size"] = len(types["weight"])
    names = ("dropout_prob", "hidden_dropout_prob", "attention_probs_dropout_prob", "nffn_activation_dropout_prob")
    return fields | dict.fromkeys(names, 0.0)


def _feed_forward_width(teacher: Teacher) -> int:
    fc1 = teacher.tensors("fc1", 0)
    return len(fc1["weight"]) if fc1 else teacher.config.intermediate_size


def build_student(teacher: Teacher, config: LunaConfig | MegaConfig) -> PreTrainedModel:
    """Return a student with random weights: a causal or masked language model or a classifier, as the teacher is one.

    The update gates of a pre-norm Mega whose layers cannot be copied are initialized to keep most of the input.

    Raises:
        ValueError: If teacher and configuration are not compatible, see `check_pair`.
    """
    masked, causal, classifier = _CLASSES[config.model_type]
    model_class = classifier if teacher.is_classifier else causal if config.is_decoder else masked
    if teacher.family.is_decoder != config.is_decoder:
        _raise_direction(teacher, type(config).__name__)
    student = model_class(config)
    own = check_pair(teacher, student)
    if config.model_type == "mega" and config.normalize_before_mega and not same_layers(teacher, own):
        with torch.no_grad():
            for layer in own.layers:
                layer.mega_layer.mx_proj.bias[: config.hidden_size] = _NEW_GATE
    return student


def check_pair(teacher: Teacher, student: PreTrainedModel, same_width: bool = True) -> Parts:
    """Check a student, possibly wrapped by DDP or FSDP2, and return its parts.

    Args:
        teacher: the teacher.
        student: model, possibly wrapped.
        same_width: whether the student must have the teacher's width; `distill` does not require it.

    Raises:
        ValueError: If the student is no Luna or Mega of tokens, or has another direction, vocabulary, width, special
            tokens or labels.
    """
    if hasattr(student, "_orig_mod") or getattr(student, "_compiled_call_impl", None) is not None:
        raise ValueError("the student is compiled, so hooks on its layers do not run; compile it after distillation")
    student = getattr(student, "module", student)
    if not isinstance(student, PreTrainedModel):
        raise ValueError(f"the student must be a model of luna_mega or DDP of one, got a {type(student).__name__}")
    config, theirs = student.config, teacher.config
    if not isinstance(student, sum(_CLASSES.values(), ())):
        raise ValueError(
            f"{type(student).__name__} cannot be a student; create one with student_config and build_student"
        )
    if getattr(config, "share_layers", False) or getattr(config, "adaptive_input_cutoffs", None):
        raise ValueError(
            "a student must not share layers or use cutoffs; set share_layers=False and adaptive_input_cutoffs=None"
        )
    if teacher.family.is_decoder != config.is_decoder:
        _raise_direction(teacher, type(student).__name__)
    sizes = ["vocab_size", *(["hidden_size"] if same_width else [])]
    for name in sizes:
        if getattr(config, name) != getattr(theirs, name):
            raise ValueError(
                f"the student's {name} is {getattr(config, name)} and the teacher's {getattr(theirs, name)}; they must "
                "be equal, as in student_config(teacher, ...)"
            )
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        token = getattr(theirs, name, None)
        if token is not None and getattr(config, name) != token:
            raise ValueError(
                f"the student's {name} is {getattr(config, name)} and the teacher's {token}; they must be equal, "
                "because both read the same tokens"
            )
    own = Parts(student, find_family(config))
    if own.is_classifier and teacher.is_classifier and config.id2label != theirs.id2label:
        raise ValueError(
            f"the student's labels are {config.id2label} and the teacher's {theirs.id2label}; they must be equal"
        )
    return own


def _raise_direction(teacher: Teacher, student: str) -> None:
    has, is_not = ("a decoder", "an encoder") if teacher.family.is_decoder else ("an encoder", "a decoder")
    raise ValueError(
        f"the teacher ({teacher.config.model_type}) is {has} and {student} is for {is_not}; set "
        f"is_decoder={teacher.family.is_decoder}, or use another teacher"
    )


def same_layers(teacher: Teacher, own: Parts) -> bool:
    """Return whether feed-forward layers and norms have the same role in teacher and student.

    A Luna then also has the teacher's heads, and an encoder only differs in the attention.
    """
    theirs, ours = teacher.tensors("fc1", 0), own.tensors("fc1", 0)
    if not (theirs and ours and theirs["weight"].shape == ours["weight"].shape):
        return False
    heads = own.config.model_type == "mega" or own.config.num_attention_heads == teacher.config.num_attention_heads
    return heads and teacher.pre_norm == own.pre_norm and teacher.activation == own.activation


def match_layers(teacher: Teacher, own: Parts, layers: Sequence[int] | None = None) -> list[int]:
    """Return the index of the teacher's layer for each layer of the student.

    Args:
        teacher: the teacher.
        own: parts of the student.
        layers: the list of indices; None = evenly spaced, including the first and the last layer.

    Raises:
        ValueError: If the list does not have one index per layer of the student, or an index is out of range.
    """
    mine, theirs = len(own.layers), len(teacher.layers)
    if layers is None:
        return [round(index * (theirs - 1) / max(1, mine - 1)) for index in range(mine)]
    if len(layers) != mine or not all(0 <= index < theirs for index in layers):
        raise ValueError(
            f"layers={list(layers)} must name one of the teacher's {theirs} layers (0 to {theirs - 1}) for each of the "
            f"student's {mine}"
        )
    return list(layers)
