"""Self-contained model folders (`luna-mega bundle`): code for folders that were saved without it."""

import json
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from luna_mega._register import CONFIGS, model_classes
from luna_mega.cards import FILE_NAME, TAG, add_section, loading_section, loading_without_package
from luna_mega.errors import ConversionError, reason
from luna_mega.escaping import markdown
from luna_mega.hub.files import copy_model
from luna_mega.hub.folder import build_config, read_config, weight_files
from luna_mega.hub.output import check_output, complete_folder
from luna_mega.modeling_common.configuration import has_code, is_foreign
from luna_mega.modeling_luna import tokenization_luna
from luna_mega.saved_code import generated_files, write_code


def bundle(folder: str | Path, output: str | Path | None = None) -> list[str]:
    """Make a folder that `AutoModel...from_pretrained(folder, trust_remote_code=True)` loads without this package.

    `save_pretrained` already writes such folders, unless `luna_mega.save_code(False)` was called.

    Args:
        folder: Folder of `save_pretrained` with a model of this package.
        output: Folder to write, absent or empty. It receives the code and a copy of the files that belong to a model
            (`luna_mega/hub/files.py`). If None, the code is added to `folder` and replaces the code of an earlier
            bundle.

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
