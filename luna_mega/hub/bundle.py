"""Self-contained model folders (`luna-mega bundle`): code for folders that were saved without it."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from luna_mega._register import CONFIGS, model_classes
from luna_mega.cards import FILE_NAME, TAG, add_section, loading_section, loading_without_package
from luna_mega.errors import ConversionError, reason
from luna_mega.escaping import markdown
from luna_mega.hub.folder import TARGET_FOLDER, build_config, read_config, weight_files
from luna_mega.hub.output import check_output, complete_folder
from luna_mega.modeling_common.configuration import has_code, is_foreign
from luna_mega.modeling_luna import tokenization_luna
from luna_mega.saved_code import generated_files, write_code

# Weights, configuration, tokenizer, processor, files of sentence-transformers, documentation. Nothing else, except
# shards that are read, is copied to a folder that is meant for an upload.
_FILES = re.compile(
    r"""
    model\.safetensors
    | (config|generation_config|conversion_report)\.json
    | (tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|encoder)\.json
    | (vocab|merges|dict|dict\.\w+)\.txt | vocab\.bpe | [\w.-]+\.model | chat_template\.(jinja|json)
    | (preprocessor_config|processor_config)\.json
    | (modules|config_sentence_transformers|sentence_bert_config)\.json
    | README\.md | (LICEN[CS]E|NOTICE)(\.md|\.txt)?
    """,
    re.VERBOSE,
)
# Subfolders: tokenizer of the target, and modules of sentence-transformers.
_FOLDERS = re.compile(rf"{TARGET_FOLDER}|\d+_[A-Za-z]+")


def bundle(folder: str | Path, output: str | Path | None = None) -> list[str]:
    """Make a folder that `AutoModel...from_pretrained(folder, trust_remote_code=True)` loads without this package.

    `save_pretrained` already writes such folders, unless `luna_mega.save_code(False)` was called.

    Args:
        folder: Folder of `save_pretrained` with a model of this package.
        output: Folder to write, absent or empty. It receives the code and a copy of the files that belong to a model
            (`copy_model`). If None, the code is added to `folder` and replaces the code of an earlier bundle.

    Returns:
        Lines of code that load the model without this package.

    Raises:
        ConversionError: If `folder` or `output` is invalid.
    """
    config, folder = read_config(folder), Path(folder)
    weight_files(folder)  # an error if there are none
    build_config(folder, config)
    if output is None:
        return _add_code(folder, folder, config)
    with complete_folder(check_output(output)) as target:
        copy_model(folder, target)
        code = Path(tokenization_luna.__file__)
        if (folder / code.name).exists():  # LunaTokenizer saves its code, which is taken from the package instead
            shutil.copyfile(code, target / code.name)
        return _add_code(target, Path(output), config)


def copy_model(folder: str | Path, output: Path) -> None:
    """Copy the files of a model folder to an empty folder; symbolic links are replaced by their targets.

    Raises:
        ConversionError: If weights are missing, or a link points outside of the folder, except to the blobs of the same
            repository in the Hub's cache.
    """
    root = Path(folder).resolve()
    homes = [root]
    if root.parent.name == "snapshots":  # the cache of huggingface_hub
        homes.append(root.parents[1] / "blobs")
    for file in _model_files(Path(folder)):
        home = file.resolve()
        if not any(home.is_relative_to(place) for place in homes):
            raise ConversionError(
                f"{file}: the symbolic link points outside of the folder; copy the file, or remove the link"
            )
        place = output / file.relative_to(folder)
        place.parent.mkdir(exist_ok=True)
        shutil.copyfile(home, place)


def _model_files(folder: Path) -> Iterator[Path]:
    """Yield the weights that `from_pretrained` reads, and the regular files whose names are in the list."""
    if (weights := weight_files(folder)) != [folder / SAFE_WEIGHTS_NAME]:
        yield from [*weights, folder / SAFE_WEIGHTS_INDEX_NAME]
    for entry in sorted(folder.iterdir()):
        if _FOLDERS.fullmatch(entry.name) and entry.is_dir():
            entries = sorted(entry.iterdir())
        else:
            entries = [entry]
        yield from (file for file in entries if _FILES.fullmatch(file.name) and file.is_file())


def _add_code(folder: Path, name: Path, config: dict[str, Any]) -> list[str]:
    """Write the code, then the configuration that names it, and complete the card; return the code to load `name`.

    The configuration is written after the code, so that a folder still loads if this is interrupted. Nothing is written
    if the card cannot be read.
    """
    text, license = _read_card(folder / FILE_NAME, name)
    foreign = {
        auto: code
        for auto, code in (config.get("auto_map") or {}).items()
        if is_foreign(code) and has_code(code, folder)
    }
    auto_map = write_code(config["model_type"], folder)
    content = json.dumps(config | {"auto_map": foreign | auto_map}, indent=2, sort_keys=True)
    replace_text(folder / "config.json", f"{content}\n")
    for file in generated_files(folder):  # earlier versions wrote the code next to the weights
        file.unlink()
    config_class = CONFIGS[config["model_type"]]
    classes = model_classes(config_class)
    listed = config.get("architectures")
    names = [*(listed if isinstance(listed, list) else []), f"{config_class.__name__.removesuffix('Config')}Model"]
    model_class = classes[next(name for name in names if isinstance(name, str) and name in classes)]
    replace_text(folder / FILE_NAME, add_section(text, loading_section(model_class, folder, name.name, license)))
    return loading_without_package(model_class, str(name))


def _read_card(card: Path, name: Path) -> tuple[str, str | None]:
    """Return the text of a card, or of a new one for `name`, and the license of the weights."""
    if card.is_file():
        text = card.read_text(encoding="utf-8-sig")
    else:
        data = ModelCardData(library_name="transformers", tags=[TAG])
        text = f"---\n{data}\n---\n\n# {markdown(name.resolve().name)}\n"
    try:
        return text, ModelCard(text, ignore_metadata_errors=True).data.license
    except Exception as error:  # huggingface_hub and PyYAML raise different types
        raise ConversionError(f"{card}: invalid metadata ({reason(error)}); repair them") from error


def replace_text(file: Path, text: str) -> None:
    """Write a text file completely or not at all."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)
