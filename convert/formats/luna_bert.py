"""luna_bert: masked language models, and the models that were fine-tuned from them."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from luna_mega import (
    LunaConfig,
    LunaForMaskedLM,
    LunaForMultipleChoice,
    LunaForSequenceClassification,
    LunaModel,
)
from luna_mega.convert.argmap import ACTIVATION, NOT, Arg, build_config, read_fields
from luna_mega.convert.argtypes import flag, number, size, whole, word
from luna_mega.convert.dictionary import Dictionaries
from luna_mega.convert.evidence import Evidence, same_bits
from luna_mega.convert.formats import _luna
from luna_mega.convert.formats._base import Tensors, problem_type
from luna_mega.convert.keymap import LAYER_NORM, KeyMap, Row
from luna_mega.convert.plan import Plan, Target
from luna_mega.convert.tokenizers import PIECES, ConvertedTokenizer
from luna_mega.convert.tokenizers.gpt2_bpe import bpe_tokenizer, read_gpt2_bpe
from luna_mega.errors import ConversionError
from luna_mega.modeling_luna.heads_luna import LunaLMHead

_BODY, _LM_HEAD = "encoder.sentence_encoder", "encoder.lm_head"
_RANKING_TASKS = ("sentence_ranking", "commonsense_qa")
_FINE_TUNING_TASKS = ("sentence_prediction", *_RANKING_TASKS)
_HEAD_OF_POOLING = {
    "cls": "sentence_classification_head",
    "packed_max": "pooling_classification_head",
    "packed_attention": "attention_classification_head",
}
# A head with any other name reads the first token.
_POOLING_OF_HEAD = {head: pooling for pooling, head in _HEAD_OF_POOLING.items()}
_SIZES = (
    "encoder_layers",
    "encoder_embed_dim",
    "encoder_ffn_embed_dim",
    "encoder_attention_heads",
    "max_positions",
    "projection_length",
)


def _sizes(*values: int) -> dict[str, int]:
    return dict(zip(_SIZES, values, strict=True))


_ARCHITECTURES = {
    **dict.fromkeys(
        ("luna_bert", "luna_base_512", "luna_base_tied_512", "luna_base_untied_512"), {"encoder_attention_heads": 12}
    ),
    "luna_base_2048": _sizes(12, 768, 3072, 12, 2048, 256),
    "luna_large_512": _sizes(24, 1024, 4096, 16, 512, 128),
    "luna_large_2048": _sizes(24, 1024, 4096, 16, 512, 256),
}


def _arch(target: Target) -> str:
    """Return the architecture of these sizes, or else a usual one: the args have all sizes anyway."""
    sizes = {row.name: getattr(target.config, row.field) for row in _TABLE if row.name in _SIZES}
    usual = f"luna_base_{'tied' if target.config.tie_key_value else 'untied'}_512"
    return next((arch for arch, own in _ARCHITECTURES.items() if own == sizes), usual)


def _task(target: Target) -> str:
    if target.head is None or target.config.classifier_hidden_size != target.config.hidden_size:
        return "masked_lm"  # the other tasks build a head of width d before they read the file
    return "sentence_ranking" if target.model_class is LunaForMultipleChoice else "sentence_prediction"


def _has_head(target: Target) -> bool:
    return target.head is not None


def _ranks(target: Target) -> bool:
    # The num_classes of this task is the number of options, which the model does not know.
    return _has_head(target) and _task(target) == "sentence_ranking"


def _classifies(target: Target) -> bool:
    return _has_head(target) and not _ranks(target)


def _regression(target: Target) -> bool:
    return problem_type(target.config) == "regression"


def _positions(evidence: Evidence) -> int:
    rows, _ = evidence.shape(f"{_BODY}.embed_positions.weight", "positions + 2", "width")
    return rows - 2  # padding and the row before it


def _tied_lm(evidence: Evidence) -> dict[str, bool]:
    evidence.shape(f"{_LM_HEAD}.weight", "vocabulary", "width")
    same = same_bits(evidence.tensors[f"{_LM_HEAD}.weight"], evidence.tensors[f"{_BODY}.embed_tokens.weight"])
    untied = evidence.args.get("untie_weights_luna")
    if not same:
        evidence.prefer("untie_weights_luna", True)
    return {"tie_word_embeddings": same and not untied}


_FRESH = "the folder has no LM head, which fairseq's loader asks for: a new, untrained one is written"
_TABLE = (
    *_luna.encoder_arguments(
        _BODY,
        layers=lambda evidence: evidence.unshared_layers(f"{_BODY}.layers"),
        width=lambda evidence: evidence.shape(f"{_BODY}.embed_tokens.weight", "vocabulary", "width")[1],
        positions=Arg("max_positions", "max_position_embeddings", measure=_positions, kind=size),
    ),
    Arg("arch", write=_arch, kind=word),
    Arg("task", write=_task, kind=word),
    Arg("criterion", write=_task, kind=word),
    Arg("projection_length", "projection_length", measure=_luna.packed_length(_BODY), kind=size),
    _luna.PACKED_LENGTH_FIXED,
    _luna.UNTIED_KEY_VALUE,
    Arg("untie_weights_luna", "tie_word_embeddings", NOT, read=_tied_lm, kind=flag),
    Arg("activation_dropout", "activation_dropout", default=0.0, kind=number),
    Arg("encoder_layerdrop", "layerdrop", default=0.0, kind=number),
    Arg("pooler_activation_fn", "classifier_activation", ACTIVATION, "tanh", when=_has_head, kind=word),
    Arg("pooler_dropout", "classifier_dropout", default=0.0, when=_has_head, kind=number),
    Arg("ranking_head_name", write=lambda target: target.head, when=_ranks, kind=word),
    Arg("num_classes", write=lambda target: target.config.num_labels, when=_classifies, kind=whole),
    Arg("regression_target", write=_regression, when=_classifies, kind=flag),
    Arg("classification_head_name", write=lambda target: target.head, when=_classifies, kind=word),
)


class LunaBert(_luna.LunaFormat):
    """Masked language models, and models with one or more named classification heads beside their LM head."""

    name = "luna_bert"
    revisions = {
        "r21": _luna.code_of_2021("luna_bert"),
        "head": _luna.code_of_2023("luna_bert of the 2023 code"),
    }
    written = ("r21",)
    classes = (LunaModel, LunaForMaskedLM, LunaForMultipleChoice, LunaForSequenceClassification)
    classifiers = (LunaForMultipleChoice, LunaForSequenceClassification)
    named_heads = True
    also_loads = (LunaForMaskedLM,)
    table = _TABLE
    architectures = _ARCHITECTURES
    criteria = {
        "masked_lm": "MaskedLmLoss",
        "sentence_prediction": "SentencePredictionCriterion",
        "sentence_ranking": "SentenceRankingCriterion",
    }
    vocabulary_places = dict.fromkeys(("sentence_prediction", "sentence_ranking"), "input0/dict.txt")
    label_places = {"sentence_prediction": "label/dict.txt"}

    def recognise(self, tensors: Tensors, args: dict[str, Any]) -> str | None:
        """Return the revision, which an argument tells that the code has had since May 2022."""
        if not any(re.match(r"(encoder|decoder)\.sentence_encoder\.projected_embeddings$", key) for key in tensors):
            return None
        return "head" if "stop_min_lr" in args else "r21"

    def canonical(self, tensors: Tensors) -> tuple[Tensors, list[str]]:
        """Return the tensors under today's names: early files say `decoder.` for `encoder.`."""
        early = r"^decoder\.(?=(sentence_encoder|lm_head)\.)"
        renamed = {re.sub(early, "encoder.", key): tensor for key, tensor in tensors.items()}
        notes = ["early file: its prefix 'decoder.' is today's 'encoder.'"]
        return renamed, notes * (renamed.keys() != tensors.keys())

    def plan(self, evidence: Evidence, head: str | None = None) -> Plan:
        """Return the plan: the head `head`, else the only one of a fine-tuned model, else the masked LM."""
        names = sorted({key.split(".")[1] for key in evidence.tensors if key.startswith("classification_heads.")})
        for name in names:
            if not re.fullmatch(r"[\w-]+", name):
                raise ConversionError(f"classification head {name!r}: a name has letters, digits, '_' and '-' only")
        head = _choose_head(names, evidence.args, head)
        vocab_size, _ = evidence.shape(f"{_BODY}.embed_tokens.weight", "vocabulary", "width")
        fields = {"vocab_size": vocab_size} | read_fields(self.table, evidence)
        model_class = LunaForMaskedLM
        if head is not None:
            model_class, head_fields = _head(evidence, head)
            fields |= head_fields
        config = build_config(LunaConfig, self.table, evidence, **fields)
        decided = ("tie_key_value", "tie_word_embeddings", "dynamic_projection_length")
        return Plan(
            model_class,
            config,
            _keymap(config, head, tuple(name for name in names if name != head)),
            appended_symbol="<mask>",
            num_labels=fields.get("num_labels"),
            also_loads=() if head is None else (LunaForMaskedLM,),
            decisions={"head": head} | {name: getattr(config, name) for name in decided},
            notes=[] if head is None else ["the LM head is kept: AutoModelForMaskedLM loads from the same folder"],
            warnings=evidence.warnings,
        )

    def tokenizer(self, plan: Plan, dictionaries: Dictionaries, bpe: str | Path | None) -> ConvertedTokenizer | None:
        """Return GPT-2's byte-pair encoding with the ids of the dictionary."""
        if bpe is None:
            plan.notes.append("no tokenizer: --bpe DIR, the folder with GPT-2's encoder.json and vocab.bpe, adds it")
            return None
        if dictionaries.vocabulary is None:
            raise ConversionError(f"--bpe {bpe}: there is no dictionary beside the checkpoint; give it with --dict")
        length = plan.config.max_position_embeddings
        tokenizer, missing = bpe_tokenizer(dictionaries.vocabulary, read_gpt2_bpe(bpe), plan.appended_symbol, length)
        if missing:
            plan.notes.append(
                "the tokenizer's class is in the folder: without luna_mega it needs trust_remote_code=True"
            )
        return ConvertedTokenizer(tokenizer, PIECES, missing)

    def heads(self, plan: Plan, tensors: Tensors) -> list[str]:
        """Return the LM head and every classification head."""
        named = [
            f"{key.split('.')[1]}: {len(tensor)} classes"
            for key, tensor in tensors.items()
            if key.startswith("classification_heads.") and key.endswith(".out_proj.weight") and ".attn." not in key
        ]
        return ["masked LM", *named]

    def keymap(self, config: LunaConfig, revision: str, head: str | None = None) -> KeyMap:
        """Return the map of a file whose only classification head is `head`."""
        return _keymap(config, head)

    def allowed(self, target: Target) -> dict[str, tuple]:
        """Return the values that all encoders can express, and the values of the head."""
        config = target.config
        allowed = _luna.allowed_in_encoders(config, target.revision) | _luna.ONLY_LEARNED | {"share_layers": (False,)}
        if target.model_class is LunaForMultipleChoice:
            allowed["classifier_hidden_size"] = (config.hidden_size,)
        if target.model_class not in self.classifiers:
            return allowed
        any_kind, own_kind = tuple(_HEAD_OF_POOLING), (_POOLING_OF_HEAD.get(target.head, "cls"),)
        return allowed | {
            "pooling": any_kind if target.head is None else own_kind,
            "pool_padding": (False,),
            "drop_first_token": (False,),
            "classifier_num_layers": (1,),
            "classifier_bias": (True,),
            "classifier_activation": _luna.activations(target.revision),
        }

    def unused(self, target: Target) -> set[str]:
        """Return the fields that may differ; for a head that ranks, the number of labels is one of them."""
        ranking = {"num_labels", "drop_first_token"} if target.model_class is LunaForMultipleChoice else set()
        return super().unused(target) | ranking

    def usual_head(self, config: LunaConfig) -> str:
        """Return the name that the original gives a head of this kind."""
        return _HEAD_OF_POOLING[config.pooling]

    def remarks(self, target: Target, args: dict[str, Any], left_out: list[str]) -> list[str]:
        """Return notes on heads that the file lacks, and on a task that does not name the head."""
        notes = []
        if heads := sorted({name.split(".")[1] for name in left_out if name.startswith("classification_heads.")}):
            notes.append(f"the conversion left out the heads {', '.join(heads)}: they are not in the file")
        if target.head is not None and args.get("task") == "masked_lm":
            notes.append(f"the task in args is masked_lm: luna-mega convert takes the head with --head {target.head}")
        return notes


