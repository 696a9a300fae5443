"""Read model folders of `save_pretrained`, `luna-mega convert` or the Hub without building the model."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, RobertaTokenizer
from transformers.utils import (
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from luna_mega._register import CONFIGS, model_classes
from luna_mega.errors import ConversionError, reason, shown
from luna_mega.hub.find import find_model
from luna_mega.hub.output import check_path

TARGET_FOLDER = "target"  # tokenizer of the target of an encoder-decoder, if it differs from the source's


@dataclass(frozen=True)
class ModelFolder:
    """A model folder."""

    path: Path
    files: list[Path]  # with the weights
    model_class: type[PreTrainedModel]
    config: PreTrainedConfig

    def load(self, **options: Any) -> PreTrainedModel:
        """Return the model in evaluation mode; the options are those of `from_pretrained`.

        Raises:
            ConversionError: If the weights do not fit the configuration.
        """
        if (self.path / GENERATION_CONFIG_NAME).is_file():
            read_json(self.path / GENERATION_CONFIG_NAME)  # transformers raises a bare TypeError
        try:
            model, info = self.model_class.from_pretrained(
                self.path, use_safetensors=True, output_loading_info=True, **options
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # transformers, torch and safetensors raise different types
            raise ConversionError(f"{self.path}: {type(error).__name__}: {reason(error)}") from error
        if missing := sorted(info["missing_keys"]):
            raise ConversionError(f"{self.path}: the weights lack {', '.join(missing)[:200]}")
        return model.eval()


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that `from_pretrained` reads; raise an error if one is missing.

    As in transformers, `model.safetensors` takes precedence over an index of shards, which is then from another save.
    """
    single, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    sharded = index.is_file() and not single.is_file()
    files = [folder / name for name in sorted(set(read_weight_map(index).values()))] if sharded else [single]
    if missing := [file.name for file in files if not file.is_file()]:
        for name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
            if (folder / name).is_file():
                raise ConversionError(
                    f"{folder}: has its weights only in {name}; "
                    "convert them with AutoModel...from_pretrained(FOLDER).save_pretrained(NEW)"
                )
        raise ConversionError(
            f"{folder}: no {', '.join(missing[:3])}; use a folder of save_pretrained, with safetensors"
        )
    return files


def read_weight_map(index: Path) -> dict[str, str]:
    """Return the file name of each tensor from the index of sharded weights; raise an error for paths."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(map(_is_file_name, places.values())):
        raise ConversionError(f"{index}: weight_map must name files of this folder, got {shown(places)}")
    return places


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer from the Hub or a folder without running its code.

    RoBERTa's `vocab.json` and `merges.txt` are sufficient.

    Raises:
        ConversionError: There is no such folder or model, or it has no tokenizer that can be loaded.
    """
    names = {path.name for path in Path(source).glob("*")}
    bare = {"vocab.json", "merges.txt"} <= names and not names & {"tokenizer.json", "tokenizer_config.json"}
    place = find_model(str(source))
    try:
        if bare:
            tokenizer = RobertaTokenizer.from_pretrained(place)
        else:
            tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    except Exception as error:  # damaged files raise errors of many types in transformers and tokenizers
        raise ConversionError(
            f"{source}: no tokenizer that transformers {transformers.__version__} loads ({type(error).__name__}: "
            f"{reason(error)})"
        ) from error
    # transformers 5 returns an empty tokenizer if there are no files.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ConversionError(f"{source}: there is no tokenizer, or its vocabulary is empty; save the tokenizer there")
    return tokenizer


def remove_truncation(processor: Any) -> None:
    """Remove the truncation and padding of the last call, which `save_pretrained` would write to tokenizer.json."""
    if isinstance(processor, PreTrainedTokenizerBase) and processor.is_fast:
        processor.backend_tokenizer.no_truncation()
        processor.backend_tokenizer.no_padding()


def largest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest token id, which can exceed the number of tokens."""
    return max(tokenizer.get_vocab().values(), default=-1)


def stacks(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """Return the configuration of each stack of layers: of the encoder, of the decoder, or of both."""
    if config.is_encoder_decoder:
        return {"encoder": config.encoder_config, "decoder": config.decoder_config}
    return {"decoder" if config.is_decoder else "encoder": config}


def read_config(path: str | Path) -> dict[str, Any]:
    """Return config.json of a folder; raise an error unless it belongs to a model of this package."""
    path = check_path(path)
    if not path.is_dir():
        raise ConversionError(f"{path}: {'is a file; use a model folder' if path.exists() else 'no such folder'}")
    file = path / "config.json"
    if not file.is_file():
        raise ConversionError(f"{path}: no config.json; use a folder of save_pretrained")
    content = read_json(file)
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIGS:
        raise ConversionError(
            f"{file}: model_type {shown(model_type)} is not supported; expected {', '.join(map(repr, CONFIGS))}"
        )
    if not isinstance(content.get("auto_map") or {}, dict):
        raise ConversionError(f"{file}: auto_map {shown(content['auto_map'])} is not an object; remove it")
    return content


def build_config(path: str | Path, content: dict[str, Any]) -> PreTrainedConfig:
    """Return the configuration from the content of config.json; raise an error for unsupported values."""
    try:
        return CONFIGS[content["model_type"]].from_dict(dict(content))
    except Exception as error:  # transformers raises many types of errors for a value of a wrong type
        raise ConversionError(f"{Path(path) / 'config.json'}: {reason(error)}") from error


def read_folder(path: str | Path) -> ModelFolder:
    """Open a folder with a model of this package; raise an error if it is another one, or is damaged."""
    content, path = read_config(path), Path(path)
    files, file = weight_files(path), path / "config.json"
    config = build_config(path, content)
    names, classes = content.get("architectures") or [None], model_classes(type(config))
    name = names[0] if isinstance(names, list) else names
    if not isinstance(name, str) or name not in classes:
        raise ConversionError(f"{file}: architectures {shown(name)} is not one of {', '.join(classes)}")
    return ModelFolder(path, files, classes[name], config)


def read_json(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file; raise an error unless it is an object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{file}: not JSON ({error}); repair it") from error
    if not isinstance(content, dict):
        raise ConversionError(f"{file}: not a JSON object; repair it")
    return content
