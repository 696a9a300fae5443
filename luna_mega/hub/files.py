"""The files that belong to a model folder, and their copies (`luna-mega bundle`, `luna-mega demo --space`)."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from luna_mega.errors import ConversionError
from luna_mega.hub.folder import TARGET_FOLDER

# Weights, configuration, tokenizer, processor, sentence-transformers' files, texts for people. Nothing else is copied
# into a folder that is made for upload.
_FILES = re.compile(
    r"""
    model(-\d+-of-\d+)?\.safetensors | model\.safetensors\.index\.json | source_norms\.safetensors
    | (config|generation_config|conversion_report)\.json
    | (tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|encoder)\.json
    | (vocab|merges|dict|dict\.\w+)\.txt | vocab\.bpe | [\w.-]+\.model | chat_template\.(jinja|json)
    | (preprocessor_config|processor_config)\.json
    | (modules|config_sentence_transformers|sentence_bert_config)\.json
    | README\.md | (LICENSE|LICENCE|NOTICE)(\.md|\.txt)?
    """,
    re.VERBOSE,
)
# Sub-folders: a target's tokenizer, and the modules of sentence-transformers.
_FOLDERS = re.compile(rf"{TARGET_FOLDER}|\d+_[A-Za-z]+")


def copy_model(folder: str | Path, output: Path) -> None:
    """Copy the files of a model folder into an empty folder, links as what they lead to.

    Raises:
        ConversionError: a link leads out of the folder, and not to the blobs of the Hub's cache beside it.
    """
    root = Path(folder).resolve()
    homes = [root]
    if root.parent.name == "snapshots":  # the cache of huggingface_hub
        homes.append(root.parents[1] / "blobs")
    for file in _model_files(Path(folder)):
        home = file.resolve()
        if not any(home.is_relative_to(place) for place in homes):
            raise ConversionError(f"{file}: a link out of the folder; put the file itself there, or remove the link")
        place = output / file.relative_to(folder)
        place.parent.mkdir(exist_ok=True)
        shutil.copyfile(home, place)


def _model_files(folder: Path) -> Iterator[Path]:
    """Yield the files of the list; a folder or a special file under the name of one is none."""
    for entry in sorted(folder.iterdir()):
        if _FOLDERS.fullmatch(entry.name) and entry.is_dir():
            entries = sorted(entry.iterdir())
        else:
            entries = [entry]
        yield from (file for file in entries if _FILES.fullmatch(file.name) and file.is_file())
