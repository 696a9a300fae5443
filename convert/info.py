"""Describes a model folder or checkpoint: architecture, parameters, memory, FLOPs, heads, origin: `luna-mega info`."""

import argparse
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from luna_mega.convert import cost_luna, cost_mega
from luna_mega.convert.errors import ConversionError
from luna_mega.convert.formats import Format
from luna_mega.convert.formats.registry import detect, find_format
from luna_mega.convert.model_folder import ModelFolder, position_limit, read_folder
from luna_mega.convert.reader import read_checkpoint

_COSTS = {"luna": cost_luna, "mega": cost_mega}
# Modules of the models -> the part that they are counted in; all else is of a head.
_PARTS = {
    "embeddings": "embeddings",
    "embedding_layer": "embeddings",
    "embedding_norm": "embeddings",
    "encoder": "encoder",
    "layers": "encoder",
    "final_norm": "encoder",
}


@dataclass(frozen=True)
class Info:
    """What `luna-mega info` prints. Bytes are for one sequence of `length` positions in the dtype of the weights."""

    path: str
    written_by: str
    model_class: str
    config: dict[str, int | str | bool]
    heads: list[str]
    parameters: dict[str, int]
    weights: dict[str, int | str]
    length: int
    flops_per_token: dict[str, float]
    activation_bytes: dict[str, int]
    training_state_bytes: int
    formulas: dict[str, str]

    def __str__(self) -> str:
        parameters = {name: f"{value:,}" for name, value in self.parameters.items()}
        flops = {name: _short(value) for name, value in self.flops_per_token.items()}
        memory = {name: f"{_short(value)}B" for name, value in self.activation_bytes.items()}
        rows = {
            "path": self.path,
            "written by": self.written_by,
            "class": self.model_class,
            "config": _listed(self.config),
            "heads": "; ".join(self.heads) or "none",
            "parameters": f"{parameters.pop('total')}: {_listed(parameters)}",
            "weights": f"{_short(self.weights['bytes'])}B ({self.weights['dtype']}), with Adam "
            f"{_short(self.training_state_bytes)}B",
            "FLOPs/token": f"{flops.pop('total').strip()} at length {self.length}: {_listed(flops)}",
            "activations": f"{_listed(memory)}, of one sequence of length {self.length}",
        }
        lines = [f"{name:<13}{value}" for name, value in rows.items()]
        return "\n".join([*lines, "", *(textwrap.fill(f"{name}: {text}", 100) for name, text in self.formulas.items())])


def _listed(values: dict) -> str:
    return ", ".join(f"{name} {value}".rstrip() for name, value in values.items())


def _short(number: float) -> str:
    for unit in ("", "k", "M", "G"):
        if number < 1000:
            return f"{number:.4g} {unit}"
        number /= 1000
    return f"{number:.4g} T"


def describe(path: str | Path, length: int | None = None) -> Info:
    """Describes a model without building it in memory.

    Args:
        path: model folder, or fairseq checkpoint of a Luna or Mega model.
        length: positions for memory and FLOPs; None = `max_position_embeddings` or `max_positions`.

    Raises:
        ConversionError: `path` is neither, or the model has fewer positions.
    """
    read = _read_checkpoint if Path(path).is_file() else _read_folder
    config, model_class, written_by, heads, dtypes = read(path)
    if config.is_encoder_decoder or (config.model_type == "luna" and config.is_decoder):
        kind = "an encoder-decoder" if config.is_encoder_decoder else "a decoder of Luna"
        raise ConversionError(
            f"{path}: {model_class.__name__} is {kind}, whose cost this version does not count; config.json has its "
            "sizes"
        )
    limit, cost = position_limit(config), _COSTS[config.model_type]
    if length is not None and limit is not None and length > limit:
        raise ConversionError(f"--length {length}: the model has {limit} learned positions")
    length = length or config.max_position_embeddings
    with torch.device("meta"):
        model = model_class(config)
    parameters = count_parameters(model)
    dtype = dtypes.most_common(1)[0][0]
    size = getattr(torch, dtype).itemsize
    return Info(
        path=str(path),
        written_by=written_by,
        model_class=model_class.__name__,
        config={
            name: getattr(config, name) for name in cost.FIELDS if name != "vocab_size" or config.input_type == "tokens"
        },
        heads=heads,
        parameters=parameters,
        weights={"dtype": dtype, "bytes": parameters["total"] * size},
        length=length,
        flops_per_token=cost.flops_per_token(model, length),
        activation_bytes=_activations(model, cost, length, size),
        training_state_bytes=4 * size * parameters["total"],
        formulas=cost.FORMULAS,
    )


