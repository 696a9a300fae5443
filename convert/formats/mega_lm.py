"""mega_lm: Mega language models, with an ordinary vocabulary or an adaptive one."""

import re
from itertools import accumulate

import torch

from luna_mega import MegaConfig, MegaForCausalLM
from luna_mega.convert.argtypes import cutoffs, flag, number, size, word
from luna_mega.convert.dictionaries import Dictionaries, VocabularyAndLabels
from luna_mega.convert.evidence import Evidence, Target, same_bits
from luna_mega.convert.formats import _mega
from luna_mega.convert.formats.containers import FairseqFile
from luna_mega.convert.formats.format import Bpe, Companions, Facts, Notes
from luna_mega.convert.keymap import KeyMap, Row
from luna_mega.convert.table import COMMON, NOT, Arg, Codec, derived, fields, fixed, limited, write_only
from luna_mega.convert.tokenizers import PIECES, WORDS, ConvertedTokenizer
from luna_mega.convert.tokenizers.gpt2_bpe import read_gpt2_bpe
from luna_mega.convert.tokenizers.language_models import (
    byte_tokenizer,
    holds_bytes,
    lm_bpe_tokenizer,
    lm_word_tokenizer,
)
from luna_mega.hub.folder import position_limit

_BODY = "decoder"
_EMBEDDING, _BANDS = f"{_BODY}.embed_tokens.weight", f"{_BODY}.embed_tokens.embeddings"
_PROJECTION = f"{_BODY}.project_in_dim.weight"
_OUT, _ADAPTIVE = f"{_BODY}.output_projection.weight", f"{_BODY}.adaptive_softmax"
_STACK = _mega.Stack(_BODY)
_BIG = {
    "dropout": 0.3,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "activation_dropout": 0.1,
    "adaptive_softmax_dropout": 0.2,
    "tie_adaptive_proj": True,
}
_ARCHITECTURES = {
    "mega_lm_adaptive_big": _BIG,
    "mega_lm_wiki103": _BIG,
    "mega_lm_adaptive_base": _BIG,
    "mega_lm_enwik8_base": {"activation_dropout": 0.0},
    "mega_lm_enwik8_large": {"dropout": 0.2, "attention_dropout": 0.1, "hidden_dropout": 0.1},
    "mega_lm_pg19_base": {"dropout": 0.0, "activation_dropout": 0.0},
}
_LISTED = Codec(lambda value: value, lambda cutoffs: None if cutoffs is None else ",".join(map(str, cutoffs)))
_DECIDED = (
    *_mega.DECIDED,
    "scale_embedding",
    "tie_word_embeddings",
    "adaptive_input_cutoffs",
    "adaptive_softmax_cutoffs",
)


def _has_bands(evidence: Evidence) -> bool:
    return f"{_BANDS}.0.0.weight" in evidence.tensors


def _widths(evidence: Evidence) -> tuple[int, int]:
    """Return the widths of the model and of the embedding."""
    if _has_bands(evidence):
        return evidence.shape(f"{_BANDS}.0.1.weight", "width", "width of the embedding")
    _, size = evidence.shape(_EMBEDDING, "vocabulary", "width")
    if _PROJECTION not in evidence.tensors:
        return size, size
    return evidence.shape(_PROJECTION, "width", "width of the embedding")[0], size


def _ends(evidence: Evidence, prefix: str, matrix: str, before: tuple[int, ...] = ()) -> list[int]:
    """Return the end of each band under `prefix`; `before` has the sizes of earlier bands."""
    names = (f"{prefix}.{band}.{matrix}.weight" for band in range(evidence.layers(prefix)))
    return list(accumulate((*before, *(evidence.shape(name, "words", "width")[0] for name in names))))


def _vocabulary(evidence: Evidence) -> int:
    if _has_bands(evidence):
        return _ends(evidence, _BANDS, "0")[-1]
    return evidence.shape(_EMBEDDING, "vocabulary", "width")[0]


def _input_cutoffs(evidence: Evidence) -> dict[str, list[int]]:
    cutoffs = _ends(evidence, _BANDS, "0")[:-1]
    return {"adaptive_input_cutoffs": _checked(evidence, "adaptive_input_cutoff", cutoffs)}


