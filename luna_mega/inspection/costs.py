"""FLOPs and memory of a model (`luna-mega info`); each family has the formulas of its layers."""

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from luna_mega import LunaConfig, MegalodonConfig
from luna_mega.hub.card import architecture
from luna_mega.hub.folder import stacks
from luna_mega.inspection import costs_luna, costs_mega, costs_megalodon

_EMBEDDINGS = ("embeddings", "embedding_layer", "embedding_norm", "embed_tokens")
_STACKS = ("encoder", "decoder", "layers", "final_norm", "output_projection")
_LANGUAGE_MODELS = ("MaskedLM", "CausalLM", "ConditionalGeneration")
_HEADS_FOR_EVERY_TOKEN = (*_LANGUAGE_MODELS, "TokenClassification", "QuestionAnswering")


def fields(config: PreTrainedConfig) -> dict[str, int | str | bool]:
    """Return the configuration fields with the sizes of the model, and the decoder's fields if they differ."""
    values = architecture(config)
    if config.is_encoder_decoder:
        own = architecture(config.decoder_config).items()
        values |= {f"decoder_{name}": value for name, value in own if value != values[name]}
    return values


def usual_length(config: PreTrainedConfig) -> int:
    """Return the maximum number of positions of a model, or its chunk size if there is no maximum."""
    return config.max_position_embeddings if hasattr(config, "max_position_embeddings") else config.chunk_size


def formulas(config: PreTrainedConfig) -> dict[str, str]:
    """Return the formulas of the costs as text."""
    return _family(config).FORMULAS


def count_parameters(model: PreTrainedModel) -> dict[str, int]:
    """Return the numbers of parameters of embeddings, stacks and head, and the total; tied weights count once."""
    counts = dict.fromkeys(("embeddings", *stacks(model.config), "head"), 0)
    for name, parameter in model.named_parameters():
        counts[_part(model, name)] += parameter.numel()
    return counts | {"total": sum(counts.values())}


def flops_per_token(model: PreTrainedModel, length: int) -> dict[str, float]:
    """Return the FLOPs of a forward pass over one sequence of `length` positions, divided by `length`.

    Source and target of an encoder-decoder have `length` positions each; names of parts start with the stack.
    """
    counts = {}
    for name, config in stacks(model.config).items():
        prefix = f"{name}_" if model.config.is_encoder_decoder else ""
        parts = _family(config).flops_per_token(config, length)
        counts |= {f"{prefix}{part}": flops for part, flops in parts.items()}
    counts["head"] = _head_flops(model, length) / length
    return counts | {"total": sum(counts.values())}


def inference_activations(model: PreTrainedModel, length: int) -> int:
    """Return the peak number of elements in memory in inference, for one sequence, without a cache."""
    family, config = _family(model.config), model.config
    peaks = {name: family.inference_activations(stack, length) for name, stack in stacks(config).items()}
    if (kind := _kind(model)) in _LANGUAGE_MODELS:
        last = list(stacks(config).values())[-1]
        scores = getattr(last, "scores", last.vocab_size)
        scores *= 2 if getattr(last, "adaptive_softmax_cutoffs", None) else 1
        peaks["head"] = length * (scores + (2 if kind == "MaskedLM" else 1) * last.hidden_size)
    if config.is_encoder_decoder:  # the output of the encoder is kept during decoding
        peaks = {name: peak + length * config.hidden_size * (name != "encoder") for name, peak in peaks.items()}
    return max(peaks.values())


def training_activations(model: PreTrainedModel, length: int) -> int:
    """Return the number of elements saved for the backward pass, for one sequence, without checkpointing."""
    family, sides = _family(model.config), stacks(model.config)
    kept = sum(family.training_activations(stack, length) for stack in sides.values())
    if (kind := _kind(model)) in _LANGUAGE_MODELS:
        kept += length * family.language_model_activations(list(sides.values())[-1], kind)
    return round(kept)


def cache_numbers(model: PreTrainedModel, length: int) -> int | None:
    """Return the number of elements of the cache of a decoder after `length` positions of target and source.

    Encoders have no cache: None.
    """
    decoder = stacks(model.config).get("decoder")
    return None if decoder is None else _family(decoder).cache_numbers(decoder, length)


def _family(config: PreTrainedConfig):
    if isinstance(config, MegalodonConfig):
        return costs_megalodon
    return costs_luna if isinstance(config, LunaConfig) else costs_mega


def _kind(model: PreTrainedModel) -> str:
    """Return the name of the head, or "" if there is none."""
    return type(model).__name__.partition("For")[2]


def _part(model: PreTrainedModel, name: str) -> str:
    """Return the part that a parameter or module belongs to: embeddings, a stack, or head."""
    first, _, rest = name.removeprefix(f"{model.base_model_prefix}.").partition(".")
    if model.config.is_encoder_decoder and first in ("encoder", "decoder"):
        return "embeddings" if rest.split(".")[0] in _EMBEDDINGS else first
    if first in _EMBEDDINGS:
        return "embeddings"
    return next(iter(stacks(model.config))) if first in _STACKS else "head"


def _head_flops(model: PreTrainedModel, length: int) -> float:
    """Return the FLOPs of the linear layers of the head, for one sequence (half a pair)."""
    kind = _kind(model)
    times = length if kind in _HEADS_FOR_EVERY_TOKEN else 1 / (2 if kind == "SequencePairClassification" else 1)
    counts = {
        name: 2 * times * module.in_features * module.out_features
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and _part(model, name) == "head"
    }
    return sum((counts | _family(model.config).head_flops(model, length)).values())
