"""Model cards: the README.md of a model folder, with metadata for the Hub. `model_card.md` is their template."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedConfig
from transformers.modelcard import extract_hyperparameters_from_trainer

import luna_mega
from luna_mega._register import _AUTO_CLASSES, CONFIGS
from luna_mega.escaping import code, code_block, markdown, one_line
from luna_mega.hub.licenses import license_metadata
from luna_mega.modeling_common.base import INPUT_OF_FIELD

FILE_NAME = "README.md"
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
# Suffixes of metrics that do not measure quality.
_NOT_QUALITY = ("_runtime", "_per_second", "_preparation_time", "epoch", "tokens_seen")
# Fields of the configuration in the table of the architecture, by model family.
FIELDS = {
    "luna": (
        "num_hidden_layers", "share_layers", "hidden_size", "intermediate_size", "num_attention_heads",
        "num_pack_attention_heads", "pack_method", "projection_length", "dynamic_projection_length",
        "contextual_projection", "tie_key_value", "hidden_act", "pre_norm", "input_type", "vocab_size",
        "max_position_embeddings", "position_embedding_type", "position_extension", "position_table_size", "pooling",
        "pool_padding",
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
# Fields of most configurations of transformers, under these names or through an `attribute_map`.
_COMMON_FIELDS = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip


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

    Args:
        name: Title of the card.
        model_class: Name of the class of the converted model.
        config: Configuration of the converted model.
        source: `file`, `sha256` and `arch` of the checkpoint, and the `software` that saved it.
        report: Text of the conversion report; the line about the output folder is omitted.
        parameters: Number of parameters.
        tokenizer: Whether the folder contains a tokenizer.
        license: License of the weights, in the form that `license_metadata` accepts.

    Raises:
        ConversionError: If the license does not have that form.
    """
    software = source.get("software", "fairseq")
    origin = {"software": software, "file": code(source["file"]), "sha256": code(source["sha256"])}
    lines = "\n".join(line for line in report.splitlines() if not line.startswith("written "))
    intro = f"converted from a {software} checkpoint of {code(source['arch'])}"
    content = {"intro": intro, "source": origin, "report": code_block(lines)}
    return _card(name, model_class, config, parameters, tokenizer, license, content)


def training_card(
    trainer: "transformers.Trainer",
    command: Sequence[str],
    dataset: str,
    dataset_config: str | None = None,
    *,
    split: str = "validation",
    metrics: Mapping[str, float] | None = None,
    base_model: str | None = None,
    origin: str = "fine-tuned",
    sections: Mapping[str, str] | None = None,
    license: str | None = None,
) -> ModelCard:
    """Return the card of a model that `trainer` has trained. It may be any model of transformers.

    Args:
        trainer: Trainer after training.
        command: Program and arguments; the value of `--hub_token` is not shown.
        dataset: Name on the Hub or local folder.
        dataset_config: Configuration of the dataset, such as "sst2" of GLUE.
        split: Split of the dataset on which `metrics` were computed.
        metrics: Result of `trainer.evaluate()`. If None, the card has no results.
        base_model: Name on the Hub or local folder of the initial model. None means trained from scratch.
        origin: Relation to `base_model`, such as "fine-tuned" or "distilled".
        sections: Further sections after the results, Markdown by title.
        license: License of the weights, in the form that `license_metadata` accepts.

    Raises:
        ConversionError: If the license does not have that form.
    """
    # FSDP2 adds a prefix to the class of a sharded model.
    model, model_class = trainer.model, type(trainer.model).__name__.removeprefix("FSDP")
    name = (trainer.args.hub_model_id or str(Path(trainer.args.output_dir).resolve())).split("/")[-1]
    data = one_line(" ".join(filter(None, [_shown(dataset), dataset_config])))
    quality = {score: value for score, value in (metrics or {}).items() if not score.endswith(_NOT_QUALITY)}
    scores = {one_line(score.removeprefix("eval_")): float(value) for score, value in quality.items()}
    about = {
        "task_type": task_of(model_class, model.config) or "other",
        "dataset_type": one_line(_shown(dataset)),
        "dataset_name": data,
        "dataset_config": dataset_config and one_line(dataset_config),
        "dataset_split": one_line(split),
    }
    results = [EvalResult(metric_type=score, metric_value=value, **about) for score, value in scores.items()]
    lines = re.sub(r"(--hub[_-]token[ =])\S+", r"\1...", shlex.join(command))
    versions = {module.__name__: module.__version__ for module in (luna_mega, transformers, torch)}
    settings = {"steps": trainer.state.global_step} | extract_hyperparameters_from_trainer(trainer) | versions
    start = "trained from scratch" if base_model is None else f"{origin} from {code(_shown(base_model))}"
    content = {
        "intro": f"{start} on {markdown(data)}",
        "split": markdown(split),
        "data": markdown(data),
        "scores": _cells(scores),
        "sections": sections or {},
        "command": code_block(lines, "sh"),
        "settings": _cells(settings),
    }
    return _card(
        name,
        model_class,
        model.config,
        model.num_parameters(),
        trainer.processing_class is not None,
        license,
        content,
        datasets=[dataset] if _is_on_hub(dataset) else None,
        base_model=base_model if base_model and _is_on_hub(base_model) else None,
        metrics=list(scores) or None,
        eval_results=results or None,
        model_name=one_line(name) if results else None,
    )