def _softmax_cutoffs(evidence: Evidence) -> dict[str, list[int] | None]:
    if not _ties_bands(evidence):
        tails = evidence.layers(f"{_ADAPTIVE}.tail")
        scores, _ = evidence.shape(f"{_ADAPTIVE}.head.weight", "words and classes", "width")
        cutoffs = _ends(evidence, f"{_ADAPTIVE}.tail", "2", (scores - tails,))[:-1]
    else:
        cutoffs = _ends(evidence, _BANDS, "0")[:-1] if _has_bands(evidence) else None
    return {"adaptive_softmax_cutoffs": _checked(evidence, "adaptive_softmax_cutoff", cutoffs)}


def _checked(evidence: Evidence, name: str, in_file: list[int] | None) -> list[int] | None:
    """Return the cutoffs in the tensors, and warn if the argument differs; it can end with the vocabulary size."""
    in_args = [int(number) for number in re.findall(r"\d+", str(evidence.args.get(name)))]
    if in_args and in_file is not None and in_args not in (in_file, [*in_file, _vocabulary(evidence)]):
        evidence.prefer(name, ",".join(map(str, in_file)))
    return in_file


def _is_adaptive(evidence: Evidence) -> bool:
    return any(key.startswith(f"{_ADAPTIVE}.") for key in evidence.tensors)


def _ties_bands(evidence: Evidence) -> bool:
    return f"{_ADAPTIVE}.head.class_proj.weight" in evidence.tensors


def _shares_words(evidence: Evidence) -> dict[str, bool]:
    """Return whether an ordinary output layer is tied to the embedding."""
    tensors = evidence.tensors
    evidence.shape(_OUT, "vocabulary", "width")
    same = _EMBEDDING in tensors and same_bits(tensors[_OUT], tensors[_EMBEDDING])
    if not same:
        evidence.prefer("share_decoder_input_output_embed", False)
    return {"tie_word_embeddings": same and evidence.args.get("share_decoder_input_output_embed") is not False}


def _shares_projections(evidence: Evidence) -> dict[str, bool]:
    """Return whether the tails use the projections of the embedding: by shapes, values and, if equal, the argument."""
    if not _ties_bands(evidence):
        return {"tie_adaptive_projections": False}
    pairs = [
        [evidence.tensors.get(name) for name in (f"{_ADAPTIVE}.tail.{tail}.0.weight", f"{_BANDS}.{tail + 1}.1.weight")]
        for tail in range(evidence.layers(f"{_ADAPTIVE}.tail"))
    ]
    requested = evidence.arg("tie_adaptive_proj")
    if any(tensor is None for pair in pairs for tensor in pair):
        return {"tie_adaptive_projections": requested}  # the key map reports the missing tensor
    shapes = all(ours.shape == theirs.shape for ours, theirs in pairs)
    tied = shapes and (requested or all(same_bits(*pair) for pair in pairs))
    return {"tie_adaptive_projections": evidence.prefer("tie_adaptive_proj", tied)}


def _adaptive(target: Target) -> bool:
    return target.config.adaptive_softmax_cutoffs is not None


def _tied(target: Target, adaptive: bool) -> bool:
    return target.config.tie_word_embeddings and _adaptive(target) is adaptive


def _softmax_factor(target: Target) -> float:
    config = target.config
    return config.adaptive_input_factor if config.tie_word_embeddings else config.adaptive_softmax_factor


# Common fields of all language models; fairseq prepends `</s>`, id 2.
_CONSTANTS = {
    "is_decoder": True,
    "bidirectional": False,
    "add_lm_hidden_dense_layer": False,
    "lm_head_bias": False,
    "bos_token_id": 2,
}


