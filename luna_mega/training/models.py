"""Load or create configuration, model and tokenizer."""

import copy
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import yaml
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.hf_argparser import HfArg
from transformers.utils import cached_file

from luna_mega._register import CONFIGS
from luna_mega.hub.find import find_model
from luna_mega.hub.folder import largest_id, load_tokenizer, stacks
from luna_mega.training.arguments import fail, one_line, say
from luna_mega.training.tokenizers import train_bpe, train_joint_bpe

# Models of transformers whose position ids start after the padding id.
COUNT_FROM_PADDING = ("camembert", "longformer", "mpnet", "roberta", "xlm-roberta")


@dataclass
class CheckpointArguments:
    _argument_group_name = "model"

    model_name_or_path: str | None = HfArg(default=None, help="folder or Hub name; default: train from scratch")
    model_type: str = HfArg(default="luna", help="type of a new model: luna, mega, roberta, bart, ...")
    config_overrides: str = HfArg(
        default="", help="configuration fields: hidden_size=128,pooling=mean; luna.hidden_size=128 for a new luna only"
    )
    ignore_mismatched_sizes: bool = HfArg(default=False, help="replace heads of another size or with other labels")
    decay_all_weights: bool = HfArg(
        default=False, help="weight decay of all weights, as in fairseq; default: not of biases and norms"
    )
    license: str | None = HfArg(default=None, help="license of the weights in the model card: apache-2.0")


@dataclass
class ModelArguments(CheckpointArguments):
    tokenizer_name: str | None = HfArg(default=None, help="folder or Hub name; default: the model's")
    vocab_size: int = HfArg(default=8000, help="vocabulary size of the BPE that is trained if there is no tokenizer")


