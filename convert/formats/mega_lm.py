"""mega_lm: Mega language models, with an ordinary vocabulary or an adaptive one."""

import re
from itertools import accumulate, product

from luna_mega import MegaConfig, MegaForCausalLM
from luna_mega.convert.dictionaries import Dictionaries, VocabularyAndLabels
from luna_mega.convert.evidence import Evidence, ModelSpec, cutoffs, flag, number, same_bits, size, word
from luna_mega.convert.formats import _mega
from luna_mega.convert.formats.format import Bpe, Companions, Facts, Notes
from luna_mega.convert.keymap import KeyMap, Row
from luna_mega.convert.table import Arg, derived, fields, read_if, typed
from luna_mega.convert.tokenizers import ConvertedTokenizer
from luna_mega.convert.tokenizers.language_models import lm_tokenizer

_BODY = "decoder"
_EMBEDDING, _BANDS = f"{_BODY}.embed_tokens.weight", f"{_BODY}.embed_tokens.embeddings"
_PROJECTION = f"{_BODY}.project_in_dim.weight"
_OUT, _ADAPTIVE = f"{_BODY}.output_projection.weight", f"{_BODY}.adaptive_softmax"
# An adaptive vocabulary is divided into bands. A band of the embedding has the matrices "0" of words and "1" of their
# projection. A tail of the softmax, which scores a band after the first, has "0" of the projection and "2" of words.
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
    **dict.fromkeys(("mega_lm_adaptive_big", "mega_lm_wiki103", "mega_lm_adaptive_base"), _BIG),
    "mega_lm_enwik8_base": {"activation_dropout": 0.0},
    "mega_lm_enwik8_large": {"dropout": 0.2, "attention_dropout": 0.1, "hidden_dropout": 0.1},
    "mega_lm_pg19_base": {"dropout": 0.0, "activation_dropout": 0.0},
}
_CUTOFFS = ("adaptive_input_cutoffs", "adaptive_softmax_cutoffs")


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
    """Return the cumulative sizes of the bands under `prefix`; `before` contains the sizes of earlier bands."""
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
    """Return the cutoffs of the tensors; warn if the argument differs (it may end with the vocabulary size)."""
    in_args = [int(number) for number in re.findall(r"\d+", str(evidence.args.get(name)))]
    if in_args and in_file is not None and in_args not in (in_file, [*in_file, _vocabulary(evidence)]):
        evidence.prefer(name, ",".join(map(str, in_file)))
    return in_file


def _is_adaptive(evidence: Evidence) -> bool:
    return any(key.startswith(f"{_ADAPTIVE}.") for key in evidence.tensors)


def _ties_bands(evidence: Evidence) -> bool:
    return f"{_ADAPTIVE}.head.class_proj.weight" in evidence.tensors


def _shares_words(evidence: Evidence) -> dict[str, bool]:
    name = "share_decoder_input_output_embed"
    return {} if _is_adaptive(evidence) else evidence.ties(name, True, _OUT, _EMBEDDING)


def _shares_projections(evidence: Evidence) -> dict[str, bool]:
    """Return whether bands after the first share the projections of the embedding.

    Shapes and values determine this and, if the values are equal, the argument.
    """
    if not _ties_bands(evidence):
        return {"tie_adaptive_projections": False}
    tails = range(evidence.layers(f"{_ADAPTIVE}.tail"))
    pairs = [(f"{_ADAPTIVE}.tail.{tail}.0.weight", f"{_BANDS}.{tail + 1}.1.weight") for tail in tails]
    shapes = ([evidence.shape(name, "rows", "columns") for name in pair] for pair in pairs)
    tied = all(ours == theirs for ours, theirs in shapes)
    if tied and not evidence.arg("tie_adaptive_proj"):
        tied = all(same_bits(evidence.tensors[ours], evidence.tensors[theirs]) for ours, theirs in pairs)
    return {"tie_adaptive_projections": evidence.prefer("tie_adaptive_proj", tied)}