def _activations(model: PreTrainedModel, cost, length: int, size: int) -> dict[str, int]:
    numbers = {
        "inference": cost.inference_activations(model, length),
        "training": cost.training_activations(model, length),
    }
    if getattr(model.config, "is_decoder", False):
        numbers["cache"] = cost.cache_numbers(model, length)
    return {name: size * count for name, count in numbers.items()}


def _read_folder(path: str | Path):
    folder = read_folder(path)
    names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": None}  # None: counters
    dtypes = Counter()
    for name, info in folder.tensor_info.items():
        if info.dtype not in names:
            raise ConversionError(f"{info.file}: {name} has dtype {info.dtype}, not one of {', '.join(names)}")
        if names[info.dtype] is not None:
            dtypes[names[info.dtype]] += torch.Size(info.shape).numel()
    return folder.config, folder.model_class, _origin(folder), _folder_heads(folder), dtypes


def _origin(folder: ModelFolder) -> str:
    if folder.report is None:
        return f"save_pretrained of transformers {folder.transformers_version or '(version not recorded)'}"
    source = folder.report["source"]
    return f"luna-mega convert, from {source['file']}, " + _fairseq(
        find_format(source["layout"]), source["revision"], source["arch"]
    )


def _fairseq(found: Format, revision: str, arch: str) -> str:
    return f"a {found.name} checkpoint (arch {arch}) of {found.revisions[revision].code}"


def _folder_heads(folder: ModelFolder) -> list[str]:
    names, heads = folder.tensor_info, []
    name, config = folder.model_class.__name__.rpartition("For")[2], folder.config
    if name == "CausalLM":
        heads.append("causal LM")
    elif any(name.startswith(("lm_head.", "mlm_head.")) for name in names):
        heads.append("masked LM")
    if name == "QuestionAnswering":
        heads.append(f"{name}: start and end")
    elif name == "TokenClassification":
        heads.append(f"{name}: {config.num_labels} classes")
    elif "Classification" in name or name == "MultipleChoice":
        scores = "one score an option" if name == "MultipleChoice" else f"{config.num_labels} classes"
        heads.append(f"{name}: {scores}, pooling {config.pooling}")
    return heads


def _read_checkpoint(path: str | Path):
    checkpoint = read_checkpoint(path)
    found, revision = detect(checkpoint)
    tensors, _ = found.canonical(checkpoint.tensors)
    plan = found.plan(found.evidence(tensors, checkpoint.args, found.assumed(revision)))
    dtypes = Counter()
    for tensor in filter(torch.is_floating_point, tensors.values()):
        dtypes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    origin = _fairseq(found, revision, found.architecture(checkpoint.args))
    return plan.config, plan.model_class, f"fairseq: {origin}", found.heads(plan, tensors), dtypes


def count_parameters(model: PreTrainedModel) -> dict[str, int]:
    """Unique parameters (a tied weight counts once) of embeddings, encoder and head, and their total."""
    counts = dict.fromkeys(("embeddings", "encoder", "head"), 0)
    for name, parameter in model.named_parameters():
        part = name.removeprefix(f"{model.base_model_prefix}.").split(".")[0]
        counts[_PARTS.get(part, "head")] += parameter.numel()
    return counts | {"total": sum(counts.values())}


def main(argv: Sequence[str] | None = None) -> int:
    """`luna-mega info`: describes a model.

    Args:
        argv: arguments without the program name; those of the process when None.

    Returns:
        Exit status: 0 done, 1 the input is at fault, with one line about it on stderr.

    Raises:
        SystemExit: 2 on wrong usage, 0 after `--help`.
    """
    parser = argparse.ArgumentParser(
        prog="luna-mega info",
        description="Describes a model: architecture, parameters, memory and FLOPs at a length, heads, and which "
        "code wrote it.",
    )
    parser.add_argument("path", metavar="PATH", help="a model folder or a fairseq checkpoint")
    parser.add_argument("--length", metavar="N", type=int, help="positions (default: as many as the model has)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    if options.length is not None and options.length < 1:
        parser.error(f"--length {options.length}: at least 1")
    try:
        info = describe(options.path, options.length)
    except (ConversionError, OSError) as error:
        print(f"luna-mega info: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(info), indent=2) if options.json else info)
    return 0
