"""Model cards: the README.md of a model folder, with metadata that the Hub understands."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedConfig
from transformers.modelcard import extract_hyperparameters_from_trainer

import luna_mega
from luna_mega._register import _AUTO_CLASSES
from luna_mega.escaping import code, code_block, markdown, one_line
from luna_mega.hub.licenses import license_metadata
from luna_mega.modeling_common.base import INPUT_OF_FIELD

FILE_NAME = "README.md"
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
# Endings of metrics that do not say how good a model is.
_NOT_QUALITY = ("_runtime", "_per_second", "_preparation_time", "epoch", "tokens_seen")

_PAIR_USAGE = (
    'first, second = (tokenizer(text, return_tensors="pt") for text in ("One text.", "Another text."))',
    'logits = model(**first, **{f"pair_{name}": value for name, value in second.items()}).logits',
)


@dataclass(frozen=True)
class Family:
    """The parts that all cards of Luna, or of Mega, have in common.

    `fields` are the fields of the configuration in the table of the architecture. `differences` are lines of
    docs/deviations.md, (original, here), whose effect a user of the weights may notice.
    """

    paper: str
    bibtex: str
    fields: tuple[str, ...]
    differences: tuple[tuple[str, str], ...]


FAMILIES = {
    "luna": Family(
        paper="[Luna: Linear Unified Nested Attention](https://arxiv.org/abs/2106.01540) (Ma et al. 2021)",
        bibtex="""@inproceedings{ma2021luna,
  title     = {Luna: Linear Unified Nested Attention},
  author    = {Xuezhe Ma and Xiang Kong and Sinong Wang and Chunting Zhou and Jonathan May and Hao Ma and
               Luke Zettlemoyer},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {34},
  year      = {2021},
  url       = {https://arxiv.org/abs/2106.01540}
}""",
        fields=(
            "num_hidden_layers", "share_layers", "hidden_size", "intermediate_size", "num_attention_heads",
            "num_pack_attention_heads", "projection_length", "dynamic_projection_length", "contextual_projection",
            "tie_key_value", "hidden_act", "pre_norm", "input_type", "vocab_size", "max_position_embeddings",
            "position_embedding_type", "pooling", "pool_padding",
        ),  # fmt: skip
        differences=(
            (
                "A sequence of nothing but padding gives NaN.",
                "Its attention output and gradient are 0, the model's output finite.",
            ),
            (
                "The pack softmax runs in the tensor's own dtype, the unpack softmax in float32.",
                "Both in float32.",
            ),
            ("The first token is position 0, also with padding on the left.", "The first token that is not padding."),
        ),
    ),
    "mega": Family(
        paper="[Mega: Moving Average Equipped Gated Attention](https://arxiv.org/abs/2209.10655) (Ma et al. 2022)",
        bibtex="""@inproceedings{ma2023mega,
  title     = {Mega: Moving Average Equipped Gated Attention},
  author    = {Xuezhe Ma and Chunting Zhou and Xiang Kong and Junxian He and Liangke Gui and Graham Neubig and
               Jonathan May and Luke Zettlemoyer},
  booktitle = {International Conference on Learning Representations},
  year      = {2023},
  url       = {https://arxiv.org/abs/2209.10655}
}""",
        fields=(
            "num_hidden_layers", "hidden_size", "intermediate_size", "shared_representation_size",
            "ema_projection_size", "nffn_hidden_size", "bidirectional", "use_chunking", "chunk_size", "truncation",
            "attention_activation", "relative_positional_bias", "normalization_type", "normalize_before_mega",
            "input_type", "image_size", "patch_size", "vocab_size", "adaptive_softmax_cutoffs", "max_positions",
            "pooling",
        ),  # fmt: skip
        differences=(
            (
                "A chunk whose keys are all padding is attended to as if it were not.",
                "A position with nothing to attend to gives 0, with gradient 0.",
            ),
            (
                "Chunks are counted from the first position of the batch, also where that is padding.",
                "From the first token of the sequence.",
            ),
        ),
    ),
    "megalodon": Family(
        paper="[Megalodon: Efficient LLM Pretraining and Inference with Unlimited Context Length]"
        "(https://arxiv.org/abs/2404.08801) (Ma et al. 2024)",
        bibtex="""@inproceedings{ma2024megalodon,
  title     = {Megalodon: Efficient {LLM} Pretraining and Inference with Unlimited Context Length},
  author    = {Xuezhe Ma and Xiaomeng Yang and Wenhan Xiong and Beidi Chen and Lili Yu and Hao Zhang and
               Jonathan May and Luke Zettlemoyer and Omer Levy and Chunting Zhou},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2024},
  url       = {https://arxiv.org/abs/2404.08801}
}""",
        fields=(
            "num_hidden_layers", "hidden_size", "num_attention_heads", "shared_representation_size", "value_size",
            "intermediate_size", "ema_projection_size", "norm_num_groups", "chunk_size", "rope_theta", "swiglu",
            "vocab_size", "output_size",
        ),  # fmt: skip
        differences=(
            (
                "In inference of 8 chunks or more the norms see the last chunks only.",
                "They see everything, as in training; `windowed_statistics=True` is the original.",
            ),
            ("The model has no padding mask.", "Padding on either side changes nothing."),
        ),
    ),
}  # fmt: skip


# Fields that most configurations of transformers have, under these names or through an `attribute_map`.
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
        name: title of the card.
        model_class, config, parameters: name of the class, configuration and size of the converted model.
        source: `file`, `sha256` and `arch` of the checkpoint, and the `software` that saved it.
        report: text of the report of the conversion; its line about the output folder is left out.
        tokenizer: whether the folder has one.
        license: the licence of the weights, as `license_metadata` takes it.

    Raises:
        ConversionError: the licence has no such form.
    """
    lines = "\n".join(line for line in report.splitlines() if not line.startswith("written "))
    software = source.get("software", "fairseq")
    origin = (
        f"Converted from the {software} checkpoint {code(source['file'])} (SHA-256 {code(source['sha256'])}).\n"
        "`conversion_report.json` has every tensor and the arguments of the original training.\n\n"
        f"{code_block(lines)}\n\n"
        "Which data it was trained on and how well it does is not in the file."
    )
    return _card(
        name,
        model_class,
        config,
        parameters,
        intro=f"converted from a {software} checkpoint of {code(source['arch'])}",
        tokenizer=tokenizer,
        sections={"Origin": origin},
        license=license,
    )


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
    """Return the card of a model that `trainer` has trained; it may be any model of transformers.

    Args:
        command: program and arguments; the value of `--hub_token` is not shown.
        dataset: name on the Hub or local folder.
        dataset_config: its configuration, as "sst2" of GLUE.
        split: part of the data on which `metrics` were measured.
        metrics: result of `trainer.evaluate()`; None = the card has no results.
        base_model: name on the Hub or local folder of the model that was fine-tuned; None = trained from scratch.
        origin: how it came from that: "fine-tuned", "distilled".
        sections: further ones, Markdown by title, after the results.
        license: the licence of the weights, as `license_metadata` takes it.

    Raises:
        ConversionError: the licence has no such form.
    """
    # FSDP2 gives the class of a sharded model a prefix.
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
    parts = (
        {"Results": f"On the {markdown(split)} split of {markdown(data)}.\n\n{_values(scores, 'metric')}"}
        if scores
        else {}
    )
    parts |= sections or {}
    parts["Training"] = f"{code_block(lines, 'sh')}\n\n{_values(settings, 'setting')}"
    start = "trained from scratch" if base_model is None else f"{origin} from {code(_shown(base_model))}"
    return _card(
        name,
        model_class,
        model.config,
        model.num_parameters(),
        intro=f"{start} on {markdown(data)}",
        tokenizer=trainer.processing_class is not None,
        sections=parts,
        license=license,
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
    *,
    intro: str,
    tokenizer: bool,
    sections: Mapping[str, str],
    license: str | None,
    **metadata: Any,
) -> ModelCard:
    family, stated = _family(config), license_metadata(license)
    data = ModelCardData(
        library_name="transformers",
        tags=[config.model_type],
        pipeline_tag=task_of(model_class, config),
        **stated,
        **metadata,
    )
    if family:
        fields = [field for field in family.fields if INPUT_OF_FIELD.get(field) in (None, config.input_type)]
    else:
        fields = [field for field in _COMMON_FIELDS if hasattr(config, field)]
    architecture = {field: getattr(config, field) for field in fields} | {"parameters": f"{parameters:,}"}
    parts = {
        "Use": _usage(model_class, config, tokenizer),
        "Architecture": _values(architecture, "field of the configuration"),
        **sections,
        "Licence": f"Of the weights: {stated.get('license_name') or license or 'not stated'}.",
    }
    head = f"# {markdown(name)}\n\n`{model_class}`, {intro}."
    if family:
        head += f" The architecture is that of {family.paper}."
        differences = _table(dict(family.differences), "original", "here")
        parts["Differences from the original code"] = (
            f"{differences}\n\nAll differences, each with its test, are in `docs/deviations.md` of luna-mega."
        )
        parts["Licence"] += " Of the code of luna-mega: Apache License 2.0."
        parts["Citation"] = f"```bibtex\n{family.bibtex}\n```"
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in parts.items())
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{head}\n\n{body}\n")


def _usage(model_class: str, config: PreTrainedConfig, tokenizer: bool) -> str:
    ours = _family(config) is not None
    loaders = {suffix: auto_class for auto_class, (suffix, _) in _AUTO_CLASSES.items()} | {"Seq2SeqModel": "AutoModel"}
    loader = loaders.get(_suffix(model_class, config))
    if loader is None:
        loader = f"luna_mega.{model_class}" if ours else model_class
    pictures = _suffix(model_class, config) == "ForImageClassification"
    names = [loader] * (not loader.startswith("luna_mega."))
    names += ["AutoImageProcessor"] * pictures + ["AutoTokenizer"] * tokenizer
    lines = ["import luna_mega  # makes the model known to transformers"] * ours
    lines += [f"from transformers import {', '.join(names)}"] * bool(names)
    lines += ["", 'path = "..."  # this repository, or a folder with its files']
    lines += [f"model = {loader}.from_pretrained(path)"]
    lines += ["processor = AutoImageProcessor.from_pretrained(path)"] * pictures
    lines += ["tokenizer = AutoTokenizer.from_pretrained(path)"] * tokenizer
    if tokenizer and _suffix(model_class, config) == "ForSequencePairClassification":
        lines += _PAIR_USAGE
    code = "```python\n" + "\n".join(lines) + "\n```"
    if not ours:
        return code
    return (
        f"{code}\n\nWhere luna-mega is not installed, `trust_remote_code=True` loads a folder that `luna-mega bundle` "
        "has made."
    )


def _family(config: PreTrainedConfig) -> Family | None:
    return FAMILIES.get(config.model_type.removesuffix("_seq2seq"))


def _suffix(model_class: str, config: PreTrainedConfig) -> str:
    return model_class.removeprefix(type(config).__name__.removesuffix("Config").removesuffix("Seq2Seq"))


def task_of(model_class: str, config: PreTrainedConfig) -> str | None:
    """Return the Hub's name of the model's task, None for real-valued input, which no pipeline takes."""
    values = getattr(config, "input_type", "tokens") == "values"
    return None if values else _TASKS.get(_suffix(model_class, config))


def _is_on_hub(name: str) -> bool:
    return re.fullmatch(r"[\w.-]{1,96}(/[\w.-]{1,96})?", name, re.ASCII) is not None and not Path(name).exists()


def _shown(name: str) -> str:
    """Return a name on the Hub as it is, and only the last part of a local path: the rest is private."""
    return name if _is_on_hub(name) else os.path.basename(os.path.abspath(name))


def _values(rows: Mapping[str, Any], head: str) -> str:
    """Return a table of names and values, which come from files and arguments."""
    texts = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in rows.items()}
    return _table({markdown(name): markdown(text) for name, text in texts.items()}, head, "value")


def _table(rows: Mapping[str, str], *head: str) -> str:
    return "\n".join(f"| {name} | {text} |" for name, text in [head, ("---", "---"), *rows.items()])
