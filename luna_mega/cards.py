"""Model cards: of saved models, of converted checkpoints and of training runs.

The cards of `Trainer` and `push_to_hub` contain a section with the code that loads the model, with and without this
package, and the license. `model_card.md` is the template of the cards of converted checkpoints.
"""

import functools
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modelcard import TrainingSummary
from transformers.modeling_utils import unwrap_model

from luna_mega._register import auto_classes, model_classes
from luna_mega.compat import REQUIRED, SUPPORTED
from luna_mega.errors import ConversionError, shown
from luna_mega.escaping import code, code_block, markdown
from luna_mega.modeling_common.base import INPUT_OF_FIELD, CommonPreTrainedModel
from luna_mega.modeling_common.configuration import CODE_FOLDER

FILE_NAME = "README.md"
TAG = "luna-mega"
# transformers 4 does not run the code, so that only this sentence can say what it requires.
WITHOUT_PACKAGE = (
    f"Without luna-mega, transformers runs the code in `{CODE_FOLDER}`, which requires transformers "
    f"{REQUIRED['transformers']} or later and is tested with torch {SUPPORTED['torch'][0]} or later:"
)
_TEMPLATE = str(Path(__file__).with_name("model_card.md"))
_TASKS = {
    "Model": "feature-extraction",
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "ForConditionalGeneration": "translation",
    "ForSequenceClassification": "text-classification",
    "ForImageClassification": "image-classification",
    "ForMultipleChoice": "multiple-choice",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
}
# https://huggingface.co/docs/hub/repositories-licenses
_LICENSES = frozenset(
    """
    afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
    bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0
    cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 etalab-2.0
    eupl-1.1 eupl-1.2 fair-noncommercial-research-license gemma gfdl gpl gpl-2.0 gpl-3.0 grok2-community h-research
    intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 lppl-1.3c mit
    mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openmdw-1.0 openrail openrail++ osl-3.0 pddl postgresql unknown unlicense
    wtfpl zlib
    """.split()
)
# Fields of the configuration in the table of the architecture, by model family.
FIELDS = {
    "luna": (
        "num_hidden_layers", "share_layers", "hidden_size", "intermediate_size", "num_attention_heads",
        "num_pack_attention_heads", "projection_length", "dynamic_projection_length", "contextual_projection",
        "tie_key_value", "hidden_act", "pre_norm", "input_type", "vocab_size", "max_position_embeddings",
        "position_embedding_type", "pooling", "pool_padding",
    ),
    "mega": (
        "num_hidden_layers", "hidden_size", "intermediate_size", "shared_representation_size",
        "ema_projection_size", "nffn_hidden_size", "bidirectional", "use_chunking", "chunk_size", "truncation",
        "attention_activation", "relative_positional_bias", "normalization_type", "normalize_before_mega",
        "input_type", "image_size", "patch_size", "vocab_size", "adaptive_softmax_cutoffs", "max_positions",
        "pooling",
    ),
    "megalodon": (
        "num_hidden_layers", "hidden_size", "num_attention_heads", "shared_representation_size", "value_size",
        "intermediate_size", "ema_projection_size", "norm_num_groups", "chunk_size", "rope_theta", "swiglu",
        "vocab_size", "output_size",
    ),
}  # fmt: skip


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
    loader = auto_class_of(model_class) or f"luna_mega.{model_class.__name__}"
    lines = ["import luna_mega  # registers the model with transformers", *_loading_lines(loader, folder, name)]
    text = ["## Load this model", "", "```python", *lines, "```", ""]
    has_code = Path(folder, CODE_FOLDER).is_dir()
    if has_code:
        lines = loading_without_package(model_class, name, _has_tokenizer(folder))
        text += [WITHOUT_PACKAGE, "", "```python", *lines, "```", ""]
    licenses = f"Weights: {license or 'not stated; set `license` in the metadata of this card'}."
    licenses += f" `{CODE_FOLDER}`: Apache License 2.0." * has_code
    return "\n".join([*text, licenses, ""])


def _has_tokenizer(folder: str | os.PathLike[str]) -> bool:
    return Path(folder, "tokenizer_config.json").is_file()


def _loading_lines(loader: str, folder: str | os.PathLike[str], name: str) -> list[str]:
    """Return lines of code that load a model with the class `loader`, and the tokenizer if the folder has one."""
    has_tokenizer = _has_tokenizer(folder)
    imports = sorted([*([] if "." in loader else [loader]), *["AutoTokenizer"] * has_tokenizer])
    lines = [f"from transformers import {', '.join(imports)}"] if imports else []
    lines += ["", f"model = {loader}.from_pretrained({json.dumps(name)})"]
    return lines + [f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(name)})"] * has_tokenizer


def loading_without_package(model_class: type, name: str, tokenizer: bool = False) -> list[str]:
    """Return lines of code that load a model, with its code in the same folder or repository, and its tokenizer."""
    if auto := auto_class_of(model_class):
        classes = {"model": auto} | ({"tokenizer": "AutoTokenizer"} if tokenizer else {})
        call = f"from_pretrained({json.dumps(name)}, trust_remote_code=True)"
        lines = [f"{variable} = {loader}.{call}" for variable, loader in classes.items()]
        return [f"from transformers import {', '.join(sorted(classes.values()))}", "", *lines]
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


