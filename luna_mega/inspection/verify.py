"""Compare two models layer by layer on the same inputs (`luna-mega verify`)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tqdm import tqdm
from transformers import PreTrainedConfig
from transformers.utils import logging

from luna_mega import LunaConfig
from luna_mega.convert.formats.registry import is_checkpoint
from luna_mega.convert.importer import convert_checkpoint
from luna_mega.convert.tensors import few
from luna_mega.errors import ConversionError, reason, shown
from luna_mega.hub.folder import ModelFolder, length_limit, load_tokenizer, position_limit, read_folder, stacks
from luna_mega.hub.samples import accepts, make_inputs, sample_inputs
from luna_mega.modeling_common.masks import find_mask

_INPUTS = (
    "input_ids", "attention_mask", "token_type_ids", "position_ids", "input_values", "pixel_values", "pair_input_ids",
    "pair_attention_mask", "pair_input_values", "decoder_input_ids", "decoder_attention_mask", "encoder_hidden_states",
    "encoder_attention_mask", "packed_states", "packed_mask",
)  # fmt: skip
_RESULTS = ("logits", "start_logits", "end_logits", "last_hidden_state")
# Two models must agree in these fields; otherwise their layers cannot be compared.
_SHAPE_FIELDS = ("input_type", "vocab_size", "num_hidden_layers", "hidden_size")
_LUNA_SHAPE_FIELDS = ("projection_length", "dynamic_projection_length", "drop_first_token")


@dataclass(frozen=True)
class Comparison:
    """Largest absolute differences between two models `a` and `b`.

    `inputs` has the shapes of the arguments of `forward` by batch, and the differences are the largest of all batches.

    `layers` has a row `{"layer", "hidden"}` for each layer, where layer 0 is the embeddings. Rows of Luna also have
    "packed" for P, and rows of an encoder-decoder "stack", "encoder" or "decoder". `results` has the outputs. None
    means NaN or Inf in only one of the models. Padding is not compared.
    """

    a: str
    b: str
    model_class: str
    inputs: dict[str, dict[str, list[int]]]
    layers: list[dict[str, str | int | float | None]]
    results: dict[str, float | None]
    tolerance: float

    @property
    def largest(self) -> float | None:
        """Return the largest of all differences; None as in `layers`."""
        differences = [row[name] for row in self.layers for name in _columns(row)] + list(self.results.values())
        return None if None in differences else max(differences)

    @property
    def within(self) -> bool:
        """Return whether all differences are within the tolerance."""
        return self.largest is not None and self.largest <= self.tolerance

    def __str__(self) -> str:
        lines = [
            f"A        {self.a}",
            f"B        {self.b}",
            f"class    {self.model_class}",
            f"inputs   {_listed(self.inputs)}",
            "",
        ]
        columns = list(dict.fromkeys(name for row in self.layers for name in _columns(row)))
        lines.append(f"{'layer':<20}" + "".join(f"{name:>10}" for name in columns))
        for row in self.layers:
            name = f"{row.get('stack', '')} {row['layer'] or 'embeddings'}".lstrip()
            lines.append(
                f"{name:<20}" + "".join(f"{_number(row[column]) if column in row else '-':>10}" for column in columns)
            )
        lines += [f"{name:<20}{_number(value):>10}" for name, value in self.results.items()]
        verdict = "equal in every number" if self.largest == 0 else f"largest difference {_number(self.largest)}"
        return "\n".join([*lines, "", f"{verdict}: {'within' if self.within else 'MORE THAN'} {self.tolerance:g}"])


def _listed(inputs: dict[str, dict[str, list[int]]]) -> str:
    """Return the shapes of one batch, or for several batches the argument names and the first shape of each batch."""
    if len(inputs) == 1:
        return ", ".join(f"{name} {shape}" for shapes in inputs.values() for name, shape in shapes.items())
    names = dict.fromkeys(name for shapes in inputs.values() for name in shapes)
    batches = [f"{batch} {next(iter(shapes.values()))}" for batch, shapes in inputs.items()]
    return f"{', '.join(names)}: {', '.join(batches)}"


def _columns(row: Mapping) -> list[str]:
    return [name for name in row if name not in ("stack", "layer")]


def _number(value: float | None) -> str:
    return "NaN/Inf" if value is None else f"{value:.1e}" if value else "0"


def compare(
    a: str | Path,
    b: str | Path,
    *,
    inputs: str | Path | None = None,
    texts: Sequence[str] = (),
    batch: int | None = None,
    length: int | None = None,
    seed: int = 0,
    tolerance: float = 1e-5,
    head: str | None = None,
    layer_norm: str = "auto",
    ema_convention: str = "auto",
    progress: bool = False,
) -> Comparison:
    """Run two models of the same class in float32 and evaluation mode on the same inputs.

    Args:
        a: Model folder, or checkpoint of the original code, which is converted to a temporary folder.
        b: The second model folder or checkpoint.
        inputs: Safetensors file with arguments of `forward`, such as `input_ids` `[B, T]`.
        texts: Sentences for the tokenizer of `a` (or `b`); for multiple choice the options of one question.
        batch: Number of random sequences (default: 2). Without `inputs`, `texts`, `batch` and `length`, all batches of
            `sample_inputs` are compared.
        length: Length of the random sequences (default: 64). Every second one is shorter, so that there is padding.
        seed: Seed of random inputs.
        tolerance: Largest difference that counts as equal.
        head: Option of `convert_checkpoint` for checkpoints.
        layer_norm: Option of `convert_checkpoint`.
        ema_convention: Option of `convert_checkpoint`.
        progress: Show a progress bar on stderr if it is a terminal.

    Raises:
        ConversionError: A model or the inputs are invalid, or the models are not comparable.
    """
    options = {"head": head, "layer_norm": layer_norm, "ema_convention": ema_convention}
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value not in (None, "auto")]
    if given and not (is_checkpoint(a) or is_checkpoint(b)):
        raise ConversionError(f"{', '.join(given)} applies to checkpoints, but A and B are model folders; omit it")
    with quiet_transformers(), _folder(a, options, progress) as first, _folder(b, options, progress) as second:
        _check_same_kind(a, first, b, second)
        if inputs is not None:
            batches = {"file": _read_inputs(Path(inputs), first)}
        elif texts:
            batches = {"texts": _tokenize(texts, first, second)}
        else:
            batches = _random(first, batch, length, seed)
        folders = tqdm((first, second), desc="models", delay=1, disable=None if progress else True)
        outputs = [_run(folder, batches) for folder in folders]
    pairs = [(*pair, first.config) for pair in zip(*outputs, batches.values(), strict=True)]
    return Comparison(
        a=str(a),
        b=str(b),
        model_class=first.model_class.__name__,
        inputs={
            batch: {name: list(tensor.shape) for name, tensor in tensors.items()} for batch, tensors in batches.items()
        },
        layers=[_largest(rows) for rows in zip(*(_layers(*pair) for pair in pairs), strict=True)],
        results=_largest([_results(*pair) for pair in pairs]),
        tolerance=tolerance,
    )


def _random(folder: ModelFolder, batch: int | None, length: int | None, seed: int) -> dict[str, dict]:
    """Return the batches of `sample_inputs`, or one batch of the given size."""
    try:
        if batch is None and length is None:
            return sample_inputs(folder, seed=seed)
        batch, length = batch or 2, length or 64
        longest = min(length, length_limit(folder.config) or length)
        lengths = [(longest, (longest + 1) // 2)[index % 2] for index in range(batch)]
        return {"random": make_inputs(folder, lengths, seed=seed)}
    except RuntimeError as error:  # raised by torch: not enough memory, or a number that is too large
        raise ConversionError(f"--batch {batch} --length {length} --seed {seed}: {error}") from error


def _largest(rows: Sequence[Mapping]) -> dict:
    """Return the largest differences over batches, given the rows of one layer or of the results."""
    largest = dict(rows[0])
    for name in _columns(largest):
        values = [row[name] for row in rows]
        largest[name] = None if None in values else max(values)
    return largest


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Disable progress bars and warnings of transformers; missing weights are errors in this module."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _folder(path: str | Path, options: dict[str, str | None], progress: bool) -> Iterator[ModelFolder]:
    if not is_checkpoint(path):
        yield read_folder(path)
        return
    with TemporaryDirectory() as temporary:
        convert_checkpoint(path, Path(temporary, "model"), progress=progress, **options)
        yield read_folder(Path(temporary, "model"))


def _check_same_kind(a, first: ModelFolder, b, second: ModelFolder) -> None:
    pairs = [("class", first.model_class.__name__, second.model_class.__name__)]
    if type(first.config) is type(second.config) and stacks(first.config).keys() == stacks(second.config).keys():
        fields = [name for name in _SHAPE_FIELDS if name != "vocab_size" or first.config.input_type == "tokens"]
        fields += _LUNA_SHAPE_FIELDS if isinstance(first.config, LunaConfig) else ()
        for stack, ours in stacks(first.config).items():
            label, theirs = "decoder " * (stack == "decoder"), stacks(second.config)[stack]
            pairs += [(label + name, getattr(ours, name), getattr(theirs, name)) for name in fields]
    if different := [f"{name}: {shown(ours)} and {shown(theirs)}" for name, ours, theirs in pairs if ours != theirs]:
        raise ConversionError(
            f"{a} and {b} cannot be compared ({'; '.join(different)}); --head chooses the head of a checkpoint"
        )


def _read_inputs(path: Path, folder: ModelFolder) -> dict[str, torch.Tensor]:
    model_class = folder.model_class
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ConversionError(f"{path}: not a safetensors file ({error})") from error
    known = [name for name in _INPUTS if accepts(model_class, name)]
    if unknown := sorted(tensors.keys() - set(known)):
        raise ConversionError(
            f"{path}: {few(unknown)}: {model_class.__name__} has no such inputs; it supports {', '.join(known)}"
        )
    if not tensors:
        raise ConversionError(f"{path}: contains no tensors; {model_class.__name__} supports {', '.join(known)}")
    for name, tensor in tensors.items():
        if not name.endswith("input_ids"):
            continue
        if tensor.is_floating_point() or tensor.is_complex():
            raise ConversionError(f"{path}: {name} has dtype {tensor.dtype}; ids must be integers")
        vocab_size = folder.config.get_text_config(decoder=name.startswith("decoder_")).vocab_size
        if tensor.numel() and not 0 <= tensor.min() <= tensor.max() < vocab_size:
            raise ConversionError(f"{path}: {name} has ids outside of the vocabulary, 0 to {vocab_size - 1}")
    return tensors


def _tokenize(texts: Sequence[str], *folders: ModelFolder) -> dict[str, torch.Tensor]:
    model_class = folders[0].model_class
    for name, what in (("pair_input_ids", "pairs of sequences"), ("decoder_input_ids", "a source and a target")):
        if accepts(model_class, name):
            raise ConversionError(f"--text: this model requires {what}; use --inputs")
    for folder in folders:
        if not (folder.path / "tokenizer_config.json").is_file():
            continue
        tokenizer = load_tokenizer(folder.path)
        limit = position_limit(folder.config)
        if tokenizer.pad_token is None:  # the mask marks padding
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
        try:
            tokens = tokenizer(
                list(texts), padding=True, return_tensors="pt", truncation=limit is not None, max_length=limit
            )
        except (ValueError, TypeError) as error:  # such as a tokenizer without a padding token
            raise ConversionError(f"--text: the tokenizer of {folder.path} raises an error: {reason(error)}") from error
        tensors = {name: tokens[name] for name in make_inputs(folders[0], [1]) if name in tokens}
        options = model_class.__name__.endswith("ForMultipleChoice")  # of one question
        return {name: tensor[None] if options else tensor for name, tensor in tensors.items()}
    raise ConversionError("--text: neither model has a tokenizer; convert with --bpe, or use --inputs")


@torch.no_grad()
def _run(folder: ModelFolder, batches: Mapping[str, Mapping[str, torch.Tensor]]) -> list[Mapping]:
    """Return the output of every batch."""
    model = folder.load(dtype=torch.float32)
    # Products can differ in the last bit if equal weights have different offsets in their mapped files.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    try:
        return [model(**tensors, output_hidden_states=True) for tensors in batches.values()]
    except (ValueError, IndexError, RuntimeError, TypeError) as error:
        raise ConversionError(f"the inputs do not fit {folder.path}: {reason(error)}") from error


def _mask(output: Mapping, tensors: Mapping, config: PreTrainedConfig, prefix: str = "") -> torch.Tensor:
    """Return a mask of the compared positions: `[B, T]`, or `[B options, T]` for multiple choice.

    The positions are those of the source or, if `prefix` is "decoder_", of the target. For pairs, they are those of the
    first sequence.
    """
    mask = tensors.get(f"{prefix}attention_mask")
    if mask is None and f"{prefix}input_ids" in tensors:
        mask = find_mask(tensors[f"{prefix}input_ids"], config)
    if mask is None:
        states = output[f"{prefix or 'encoder_' * config.is_encoder_decoder}hidden_states"]
        return torch.ones(states[0].shape[:2], dtype=torch.bool)
    mask = mask.bool().flatten(0, -2)
    # Without the first token of each sequence, for padding on both sides.
    return mask[:, 1:] & mask[:, :-1] if getattr(config, "drop_first_token", False) else mask


def _layers(first: Mapping, second: Mapping, tensors: Mapping, config: PreTrainedConfig) -> list[dict]:
    """Return the rows of all layers, see `Comparison`."""
    mask = _mask(first, tensors, config)
    names = {"": ("hidden_states", mask, "packed_hidden_states")}
    if config.is_encoder_decoder:
        names = {
            "encoder": ("encoder_hidden_states", mask, "encoder_packed_hidden_states"),
            "decoder": ("decoder_hidden_states", _mask(first, tensors, config, "decoder_"), "packed_hidden_states"),
        }
    rows = []
    for stack, (hidden, keep, packed) in names.items():
        start = {"stack": stack} if stack else {}
        values = [_difference(*pair, keep) for pair in zip(first[hidden], second[hidden], strict=True)]
        layers = [start | {"layer": layer, "hidden": value} for layer, value in enumerate(values)]
        if first.get(packed) is not None:
            used = None  # all rows of P
            if "packed_mask" in tensors:
                used = tensors["packed_mask"].bool()
            elif config.dynamic_projection_length and not config.add_cross_attention:
                used = torch.arange(first[packed][-1].shape[1]) < mask.sum(dim=1, keepdim=True)
            values = [_difference(*pair, used) for pair in zip(first[packed], second[packed], strict=True)]
            for row, value in zip(layers, values, strict=True):
                row["packed"] = value
        rows += layers
    return rows


def _results(first: Mapping, second: Mapping, tensors: Mapping, config: PreTrainedConfig) -> dict[str, float | None]:
    mask, results = _mask(first, tensors, config, "decoder_" * config.is_encoder_decoder), {}
    for name in _RESULTS:
        if first.get(name) is not None:
            shapes = [list(output[name].shape) for output in (first, second)]
            if shapes[0] != shapes[1]:
                raise ConversionError(
                    f"{name} of A and B have shapes {shapes[0]} and {shapes[1]}; compare models with equal heads"
                )
            a_position_each = first[name].dim() == 3 or name in ("start_logits", "end_logits")
            results[name] = _difference(first[name], second[name], mask if a_position_each else None)
    return results


def _difference(first: torch.Tensor, second: torch.Tensor, keep: torch.Tensor | None) -> float | None:
    """Return the largest difference at positions in `keep`: 0 for equal Inf and NaN, None for unequal ones."""
    if keep is not None:
        first, second = first[keep], second[keep]
    if first.numel() == 0:
        return 0.0
    same = (first == second) | (first.isnan() & second.isnan())
    largest = (first - second).abs().masked_fill(same, 0.0).max().item()
    return largest if math.isfinite(largest) else None