# Common fields of all language models; fairseq prepends `</s>`, id 2.
_CONSTANTS = dict.fromkeys(("bidirectional", "add_lm_hidden_dense_layer", "lm_head_bias"), False)
_CONSTANTS |= {"is_decoder": True, "bos_token_id": 2}
_TABLE = (
    *typed(word, "arch"),
    _STACK.positions("max_target_positions", "decoder_chunk_size", default=1024),
    *_STACK.sizes("decoder", lambda evidence: _widths(evidence)[0]),
    Arg("decoder_input_dim", "embedding_size", read=lambda evidence: _widths(evidence)[1], kind=size),
    *_mega.options(_STACK, truncation=2048),
    Arg("share_decoder_input_output_embed", read=_shares_words, kind=flag),
    *read_if(
        _has_bands,
        Arg("adaptive_input_cutoff", "adaptive_input_cutoffs", read=_input_cutoffs, kind=cutoffs),
        Arg("adaptive_input_factor", "adaptive_input_factor", default=4, kind=number),
    ),
    *read_if(
        _is_adaptive,
        Arg("adaptive_softmax_cutoff", "adaptive_softmax_cutoffs", read=_softmax_cutoffs, kind=cutoffs),
        Arg("adaptive_softmax_factor", "adaptive_softmax_factor", default=4, kind=number),
        Arg("adaptive_softmax_dropout", "adaptive_softmax_dropout", default=0.0, kind=number),
        Arg("tie_adaptive_weights", "tie_word_embeddings", read=_ties_bands, kind=flag),
        Arg("tie_adaptive_proj", "tie_adaptive_projections", default=False, read=_shares_projections, kind=flag),
    ),
    derived("vocab_size", _vocabulary),
    fields(lambda evidence: _CONSTANTS),
)


class MegaLM(_mega.MegaFormat):
    """Language models of `mega_lm*`."""

    facts = Facts(
        name="mega_lm",
        revisions=_mega.REVISIONS,
        model_classes=(MegaForCausalLM,),
        stacks=frozenset({("mega", _BODY)}),
        architectures=_ARCHITECTURES,
        decided=(*_mega.DECIDED, "scale_embedding", "tie_word_embeddings", *_CUTOFFS),
        **_mega.FACTS,
    )
    table = _TABLE

    def keymap(self, spec: ModelSpec) -> KeyMap:
        config, words = spec.config, "mega.embedding_layer.word_embeddings"
        embedding = [Row(_EMBEDDING, f"{words}.weight")]
        if config.adaptive_input_cutoffs is not None:
            bands = product(range(len(config.adaptive_input_cutoffs) + 1), enumerate(("words", "projections")))
            embedding = [
                _mega.placeholder_row(f"{_BODY}.embed_tokens._float_tensor"),
                *(Row(f"{_BANDS}.{band}.{n}.weight", f"{words}.{part}.{band}.weight") for band, (n, part) in bands),
            ]
        return KeyMap(
            [
                _mega.placeholder_row(f"{_BODY}.version"),
                *embedding,
                Row(_PROJECTION, "mega.embedding_layer.projection.weight"),
                *_mega.layer_rows(_BODY, spec.revision),
                *([Row(_OUT, "lm_head.weight")] if config.adaptive_softmax_cutoffs is None else _softmax_rows(config)),
            ]
        )

    def companions(self, spec: ModelSpec, evidence: Evidence) -> Companions:
        def tokenizer(dictionaries: Dictionaries, bpe: Bpe, notes: list[str]) -> ConvertedTokenizer | None:
            found = dictionaries.has_vocabulary(bpe)
            return lm_tokenizer(dictionaries.vocabulary, bpe, spec.config.longest_input) if found else None

        return Companions(VocabularyAndLabels(spec.vocab_size, None, None), tokenizer)

    def report(self, spec: ModelSpec, evidence: Evidence) -> Notes:
        name, notes = "activation_dropout", []
        if evidence.args.get(name) is None and name not in _ARCHITECTURES.get(str(evidence.args.get("arch")), {}):
            notes.append(f"args.{name} is missing, which is an error in the original; using 0.0")
        return Notes({"ema_convention": spec.revision}, notes)


def _softmax_rows(config: MegaConfig) -> list[Row]:
    """Return the rows of an adaptive softmax; if it is tied, its matrices and projections are copies."""

    def copy(source: str, of: str) -> Row:
        return Row(source, None, reason="tied to the embedding", copy_of=f"{_BANDS}.{of}.weight")

    head, tied = f"{_ADAPTIVE}.head", config.tie_word_embeddings
    rows = [_mega.placeholder_row(f"{_ADAPTIVE}.version")]
    if tied:
        projected = config.embedding_size != config.hidden_size
        rows += [
            _mega.placeholder_row(f"{head}._float_tensor"),
            Row(f"{head}.word_proj.0.weight", "lm_head.head_projection.weight"),
            copy(f"{head}.word_proj.{'1.' if projected else ''}weight", "0.0"),
        ]
    rows.append(Row(f"{head}.{'class_proj.' if tied else ''}weight", "lm_head.head.weight"))
    for tail in range(len(config.adaptive_softmax_cutoffs)):
        projection = Row(f"{_ADAPTIVE}.tail.{tail}.0.weight", f"lm_head.projections.{tail}.weight")
        words = Row(f"{_ADAPTIVE}.tail.{tail}.2.weight", f"lm_head.words.{tail}.weight")
        if tied:
            words = copy(words.source, f"{tail + 1}.0")
        if tied and config.tie_adaptive_projections:
            projection = copy(projection.source, f"{tail + 1}.1")
        rows += [projection, words]
    return rows