def conversion_card(
    name: str,
    model_class: str,
    config: PreTrainedConfig,
    source: Mapping[str, Any],
    report: str,
    *,
    parameters: int,
    tokenizer: bool,
    license: str | None = None,
) -> ModelCard:
    """Return the card of a converted checkpoint.

    `source` contains `file`, `sha256` and `arch` of the checkpoint, and the `software` that saved it. `report` is the
    text of the conversion report, whose line about the output folder is omitted.

    Raises:
        ConversionError: If the license does not have the form that `license_metadata` accepts.
    """
    software = source.get("software", "fairseq")
    suffix = _suffix(model_class, config)
    cls = model_classes(type(config))[model_class]
    loader = auto_class_of(cls)
    imports = [loader] if loader else []
    imports += ["AutoImageProcessor"] * (suffix == "ForImageClassification") + ["AutoTokenizer"] * tokenizer
    data = ModelCardData(
        library_name="transformers",
        tags=[config.model_type, TAG],
        pipeline_tag=task_of(model_class, config),
        **license_metadata(license),
    )
    return ModelCard.from_template(
        data,
        template_path=_TEMPLATE,
        name=markdown(name),
        model_class=model_class,
        family=config.model_type.removesuffix("_seq2seq"),
        imports=imports,
        loader=loader or f"luna_mega.{model_class}",
        without_package_sentence=WITHOUT_PACKAGE,
        without_package=loading_without_package(cls, "...", tokenizer),
        pairs=tokenizer and suffix == "ForSequencePairClassification",
        architecture={field: markdown(value) for field, value in architecture(config).items()},
        parameters=f"{parameters:,}",
        source={name: code(source[name]) for name in ("file", "sha256", "arch")} | {"software": software},
        report=code_block("\n".join(line for line in report.splitlines() if not line.startswith("written "))),
    )


def architecture(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of the configuration that describe the architecture of a model, and their values."""
    fields = FIELDS[config.model_type.removesuffix("_seq2seq")]
    return {field: getattr(config, field) for field in fields if INPUT_OF_FIELD.get(field) in (None, config.input_type)}


def _suffix(model_class: str, config: PreTrainedConfig) -> str:
    return model_class.removeprefix(type(config).__name__.removesuffix("Config").removesuffix("Seq2Seq"))


def task_of(model_class: str, config: PreTrainedConfig) -> str | None:
    """Return the Hub's name of the task of a model; None for real-valued input, which no pipeline accepts."""
    values = getattr(config, "input_type", "tokens") == "values"
    return None if values else _TASKS.get(_suffix(model_class, config))


def license_metadata(license: str | None) -> dict[str, str]:
    """Return the metadata of a license for a model card.

    Args:
        license: Identifier of the Hub ("mit"), or "other:NAME" for any other license, with a name of lowercase letters,
            digits, "-" and "."; None for no license.

    Raises:
        ConversionError: If the license does not have this form.
    """
    if license is None:
        return {}
    if license in _LICENSES:
        return {"license": license}
    kind, _, name = license.partition(":")
    if kind == "other" and re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,99}", name):
        return {"license": "other", "license_name": name}
    raise ConversionError(
        f"license {shown(license)} is not one of the Hub's identifiers, such as mit, apache-2.0 or cc-by-4.0; use "
        "other:NAME for any other license, with lowercase letters, digits, - and . in NAME"
    )


def describe_source(data: object) -> dict[str, str | None]:
    """Return the arguments of `Trainer.create_model_card` for the dataset; of local paths, only the last part."""
    paths = getattr(data, "train_files", None) or data.dataset_path or data.dataset_name
    if paths is None:
        return {}
    paths = paths if isinstance(paths, list) else [paths]
    if paths == [data.dataset_name] and not Path(data.dataset_name).exists():
        return {"dataset": data.dataset_name, "dataset_tags": data.dataset_name, "dataset_args": data.dataset_config}
    return {"dataset": markdown(" and ".join(Path(path).resolve().name for path in paths))}


def complete_trainer_card(trainer: Any, base: str | None, license: str | None, source: dict[str, str | None]) -> None:
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
        card = ModelCard.load(output / FILE_NAME, ignore_metadata_errors=True)
        card.data.license_name = metadata.get("license_name")
        card.text = re.sub(r"\n## [^\n]+\n\nMore information needed\n", "", card.text)
        if max_tokens := getattr(trainer, "max_tokens", None):
            card.text = re.sub("- train_batch_size: .*", f"- train_batch_tokens: {max_tokens} per device", card.text)
            card.text = re.sub("- total_train_batch_size: .*\n", "", card.text)
        if "from_pretrained" not in card.text:  # models of transformers
            place = trainer.args.hub_model_id or about["model_name"]
            lines = "\n".join(_loading_lines(model_class, output, place))
            card.text = add_section(card.text, f"## Load this model\n\n{code_block(lines, 'python')}\n")
        if is_local:
            name = code(Path(base).resolve().name)
            card.text = card.text.replace("was trained from scratch", f"was fine-tuned from {name}", 1)
        card.save(output / FILE_NAME)

    trainer.create_model_card = create_model_card
