"""luna_bert: masked language models, and models that were fine-tuned from them."""

import re
from collections.abc import Iterable
from typing import Any

from luna_mega import LunaForMaskedLM, LunaForMultipleChoice, LunaForSequenceClassification, LunaModel
from luna_mega.convert.dictionaries import Dictionaries, VocabularyAndLabels
from luna_mega.convert.evidence import Evidence, ModelSpec, flag, number, size, word
from luna_mega.convert.formats import _luna
from luna_mega.convert.formats._luna import CODE_2021, CODE_2023
from luna_mega.convert.formats.format import Bpe, Companions, Facts, Format, Notes
from luna_mega.convert.keymap import LAYER_NORM, KeyMap, Row, rows
from luna_mega.convert.safe_load import Checkpoint
from luna_mega.convert.table import ACTIVATIONS, HEAD, MODEL, NOT, Arg, derived, fields, size_of, typed
from luna_mega.convert.tokenizers import PIECES, ConvertedTokenizer
from luna_mega.convert.tokenizers.gpt2_bpe import bpe_tokenizer, read_gpt2_bpe
from luna_mega.errors import ConversionError, shown

_BODY, _LM_HEAD = "encoder.sentence_encoder", "encoder.lm_head"
_NOTE = "early file: its prefix 'decoder.' is today's 'encoder.'"
_EARLY_PREFIX = (r"^decoder\.(?=(sentence_encoder|lm_head)\.)", "encoder.", _NOTE)
_RANKING_TASKS = ("sentence_ranking", "commonsense_qa")
_FINE_TUNING_TASKS = ("sentence_prediction", *_RANKING_TASKS)
# The original selects the pooling by the name of the head; heads of any other name pool the first token ("cls").
_POOLING_OF_HEAD = {
    "sentence_classification_head": "cls",
    "pooling_classification_head": "packed_max",
    "attention_classification_head": "packed_attention",
}
_SIZES = tuple(
    "encoder_layers encoder_embed_dim encoder_ffn_embed_dim encoder_attention_heads max_positions "
    "projection_length".split()
)


def _sizes(*values: int) -> dict[str, int]:
    return dict(zip(_SIZES, values, strict=True))


_NAMES_512 = ("luna_bert", "luna_base_512", "luna_base_tied_512", "luna_base_untied_512")
_ARCHITECTURES = {
    **dict.fromkeys(_NAMES_512, {"encoder_attention_heads": 12}),
    "luna_base_2048": _sizes(12, 768, 3072, 12, 2048, 256),
    "luna_large_512": _sizes(24, 1024, 4096, 16, 512, 128),
    "luna_large_2048": _sizes(24, 1024, 4096, 16, 512, 256),
}


def _tied_lm(evidence: Evidence) -> dict[str, bool]:
    return evidence.ties("untie_weights_luna", False, f"{_LM_HEAD}.weight", _EMBEDDING[0])


def _names_of_heads(keys: Iterable[str]) -> list[str]:
    return sorted({key.split(".")[1] for key in keys if key.startswith("classification_heads.")})


def _head(evidence: Evidence) -> dict[str, Any]:
    """Return class, name and fields of the head: the requested head, or the only one of a fine-tuned model."""
    names, name, task = _names_of_heads(evidence.tensors), evidence.head, evidence.args.get("task")
    if wrong := next((name for name in names if not re.fullmatch(r"[\w-]+", name)), None):
        raise ConversionError(f"classification head {shown(wrong)}: a name has letters, digits, '_' and '-' only")
    if name is not None and name not in names:
        has = f"has {', '.join(names)}" if names else "has no classification head"
        raise ConversionError(f"--head {name}: the file {has}")
    if name is None and task in _FINE_TUNING_TASKS and len(names) == 1:
        name = names[0]
    if name is None:
        return {MODEL: LunaForMaskedLM}
    num_labels, inner = evidence.shape(f"classification_heads.{name}.out_proj.weight", "classes", "inner width")
    head_fields = {HEAD: name, "pooling": _POOLING_OF_HEAD.get(name, "cls"), "classifier_hidden_size": inner}
    if task in _RANKING_TASKS and num_labels == 1:
        return head_fields | {MODEL: LunaForMultipleChoice}
    regression = {"problem_type": "regression"} if evidence.args.get("regression_target") else {}
    return head_fields | regression | {MODEL: LunaForSequenceClassification, "num_labels": num_labels}


