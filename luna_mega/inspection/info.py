"""Describe a model folder or checkpoint: architecture, sizes, heads, origin (`luna-mega info`)."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from luna_mega import LunaConfig
from luna_mega.convert.formats import Format
from luna_mega.convert.formats.format import read_model
from luna_mega.convert.formats.registry import detect, find_format, is_checkpoint, open_checkpoint
from luna_mega.convert.tensors import dtype_name, few, meta_model
from luna_mega.errors import ConversionError, shown
from luna_mega.hub.card import architecture
from luna_mega.hub.folder import REPORT_NAME, ModelFolder, TensorInfo, length_limit, read_folder, stacks

_EMBEDDINGS = ("embeddings", "embedding_layer", "embedding_norm", "embed_tokens")
_STACKS = ("encoder", "decoder", "layers", "final_norm", "output_projection")
_LANGUAGE_MODELS = {
    "MaskedLM": "masked LM",
    "CausalLM": "causal LM",
    "ConditionalGeneration": "sequence-to-sequence LM",
}


@dataclass(frozen=True)
class Info:
    """Description of a model, with the bytes of its weights and cache as `from_pretrained` loads it in this dtype.

    `cache_bytes` contains the bytes of the cache of one sequence of `length` positions, and their growth with its last
    position (`"token"`); None for an encoder. Source and spec of an encoder-decoder have `length` positions each.
    """

    path: str
    written_by: str
    model_class: str
    config: dict[str, int | str | bool]
    attention: str
    heads: list[str]
    parameters: dict[str, int]
    weights: dict[str, int | str]
    length: int
    cache_bytes: dict[str, int] | None
    warnings: list[str]

    def __str__(self) -> str:
        parameters = {name: f"{value:,}" for name, value in self.parameters.items()}
        rows = {
            "path": self.path,
            "written by": self.written_by,
            "class": self.model_class,
            "config": _listed(self.config),
            "attention": self.attention,
            "heads": "; ".join(self.heads) or "none",
            "parameters": f"{parameters.pop('total')}: {_listed(parameters)}",
            "weights": f"{_short(self.weights['bytes'])}B ({self.weights['dtype']})",
        }
        if self.cache_bytes is not None:
            sequence, token = (f"{_short(size)}B" for size in self.cache_bytes.values())
            both = {"encoder", "decoder"} <= self.parameters.keys()
            of = "source and one target" if both else "sequence"
            rows["cache"] = f"{sequence} for one {of} of length {self.length}, {token} for one more token"
        lines = [f"{name:<13}{' '.join(value.split())}" for name, value in rows.items()]
        lines += [f"{'warning':<13}{text}" for text in self.warnings]
        return "\n".join(lines)


def _listed(values: dict) -> str:
    return ", ".join(f"{name} {value}".rstrip() for name, value in values.items())


def _short(number: float) -> str:
    for unit in ("", "k", "M", "G"):
        if number < 1000:
            return f"{number:.4g} {unit}"
        number /= 1000
    return f"{number:.4g} T"


def describe(path: str | Path, length: int | None = None, progress: bool = False) -> Info:
    """Describe a model without allocating its weights.

    Args:
        path: Model folder, or checkpoint of the original code.
        length: Number of positions in the cache. None = `max_position_embeddings` or `max_positions`, for Megalodon one
            chunk.
        progress: Show a progress bar on stderr if it is a terminal.

    Raises:
        ConversionError: `path` is neither, or `length` exceeds the positions of the model.
    """
    description = _read_checkpoint(path, progress) if is_checkpoint(path) else _read_folder(path)
    config, model_class, written_by, heads, dtypes, warnings, tensors = description
    limit = length_limit(config)
    if length is not None and limit is not None and length > limit:
        raise ConversionError(f"--length {length}: the model has {limit} learned positions; use a smaller length")
    usual = config.max_position_embeddings if hasattr(config, "max_position_embeddings") else config.chunk_size
    length = length or min(usual, limit or usual)
    try:
        model = meta_model(model_class, config, getattr(torch, dtypes.most_common(1)[0][0]))
    except ConversionError as error:
        raise ConversionError(f"{path}: {error}") from error
    if tensors is not None:
        warnings = [*warnings, *_compare_weights(path, model, tensors)]
    return Info(
        path=str(path),
        written_by=written_by,
        model_class=model_class.__name__,
        config=_fields(config),
        attention=_attention(config),
        heads=heads,
        parameters=count_parameters(model),
        weights={"dtype": dtype_name(model.dtype), "bytes": sum(weight.nbytes for weight in model.parameters())},
        length=length,
        cache_bytes=_count_cache(model, length) if "decoder" in stacks(config) else None,
        warnings=warnings,
    )


def _fields(config: PreTrainedConfig) -> dict[str, int | str | bool]:
    """Return the configuration fields with the sizes of the model; fields of the decoder are added if they differ."""
    values = architecture(config)
    if config.is_encoder_decoder:
        own = architecture(config.decoder_config).items()
        values |= {f"decoder_{name}": value for name, value in own if value != values[name]}
    return values


def _attention(config: PreTrainedConfig) -> str:
    """Return the positions that a position attends to, and how time grows with the length; by stack if they differ."""
    kinds = {}
    for name, stack in stacks(config).items():
        if isinstance(stack, LunaConfig):
            kinds[name] = f"{stack.projection_length} packed rows, linear"
        elif getattr(stack, "use_chunking", True):  # Megalodon always has chunks
            kinds[name] = f"chunks of {stack.chunk_size}, linear"
        else:
            kinds[name] = "all positions, quadratic"
    both = [f"{name}: {kind}" for name, kind in kinds.items()]
    return "; ".join(both) if len(set(kinds.values())) > 1 else kinds.popitem()[1]


def count_parameters(model: PreTrainedModel) -> dict[str, int]:
    """Return the numbers of parameters of embeddings, stacks and head, and the total; tied weights count once."""
    counts = dict.fromkeys(("embeddings", *stacks(model.config), "head"), 0)
    for name, parameter in model.named_parameters():
        counts[_part(model, name)] += parameter.numel()
    return counts | {"total": sum(counts.values())}


def _part(model: PreTrainedModel, name: str) -> str:
    """Return the part to which a parameter belongs: "embeddings", a stack, or "head"."""
    first, _, rest = name.removeprefix(f"{model.base_model_prefix}.").partition(".")
    if model.config.is_encoder_decoder and first in ("encoder", "decoder"):
        return "embeddings" if rest.split(".")[0] in _EMBEDDINGS else first
    if first in _EMBEDDINGS:
        return "embeddings"
    return next(iter(stacks(model.config))) if first in _STACKS else "head"


def _count_cache(model: PreTrainedModel, length: int) -> dict[str, int]:
    """Return the bytes of a model's cache after `length` positions, and the bytes that the last position adds."""
    size, *before = (_cache_bytes(model, positions) for positions in (length, length - 1) if positions > 0)
    return {"sequence": size, "token": size - sum(before)}


