"""Load teachers, which may be damaged or not match their configuration, and check their tokenizers."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME, cached_file

from luna_mega.convert.safe_load.reader import read_tensors
from luna_mega.distillation.originals import check_adapter, check_quantization
from luna_mega.distillation.parts import find_head
from luna_mega.distillation.teachers import Teacher, check_teacher, model_class
from luna_mega.errors import ConversionError, reason
from luna_mega.hub.find import find_file, find_model
from luna_mega.hub.folder import largest_id, open_weights, read_weight_map


def load_teacher(name_or_path: str, num_labels: int | None = None, **options: Any) -> Teacher:
    """Load a teacher from a folder or the Hub, with the head that its `config.json` specifies.

    Weights are read from safetensors or, if there are none, from `pytorch_model.bin` by a reader that executes nothing.
    Their sizes are compared with the configuration before a model is built. Code that comes with a model is not run.

    Args:
        name_or_path: folder or name on the Hub.
        num_labels: load a sequence classifier, whose head is new unless the checkpoint has one of that size.
        options: passed to `from_pretrained` (`revision`, `dtype`, `device_map`, ...).

    Raises:
        ValueError: There is no such folder or model, or it cannot be a teacher, is damaged, lacks weights, or requires
            its own code.
    """
    if options.pop("trust_remote_code", False):
        raise ValueError("trust_remote_code=True runs code of the teacher; omit it, and use a model of transformers")
    places = {key: options.pop(key) for key in ("revision", "cache_dir", "token", "subfolder") if key in options}
    name = find_teacher(name_or_path, places)
    return load_weights(name, *read_config(name, num_labels, places), num_labels, places, **options)


def find_teacher(name: str, places: dict[str, Any] | None = None) -> str:
    """Return the folder or name that a teacher is loaded from; see `find_model`."""
    folder = Path(name)
    if folder.suffix == ".gguf" or (any(folder.glob("*.gguf")) and not (folder / "config.json").exists()):
        raise ValueError(f"{name} is a GGUF checkpoint; pass a checkpoint in safetensors")
    return find_model(name, **{key: value for key, value in (places or {}).items() if key != "subfolder"})


def read_config(
    name: str, num_labels: int | None, places: dict[str, Any]
) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """Return the configuration and the class of a teacher; see `load_teacher`."""
    with _one_line(name):
        check_adapter(name, places)
        config = AutoConfig.from_pretrained(name, trust_remote_code=False, **places)
    check_quantization(name, config)
    check_teacher(config)
    with _one_line(name):
        if num_labels is None:
            return config, model_class(config)
        config.num_labels = num_labels
        return config, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]


def load_weights(
    name: str,
    config: PreTrainedConfig,
    kind: type[PreTrainedModel],
    num_labels: int | None,
    places: dict[str, Any],
    **options: Any,
) -> Teacher:
    """Return the teacher of a configuration and a class; see `load_teacher`."""
    with _one_line(name):
        tensors, shapes = _read_weights(name, places)
    _check_sizes(name, kind, config, shapes)
    with _one_line(name):
        source = {"config": config} | places
        if tensors is None:
            source |= {"pretrained_model_name_or_path": name, "use_safetensors": True}
        else:
            source |= {"pretrained_model_name_or_path": None, "state_dict": tensors}
        # Sizes that do not match are collected, to name one of them in the error below.
        collected = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, info = kind.from_pretrained(**source, **collected, **options)
    _check_loaded(name, model, info, num_labels)
    teacher = Teacher(model)
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    ids = ids[:, None] if find_head(model) == "ForMultipleChoice" else ids
    with _one_line(name), torch.no_grad():  # invalid values of the configuration may only show here
        logits = model(**teacher.inputs({"input_ids": ids}))[0]
    if not torch.isfinite(logits).all():
        raise ValueError(f"{name}: the teacher's logits are not finite; use another checkpoint")
    return teacher


def _check_loaded(name: str, model: PreTrainedModel, info: dict[str, Any], num_labels: int | None) -> None:
    """Raise an error if weights are missing or have another shape; with `num_labels`, the head may be new."""
    body = "" if num_labels is None else f"{model.base_model_prefix}."
    for key, stored, expected in sorted(entry for entry in info["mismatched_keys"] if entry[0].startswith(body)):
        raise ValueError(
            f"{name}: {key} has shape {list(stored)}, but config.json specifies {list(expected)}; pass the "
            "checkpoint's own config.json"
        )
    missing = sorted(key for key in info["missing_keys"] if key.startswith(body))
    if num_labels is not None or model.base_model is model:  # a bare encoder may be saved without the pooler
        missing = [key for key in missing if "pooler." not in key]
    if missing:
        raise ValueError(
            f"{name} lacks {len(missing)} weights of {type(model).__name__} ({missing[0]}, ...), which would be "
            "random; use a checkpoint with its head"
        )


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    """Raise any error about a damaged file as a ValueError of one line; transformers and torch raise many types."""
    try:
        yield
    except (OSError, ConversionError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ValueError(f"{name} requires its own code, which is not run; use a model of transformers") from error
        raise ValueError(f"{name}: {type(error).__name__}: {reason(error)}") from error


def _read_weights(name: str, places: dict[str, Any]) -> tuple[dict[str, torch.Tensor] | None, dict[str, torch.Size]]:
    """Return the tensors of pickled weights and all shapes.

    For safetensors, the tensors are None and only the headers are read.
    """
    if files := _find(name, SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, places):
        shapes = {}
        for file in files:
            with open_weights(file) as weights:
                shapes |= {key: torch.Size(weights.get_slice(key).get_shape()) for key in weights.keys()}
        return None, shapes
    if not (files := _find(name, WEIGHTS_NAME, WEIGHTS_INDEX_NAME, places)):
        raise ConversionError(
            f"{name}: no weights in {SAFE_WEIGHTS_NAME} or {WEIGHTS_NAME}; pass a checkpoint of transformers"
        )
    tensors = {key: tensor for file in files for key, tensor in read_tensors(file).tensors.items()}
    return tensors, {key: tensor.shape for key, tensor in tensors.items()}


def _find(name: str, single: str, index: str, places: dict[str, Any]) -> list[Path]:
    """Return the file that contains all weights, or the files in an index, or an empty list."""
    if file := find_file(name, single, **places):
        return [file]
    if file := find_file(name, index, **places):
        shards = sorted(set(read_weight_map(file).values()))
        return [Path(cached_file(name, shard, **places)) for shard in shards]
    return []


def _check_sizes(name: str, kind: type, config: PreTrainedConfig, shapes: dict[str, torch.Size]) -> None:
    """Raise an error if the weights have other layers than the configuration, or less than half of its parameters.

    `from_pretrained` reports smaller differences, but allocates and initializes missing parameters first.
    """
    layer = re.compile(rf"(?:^|\.){re.escape(check_teacher(config).layers.rpartition('.')[2])}\.(\d+)\.")
    layers = 1 + max((int(match[1]) for key in shapes if (match := layer.search(key))), default=-1)
    wanted = config.num_hidden_layers
    if wanted != layers:
        raise ValueError(
            f"{name}: config.json specifies {wanted} layers, but the weights have {layers}; pass a complete checkpoint"
        )
    with _one_line(name), torch.device("meta"):
        parameters = kind(config).num_parameters()
    if parameters > 2 * (present := sum(shape.numel() for shape in shapes.values())):
        raise ValueError(
            f"{name}: config.json specifies {parameters:,} parameters, but the weights have {present:,}; pass a "
            "complete checkpoint with its own config.json"
        )


def check_tokenizer(teacher: Teacher, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ValueError` if a tokenizer is not the teacher's.

    It has larger ids than the teacher, no mask token for a masked language model, or another padding token, if
    positions depend on it.
    """
    if find_head(teacher.model) == "ForMaskedLM" and tokenizer.mask_token_id is None:
        raise ValueError("the tokenizer has no mask token, which a masked LM requires; use the teacher's tokenizer")
    if (largest := largest_id(tokenizer)) >= teacher.config.vocab_size:
        raise ValueError(
            f"the tokenizer has token id {largest}, but the teacher's vocab_size is {teacher.config.vocab_size}; use "
            "the teacher's tokenizer"
        )
    own, padding = getattr(teacher.config, "pad_token_id", None), tokenizer.pad_token_id
    if teacher.family.padded and None not in (own, padding) and own != padding:
        raise ValueError(f"the tokenizer pads with {padding} and the teacher with {own}; use the teacher's tokenizer")