_EMBEDDING = (f"{_BODY}.embed_tokens.weight", "vocabulary", "width")  # key and names of dimensions, for `size_of`
_TABLE = (
    *_luna.encoder_arguments(
        _BODY,
        layers=lambda evidence: evidence.unshared_layers(f"{_BODY}.layers"),
        width=size_of(*_EMBEDDING, index=1),
        positions=_luna.positions(_BODY),
    ),
    *typed(word, "arch", "task"),
    Arg("projection_length", "projection_length", read=_luna.packed_length(_BODY), kind=size),
    _luna.PACKED_LENGTH_FIXED,
    _luna.UNTIED_KEY_VALUE,
    Arg("untie_weights_luna", "tie_word_embeddings", NOT, read=_tied_lm, kind=flag),
    Arg("activation_dropout", "activation_dropout", default=0.0, kind=number),
    Arg("encoder_layerdrop", "layerdrop", default=0.0, kind=number),
    Arg("pooler_activation_fn", "classifier_activation", ACTIVATIONS, "tanh", kind=word),
    Arg("pooler_dropout", "classifier_dropout", default=0.0, kind=number),
    *typed(flag, "regression_target"),
    derived("vocab_size", size_of(*_EMBEDDING)),
    fields(_head),
)


class LunaBert(Format):
    """Masked language models, also with one or more named classification heads."""

    facts = Facts(
        name="luna_bert",
        revisions=_luna.REVISIONS,
        model_classes=(LunaForMaskedLM, LunaModel, LunaForMultipleChoice, LunaForSequenceClassification),
        additional_classes=(LunaForMaskedLM,),
        stacks=frozenset({("luna", _BODY)}),
        architectures=_ARCHITECTURES,
        aliases=(_EARLY_PREFIX,),
        named_heads=True,
        decided=("tie_key_value", "tie_word_embeddings", "dynamic_projection_length"),
        **_luna.FACTS,
    )
    table = _TABLE

    def recognize(self, file: Checkpoint) -> str | None:
        return CODE_2023 if "stop_min_lr" in file.args else CODE_2021

    def keymap(self, spec: ModelSpec) -> KeyMap:
        entries = [
            *(Row(f"{_LM_HEAD}.{part}", f"lm_head.decoder.{part}") for part in ("weight", "bias")),
            *rows(_LM_HEAD, "lm_head", ["dense"]),
            *rows(_LM_HEAD, "lm_head", ["layer_norm"], LAYER_NORM),
            Row(f"{_BODY}.embed_tokens.weight", "luna.embeddings.word_embeddings.weight"),
            *_luna.encoder_rows(_BODY),
        ]
        if spec.head is not None:
            source = f"classification_heads.{spec.head}"
            entries += [
                *rows(source, "pooler", {"in_proj": "dense"}),
                *rows(f"{source}.attn", "pooler.attention", ("q_proj", "k_proj", "v_proj", "out_proj")),
                *rows(source, "pooler", {"layernorm": "layer_norm"}, LAYER_NORM),
                *rows(source, "classifier", {"dense": "dense.0", "out_proj": "out_proj"}),
            ]
        reason = "head not chosen; --head {name} converts it"
        return KeyMap([*entries, Row("classification_heads.{name}.{rest}", None, reason=reason, except_name=spec.head)])

    def companions(self, spec: ModelSpec, evidence: Evidence) -> Companions:
        config = spec.config
        labels = config.num_labels if spec.model_class is LunaForSequenceClassification else None
        kind = VocabularyAndLabels(config.vocab_size, "<mask>", labels)

        def tokenizer(dictionaries: Dictionaries, bpe: Bpe, notes: list[str]) -> ConvertedTokenizer | None:
            if bpe is None:
                notes.append("no tokenizer: --bpe DIR, the folder with GPT-2's encoder.json and vocab.bpe, adds it")
                return None
            dictionaries.has_vocabulary(bpe)
            length = config.max_position_embeddings
            converted, missing = bpe_tokenizer(dictionaries.vocabulary, read_gpt2_bpe(bpe), "<mask>", length)
            if missing:
                notes.append(
                    "the tokenizer's class is in the folder: without luna_mega it needs trust_remote_code=True"
                )
            return ConvertedTokenizer(converted, PIECES, missing)

        return Companions(kind, tokenizer)

    def report(self, spec: ModelSpec, evidence: Evidence) -> Notes:
        kept = ["the LM head is kept: AutoModelForMaskedLM loads from the same folder"] * (spec.head is not None)
        return Notes({"head": spec.head}, kept)
