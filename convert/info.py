"""Describes a Luna folder or checkpoint: architecture, parameters, memory, FLOPs, heads, origin: `luna-mega info`."""

import argparse
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from luna_mega import (
    LunaConfig,
    LunaForMaskedLM,
    LunaForQuestionAnswering,
    LunaForSequencePairClassification,
    LunaForTokenClassification,
    LunaModel,
)
from luna_mega.convert.errors import ConversionError
from luna_mega.convert.fairseq_reader import read_checkpoint
from luna_mega.convert.model_folder import ModelFolder, read_folder
from luna_mega.convert.plan_luna_bert import plan_luna_bert
from luna_mega.convert.plan_luna_lra import plan_luna_lra
from luna_mega.convert.source_detect import canonical, detect

_REVISIONS = {"r21": "2021", "head": "2023"}
_FIELDS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "projection_length",
    "tie_key_value",
    "share_layers",
    "input_type",
    "vocab_size",
    "position_embedding_type",
    "max_position_embeddings",
)
_HEADS_FOR_EVERY_TOKEN = (LunaForMaskedLM, LunaForTokenClassification, LunaForQuestionAnswering)
FORMULAS = {
    "FLOPs/token": "2 for each multiply-add; d width, f intermediate size, L = min(l, n) rows of P, r = L / n. Per "
    "layer: projections (6 + 4r) d^2, untied (8 + 6r) d^2; attention 8 L d; feed-forward 4 d f. Head: 2 for each "
    "weight, for every token (masked LM) or once a sequence. Norms, softmax and activations are not counted. A "
    "training step takes about three times as many.",
    "inference": "n max(5d + 2f, 7d) + 5 L d numbers; with a masked-LM head at least n (V + 2d).",
    "training": "In each layer n ((7 + 2m + u) d + (2 + a) f + h + 4) + L ((5 + m + u) d + h + 2) numbers, in the "
    "embeddings (n + L) ((1 + m) d + 2), in a masked-LM head n (4d + 2 + 2V); m, a = 1 with dropout and activation "
    "dropout, u = 1 with untied keys and values. Fused kernels do not store attention weights; attention dropout on a "
    "CPU adds about 7 h n L a layer. Dropout masks are counted as numbers; on a GPU they are bytes.",
    "with Adam": "weight, gradient and two moments for each parameter.",
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
        return "\n".join([*lines, "", *(textwrap.fill(f"{name}: {text}", 100) for name, text in FORMULAS.items())])


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
        path: model folder, or fairseq checkpoint of a Luna encoder.
        length: positions for memory and FLOPs; None = `max_position_embeddings`.

    Raises:
        ConversionError: `path` is neither, or the model has fewer positions.
    """
    read = _read_checkpoint if Path(path).is_file() else _read_folder
    config, model_class, written_by, heads, dtypes = read(path)
    limit = config.max_position_embeddings
    if length is not None and length > limit and config.position_embedding_type == "learned":
        raise ConversionError(f"--length {length}: the model has {limit} learned positions")
    length = length or limit
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
            name: getattr(config, name) for name in _FIELDS if name != "vocab_size" or config.input_type == "tokens"
        },
        heads=heads,
        parameters=parameters,
        weights={"dtype": dtype, "bytes": parameters["total"] * size},
        length=length,
        flops_per_token=flops_per_token(model, length),
        activation_bytes={
            "inference": size * inference_activations(model, length),
            "training": size * training_activations(model, length),
        },
        training_state_bytes=4 * size * parameters["total"],
    )


def _read_folder(path: str | Path):
    folder = read_folder(path)
    names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    dtypes = Counter()
    for name, info in folder.tensor_info.items():
        if info.dtype not in names:
            raise ConversionError(f"{info.file}: {name} has dtype {info.dtype}, not one of {', '.join(names)}")
        dtypes[names[info.dtype]] += torch.Size(info.shape).numel()
    return folder.config, folder.model_class, _origin(folder), _folder_heads(folder), dtypes


def _origin(folder: ModelFolder) -> str:
    if folder.report is None:
        return f"save_pretrained of transformers {folder.transformers_version or '(version not recorded)'}"
    source = folder.report["source"]
    return f"luna-mega convert, from {source['file']}, " + _fairseq(
        source["layout"], source["revision"], source["arch"]
    )


def _fairseq(layout: str, revision: str, arch: str) -> str:
    return f"a {layout} checkpoint (arch {arch}) of the {_REVISIONS[revision]} fairseq code"


def _folder_heads(folder: ModelFolder) -> list[str]:
    names, heads = folder.tensor_info, []
    if any(name.startswith("lm_head.") for name in names):
        heads.append("masked LM")
    name, config = folder.model_class.__name__.removeprefix("LunaFor"), folder.config
    if folder.model_class is LunaForQuestionAnswering:
        heads.append(f"{name}: start and end")
    elif folder.model_class is LunaForTokenClassification:
        heads.append(f"{name}: {config.num_labels} classes")
    elif folder.model_class not in (LunaModel, LunaForMaskedLM):
        scores = "one score an option" if name == "MultipleChoice" else f"{config.num_labels} classes"
        heads.append(f"{name}: {scores}, pooling {config.pooling}")
    return heads


def _read_checkpoint(path: str | Path):
    checkpoint = read_checkpoint(path)
    source, tensors = detect(checkpoint), canonical(checkpoint)
    if source.layout == "luna_bert":
        plan = plan_luna_bert(source, tensors, checkpoint.args, None)
        heads = ["masked LM"]
    else:
        plan = plan_luna_lra(source, tensors, checkpoint.args)
        name = plan.model_class.__name__.removeprefix("LunaFor")
        heads = [f"{name}: {plan.config.num_labels} classes, pooling {plan.config.pooling}"]
    for key, tensor in tensors.items():
        if key.startswith("classification_heads.") and key.endswith(".out_proj.weight") and ".attn." not in key:
            heads.append(f"{key.split('.')[1]}: {len(tensor)} classes")
    dtypes = Counter()
    for tensor in tensors.values():
        dtypes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    origin = _fairseq(source.layout, source.revision, source.arch)
    return plan.config, plan.model_class, f"fairseq: {origin}", heads, dtypes


def count_parameters(model: PreTrainedModel) -> dict[str, int]:
    """Unique parameters (a tied weight counts once) of embeddings, encoder and head, and their total."""
    counts = dict.fromkeys(("embeddings", "encoder", "head"), 0)
    for name, parameter in model.named_parameters():
        part = name.removeprefix("luna.").split(".")[0]
        counts[part if part in counts else "head"] += parameter.numel()
    return counts | {"total": sum(counts.values())}


def flops_per_token(model: PreTrainedModel, length: int) -> dict[str, float]:
    """FLOPs of a forward pass over one sequence of `length` positions, divided by `length`.

    With width d, intermediate size f, L = min(l, n) rows of P and r = L / n, every layer has 2 FLOPs for each
    multiply-add of

    - projections: query, output and context key/value d^2 each for a token; pack query and packed key/value d^2 each
      for a row of P; one more for keys and values that are not tied. (6 + 4r) d^2, or (8 + 6r) d^2;
    - attention: scores and weighted sum, L d each, for pack and for unpack: 8 L d;
    - feed-forward: 4 d f.

    A head has 2 for each of its weights, for every token (masked LM, tokens, spans) or once a sequence. Norms, softmax
    and activations are not counted; a training step takes about three times as many.
    """
    config = model.config
    width, rows = config.hidden_size, _rows(config, length)
    ratio = rows / length
    of_token, of_row = (6, 4) if config.tie_key_value else (8, 6)
    layers = config.num_hidden_layers
    found = {
        "projections": layers * (of_token + of_row * ratio) * width**2,
        "attention": layers * 8 * rows * width,
        "feed_forward": layers * 4 * width * config.intermediate_size,
        "head": sum(_head_flops(model, length, rows)) / length,
    }
    return found | {"total": sum(found.values())}


def _rows(config: LunaConfig, length: int) -> int:
    return min(config.projection_length, length) if config.dynamic_projection_length else config.projection_length


def _head_flops(model: PreTrainedModel, length: int, rows: int) -> Iterator[float]:
    """Of every linear layer of the head, for one sequence (half a pair)."""
    of_row = ("pooler.dense", "pooler.attention.k_proj", "pooler.attention.v_proj")
    towers = 2 if isinstance(model, LunaForSequencePairClassification) else 1
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or name.split(".")[0] in ("luna", "embeddings", "encoder"):
            continue
        times = length if isinstance(model, _HEADS_FOR_EVERY_TOKEN) else 1 / towers
        if name.startswith("pooler."):
            times = rows if name in of_row else 1
        yield 2 * times * module.in_features * module.out_features
        if name == "pooler.attention.out_proj":
            yield 4 * rows * module.in_features


def inference_activations(model: PreTrainedModel, length: int) -> int:
    """Numbers alive at the peak of a forward pass without gradient, for one sequence; see `FORMULAS`."""
    config = model.config
    width, ffn = config.hidden_size, config.intermediate_size
    peak = length * max(5 * width + 2 * ffn, 7 * width) + 5 * _rows(config, length) * width
    if isinstance(model, LunaForMaskedLM):
        return max(peak, length * (config.vocab_size + 2 * width))
    return peak


def training_activations(model: PreTrainedModel, length: int) -> int:
    """Numbers kept for the backward pass, for one sequence, without checkpointing; see `FORMULAS`."""
    config = model.config
    width, heads, rows = config.hidden_size, config.num_attention_heads, _rows(config, length)
    masks, ffn_masks, untied = config.dropout > 0, config.activation_dropout > 0, not config.tie_key_value
    of_token = (7 + 2 * masks + untied) * width + (2 + ffn_masks) * config.intermediate_size + heads + 4
    of_row = (5 + masks + untied) * width + heads + 2
    kept = config.num_hidden_layers * (length * of_token + rows * of_row)
    kept += (length + rows) * ((1 + masks) * width + 2)
    if isinstance(model, LunaForMaskedLM):
        kept += length * (4 * width + 2 + 2 * config.vocab_size)
    return kept


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
        description="Describes a Luna model: architecture, parameters, memory and FLOPs at a length, heads, and which "
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
    print(json.dumps(asdict(info) | {"formulas": FORMULAS}, indent=2) if options.json else info)
    return 0
