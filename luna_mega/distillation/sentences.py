"""Folders of sentence-transformers: the modules after the transformer, and the vectors that they return."""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from luna_mega.errors import shown
from luna_mega.hub.find import find_file
from luna_mega.hub.folder import read_json
from luna_mega.modeling_common.pooled_heads import first_token, masked_mean

_MODES = {  # field of an earlier version -> value of `pooling_mode`
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
    """The modules of a sentence-transformers folder after its transformer."""

    pooling: tuple[str, ...]  # modes of the pooling, whose vectors are concatenated; empty for a cross-encoder
    normalizes: bool = False  # whether the vectors are scaled to length 1
    max_seq_length: int | None = None  # longest text in tokens; None = not specified
    files: dict[str, Path] = field(default_factory=dict)  # relative paths -> the files to copy
    settings: dict[str, Any] = field(default_factory=dict)  # contents of `sentence_bert_config.json`
    others: tuple[str, ...] = ()  # types of modules that are neither pooling nor normalization
    kind: str = "SentenceTransformer"  # class of sentence-transformers that loads the folder

    def write(self, folder: Path, max_length: int) -> None:
        """Write the modules next to a saved transformer for texts of `max_length` tokens."""
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
    names = [kind for kind, _ in kinds[1:]]
    settings, prompts = _read(name, _CONFIGS[0]) or {}, _read(name, _CONFIGS[1]) or {}
    length, texts = settings.get("max_seq_length"), prompts.get("prompts") or {}
    model = prompts.get("model_type", _MODELS["SpladePooling" in names])
    outside = next((path for _, path in kinds if Path(path).is_absolute() or ".." in Path(path).parts), None)
    unknown = next((kind for kind in names if kind not in _MODULES), None)

    def check(valid: bool, message: str) -> None:
        if not valid:
            raise ValueError(f"{name}: {message}")

    check(
        kinds[:1] in [[(kind, "")] for kind in _TRANSFORMERS],
        f"the first module in modules.json must be a Transformer in the same folder, got {kinds[:1]}; pass the folder "
        "of the transformer",
    )
    check(outside is None, f"modules.json names {shown(outside)}, which is not in the folder; copy the module there")
    check(
        unknown is None,
        f"the module {shown(unknown)} in modules.json is not supported; supported are {', '.join(_MODULES)}",
    )
    check(model in _MODELS, f"a {shown(model)} is not supported; supported are {', '.join(_MODELS)}")
    check(
        model == "CrossEncoder" or not {*names}.isdisjoint(_POOLING),
        "modules.json contains no Pooling; add one, or pass a folder without modules.json",
    )
    check(
        length is None or (type(length) is int and length > 0),
        f"max_seq_length must be a positive integer, got {shown(length)}; repair {_CONFIGS[0]}",
    )
    check(
        isinstance(texts, dict) and all(isinstance(text, str) for text in texts.values()),
        f"prompts must be texts by name, got {shown(texts)}; repair {_CONFIGS[1]}",
    )
    files = {path: file for path in ("modules.json", _CONFIGS[1]) if (file := find_file(name, path))}
    paths = [f"{path}/{file}" for _, path in kinds[1:] if path for file in _FILES]
    files |= {path: place for path in paths if (place := find_file(name, path))}
    pooling = [_pooling(name, f"{path}/config.json") for kind, path in kinds if kind == "Pooling"][-1:]
    others = tuple(kind for kind in names if kind not in ("Pooling", "Normalize"))
    return SentenceModules(pooling[0] if pooling else (), "Normalize" in names, length, files, settings, others, model)


def _short(kind: str) -> str:
    """Return the class name of a module of sentence-transformers, or the qualified name of another class."""
    return kind.rpartition(".")[2] if kind.startswith("sentence_transformers.") else kind


def _pooling(name: str, path: str) -> tuple[str, ...]:
    """Return the modes of a pooling module."""
    config = _read(name, path) or {}
    given = config.get("pooling_mode", [mode for field, mode in _MODES.items() if config.get(field)])
    modes = tuple(given) if isinstance(given, list) else (given,)
    width, model = config.get("word_embedding_dimension"), _read(name, "config.json") or {}
    size = model.get("hidden_size", model.get("dim"))
    if None not in (width, size) and width != size:
        raise ValueError(
            f"{name}: {path} is for vectors of {width} numbers, but config.json specifies {size}; pass the "
            "folder's own files"
        )
    unknown = [str(mode) for mode in modes if mode not in _MODES.values()]
    unknown += [field for field in config if field.startswith("pooling_mode_") and field not in _MODES]
    if unknown or not modes:
        raise ValueError(
            f"{name}: {path} has the pooling {', '.join(unknown) or 'none'}; supported are {', '.join(_MODES.values())}"
        )
    return modes


def _read(name: str, path: str, kind: type = dict) -> Any:
    """Return the content of a JSON file, or None if there is no file."""
    file = find_file(name, path)
    return None if file is None else read_json(file, kind)