def _card(
    name: str,
    model_class: str,
    config: PreTrainedConfig,
    parameters: int,
    tokenizer: bool,
    license: str | None,
    content: Mapping[str, Any],
    **metadata: Any,
) -> ModelCard:
    """Return the card from the template, with the parts that all cards share."""
    data = ModelCardData(
        library_name="transformers",
        tags=[config.model_type],
        pipeline_tag=task_of(model_class, config),
        **license_metadata(license),
        **metadata,
    )
    family = config.model_type.removesuffix("_seq2seq")
    suffix, loader = _suffix(model_class, config), _auto_class(model_class, config)
    imports = [loader, *["AutoImageProcessor"] * (suffix == "ForImageClassification"), *["AutoTokenizer"] * tokenizer]
    return ModelCard.from_template(
        data,
        template_path=_TEMPLATE,
        name=markdown(name),
        model_class=model_class,
        family=family if family in FIELDS else None,
        imports=[part for part in imports if not part.startswith("luna_mega.")],
        loader=loader,
        pairs=tokenizer and suffix == "ForSequencePairClassification",
        architecture=_cells(architecture(config) | {"parameters": f"{parameters:,}"}),
        **content,
    )


def architecture(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields of the configuration that describe the architecture of a model, and their values."""
    fields = FIELDS.get(config.model_type.removesuffix("_seq2seq"))
    if fields is None:
        return {field: getattr(config, field) for field in _COMMON_FIELDS if hasattr(config, field)}
    return {field: getattr(config, field) for field in fields if INPUT_OF_FIELD.get(field) in (None, config.input_type)}


def _auto_class(model_class: str, config: PreTrainedConfig) -> str:
    """Return the Auto class that loads the model, or its own class if there is none."""
    loaders = {suffix: auto_class for auto_class, (suffix, _) in _AUTO_CLASSES.items()} | {"Seq2SeqModel": "AutoModel"}
    own = f"luna_mega.{model_class}" if config.model_type in CONFIGS else model_class
    return loaders.get(_suffix(model_class, config), own)


def _suffix(model_class: str, config: PreTrainedConfig) -> str:
    return model_class.removeprefix(type(config).__name__.removesuffix("Config").removesuffix("Seq2Seq"))


def task_of(model_class: str, config: PreTrainedConfig) -> str | None:
    """Return the Hub's name of the task of a model; None for real-valued input, which no pipeline accepts."""
    values = getattr(config, "input_type", "tokens") == "values"
    return None if values else _TASKS.get(_suffix(model_class, config))


def _is_on_hub(name: str) -> bool:
    return re.fullmatch(r"[\w.-]{1,96}(/[\w.-]{1,96})?", name, re.ASCII) is not None and not Path(name).exists()


def _shown(name: str) -> str:
    """Return a name on the Hub unchanged, and only the last part of a local path, because the rest is private."""
    return name if _is_on_hub(name) else os.path.basename(os.path.abspath(name))


def _cells(rows: Mapping[str, Any]) -> dict[str, str]:
    """Return names and values, which come from files and arguments, as escaped cells of a table."""
    texts = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in rows.items()}
    return {markdown(name): markdown(text) for name, text in texts.items()}
