"""From the tensors of a checkpoint to those of the model: every one mapped, dropped with a reason, or an error."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from luna_mega.convert.keymap import KeyMap
from luna_mega.convert.keymap_luna import LAYER_NORM
from luna_mega.convert.plan import Plan
from luna_mega.errors import ConversionError

# Output layers that are tied to the embedding, which is saved.
_TIED_TO_EMBEDDING = ("lm_head.decoder.weight", "lm_head.weight")


@dataclass(frozen=True)
class Mapping:
    """`mapped`: source name -> target name; `dropped`: source name -> reason; `norm_weights`: source names.

    `absent`: target names of counters that a file may lack, and that start at 0.
    """

    mapped: dict[str, str]
    dropped: dict[str, str]
    norm_weights: list[str]
    absent: list[str]


def map_tensors(plan: Plan, tensors: dict[str, torch.Tensor]) -> Mapping:
    """Names every tensor's place and checks it against the model.

    Raises:
        ConversionError: a tensor without a place, a place without a tensor, or another shape.
    """
    mapped, dropped, norm_weights, unexpected = {}, {}, [], []
    expected = _expected_shapes(plan)
    for key in tensors:
        match = plan.keymap.forward(key)
        if match is None or match.key not in (None, *expected):
            unexpected.append(key)
        elif match.key is None:
            dropped[key] = match.row.reason
        else:
            mapped[key] = match.key
            if match.row.transform == LAYER_NORM and key.endswith(".weight"):
                norm_weights.append(key)
    without = [target for target in expected if target not in mapped.values()]
    absent = [target for target in without if target.endswith(".num_batches_tracked")]
    missing = [_source_name(plan.keymap, target) for target in without if target not in absent]
    problems = [f"{what}: {few(keys)}" for what, keys in (("missing", missing), ("unexpected", unexpected)) if keys]
    if problems:
        raise ConversionError(
            f"the tensors are not those of {plan.model_class.__name__} ({'; '.join(problems)}); the file is incomplete "
            "or of a changed model"
        )
    for key, target in mapped.items():
        if tensors[key].shape != expected[target]:
            raise ConversionError(
                f"tensor {key!r} has shape {list(tensors[key].shape)}, the model needs {list(expected[target])}"
            )
    return Mapping(mapped, dropped, norm_weights, absent)


def convert_tensors(
    plan: Plan, mapping: Mapping, tensors: dict[str, torch.Tensor], plus_one: bool, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The tensors under their new names in `dtype`; with `plus_one` the norm weights are stored minus one.

    Integers stay what they are. Every one has storage of its own: what shares it is saved once, also where the model
    does not tie it.
    """
    raised = set(mapping.norm_weights) if plus_one else set()
    converted = {}
    for key, target in mapping.mapped.items():
        tensor = tensors[key].float().add(1) if key in raised else tensors[key]
        if not _is_copy(target, plan.config):
            converted[target] = tensor.to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
    return converted | {target: torch.zeros((), dtype=torch.long) for target in mapping.absent}


def _is_copy(target: str, config: PreTrainedConfig) -> bool:
    """Whether a tensor of the model is another one's copy, which is not saved."""
    if target in _TIED_TO_EMBEDDING:
        return config.tie_word_embeddings
    of_target = ".decoder." in target and target.endswith(".word_embeddings.weight")
    return of_target and config.share_encoder_decoder_embeddings


def without_memory(model_class: type[PreTrainedModel], plan: Plan) -> PreTrainedModel:
    """The model on the meta device: names and shapes only."""
    with torch.device("meta"):
        return model_class(plan.config)


def few(keys: list[str]) -> str:
    """The first five names and how many more there are."""
    return ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")


def _expected_shapes(plan: Plan) -> dict[str, torch.Size]:
    shapes = {}
    for model_class in (plan.model_class, *plan.also_loads):
        shapes |= {name: tensor.shape for name, tensor in without_memory(model_class, plan).state_dict().items()}
    return shapes


def _source_name(keymap: KeyMap, target: str) -> str:
    match = keymap.backward(target)
    return target if match is None else match.key
