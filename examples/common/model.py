"""The model and the tokenizer of a run: loaded, or made from scratch."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import yaml
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import luna_mega  # noqa: F401  (registers the models with the Auto classes)
from common.arguments import fail
from common.bpe import load_tokenizer, train_bpe


@dataclass
class CheckpointArguments:
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "converted checkpoint or Hub name; without it training starts from scratch"}
    )
    model_type: str = field(default="luna", metadata={"help": "model that is trained from scratch: luna or mega"})
    config_overrides: str = field(default="", metadata={"help": "config fields: hidden_size=128,pooling=mean"})
    ignore_mismatched_sizes: bool = field(default=False, metadata={"help": "replace a head of another size"})
    license: str | None = field(default=None, metadata={"help": "of the weights, for the model card: apache-2.0"})


@dataclass
class ModelArguments(CheckpointArguments):
    tokenizer_name: str | None = field(default=None, metadata={"help": "folder or Hub name of another tokenizer"})
    vocab_size: int = field(default=8000, metadata={"help": "size of the BPE that is trained without a tokenizer"})


def make_tokenizer(model: ModelArguments, texts: Iterable[str], max_length: int) -> PreTrainedTokenizerBase:
    """The tokenizer that `model` names, or a BPE trained on `texts`, which are not looked at otherwise."""
    source = model.tokenizer_name or model.model_name_or_path
    try:
        return load_tokenizer(source) if source else train_bpe(texts, model.vocab_size, max_length)
    except (OSError, ValueError) as error:
        fail(f"no tokenizer in {source} (--tokenizer_name names another): {error}" if source else error)


def make_config(
    model: CheckpointArguments, tokenizer: PreTrainedTokenizerBase | None, max_length: int, **values: Any
) -> PreTrainedConfig:
    """The configuration of the model for inputs of up to `max_length` tokens, without `tokenizer` real numbers.

    `values` are fields that the task sets; `--config_overrides` wins over them. Ends the script when the tokenizer or
    the length does not fit the model.
    """
    kind = "values" if tokenizer is None else "tokens"
    try:
        overrides = yaml.safe_load(f"{{{model.config_overrides.replace('=', ': ')}}}")
        if model.model_name_or_path:
            config = AutoConfig.from_pretrained(model.model_name_or_path)
            values = {**config.to_dict(), **values}
        else:
            config = AutoConfig.for_model(model.model_type)
            values |= {"input_type": kind, "max_position_embeddings": max_length}
        if tokenizer is not None and not model.model_name_or_path:
            values["vocab_size"] = len(tokenizer)
            values |= {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
        if unknown := [name for name in overrides if not hasattr(config, name)]:
            fail(f"--config_overrides: {config.model_type} has no field {', '.join(unknown)}")
        # A field can have two names, max_position_embeddings and Mega's own max_positions; the last value has to win.
        values = {config.attribute_map.get(name, name): value for name, value in [*values.items(), *overrides.items()]}
        config = type(config).from_dict(values)
    except (OSError, ValueError, TypeError, StrictDataclassError, yaml.YAMLError) as error:
        fail(f"configuration: {error}")
    if getattr(config, "input_type", kind) != kind:
        fail(f"{model.model_name_or_path or 'the model'} reads {config.input_type} (input_type), not {kind}")
    positions = longest_input(config)
    if tokenizer is not None:
        check_tokenizer(tokenizer, config)
        positions = min(positions, tokenizer.model_max_length)
    if max_length > positions:
        fail(f"inputs of {max_length} {kind} do not fit in the {positions} positions of the model or its tokenizer")
    return config


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    if len(tokenizer) > config.vocab_size:
        fail(f"the tokenizer has {len(tokenizer)} entries, the model only vocab_size={config.vocab_size}")
    if tokenizer.pad_token_id != config.pad_token_id:
        fail(f"the tokenizer pads with id {tokenizer.pad_token_id}, the model with {config.pad_token_id}")


def longest_input(config: PreTrainedConfig) -> float:
    """Positions that the model takes; Mega takes any number with a rotary bias or attention in chunks."""
    if config.model_type == "mega" and (config.use_chunking or config.relative_positional_bias == "rotary"):
        return float("inf")
    return config.max_position_embeddings


def make_model(auto_class: type, model: CheckpointArguments, config: PreTrainedConfig) -> PreTrainedModel:
    """The model of `config` with the weights that `model` names, or new ones."""
    if not model.model_name_or_path:
        return auto_class.from_config(config)
    return auto_class.from_pretrained(
        model.model_name_or_path, config=config, ignore_mismatched_sizes=model.ignore_mismatched_sizes
    )


def boundary_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """The ids of `<s>` and `</s>`."""
    ids = tokenizer.bos_token_id, tokenizer.eos_token_id
    if None in ids:
        fail(f"the tokenizer has bos_token {tokenizer.bos_token} and eos_token {tokenizer.eos_token}; both are needed")
    return ids
