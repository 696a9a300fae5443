"""The section of a model card that says how to load the model, with and without this package, and its license.

The cards of `Trainer` and `push_to_hub` contain it.
"""

import functools
import json
import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers import PreTrainedModel
from transformers.modelcard import TrainingSummary
from transformers.modeling_utils import unwrap_model

from luna_mega._register import auto_classes, model_classes
from luna_mega.compat import REQUIRED, SUPPORTED
from luna_mega.modeling_common.base import CommonPreTrainedModel
from luna_mega.modeling_common.configuration import CODE_FOLDER

FILE_NAME = "README.md"
TAG = "luna-mega"
# transformers 4 does not run the code, so that only this sentence can say what it requires.
WITHOUT_PACKAGE = (
    f"Without luna-mega, transformers runs the code in `{CODE_FOLDER}`, which requires transformers "
    f"{REQUIRED['transformers']} or later and is tested with torch {SUPPORTED['torch'][0]} or later:"
)


def auto_class_of(model_class: type) -> str | None:
    """Return the name of the most specific Auto class that loads a model class, or None."""
    classes = auto_classes(model_class.config_class)
    return next((name for name, cls in reversed(classes.items()) if cls is model_class), None)


def known_class(model_class: type) -> type | None:
    """Return the class of this package that a class is or, as those of FSDP2 and of users, derives from; or None."""
    known = model_classes(model_class.config_class).values()
    return next((cls for cls in model_class.__mro__ if cls in known), None)


def loading_section(model_class: type, folder: str | os.PathLike[str], name: str, license: str | None) -> str:
    """Return the section of a card.

    Args:
        model_class: Class of the model, of this package.
        folder: Folder with the files that are pushed.
        name: Repository or folder that the code loads.
        license: License of the weights, if it is known.
    """
    auto = auto_class_of(model_class)
    imports = [auto] if auto else []
    lines = ["import luna_mega  # registers the model with transformers"]
    tokenizer = []
    if Path(folder, "tokenizer_config.json").is_file():
        imports.append("AutoTokenizer")
        tokenizer = [f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(name)})"]
    if imports:
        lines.append(f"from transformers import {', '.join(imports)}")
    loader = auto or f"luna_mega.{model_class.__name__}"
    lines += ["", f"model = {loader}.from_pretrained({json.dumps(name)})", *tokenizer]
    text = ["## Load this model", "", "```python", *lines, "```", ""]
    has_code = Path(folder, CODE_FOLDER).is_dir()
    if has_code:
        text += [
            WITHOUT_PACKAGE,
            "",
            "```python",
            *loading_without_package(model_class, name),
            "```",
            "",
        ]
    licenses = f"Weights: {license or 'not stated; set `license` in the metadata of this card'}."
    licenses += f" `{CODE_FOLDER}`: Apache License 2.0." * has_code
    return "\n".join([*text, licenses, ""])


def loading_without_package(model_class: type, name: str) -> list[str]:
    """Return lines of code that load a model, with its code in the same folder or repository."""
    if auto := auto_class_of(model_class):
        return [
            f"from transformers import {auto}",
            "",
            f"model = {auto}.from_pretrained({json.dumps(name)}, trust_remote_code=True)",
        ]
    reference = f"{CODE_FOLDER}/auto_{model_class.config_class.model_type}.{model_class.__name__}"
    return [
        "from transformers.dynamic_module_utils import get_class_from_dynamic_module",
        "",
        f"model_class = get_class_from_dynamic_module({json.dumps(reference)}, {json.dumps(name)})",
        f"model = model_class.from_pretrained({json.dumps(name)})",
    ]


def how_to_load(model_class: type, folder: str) -> str:
    """Return one line that says how to load a folder with the code of its model."""
    auto = auto_class_of(model_class)
    call = f"{auto or f'luna_mega.{model_class.__name__}'}.from_pretrained({json.dumps(folder)})"
    without = "; without luna-mega, add trust_remote_code=True" if auto else ""
    return f"{call} after `import luna_mega`{without}"


def add_section(card: str, section: str) -> str:
    """Insert a section before the first one of a card, or renew what a card says that the code requires."""
    if CODE_FOLDER in card:
        sentence = rf"^Without luna-mega, transformers runs the code in `{CODE_FOLDER}`.*:$"
        return re.sub(sentence, WITHOUT_PACKAGE, card, flags=re.MULTILINE)
    before, heading, after = re.match(r"(.*?)(^## .*|\Z)(.*)", card, re.DOTALL | re.MULTILINE).groups()
    return f"{before.rstrip()}\n\n{section}" + f"\n{heading}{after}" * bool(heading)


def complete_card(model: PreTrainedModel, folder: str | os.PathLike[str], name: str) -> None:
    """Add the section for a model to the card in its folder, if there is a card."""
    file, model_class = Path(folder, FILE_NAME), known_class(type(model))
    if model_class is not None and file.is_file():
        text = file.read_text(encoding="utf-8-sig")
        license = ModelCard(text, ignore_metadata_errors=True).data.license
        file.write_text(add_section(text, loading_section(model_class, folder, name, license)), encoding="utf-8")


class _Summary(TrainingSummary):
    section: str  # of the model

    def to_model_card(self) -> str:
        return add_section(super().to_model_card(), self.section)


_from_trainer = TrainingSummary.from_trainer.__func__


@functools.wraps(_from_trainer)
def _summary_of_trainer(cls: type, trainer: Any, *args: Any, **options: Any) -> TrainingSummary:
    summary = _from_trainer(cls, trainer, *args, **options)
    model = unwrap_model(trainer.model)
    model_class = known_class(type(model)) if isinstance(model, CommonPreTrainedModel) else None
    if model_class is not None:
        name = trainer.hub_model_id or summary.model_name
        summary.tags = [*summary.tags, *({TAG} - {*summary.tags})]
        summary.__class__ = _Summary
        summary.section = loading_section(model_class, trainer.args.output_dir, name, summary.license)
    return summary


def add_to_cards() -> None:
    """Add the section to the cards that `push_to_hub` and `Trainer` write for models of this package."""
    CommonPreTrainedModel.card_writer = complete_card
    # `Trainer` has no hook for the text of its card.
    TrainingSummary.from_trainer = classmethod(_summary_of_trainer)