_TABLE = (
    *COMMON,
    fixed("task", "language_modeling", kept=True),
    # The args have all sizes.
    Arg("arch", write=lambda target: "mega_lm_adaptive_big" if _adaptive(target) else "mega_lm", kept=True, kind=word),
    Arg("criterion", write=lambda target: "adaptive_loss" if _adaptive(target) else "cross_entropy", kind=word),
    fixed("sample_break_mode", "complete"),
    write_only("tokens_per_sample", "max_positions", kind=size),
    _STACK.positions("max_target_positions", "decoder_chunk_size", default=1024),
    fixed("output_dictionary_size", -1),
    fixed("self_target", False),
    fixed("future_target", False),
    fixed("past_target", False),
    fixed("add_bos_token", False),
    fixed("shorten_method", "none"),
    fixed("shorten_data_split_list", ""),
    fixed("variant_block_multiple_min", 1),
    fixed("variant_block_multiple_max", 1),
    fixed("valid_block", "splits:10"),
    Arg("decoder_layers", "num_hidden_layers", measure=_STACK.layers("decoder_layers"), kind=size),
    Arg("decoder_embed_dim", "hidden_size", measure=lambda evidence: _widths(evidence)[0], kind=size),
    Arg("decoder_input_dim", "embedding_size", measure=lambda evidence: _widths(evidence)[1], kind=size),
    Arg("decoder_hidden_dim", "intermediate_size", measure=_STACK.values, kind=size),
    _STACK.feed_forward("decoder_ffn_embed_dim"),
    Arg("decoder_z_dim", "shared_representation_size", measure=_STACK.shared, kind=size),
    Arg("decoder_n_dim", "ema_projection_size", measure=_STACK.dimensions, kind=size),
    _STACK.chunk("decoder_chunk_size"),
    fixed("decoder_embed_path", None),
    *_mega.options(_STACK, truncation=2048),
    _STACK.affine_final_norm(),
    Arg("no_scale_embedding", "scale_embedding", NOT, False, kind=flag),
    *_mega.DROPOUTS,
    Arg(
        "share_decoder_input_output_embed",
        read=_shares_words,
        write=lambda target: _tied(target, adaptive=False),
        read_if=lambda evidence: not _is_adaptive(evidence),
        kind=flag,
    ),
    fixed("share_all_embeddings", False),
    Arg("adaptive_input", write=lambda target: target.config.adaptive_input_cutoffs is not None, kind=flag),
    Arg(
        "adaptive_input_cutoff",
        "adaptive_input_cutoffs",
        _LISTED,
        read=_input_cutoffs,
        read_if=_has_bands,
        kind=cutoffs,
    ),
    Arg("adaptive_input_factor", "adaptive_input_factor", default=4, read_if=_has_bands, kind=number),
    Arg(
        "adaptive_softmax_cutoff",
        "adaptive_softmax_cutoffs",
        _LISTED,
        read=_softmax_cutoffs,
        read_if=_is_adaptive,
        kind=cutoffs,
    ),
    Arg(
        "adaptive_softmax_factor",
        "adaptive_softmax_factor",
        default=4,
        read_if=_is_adaptive,
        write=_softmax_factor,
        kind=number,
    ),
    Arg("adaptive_softmax_dropout", "adaptive_softmax_dropout", default=0.0, read_if=_is_adaptive, kind=number),
    Arg(
        "tie_adaptive_weights",
        "tie_word_embeddings",
        measure=_ties_bands,
        write=lambda target: _tied(target, adaptive=True),
        read_if=_is_adaptive,
        kind=flag,
    ),
    Arg(
        "tie_adaptive_proj",
        "tie_adaptive_projections",
        default=False,
        read=_shares_projections,
        read_if=_is_adaptive,
        kind=flag,
    ),
    derived("vocab_size", _vocabulary),
    fields(lambda evidence: _CONSTANTS),
    *_mega.NORMS,
    limited("embedding_size", lambda x: (x.config.hidden_size if _tied(x, False) else x.config.embedding_size,)),
    limited("adaptive_input_cutoffs", lambda x: (None if _tied(x, False) else x.config.adaptive_input_cutoffs,)),
)


