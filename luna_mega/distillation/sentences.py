"""Folders of sentence-transformers: the modules after the transformer, and the vectors that they return."""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers.utils import cached_file

from luna_mega.errors import shown
from luna_mega.hub.folder import read_json
from luna_mega.modeling_common.pooling import first_token, masked_mean

_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
_LEGACY = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_CONFIGS = ("sentence_bert_config.json", "config_sentence_transformers.json")
_FILES = ("config.json", "model.safetensors", "pytorch_model.bin")  # files of a module
_TRANSFORMERS = ("Transformer", "MLMTransformer")
_POOLING = ("Pooling", "SpladePooling")
_MODULES = (*_POOLING, "Normalize", "Dense", "LayerNorm", "Dropout", "WeightedLayerPooling", "SparseAutoEncoder")
_MODELS = ("SentenceTransformer", "SparseEncoder", "CrossEncoder")


@dataclass
class SentenceModules:
    """The modules of a sentence-transformers folder after its transformer.

    Args:
        pooling: modes of the pooling, whose vectors are concatenated; empty for a cross-encoder.
        normalizes: whether the vectors are scaled to length 1.
        max_seq_length: longest text in tokens; None = not specified.
        prompts: texts before an input, by name.
        files: relative paths -> the files to copy.
        settings: contents of `sentence_bert_config.json`.
        others: types of modules that are neither pooling nor normalization.
        kind: class of sentence-transformers that loads the folder.
    """

    pooling: tuple[str, ...]
    normalizes: bool = False
    max_seq_length: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    kind: str = "SentenceTransformer"

    def write(self, folder: Path, max_length: int) -> None:
        """Write the modules next to a saved transformer for texts of `max_length` tokens.

        Without `files`, these are mean pooling. A folder without modules would be truncated to the position table.
        """
        if not self.files:
            _write_mean(folder)
        for name, path in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)
        settings = _without_limits(self.settings, max_length) | {"max_seq_length": max_length}
        (folder / _CONFIGS[0]).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    @property
    def embeds(self) -> bool:
        """Whether `embed` returns the vectors: the only modules are pooling by cls or mean, and normalization."""
        return self.pooling in (("cls",), ("mean",)) and not self.others

    def embed(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the vectors `[B, d]` of the last states `[B, T, d]` of a text with `mask` `[B, T]`, True = keep."""
        vectors = (first_token if self.pooling == ("cls",) else masked_mean)(states, mask)
        return functional.normalize(vectors, dim=-1) if self.normalizes else vectors


def _without_limits(settings: dict[str, Any], max_length: int) -> dict[str, Any]:
    """Return settings without length limits, except for shorter limits of queries and documents."""
    kept = dict(settings)
    longest = min(kept.get("max_seq_length") or max_length, max_length)
    for name in ("query_length", "document_length"):
        if (kept.get(name) or 0) >= longest:
            del kept[name]
    if isinstance(options := kept.get("processing_kwargs"), dict):
        kept["processing_kwargs"] = {key: _without(value, "max_length") for key, value in options.items()}
    return kept


def _without(options: Any, name: str) -> Any:
    return {key: value for key, value in options.items() if key != name} if isinstance(options, dict) else options


def _write_mean(folder: Path) -> None:
    """Write a mean pooling module to the folder of a saved transformer."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    width = json.loads((folder / "config.json").read_text(encoding="utf-8-sig"))["hidden_size"]
    (folder / "1_Pooling").mkdir(exist_ok=True)
    for path, content in (
        ("modules.json", modules),
        ("1_Pooling/config.json", {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}),
    ):
        (folder / path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_modules(name: str) -> SentenceModules | None:
    """Return the modules of a sentence-transformers folder or repository; None if it is not one.

    Raises:
        ValueError: The folder is damaged, or its first module is not a transformer in the same folder.
    """
    listed = None if Path(name).is_file() else _read(name, "modules.json", list)
    if listed is None:
        return None
    try:
        kinds = [(_short(str(entry["type"])), str(entry["path"])) for entry in listed]
    except (TypeError, KeyError) as error:
        raise ValueError(f"{name}: modules.json is not a list of modules with type and path; repair it") from error
    if not kinds or kinds[0] not in [(kind, "") for kind in _TRANSFORMERS]:
        raise ValueError(
            f"{name}: the first module in modules.json must be a Transformer in the same folder, got {kinds[:1]}; pass "
            "the folder of the transformer"
        )
    if outside := [path for _, path in kinds if Path(path).is_absolute() or ".." in Path(path).parts]:
        raise ValueError(
            f"{name}: modules.json names {shown(outside[0])}, which is not in the folder; copy the module there"
        )
    if unknown := [kind for kind, _ in kinds[1:] if kind not in _MODULES]:
        raise ValueError(
            f"{name}: the module {shown(unknown[0])} in modules.json is not supported; supported are "
            f"{', '.join(_MODULES)}"
        )
    pooling: tuple[str, ...] = ()
    files = {path: file for path in ("modules.json", _CONFIGS[1]) if (file := _find(name, path))}
    for kind, path in kinds[1:]:
        found = {f"{path}/{file}": place for file in _FILES if path and (place := _find(name, f"{path}/{file}"))}
        files |= found
        if kind == "Pooling":
            pooling = _pooling(name, f"{path}/config.json")
    settings, prompts = _read(name, _CONFIGS[0]) or {}, _read(name, _CONFIGS[1]) or {}
    sparse = any(kind == "SpladePooling" for kind, _ in kinds)
    model = prompts.get("model_type", _MODELS[sparse])
    if model not in _MODELS:
        raise ValueError(f"{name}: a {shown(model)} is not supported; supported are {', '.join(_MODELS)}")
    if model != "CrossEncoder" and not any(kind in _POOLING for kind, _ in kinds):
        raise ValueError(f"{name}: modules.json contains no Pooling; add one, or pass a folder without modules.json")
    others = tuple(kind for kind, _ in kinds[1:] if kind not in ("Pooling", "Normalize"))
    normalizes = any(kind == "Normalize" for kind, _ in kinds)
    length, texts = settings.get("max_seq_length"), prompts.get("prompts") or {}
    if length is not None and (type(length) is not int or length < 1):
        raise ValueError(
            f"{name}: max_seq_length must be a positive integer, got {shown(length)}; repair {_CONFIGS[0]}"
        )
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(f"{name}: prompts must be texts by name, got {shown(texts)}; repair {_CONFIGS[1]}")
    return SentenceModules(pooling, normalizes, length, texts, files, settings, others, model)


def _short(kind: str) -> str:
    """Return the class name of a module of sentence-transformers, or the qualified name of another class."""
    return kind.rpartition(".")[2] if kind.startswith("sentence_transformers.") else kind


def _pooling(name: str, path: str) -> tuple[str, ...]:
    """Return the modes of a pooling module."""
    config = _read(name, path) or {}
    given = config.get("pooling_mode", [mode for field, mode in _LEGACY.items() if config.get(field)])
    modes = tuple(given) if isinstance(given, list) else (given,)
    width, model = config.get("word_embedding_dimension"), _read(name, "config.json") or {}
    size = model.get("hidden_size", model.get("dim"))
    if None not in (width, size) and width != size:
        raise ValueError(
            f"{name}: {path} is for vectors of {width} numbers, but config.json specifies {size}; pass the "
            "folder's own files"
        )
    unknown = [str(mode) for mode in modes if mode not in _MODES]
    unknown += [field for field in config if field.startswith("pooling_mode_") and field not in _LEGACY]
    if unknown or not modes:
        raise ValueError(
            f"{name}: {path} has the pooling {', '.join(unknown) or 'none'}; supported are {', '.join(_MODES)}"
        )
    return modes


def _find(name: str, path: str) -> Path | None:
    file = cached_file(name, path, _raise_exceptions_for_missing_entries=False)
    return Path(file) if file else None


def _read(name: str, path: str, kind: type = dict) -> Any:
    """Return the content of a JSON file, or None if there is no file."""
    file = _find(name, path)
    return None if file is None else read_json(file, kind)
