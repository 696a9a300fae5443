"""Common parts of luna_seq2seq and mega_seq2seq, the formats of encoder-decoders."""

from luna_mega.convert.dictionaries import Dictionaries, LanguagePair
from luna_mega.convert.evidence import Evidence, ModelSpec, flag, language, same_bits, word
from luna_mega.convert.formats.format import Bpe, Companions
from luna_mega.convert.table import Arg, typed
from luna_mega.convert.tokenizers import WORDS, ConvertedTokenizer
from luna_mega.convert.tokenizers.translation import translation_tokenizer
from luna_mega.errors import ConversionError, shown

SIDES = {"encoder": "max_source_positions", "decoder": "max_target_positions"}
_LONGEST = 200
_UNSUPPORTED = ("decoder.adaptive_softmax.", "decoder.project_in_dim.", "decoder.project_out_dim.")


def _sharing(evidence: Evidence) -> dict[str, bool]:
    """Return the fields that specify which of the three embedding matrices are tied."""
    tensors, args = evidence.tensors, evidence.args
    evidence.shape("decoder.output_projection.weight", "vocabulary", "width")
    names = ("encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection")
    source, target, output = (tensors[f"{name}.weight"] for name in names)
    requested = [args.get(name) for name in ("share_all_embeddings", "share_decoder_input_output_embed")]
    tied = same_bits(target, output)
    if any(requested) and not tied:
        name = "share_all_embeddings" if requested[0] else "share_decoder_input_output_embed"
        evidence.prefer(name, False)
    tied = tied and requested != [False, False]
    joint = tied and same_bits(source, target) and requested[0] is not False
    if requested[0] and tied and not joint:
        evidence.prefer("share_all_embeddings", False)
    return {"tie_word_embeddings": tied, "share_encoder_decoder_embeddings": joint}


TASK = (
    *typed(word, "arch"),
    *typed(language, "source_lang", "target_lang"),
)
SHARING = (
    Arg("share_all_embeddings", "share_encoder_decoder_embeddings", read=_sharing, kind=flag),
    *typed(flag, "share_decoder_input_output_embed"),
)


def companions(spec: ModelSpec, evidence: Evidence, positions: int) -> Companions:
    """Return dictionaries, tokenizers and generation settings; `positions` is the decoder's number of positions."""
    config = spec.config
    languages = tuple(evidence.args.get(f"{name}_lang") or name for name in ("source", "target"))
    sizes = (config.vocab_size, config.get_text_config(decoder=True).vocab_size)

    def tokenizer(dictionaries: Dictionaries, bpe: Bpe, notes: list[str]) -> ConvertedTokenizer | None:
        if not dictionaries.has_vocabulary(bpe):
            return None
        source, other = dictionaries.vocabulary, dictionaries.target
        made = {
            dictionary: translation_tokenizer(dictionary, bpe, config.get_text_config(**side).longest_input)
            for dictionary, side in ((other, {"decoder": True}), (source, {"encoder": True}))
        }
        kind = WORDS if bpe is None else "byte-pair encoding"
        return ConvertedTokenizer(made[source], kind, [], None if other is source else made[other])

    pair = LanguagePair(languages, sizes, config.share_encoder_decoder_embeddings)
    # Equivalent to `fairseq-generate` without options; the length includes the start and the end of the sentence.
    beams = {"num_beams": 5, "length_penalty": 1.0, "early_stopping": True, "min_new_tokens": 1, "suppress_tokens": [1]}
    length = min(_LONGEST, positions - 1) + 2
    return Companions(pair, tokenizer, generation=beams | {"forced_eos_token_id": 2, "max_length": length})


def field_of(side: str, field: str, decoder_fields: dict[str, str]) -> str:
    """Return the name of `field` on a side; some fields of the decoder have separate names."""
    return field if side == "encoder" else next(own for own, common in decoder_fields.items() if common == field)


def _embeddings(evidence: Evidence) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(evidence.shape(f"{side}.embed_tokens.weight", "vocabulary", "width") for side in SIDES)


def width(evidence: Evidence) -> int:
    """Return the common width of encoder and decoder."""
    (_, width), (_, target_width) = _embeddings(evidence)
    if width != target_width:
        raise ConversionError(f"the encoder has a width of {width}, the decoder of {target_width}; they must be equal")
    return width


def vocabularies(evidence: Evidence) -> dict[str, int]:
    """Return the fields with the sizes of both vocabularies."""
    if unsupported := next((key for key in evidence.tensors if key.startswith(_UNSUPPORTED)), None):
        raise ConversionError(
            f"tensor {shown(unsupported)}: an adaptive softmax, or a decoder of another width than its embedding, is "
            "not supported; no published recipe has one"
        )
    (vocabulary, _), (target, _) = _embeddings(evidence)
    return {"vocab_size": vocabulary, "decoder_vocab_size": target}