@torch.no_grad()
def _cache_bytes(model: PreTrainedModel, length: int) -> int:
    """Return the bytes of the cache after a forward pass over one sequence."""
    config, decoder = model.config, stacks(model.config)["decoder"]
    states = torch.empty(1, length, config.hidden_size, dtype=model.dtype, device="meta")
    inputs = {"inputs_embeds": states}
    if config.is_encoder_decoder:
        inputs["decoder_inputs_embeds"] = states
    elif decoder.add_cross_attention:
        inputs["encoder_hidden_states"] = states
        if isinstance(decoder, LunaConfig):
            inputs["packed_states"] = states.new_empty(1, decoder.projection_length, config.hidden_size)
    cache = model.base_model.eval()(**inputs, use_cache=True).cache  # a classifier returns none
    sides = [cache]
    if hasattr(cache, "cross_attention_cache"):
        sides = [cache.self_attention_cache, cache.cross_attention_cache]
    layers = [vars(layer) | getattr(layer, "tensors", {}) for side in sides for layer in side.layers]
    tensors = [value for layer in layers for value in layer.values() if isinstance(value, torch.Tensor)]
    # Tied keys and values share a storage.
    return sum({id(storage := tensor.untyped_storage()): storage.nbytes() for tensor in tensors}.values())


