"""Common parts of luna_lra and mega_lra, the formats of the Long Range Arena."""

from collections.abc import Callable

from transformers import PreTrainedConfig, PreTrainedModel

from luna_mega.convert.dictionaries import Dictionaries, VocabularyAndLabels
from luna_mega.convert.evidence import Evidence, ModelSpec, integer, word
from luna_mega.convert.formats.format import Bpe, Companions
from luna_mega.convert.table import ACTIVATIONS, Arg, decoded, fields, size_of
from luna_mega.convert.tokenizers import WORDS, ConvertedTokenizer
from luna_mega.convert.tokenizers.words import word_tokenizer
from luna_mega.errors import ConversionError

_CLS = "<CLS>"
BODY, OUT = "encoder.encoder", "sentence_projection_layer.weight"
_INPUT_TYPE = {"text": "tokens", "image": "values"}
REPRESENTATION = {"cls": "cls", "mp": "mean"}
ACTIVATION = Arg("classifier_activation_fn", "classifier_activation", ACTIVATIONS, kind=word)
CLASSES = Arg("sentence_class_num", "num_labels", read=size_of(OUT, "classes", "features"), kind=integer)


def input_type(embedding: Callable[[Evidence], tuple[int, ...]]) -> Arg:
    """Return the row of the input; `embedding` returns the shape of the embedding of tokens or values."""
    names = {1: "image", 2: "text"}
    return Arg(
        "input_type", "input_type", _INPUT_TYPE, read=lambda evidence: names[len(embedding(evidence))], kind=word
    )


def vocabulary(embedding: Callable[[Evidence], tuple[int, ...]]) -> Arg:
    """Return the row of the vocabulary; for `embedding`, see `input_type`."""
    return fields(lambda evidence: {"vocab_size": shape[0]} if len(shape := embedding(evidence)) == 2 else {})


def choose_class(
    in_features: int, width: int, pair_factor: int, single: type[PreTrainedModel], pair: type[PreTrainedModel]
) -> type[PreTrainedModel]:
    """Return `single` or `pair`, by the number of features that the classifier reads."""
    if in_features == width:
        return single
    if in_features == pair_factor * width:
        return pair
    raise ConversionError(
        f"the classifier reads {in_features} features; with a width of {width} the original reads {width} (one "
        f"sequence) or {pair_factor * width} (a pair)"
    )


def representation(evidence: Evidence) -> str:
    """Return the field `pooling` for args.sen_rep_type."""
    return decoded(evidence, "sen_rep_type", evidence.arg("sen_rep_type"), REPRESENTATION)


def first_token_note(config: PreTrainedConfig) -> str:
    """Return a note on a model whose sequences start with `<CLS>`."""
    return f"every sequence starts with <CLS>, id {config.vocab_size - 1}, and ends with </s>, id 2"


def companions(spec: ModelSpec, evidence: Evidence, starts_with_cls: bool) -> Companions:
    """Return the dictionaries of a classifier, and its tokenizer of whitespace-separated symbols.

    `starts_with_cls` is whether the model was trained with `<CLS>` before every sequence.
    """
    config, tokens = spec.config, spec.config.input_type == "tokens"

    def tokenizer(dictionaries: Dictionaries, bpe: Bpe, notes: list[str]) -> ConvertedTokenizer | None:
        if bpe is not None:
            raise ConversionError(f"--bpe {bpe}: LRA has no byte-pair encoding; omit the option")
        if dictionaries.vocabulary is None:
            return None
        words = word_tokenizer(dictionaries.vocabulary, _CLS, starts_with_cls, config.max_position_embeddings)
        return ConvertedTokenizer(words, WORDS, [])

    kind = VocabularyAndLabels(spec.vocab_size, _CLS if tokens else None, config.num_labels)
    return Companions(kind, tokenizer)
