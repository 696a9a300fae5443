"""What the plans of Luna and Mega files of the Long Range Arena share."""

from transformers import PreTrainedConfig, PreTrainedModel

from luna_mega.convert.evidence import Evidence
from luna_mega.errors import ConversionError


def choose_class(
    in_features: int, width: int, pair_factor: int, single: type[PreTrainedModel], pair: type[PreTrainedModel]
) -> type[PreTrainedModel]:
    """`single` or `pair`, by the number of features that the classifier reads."""
    if in_features == width:
        return single
    if in_features == pair_factor * width:
        return pair
    raise ConversionError(
        f"the classifier reads {in_features} features; with a width of {width} the original reads {width} (one "
        f"sequence) or {pair_factor * width} (a pair)"
    )


def representation(evidence: Evidence) -> str:
    """`pooling` of args.sen_rep_type."""
    name = evidence.arg("sen_rep_type")
    if name not in ("cls", "mp"):
        raise ConversionError(f"args.sen_rep_type = {name!r} fails in the original as well; it knows cls and mp")
    return "cls" if name == "cls" else "mean"


def first_token_note(config: PreTrainedConfig) -> str:
    """What users of a model whose sequences start with `<CLS>` have to know."""
    return f"every sequence starts with <CLS>, id {config.vocab_size - 1}, and ends with </s>, id 2"