def make_tokenizer(model: ModelArguments, texts: Iterable[str], max_length: int) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `model`, or train a BPE on `texts`."""
    source = model.tokenizer_name or model.model_name_or_path
    with one_line(f"no tokenizer in {source} (pass another --tokenizer_name)" if source else ""):
        return load_tokenizer(source) if source else train_bpe(texts, model.vocab_size, max_length)


class Tokenizers(NamedTuple):
    """Tokenizers of source and target; the same object if they share a vocabulary."""

    source: PreTrainedTokenizerBase
    target: PreTrainedTokenizerBase


def make_both_tokenizers(model: ModelArguments, texts: Iterable[str], max_length: int) -> Tokenizers:
    """Load the tokenizers of `model` (the subfolder `target` contains the target's), or train one on `texts`."""
    source = model.tokenizer_name or model.model_name_or_path
    if not source:
        joint = train_joint_bpe(texts, model.vocab_size, max_length)
        return Tokenizers(joint, joint)
    with one_line(f"no tokenizer in {source} (pass another --tokenizer_name)"):
        place = find_model(source)
        first = second = load_tokenizer(place)
        if cached_file(place, "target/tokenizer_config.json", _raise_exceptions_for_missing_entries=False):
            second = AutoTokenizer.from_pretrained(place, subfolder="target")
    for tokenizer in (first, second):
        if tokenizer("a")["input_ids"][-1] != tokenizer.eos_token_id:
            fail(f"the tokenizer of {source} does not end a sentence with its eos_token {tokenizer.eos_token}")
    return Tokenizers(first, second)


def make_config(
    model: CheckpointArguments,
    tokenizer: PreTrainedTokenizerBase | None,
    max_length: int,
    kind: str | None = None,
    *,
    shorten: tuple[object, *tuple[str, ...]] | None = None,
    **values: Any,
) -> PreTrainedConfig:
    """Load or create the configuration; exit if the tokenizer or the length is not supported.

    Args:
        model: Options of the model; `--config_overrides` override `values`.
        tokenizer: Tokenizer of the model, None for other inputs.
        max_length: Maximum length of the inputs.
        kind: Type of the inputs: "tokens", "values" or "patches"; None = "tokens" with a tokenizer, else "values".
        shorten: Options and the names of those with a maximum length, for `fit_lengths`; None = longer inputs than the
            model supports are an error.
        values: Fields of the task, set if the configuration has them.
    """
    kind = kind or ("values" if tokenizer is None else "tokens")
    with one_line("configuration"):
        overrides = yaml.safe_load(f"{{{model.config_overrides.replace('=', ': ')}}}")
        loaded = {}
        if model.model_name_or_path:
            config = AutoConfig.from_pretrained(model.model_name_or_path)
            loaded = config.to_dict()
        else:
            seq2seq = f"{model.model_type}_seq2seq"  # a separate model type of Luna and Mega
            own = values.get("is_encoder_decoder") and seq2seq in CONFIG_MAPPING
            config = AutoConfig.for_model(seq2seq if own else model.model_type)
        overrides = {name: _number(value) for name, value in overrides.items()}
        overrides = _matching(overrides, config, model)
        if not model.model_name_or_path:
            values |= {"input_type": kind, "max_position_embeddings": max_length}
            if tokenizer is not None:
                if not (config.is_encoder_decoder or own or values.get("is_decoder")):
                    values |= type_fields(tokenizer, config)
                values["vocab_size"] = largest_id(tokenizer) + 1
                values |= {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
                pad = overrides.get("pad_token_id", tokenizer.pad_token_id)
                values["max_position_embeddings"] += first_position(config.model_type, pad)
        values = {name: value for name, value in values.items() if hasattr(config, name)}
        # A field can have two names, such as max_position_embeddings and Mega's max_positions; the last value is used.
        pairs = [*loaded.items(), *values.items(), *overrides.items()]
        config = type(config).from_dict({config.attribute_map.get(name, name): value for name, value in pairs})
        if config.is_encoder_decoder and not hasattr(config, "decoder_start_token_id"):  # T5 starts with padding
            config.decoder_start_token_id = config.pad_token_id
    if (reads := getattr(config, "input_type", "patches" if hasattr(config, "patch_size") else "tokens")) != kind:
        fail(f"{model.model_name_or_path or 'the model'} reads {reads} (input_type), not {kind}")
    if kind == "patches":
        return config
    if shorten is not None:
        fit_lengths(config, *shorten)
    elif max_length > (positions := longest_input(config)):
        fail(f"inputs of {max_length} {kind} do not fit in the {positions} positions of the model")
    if tokenizer is not None:
        if (largest := largest_id(tokenizer)) >= config.vocab_size:
            fail(f"the tokenizer has token id {largest}, but the model has vocab_size={config.vocab_size}")
        # A tokenizer of run_mlm.py has the block size as its maximum.
        longest = max(tokenizer.model_max_length, max_length)
        tokenizer.model_max_length = int(min(longest, longest_input(config)))
        fit_types(tokenizer, config)
    return config


def _number(value: Any) -> Any:
    """Return the number of a text like 1e-5, which is no number in YAML 1.1 without a decimal point."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[-+]?[0-9]+e[-+]?[0-9]+", value, re.I) else value


def _matching(overrides: dict[str, Any], config: PreTrainedConfig, model: CheckpointArguments) -> dict[str, Any]:
    """Return the overrides without those of new models of other types; exit if one is not a field."""
    chosen = {}
    for name, value in overrides.items():
        kind, _, field = name.rpartition(".")
        if kind and kind not in CONFIG_MAPPING:
            fail(f"--config_overrides {name}: there is no model type {kind}; use luna.FIELD, mega.FIELD or FIELD")
        checked = AutoConfig.for_model(kind) if kind else config
        if not all(hasattr(checked, own) for own in getattr(checked, "rename_fields", dict)({field: value})):
            fail(f"--config_overrides: {kind or config.model_type} has no field {field}")
        if not kind or (kind == config.model_type and not model.model_name_or_path):
            chosen[field] = value
    return getattr(config, "rename_fields", dict)(chosen)


def count_types(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of token types that the tokenizer returns for pairs, 0 if it returns none."""
    return max(tokenizer("a", "a").get("token_type_ids") or [-1]) + 1


def type_fields(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> dict[str, Any]:
    """Return the configuration fields with which a new model has embeddings of the tokenizer's types."""
    if (types := count_types(tokenizer)) < 2:
        return {}
    return {"type_vocab_size": max(types, getattr(config, "type_vocab_size", 0)), "add_token_type_embeddings": True}


def fit_types(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """Let the tokenizer, also when it is loaded again, return no token types if the model does not have all of them."""
    types = getattr(config, "type_vocab_size", 0) if getattr(config, "add_token_type_embeddings", True) else 0
    if count_types(tokenizer) > types:
        names = [name for name in tokenizer.model_input_names if name != "token_type_ids"]
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names


def label_names(model: CheckpointArguments) -> list[str] | None:
    """Return the label names of a saved model, in the order of its outputs; None for a new model."""
    if not model.model_name_or_path:
        return None
    names = AutoConfig.from_pretrained(model.model_name_or_path).id2label or {}
    return [str(names[index]) for index in sorted(names)]


def are_default(names: Sequence[str]) -> bool:
    """Return whether label names are transformers' defaults, which do not describe the labels."""
    return all(re.fullmatch(r"LABEL_\d+", name) for name in names)


def label_fields(names: Sequence[str]) -> dict[str, Any]:
    """Return the configuration fields of the label names."""
    return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}


def first_position(model_type: str, pad_token_id: int | None) -> int:
    """Return the position id of the first token; for RoBERTa and similar models, it follows the padding id."""
    if model_type not in COUNT_FROM_PADDING:
        return 0
    if pad_token_id is None:
        fail(f"{model_type}: the tokenizer has no padding token; pass another --tokenizer_name")
    return pad_token_id + 1


def fit_lengths(config: PreTrainedConfig, options: object, *names: str, side: str = "encoder") -> None:
    """Reduce the options `names`, numbers or lists of numbers, to the positions of the model; print a line for each.

    `side` specifies the inputs of an encoder-decoder: "encoder" or "decoder".
    """
    most = longest_input(config, side)
    for name in names:
        value = getattr(options, name)
        numbers = value if isinstance(value, list) else [value]
        if max(numbers) > most:
            fitting = list(dict.fromkeys(min(number, int(most)) for number in numbers))
            setattr(options, name, fitting if isinstance(value, list) else fitting[0])
            say(f"--{name} {value} is reduced to {getattr(options, name)}, because the model has {most} positions")


def longest_input(config: PreTrainedConfig, side: str = "encoder") -> float:
    """Return the maximum input length; infinite without position embeddings, such as for Mega with chunks.

    `side` specifies the inputs of an encoder-decoder: "encoder" or "decoder".
    """
    if config.model_type in CONFIGS:
        limits = [stacks(config).get(side, config).longest_input]
        if config.is_encoder_decoder and getattr(config, "relative_positional_bias", None) == "simple":
            limits.append(config.cross_positions)
        return min((limit for limit in limits if limit is not None), default=math.inf)
    positions = getattr(config, "max_position_embeddings", math.inf)
    return positions - first_position(config.model_type, config.pad_token_id)


def make_model(model_class: type, model: CheckpointArguments, config: PreTrainedConfig) -> PreTrainedModel:
    """Load the model, or create a new one from `config`; `model_class` may be an Auto class."""
    create = getattr(model_class, "from_config", model_class)
    if not model.model_name_or_path:
        try:
            return create(config)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):  # which lists all supported classes
                raise
            fail(f"--model_type {config.model_type} is not supported: transformers has no {model_class.__name__} of it")
    with one_line(f"--model_name_or_path {model.model_name_or_path}", RuntimeError):
        options = {"config": config, "ignore_mismatched_sizes": model.ignore_mismatched_sizes}
        # In the dtype of a checkpoint, such as bfloat16, most updates of a training would be lost.
        network = model_class.from_pretrained(model.model_name_or_path, dtype=torch.float32, **options)
    # Tensors of a file may be at addresses that are no multiples of 64 bytes, where sums round differently.
    for tensor in (*network.parameters(), *network.buffers()):
        tensor.data = tensor.data.clone()
    own = label_names(model) if model.ignore_mismatched_sizes else []
    if not are_default(own) and config.num_labels > 1 and set(own) != set(config.id2label.values()):
        # transformers only replaces an output layer of another size.
        wider = copy.deepcopy(config)
        wider.num_labels = config.num_labels + 1
        with torch.device("meta"):
            shapes = create(wider).state_dict()
        outputs = {name: x for name, x in create(config).state_dict().items() if x.shape != shapes[name].shape}
        network.load_state_dict(outputs, strict=False)
    return network


def boundary_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return the ids of `<s>` and `</s>`, or of `[CLS]` and `[SEP]`."""
    bos, eos, cls, sep = (getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "cls", "sep"))
    ids = cls if bos is None else bos, sep if eos is None else eos
    if None in ids:
        fail(
            f"the tokenizer has bos_token {tokenizer.bos_token} and eos_token {tokenizer.eos_token}; both are required"
        )
    return ids
