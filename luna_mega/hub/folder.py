"""Model folders (of `save_pretrained`, `luna-mega convert`, the Hub), read without building the model."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from luna_mega import LunaConfig
from luna_mega._register import CONFIGS, model_classes
from luna_mega.errors import ConversionError

REPORT_NAME = "conversion_report.json"
TARGET_FOLDER = "target"  # the tokenizer of an encoder-decoder's target, where it is another one than the source's
_REPORT_FIELDS = {"source", "decisions", "dropped", "dtype_in", "args"}


@dataclass(frozen=True)
class TensorInfo:
    """The file, shape and dtype of a tensor on disk."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ModelFolder:
    """A model folder: class and configuration from config.json; `report` is conversion_report.json, None = absent."""

    path: Path
    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    transformers_version: str | None
    report: dict[str, Any] | None

    @cached_property
    def tensor_info(self) -> dict[str, TensorInfo]:
        """Return name -> `TensorInfo`, read from the headers of the weight files.

        The names are those of a model with a head.
        """
        found = {}
        for file in self._weight_files():
            with _open(file) as weights:
                for name in weights.keys():
                    part = weights.get_slice(name)
                    found[self._full_name(name)] = TensorInfo(file, tuple(part.get_shape()), part.get_dtype())
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors, mapped from the files, under the names of `tensor_info`."""
        found = {}
        for file in self._weight_files():
            with _open(file) as weights:
                found |= {self._full_name(name): weights.get_tensor(name) for name in weights.keys()}
        return found

    def _full_name(self, name: str) -> str:
        bare = "For" not in self.model_class.__name__
        return f"{self.model_class.base_model_prefix}.{name}" if bare else name

    def _weight_files(self) -> list[Path]:
        index = self.path / SAFE_WEIGHTS_INDEX_NAME
        names = [SAFE_WEIGHTS_NAME]
        if index.is_file():
            names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        files = [self.path / name for name in names]
        if missing := [file.name for file in files if not file.is_file()]:
            raise ConversionError(f"{self.path}: no {', '.join(missing)}; give a folder that save_pretrained wrote")
        return files


def position_limit(config: PreTrainedConfig) -> int | None:
    """Return the number of positions in the model's table, None = it has no table and takes any number."""
    if isinstance(config, LunaConfig):
        return config.max_position_embeddings if config.position_embedding_type == "learned" else None
    table = config.relative_positional_bias == "simple" and not config.use_chunking
    return config.max_positions if table else None


def read_folder(path: str | Path) -> ModelFolder:
    """Open a folder that holds a Luna or Mega model.

    Raises:
        ConversionError: not such a folder, or a damaged one; one line names the file and the way out.
    """
    path = Path(path)
    if not path.is_dir():
        raise ConversionError(f"{path}: {'is a file, give a model folder' if path.exists() else 'no such folder'}")
    file = path / "config.json"
    if not file.is_file():
        raise ConversionError(f"{path}: no config.json; give a folder that save_pretrained wrote")
    content = _read_json(file)
    if content.get("model_type") not in CONFIGS:
        raise ConversionError(
            f"{file}: model_type {content.get('model_type')!r}; this version knows {', '.join(map(repr, CONFIGS))}"
        )
    try:
        config = CONFIGS[content["model_type"]].from_dict(content)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ConversionError(f"{file}: {error}") from error
    names = content.get("architectures") or [None]
    classes = model_classes(type(config))
    if names[0] not in classes:
        raise ConversionError(f"{file}: architectures {names[0]!r} is not one of {', '.join(classes)}")
    conversion = path / REPORT_NAME
    written = _read_json(conversion) if conversion.is_file() else None
    if written is not None and (written.get("format") != 1 or not _REPORT_FIELDS <= written.keys()):
        raise ConversionError(f"{conversion}: format {written.get('format')!r} is not one that this version reads")
    return ModelFolder(path, classes[names[0]], config, content.get("transformers_version"), written)


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ConversionError(f"{file}: damaged or truncated ({error}); copy or download it again") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConversionError(f"{file}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ConversionError(f"{file}: not a JSON object")
    return content