def _choose_head(names: list[str], args: dict[str, Any], requested: str | None) -> str | None:
    if requested is not None and requested not in names:
        has = f"has {', '.join(names)}" if names else "has no classification head"
        raise ConversionError(f"--head {requested}: the file {has}")
    if requested is None and args.get("task") in _FINE_TUNING_TASKS and len(names) == 1:
        return names[0]
    return requested


def _head(evidence: Evidence, name: str) -> tuple[type, dict[str, Any]]:
    num_labels, inner = evidence.shape(f"classification_heads.{name}.out_proj.weight", "classes", "inner width")
    fields = {"pooling": _POOLING_OF_HEAD.get(name, "cls"), "classifier_hidden_size": inner}
    if evidence.args.get("task") in _RANKING_TASKS and num_labels == 1:
        return LunaForMultipleChoice, fields
    if evidence.args.get("regression_target"):
        fields["problem_type"] = "regression"
    return LunaForSequenceClassification, fields | {"num_labels": num_labels}


def _keymap(config: LunaConfig, head: str | None = None, other_heads: tuple[str, ...] = ()) -> KeyMap:
    """Return the map of a file whose classification head `head` is converted and `other_heads` are not."""
    rows = [
        *(
            Row(
                f"{_LM_HEAD}.{theirs}",
                f"lm_head.{ours}",
                LAYER_NORM if "norm" in ours else None,
                fill=fill,
                note=_FRESH,
            )
            for theirs, ours, fill in _fresh_lm_head(config)
        ),
        Row(f"{_BODY}.embed_tokens.weight", "luna.embeddings.word_embeddings.weight"),
        *_luna.encoder_rows(_BODY),
    ]
    if head is not None:
        source = f"classification_heads.{head}"
        rows += [
            Row(f"{source}.in_proj.{{part}}", "pooler.dense.{part}"),
            *(
                Row(f"{source}.attn.{name}.{{part}}", f"pooler.attention.{name}.{{part}}")
                for name in ("q_proj", "k_proj", "v_proj", "out_proj")
            ),
            Row(f"{source}.layernorm.{{part}}", "pooler.layer_norm.{part}", LAYER_NORM),
            Row(f"{source}.dense.{{part}}", "classifier.dense.0.{part}"),
            Row(f"{source}.out_proj.{{part}}", "classifier.out_proj.{part}"),
        ]
    rows += [
        Row(f"classification_heads.{name}.{{rest}}", None, reason=f"head not chosen; --head {name} converts it")
        for name in other_heads
    ]
    return KeyMap(rows)


def _fresh_lm_head(config: LunaConfig) -> Iterator[tuple[str, str, Callable]]:
    """Yield the name in the file, the name in the model, and the maker of every tensor of an untrained LM head."""

    @cache
    def head() -> LunaLMHead:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same file every time
            made = LunaLMHead(config)
            for linear in (made.dense, made.decoder):
                nn.init.normal_(linear.weight, std=config.initializer_range)
                nn.init.zeros_(linear.bias)
        return made

    for ours in (
        "decoder.weight",
        "decoder.bias",
        "dense.weight",
        "dense.bias",
        "layer_norm.weight",
        "layer_norm.bias",
    ):
        theirs = ours.removeprefix("decoder.")
        yield theirs, ours, lambda dtype, name=ours: head().get_parameter(name).detach().to(dtype)
