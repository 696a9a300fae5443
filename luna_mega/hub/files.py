"""List and copy the files that belong to a model folder (`luna-mega bundle`)."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from luna_mega.errors import ConversionError
from luna_mega.hub.folder import TARGET_FOLDER, weight_files

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
