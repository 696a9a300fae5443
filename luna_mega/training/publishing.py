"""Model cards of training runs, and pushes to the Hub."""

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard
from transformers import Trainer, TrainingArguments

from luna_mega._cards import FILE_NAME as CARD_NAME, add_section
from luna_mega.escaping import code, code_block, markdown
from luna_mega.hub.card import license_metadata, task_of
from luna_mega.training.arguments import fail, one_line


def check_hub(training: TrainingArguments, license: str | None = None) -> None:
    """Exit if the license is invalid or the model cannot be pushed."""
    with one_line("--license"):
        license_metadata(license)
    if training.hub_token:
        fail("--hub_token: Trainer would push it with training_args.bin; use `hf auth login` or HF_TOKEN instead")
    if training.push_to_hub:
        with one_line("--push_to_hub"):
            HfApi().whoami()


def describe_source(data: object) -> dict[str, str | None]:
    """Return the arguments of `Trainer.create_model_card` for the dataset; of local paths, only the last part."""
    paths = getattr(data, "train_files", None) or data.dataset_path or data.dataset_name
    if paths is None:
        return {}
    paths = paths if isinstance(paths, list) else [paths]
    if paths == [data.dataset_name] and not Path(data.dataset_name).exists():
        return {"dataset": data.dataset_name, "dataset_tags": data.dataset_name, "dataset_args": data.dataset_config}
    return {"dataset": markdown(" and ".join(Path(path).resolve().name for path in paths))}


def publish(trainer: Trainer) -> None:
    """After training, write README.md and, with `--push_to_hub`, push the output folder."""
    if not trainer.args.push_to_hub:
        trainer.create_model_card()
        return
    output = trainer.args.output_dir
    again = f'hf upload {trainer.hub_model_id} {output} . --exclude "checkpoint-*"'
    with one_line(f"the push failed, but {output} is complete; push it with `{again}`", RuntimeError):
        trainer.push_to_hub()


def _loading_section(model_class: str, place: str, output: Path) -> str:
    """Return the section of a card with the code that loads a model of transformers, and its tokenizer if any."""
    names = {"model": model_class}
    if (output / "tokenizer_config.json").is_file():
        names["tokenizer"] = "AutoTokenizer"
    lines = [f"from transformers import {', '.join(sorted(names.values()))}", ""]
    lines += [f"{name} = {kind}.from_pretrained({json.dumps(place)})" for name, kind in names.items()]
    return "\n".join(["## Load this model", "", code_block("\n".join(lines), "python"), ""])


def complete_card(trainer: Trainer, base: str | None, license: str | None, source: dict[str, str | None]) -> None:
    """Let `Trainer.create_model_card`, which `push_to_hub` calls, write dataset, task, base model and license.

    `source` are its arguments for the dataset.
    """
    output, config = Path(trainer.args.output_dir), trainer.model.config
    is_local = base is not None and Path(base).exists()
    # transformers reads the name of a new model, which is empty, as the name of a base model on the Hub.
    config.name_or_path = output if base is None or is_local else base
    metadata, write = license_metadata(license), trainer.create_model_card
    model_class = type(trainer.model).__name__.removeprefix("FSDP")  # FSDP2 adds a prefix
    about: dict[str, Any] = {"model_name": (trainer.args.hub_model_id or output.resolve().name).split("/")[-1]}
    about |= {"tags": [config.model_type], "tasks": task_of(model_class, config), "license": metadata.get("license")}

    def create_model_card(**options: Any) -> None:
        write(**options | about | source)
        if not trainer.is_world_process_zero():
            return
        card = ModelCard.load(output / CARD_NAME, ignore_metadata_errors=True)
        card.data.license_name = metadata.get("license_name")
        card.text = re.sub(r"\n## [^\n]+\n\nMore information needed\n", "", card.text)
        if "from_pretrained" not in card.text:  # models of transformers
            place = trainer.args.hub_model_id or about["model_name"]
            card.text = add_section(card.text, _loading_section(model_class, place, output))
        if is_local:
            name = code(Path(base).resolve().name)
            card.text = card.text.replace("was trained from scratch", f"was fine-tuned from {name}", 1)
        card.save(output / CARD_NAME)

    trainer.create_model_card = create_model_card
