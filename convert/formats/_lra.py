"""Parts of the formats of the Long Range Arena, in Luna and Mega."""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from luna_mega.convert.argtypes import whole, word
from luna_mega.convert.dictionary import Dictionaries
from luna_mega.convert.dictionary_kinds import VocabularyAndLabels
from luna_mega.convert.evidence import Evidence
from luna_mega.convert.formats.containers import FairseqFile
from luna_mega.convert.formats.format import Bpe, Companions
from luna_mega.convert.table import ACTIVATION, Arg, Way, fixed
from luna_mega.convert.target import Target
from luna_mega.convert.tokenizers import WORDS, ConvertedTokenizer
from luna_mega.convert.tokenizers.words import word_tokenizer
from luna_mega.errors import ConversionError

_CLS, _TASKS_OF_WORDS = "<CLS>", ("long_range_arena", "lra-text")
CONTAINER = FairseqFile({"lra_cross_entropy": "LRACrossEntropyCriterion"})
BODY, OUT = "encoder.encoder", "sentence_projection_layer.weight"
_INPUT_TYPE = Way({"text": "tokens", "image": "values"}.__getitem__, {"tokens": "text", "values": "image"}.__getitem__)
REPRESENTATION = Way({"cls": "cls", "mp": "mean"}.__getitem__, {"cls": "cls", "mean": "mp"}.__getitem__)
CLASSES = Arg(
    "sentence_class_num",
    "num_labels",
    measure=lambda evidence: evidence.shape(OUT, "classes", "features")[0],
    kind=whole,
)
CRITERION, NO_REGRESSION = fixed("criterion", "lra_cross_entropy"), fixed("regression_target", False)


def classifier_activation(default: str, **options: Any) -> Arg:
    """Return the row of the activation of the classification head."""
    return Arg("classifier_activation_fn", "classifier_activation", ACTIVATION, default, kind=word, **options)


def input_type(tokens: Callable[[Evidence], bool], **options: Any) -> Arg:
    """Return the row of the input; `tokens` says whether a file has an embedding of tokens."""

    def measure(evidence: Evidence) -> str:
        return "text" if tokens(evidence) else "image"

    return Arg("input_type", "input_type", _INPUT_TYPE, measure=measure, kind=word, **options)


def layer_type(name: str) -> Arg:
    """Return the row of the argument that chose the kind of layers."""

    def read(evidence: Evidence) -> dict[str, Any]:
        evidence.prefer("layer_type", name)
        return {}

    return Arg("layer_type", read=read, write=lambda target: name, kind=word)


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
    """Return the `pooling` of args.sen_rep_type."""
    name = evidence.arg("sen_rep_type")
    if name not in ("cls", "mp"):
        raise ConversionError(f"{evidence.shown('sen_rep_type')} fails in the original as well; it knows cls and mp")
    return REPRESENTATION.there(name)


def first_token_note(config: PreTrainedConfig) -> str:
    """Return a note for users of a model whose sequences start with `<CLS>`."""
    return f"every sequence starts with <CLS>, id {config.vocab_size - 1}, and ends with </s>, id 2"


def companions(target: Target, evidence: Evidence, starts_with_cls: bool) -> Companions:
    """Return the files of a classifier: words and labels, and the tokenizer of symbols between white space.

    Args:
        starts_with_cls: whether the model was trained with `<CLS>` before every sequence.
    """
    config, tokens = target.config, target.config.input_type == "tokens"
    places = {"vocabulary_place": "src-bin/dict.txt"} if evidence.args.get("task") in _TASKS_OF_WORDS else {}

    def tokenizer(dictionaries: Dictionaries, bpe: Bpe, notes: list[str]) -> ConvertedTokenizer | None:
        if bpe is not None:
            raise ConversionError(f"--bpe {bpe}: LRA does not read GPT-2's pieces; leave the option out")
        if dictionaries.vocabulary is None:
            return None
        words = word_tokenizer(dictionaries.vocabulary, _CLS, starts_with_cls, config.max_position_embeddings)
        return ConvertedTokenizer(words, WORDS, [])

    labeled = config.problem_type != "regression"
    kind = VocabularyAndLabels(
        target.vocab_size, _CLS if tokens else None, config.num_labels, labeled=labeled, **places
    )
    return Companions(kind, tokenizer)