def _read_folder(path: str | Path):
    folder = read_folder(path)
    names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": None}  # None: counters
    dtypes = Counter()
    for name, info in folder.tensor_info.items():
        if info.dtype not in names:
            raise ConversionError(f"{info.file}: {name} has dtype {info.dtype}, not one of {', '.join(names)}")
        if names[info.dtype] is not None:
            dtypes[names[info.dtype]] += torch.Size(info.shape).numel()
    if not dtypes:
        raise ConversionError(f"{path}: the weights contain no floating-point tensor; use a model folder")
    return folder.config, folder.model_class, _origin(folder), _folder_heads(folder), dtypes, [], folder.tensor_info


def _compare_weights(path: str | Path, model: PreTrainedModel, tensors: dict[str, TensorInfo]) -> list[str]:
    """Return a warning about weights that the model does not use.

    Raise an error if weights are missing or have other shapes.
    """
    prefix = f"{model.base_model_prefix}."
    shapes = {name.removeprefix(prefix): tuple(info.shape) for name, info in tensors.items()}
    expected = {name.removeprefix(prefix): tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = {name.removeprefix(prefix) for pair in model.all_tied_weights_keys.items() for name in pair}
    if missing := sorted(expected.keys() - shapes.keys() - tied):
        raise ConversionError(f"{path}: the weights lack {few(missing)}; save the model again")
    for name in sorted(expected.keys() & shapes.keys()):
        if shapes[name] != expected[name]:
            raise ConversionError(
                f"{path}: {name} has the shape {list(shapes[name])}, but by config.json {list(expected[name])}; "
                "use the config.json of these weights"
            )
    ignored = model._keys_to_ignore_on_load_unexpected or []
    more = sorted(name for name in shapes.keys() - expected.keys() if not any(re.search(x, name) for x in ignored))
    return [f"{few(more)}: {type(model).__name__} has no such weights and ignores them"] if more else []


def _origin(folder: ModelFolder) -> str:
    if folder.report is None:
        return f"save_pretrained of transformers {folder.transformers_version or '(version not recorded)'}"
    source = folder.report["source"]
    fmt = find_format(source["layout"])
    if source["revision"] not in fmt.facts.revisions:
        raise ConversionError(
            f"{folder.path / REPORT_NAME}: {fmt.facts.name} has no revision {shown(source['revision'])}"
        )
    return f"luna-mega convert, from {source['file']}, {_origin_of(fmt, source['revision'], source['arch'])}"


def _origin_of(fmt: Format, revision: str, arch: str) -> str:
    named = "" if arch == fmt.facts.name else f" (arch {arch})"
    return f"a {fmt.facts.name} checkpoint{named} of {fmt.facts.revisions[revision].code}"


def _folder_heads(folder: ModelFolder) -> list[str]:
    config, kind = folder.config, folder.model_class.__name__.rpartition("For")[2]
    if kind in _LANGUAGE_MODELS:
        return [_LANGUAGE_MODELS[kind]]
    kept = any(name.startswith(("lm_head.", "mlm_head.")) for name in folder.tensor_info)
    heads = [_LANGUAGE_MODELS["MaskedLM"]] * kept
    if kind == "QuestionAnswering":
        heads.append(f"{kind}: start and end")
    elif kind == "TokenClassification":
        heads.append(f"{kind}: {config.num_labels} classes")
    elif "Classification" in kind or kind == "MultipleChoice":
        scores = "one score per option" if kind == "MultipleChoice" else f"{config.num_labels} classes"
        heads.append(f"{kind}: {scores}, pooling {config.pooling}")
    return heads


def _read_checkpoint(path: str | Path, progress: bool):
    fmt, revision, checkpoint, _ = detect(open_checkpoint(path, progress))
    facts = fmt.facts
    # The description does not depend on the revision.
    assumed = next(iter(facts.revisions)) if revision == "unknown" else revision
    spec, evidence = read_model(fmt, checkpoint.tensors, checkpoint.args, assumed)
    dtypes = Counter()
    for tensor in filter(torch.is_floating_point, checkpoint.tensors.values()):
        dtypes[dtype_name(tensor.dtype)] += tensor.numel()
    origin = f"{facts.container.software}: {_origin_of(fmt, revision, facts.container.architecture(checkpoint.args))}"
    warnings = [*checkpoint.warnings, *evidence.warnings]
    name, config = spec.model_class.__name__.rpartition("For")[2], spec.config
    heads = fmt.report(spec, evidence).heads or [f"{name}: {config.num_labels} classes, pooling {config.pooling}"]
    return config, spec.model_class, origin, heads, dtypes, warnings, None