class MegaLM(_mega.MegaFormat):
    """Language models of `mega_lm*`."""

    facts = Facts(
        name="mega_lm",
        revisions=_mega.revisions("Mega LM"),
        model_classes=(MegaForCausalLM,),
        stacks=frozenset({("mega", _BODY)}),
        architectures=_ARCHITECTURES,
        container=FairseqFile({"adaptive_loss": "AdaptiveLoss"}),
        decided=_DECIDED,
        **_mega.FACTS | {"unused": lambda target: _mega.unused(target, frozenset({"bos_token_id"}))},
    )
    table = _TABLE

    def keymap(self, target: Target) -> KeyMap:
        config, words = target.config, "mega.embedding_layer.word_embeddings"
        embedding = [Row(_EMBEDDING, f"{words}.weight")]
        if config.adaptive_input_cutoffs is not None:
            embedding = [_float_tensor(f"{_BODY}.embed_tokens")]
            for band in range(len(config.adaptive_input_cutoffs) + 1):
                embedding.append(Row(f"{_BANDS}.{band}.0.weight", f"{words}.words.{band}.weight"))
                embedding.append(Row(f"{_BANDS}.{band}.1.weight", f"{words}.projections.{band}.weight"))
        return KeyMap(
            [
                Row(f"{_BODY}.version", None, reason=_mega.PLACEHOLDER, fill=_mega.version),
                *embedding,
                Row(_PROJECTION, "mega.embedding_layer.projection.weight"),
                *_mega.layer_rows(_BODY, target.revision, config),
                *([Row(_OUT, "lm_head.weight")] if config.adaptive_softmax_cutoffs is None else _softmax_rows(config)),
            ]
        )

    def companions(self, target: Target, evidence: Evidence) -> Companions:
        length = position_limit(target.config)

        def tokenizer(dictionaries: Dictionaries, bpe: Bpe, notes: list[str]) -> ConvertedTokenizer | None:
            if not dictionaries.has_vocabulary(bpe):
                return None
            dictionary = dictionaries.vocabulary
            if bpe is not None:
                return ConvertedTokenizer(lm_bpe_tokenizer(dictionary, read_gpt2_bpe(bpe), length), PIECES, [])
            if holds_bytes(dictionary):
                return ConvertedTokenizer(byte_tokenizer(dictionary, length), "bytes", [])
            return ConvertedTokenizer(lm_word_tokenizer(dictionary, length), WORDS, [])

        return Companions(VocabularyAndLabels(target.vocab_size, None, None), tokenizer)

    def report(self, target: Target, evidence: Evidence) -> Notes:
        name, notes = "activation_dropout", []
        if evidence.args.get(name) is None and name not in _ARCHITECTURES.get(str(evidence.args.get("arch")), {}):
            notes.append(f"args.{name} is missing, which is an error in the original; using 0.0")
        return Notes({"ema_convention": target.revision}, notes, heads=["causal LM"])


def _float_tensor(name: str) -> Row:
    return Row(f"{name}._float_tensor", None, reason=_mega.PLACEHOLDER, fill=_mega.placeholder)


def _words_of_head(config: MegaConfig) -> str:
    projected = config.embedding_size != config.hidden_size
    return f"{_ADAPTIVE}.head.word_proj.{'1.' if projected else ''}weight"


def _softmax_rows(config: MegaConfig) -> list[Row]:
    """Return the rows of an adaptive softmax; if it is tied, its words and projections are copies."""
    tied, copies = config.tie_word_embeddings, {}
    rows = [Row(f"{_ADAPTIVE}.version", None, reason=_mega.PLACEHOLDER, fill=lambda _: torch.tensor([1]))]
    if tied:
        words = _words_of_head(config)
        copies[words] = f"{_BANDS}.0.0.weight"
        names = {
            f"{_ADAPTIVE}.head.word_proj.0.weight": "lm_head.head_projection.weight",
            words: None,
            f"{_ADAPTIVE}.head.class_proj.weight": "lm_head.head.weight",
        }
        rows.append(_float_tensor(f"{_ADAPTIVE}.head"))
    else:
        names = {f"{_ADAPTIVE}.head.weight": "lm_head.head.weight"}
    for tail in range(len(config.adaptive_softmax_cutoffs)):
        projection, output = (f"{_ADAPTIVE}.tail.{tail}.{part}.weight" for part in (0, 2))
        names |= {projection: f"lm_head.projections.{tail}.weight", output: f"lm_head.words.{tail}.weight"}
        if tied:
            copies[output] = f"{_BANDS}.{tail + 1}.0.weight"
            copies |= {projection: f"{_BANDS}.{tail + 1}.1.weight"} if config.tie_adaptive_projections else {}
    return rows + [
        Row(source, None, reason="tied to the embedding", copy_of=copies[source])
        if source in copies
        else Row(source, target)
        for source, target in names.items()
    ]
