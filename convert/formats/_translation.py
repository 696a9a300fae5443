"""Parts of the formats of encoder-decoders, in Luna and Mega."""

import copy
import re
from typing import Any

from transformers import PreTrainedConfig

from luna_mega.convert.argtypes import flag, language
from luna_mega.convert.dictionary import Dictionaries
from luna_mega.convert.dictionary_kinds import LanguagePair
from luna_mega.convert.evidence import Evidence, same_bits
from luna_mega.convert.formats.containers import FairseqFile
from luna_mega.convert.formats.format import Bpe, Companions
from luna_mega.convert.table import COMMON, Arg, Table, fixed, written
from luna_mega.convert.target import Target
from luna_mega.convert.tokenizers import WORDS, ConvertedTokenizer
from luna_mega.convert.tokenizers.translation import translation_tokenizer
from luna_mega.errors import ConversionError
from luna_mega.hub.folder import position_limit

SIDES = {"encoder": "max_source_positions", "decoder": "max_target_positions"}
_LONGEST = 200


def _sharing(evidence: Evidence) -> dict[str, bool]:
    """Return the fields that specify which of the three embedding matrices are tied."""
    tensors, args = evidence.tensors, evidence.args
    evidence.shape("decoder.output_projection.weight", "vocabulary", "width")
    names = ("encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection")
    source, target, output = (tensors[f"{name}.weight"] for name in names)
    asked = [args.get(name) for name in ("share_all_embeddings", "share_decoder_input_output_embed")]
    tied = same_bits(target, output)
    if any(asked) and not tied:
        name = "share_all_embeddings" if asked[0] else "share_decoder_input_output_embed"
        evidence.prefer(name, False)
    tied = tied and asked != [False, False]
    joint = tied and same_bits(source, target) and asked[0] is not False
    if asked[0] and tied and not joint:
        evidence.prefer("share_all_embeddings", False)
    return {"tie_word_embeddings": tied, "share_encoder_decoder_embeddings": joint}


def task_arguments(arch: Arg) -> Table:
    """Return the first rows of the table: the task, with `arch` as the row of the architecture."""
    return (
        *COMMON,
        fixed("task", "translation", kept=True),
        arch,
        fixed("criterion", "label_smoothed_cross_entropy"),
        fixed("label_smoothing", 0.1),
        fixed("source_lang", "source", kept=True, kind=language),
        fixed("target_lang", "target", kept=True, kind=language),
        fixed("left_pad_source", "True", kept=True),
        fixed("left_pad_target", "False", kept=True),
        fixed("load_alignments", False),
        fixed("truncate_source", False),
        fixed("num_batch_buckets", 0),
    )


SHARING = (
    Arg("share_all_embeddings", "share_encoder_decoder_embeddings", read=_sharing, kind=flag),
    written("share_decoder_input_output_embed", "tie_word_embeddings", kind=flag),
    fixed("adaptive_softmax_cutoff", None),
    fixed("adaptive_softmax_dropout", 0),
    fixed("adaptive_input", False),
    fixed("tie_adaptive_weights", False),
)


CONTAINER = FairseqFile({"label_smoothed_cross_entropy": "LabelSmoothedCrossEntropyCriterion"})
HEADS = ["sequence-to-sequence LM"]


def resolve(config: PreTrainedConfig, decoder_fields: dict[str, str]) -> PreTrainedConfig:
    """Return the same configuration with a value in every field of the decoder."""
    full, decoder = copy.deepcopy(config), config.decoder_config
    for own, field in decoder_fields.items():
        setattr(full, own, getattr(decoder, field))
    full.share_encoder_decoder_embeddings = config.shares_embeddings
    return full


def companions(target: Target, evidence: Evidence, positions: int) -> Companions:
    """Return the dictionaries and tokenizers of both languages, and the settings of `generate`.

    Args:
        positions: number of positions of the decoder.
    """
    config = target.config
    languages = (_language(evidence, "source_lang"), _language(evidence, "target_lang"))
    sizes = (config.vocab_size, config.get_text_config(decoder=True).vocab_size)

    def tokenizer(dictionaries: Dictionaries, bpe: Bpe, notes: list[str]) -> ConvertedTokenizer | None:
        source, other = dictionaries.vocabulary, dictionaries.target
        if source is None:
            if bpe is not None:
                raise ConversionError(f"--bpe {bpe}: there is no dictionary beside the checkpoint; give it with --dict")
            return None
        made = {
            dictionary: translation_tokenizer(dictionary, bpe, position_limit(config.get_text_config(**side)))
            for dictionary, side in ((other, {"decoder": True}), (source, {"encoder": True}))
        }
        kind = WORDS if bpe is None else "byte-pair encoding"
        return ConvertedTokenizer(made[source], kind, [], None if other is source else made[other])

    pair = LanguagePair(languages, sizes, config.share_encoder_decoder_embeddings)
    return Companions(pair, tokenizer, generation=_generation(positions))


def _language(evidence: Evidence, name: str) -> str:
    """Return the name of a language, which becomes part of the name of a file."""
    language = evidence.args.get(name) or name.removesuffix("_lang")
    if not isinstance(language, str) or not re.fullmatch(r"[\w.@+-]+", language):
        raise ConversionError(f"{evidence.shown(name)} is not the name of a language: letters, digits and .@+_- only")
    return language


def field_of(side: str, field: str, decoder_fields: dict[str, str]) -> str:
    """Return the name of `field` on a side; some fields of the decoder have names of their own."""
    return field if side == "encoder" else next(own for own, whole in decoder_fields.items() if whole == field)


def vocabularies(evidence: Evidence) -> tuple[int, int, int]:
    """Return the sizes of both vocabularies, and the width that encoder and decoder must have in common."""
    (vocabulary, width), (target, target_width) = (
        evidence.shape(f"{side}.embed_tokens.weight", "vocabulary", "width") for side in SIDES
    )
    if width != target_width:
        raise ConversionError(f"the encoder has a width of {width}, the decoder of {target_width}: they must agree")
    return vocabulary, target, width


def width(evidence: Evidence) -> int:
    """Return the width that encoder and decoder have in common."""
    return vocabularies(evidence)[2]


def _generation(positions: int) -> dict[str, Any]:
    """Return the settings of `generate` that do what `fairseq-generate` does without options.

    `positions` is the number of positions of the decoder; a target has at most one token less.
    """
    return {
        "num_beams": 5,
        "length_penalty": 1.0,
        "early_stopping": True,
        "min_new_tokens": 1,
        "suppress_tokens": [1],
        "forced_eos_token_id": 2,
        "max_length": min(_LONGEST, positions - 1) + 2,  # 2 more: the start and the end of a sentence
    }
