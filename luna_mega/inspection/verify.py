"""Compares two models, layer by layer, on the same inputs: `luna-mega verify`."""

import argparse
import inspect
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedConfig
from transformers.utils import logging

from luna_mega.convert import ema_convention as ema
from luna_mega.convert.fairseq_to_hf import convert_checkpoint
from luna_mega.convert.layer_norm import CHOICES
from luna_mega.convert.mapping import few
from luna_mega.errors import ConversionError
from luna_mega.hub.folder import ModelFolder, position_limit, read_folder

_INPUTS = (
    "input_ids",
    "attention_mask",
    "input_values",
    "pair_input_ids",
    "pair_attention_mask",
    "pair_input_values",
)
_RESULTS = ("logits", "start_logits", "end_logits", "last_hidden_state")
# In these two models must agree, or there is nothing to compare layer by layer.
_SHAPE_FIELDS = ("input_type", "vocab_size", "num_hidden_layers", "hidden_size")
_LUNA_SHAPE_FIELDS = ("projection_length", "dynamic_projection_length", "drop_first_token")


@dataclass(frozen=True)
class Comparison:
    """Largest absolute differences between two models `a` and `b`.

    `layers` has `{"layer", "hidden"}`, of Luna "packed" besides, layer 0 = the embeddings, and `results` the outputs.
    None = NaN or Inf in one model and not in the other. Padding is not compared.
    """

    a: str
    b: str
    model_class: str
    inputs: dict[str, list[int]]
    layers: list[dict[str, int | float | None]]
    results: dict[str, float | None]
    tolerance: float

    @property
    def largest(self) -> float | None:
        """The largest of all differences; None as in `layers`."""
        found = [row[name] for row in self.layers for name in row if name != "layer"] + list(self.results.values())
        return None if None in found else max(found)

    @property
    def within(self) -> bool:
        """Whether no difference exceeds the tolerance."""
        return self.largest is not None and self.largest <= self.tolerance

    def __str__(self) -> str:
        inputs = ", ".join(f"{name} {shape}" for name, shape in self.inputs.items())
        lines = [f"A        {self.a}", f"B        {self.b}", f"class    {self.model_class}", f"inputs   {inputs}", ""]
        columns = [name for name in self.layers[0] if name != "layer"]
        lines.append(f"{'layer':<20}" + "".join(f"{name:>10}" for name in columns))
        for row in self.layers:
            name = "embeddings" if row["layer"] == 0 else str(row["layer"])
            lines.append(f"{name:<20}" + "".join(f"{_number(row[column]):>10}" for column in columns))
        lines += [f"{name:<20}{_number(value):>10}" for name, value in self.results.items()]
        verdict = "equal in every number" if self.largest == 0 else f"largest difference {_number(self.largest)}"
        return "\n".join([*lines, "", f"{verdict}: {'within' if self.within else 'MORE THAN'} {self.tolerance:g}"])


def _number(value: float | None) -> str:
    return "NaN/Inf" if value is None else f"{value:.1e}" if value else "0"


def compare(
    a: str | Path,
    b: str | Path,
    *,
    inputs: str | Path | None = None,
    texts: Sequence[str] = (),
    batch: int = 2,
    length: int = 64,
    seed: int = 0,
    tolerance: float = 1e-5,
    head: str | None = None,
    layer_norm: str = "auto",
    ema_convention: str = "auto",
    progress: bool = False,
) -> Comparison:
    """Runs two models of one kind in float32 and evaluation mode on the same inputs.

    Args:
        a, b: model folders, or fairseq checkpoints, which are converted into a temporary folder.
        inputs: safetensors file with arguments of the model's forward, such as `input_ids` `[B, T]`.
        texts: sentences for the tokenizer of the folder `a` (or `b`); for multiple choice the options of one question.
        batch, length, seed: of the random inputs that are made if neither is given. Every second sequence is shorter,
            so that padding is covered.
        tolerance: largest difference that counts as equal.
        head, layer_norm, ema_convention: for checkpoints, as in `convert_checkpoint`.
        progress: show a progress bar on stderr if that is a terminal.

    Raises:
        ConversionError: a model or the inputs are at fault, or the models are of different kinds.
    """
    options = {"head": head, "layer_norm": layer_norm, "ema_convention": ema_convention}
    with _quiet_transformers(), _folder(a, options) as first, _folder(b, options) as second:
        _check_same_kind(a, first, b, second)
        if first.config.is_encoder_decoder:
            raise ConversionError(
                f"{a}: {first.model_class.__name__} is an encoder-decoder, of which this version compares no states; "
                "compare the logits of two from_pretrained models"
            )
        if inputs is not None:
            tensors = _read_inputs(Path(inputs), first)
        elif texts:
            tensors = _tokenize(texts, first, second)
        else:
            tensors = _random_inputs(first, batch, length, seed)
        outputs = []
        for folder in tqdm((first, second), desc="models", delay=1, disable=None if progress else True):
            outputs.append(_run(folder, tensors))
    mask = _mask(tensors, first.config)
    return Comparison(
        a=str(a),
        b=str(b),
        model_class=first.model_class.__name__,
        inputs={name: list(tensor.shape) for name, tensor in tensors.items()},
        layers=_layers(*outputs, mask, getattr(first.config, "dynamic_projection_length", False)),
        results=_results(*outputs, mask),
        tolerance=tolerance,
    )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No bars and no advice: what is missing or left over is an error here, or expected."""
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
def _folder(path: str | Path, options: dict[str, str | None]) -> Iterator[ModelFolder]:
    if not Path(path).is_file():
        yield read_folder(path)
        return
    with TemporaryDirectory() as temporary:
        convert_checkpoint(path, Path(temporary, "model"), **options)
        yield read_folder(Path(temporary, "model"))


def _check_same_kind(a, first: ModelFolder, b, second: ModelFolder) -> None:
    pairs = [("class", first.model_class.__name__, second.model_class.__name__)]
    if type(first.config) is type(second.config):
        fields = [name for name in _SHAPE_FIELDS if name != "vocab_size" or first.config.input_type == "tokens"]
        fields += _LUNA_SHAPE_FIELDS if first.config.model_type == "luna" else ()
        pairs += [(name, getattr(first.config, name), getattr(second.config, name)) for name in fields]
    if different := [f"{name}: {ours!r} and {theirs!r}" for name, ours, theirs in pairs if ours != theirs]:
        raise ConversionError(
            f"{a} and {b} are not models of one kind ({'; '.join(different)}); of a checkpoint, --head chooses the head"
        )


def _read_inputs(path: Path, folder: ModelFolder) -> dict[str, torch.Tensor]:
    model_class, vocab_size = folder.model_class, folder.config.vocab_size
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ConversionError(f"{path}: not a safetensors file ({error})") from error
    known = [name for name in _INPUTS if _reads(model_class, name)]
    if unknown := sorted(tensors.keys() - set(known)):
        raise ConversionError(
            f"{path}: {few(unknown)}: {model_class.__name__} has no such inputs; it takes {', '.join(known)}"
        )
    if not tensors:
        raise ConversionError(f"{path}: holds no tensors; {model_class.__name__} takes {', '.join(known)}")
    for name, tensor in tensors.items():
        if name.endswith("input_ids") and tensor.numel() and not 0 <= tensor.min() <= tensor.max() < vocab_size:
            raise ConversionError(f"{path}: {name} has ids outside of the vocabulary, 0 to {vocab_size - 1}")
    return tensors


def _tokenize(texts: Sequence[str], *folders: ModelFolder) -> dict[str, torch.Tensor]:
    model_class = folders[0].model_class
    if _reads(model_class, "pair_input_ids"):
        raise ConversionError("--text: this model reads pairs of sequences; give --inputs")
    for folder in folders:
        if not (folder.path / "tokenizer_config.json").is_file():
            continue
        tokenizer = AutoTokenizer.from_pretrained(folder.path)
        limit = folder.config.max_position_embeddings
        tokens = tokenizer(list(texts), padding=True, truncation=True, max_length=limit, return_tensors="pt")
        tensors = {name: tokens[name] for name in ("input_ids", "attention_mask")}
        if _has_options(model_class):
            return {name: tensor[None] for name, tensor in tensors.items()}
        return tensors
    raise ConversionError("--text: neither of the models has a tokenizer; convert with --bpe, or give --inputs")


def _reads(model_class: type, name: str) -> bool:
    return name in inspect.signature(model_class.forward).parameters


def _has_options(model_class: type) -> bool:
    return model_class.__name__.endswith("ForMultipleChoice")


def _random_inputs(folder: ModelFolder, batch: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    config, generator = folder.config, torch.Generator().manual_seed(seed)
    if (limit := position_limit(config)) is not None:
        length = min(length, limit)
    options = (2,) if _has_options(folder.model_class) else ()
    shape = (batch, *options, length)
    lengths = torch.full(shape[:-1], length)
    lengths[1::2] = (length + 1) // 2
    mask = torch.arange(length) < lengths[..., None]
    towers = ("", "pair_") if _reads(folder.model_class, "pair_input_ids") else ("",)
    tensors = {}
    for tower in towers:
        if config.input_type == "values":
            tensors[f"{tower}input_values"] = torch.randn(shape, generator=generator)
        else:
            first = min(4, config.vocab_size - 1)  # behind the special symbols of fairseq
            tokens = torch.randint(first, config.vocab_size, shape, generator=generator)
            tensors[f"{tower}input_ids"] = tokens.masked_fill(~mask, config.pad_token_id)
        tensors[f"{tower}attention_mask"] = mask.long()
    return tensors


@torch.no_grad()
def _run(folder: ModelFolder, tensors: Mapping[str, torch.Tensor]) -> Mapping:
    model, info = folder.model_class.from_pretrained(folder.path, dtype=torch.float32, output_loading_info=True)
    if missing := sorted(info["missing_keys"]):
        raise ConversionError(f"{folder.path}: the weights lack {few(missing)}")
    try:
        return model.eval()(**tensors, output_hidden_states=True)
    except (ValueError, IndexError, RuntimeError, TypeError) as error:
        raise ConversionError(f"the inputs do not fit {folder.path}: {error}") from error


def _mask(tensors: Mapping[str, torch.Tensor], config: PreTrainedConfig) -> torch.Tensor:
    """Positions that count, `[B, T]` bool (multiple choice: the options side by side). Pairs: of the first sequence."""
    if "attention_mask" in tensors:
        mask = tensors["attention_mask"].bool()
    elif config.input_type == "tokens":
        mask = tensors["input_ids"] != config.pad_token_id
    else:
        mask = torch.ones_like(tensors["input_values"], dtype=torch.bool)
    mask = mask.flatten(0, -2)
    # Without the first token of each, wherever the padding is.
    return mask[:, 1:] & mask[:, :-1] if getattr(config, "drop_first_token", False) else mask


def _layers(first: Mapping, second: Mapping, mask: torch.Tensor, dynamic: bool) -> list[dict]:
    compared = {"hidden": ("hidden_states", mask)}
    if "packed_hidden_states" in first:
        rows = torch.arange(first["packed_hidden_states"][0].shape[1])
        compared["packed"] = "packed_hidden_states", rows < mask.sum(dim=1, keepdim=True) if dynamic else None
    found = {"layer": range(len(first["hidden_states"]))}
    for column, (name, keep) in compared.items():
        found[column] = [
            _difference(ours, theirs, keep) for ours, theirs in zip(first[name], second[name], strict=True)
        ]
    return [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]


def _results(first: Mapping, second: Mapping, mask: torch.Tensor) -> dict[str, float | None]:
    found = {}
    for name in _RESULTS:
        if first.get(name) is not None:
            shapes = [list(output[name].shape) for output in (first, second)]
            if shapes[0] != shapes[1]:
                raise ConversionError(f"{name} of A and B have shapes {shapes[0]} and {shapes[1]}: other classes")
            a_position_each = first[name].dim() == 3 or name in ("start_logits", "end_logits")
            found[name] = _difference(first[name], second[name], mask if a_position_each else None)
    return found


def _difference(first: torch.Tensor, second: torch.Tensor, keep: torch.Tensor | None) -> float | None:
    """Largest difference where `keep` is true; equal Inf and NaN are no difference, unequal ones are None."""
    if keep is not None:
        first, second = first[keep], second[keep]
    if first.numel() == 0:
        return 0.0
    same = (first == second) | (first.isnan() & second.isnan())
    largest = (first - second).abs().masked_fill(same, 0.0).max().item()
    return largest if math.isfinite(largest) else None


def main(argv: Sequence[str] | None = None) -> int:
    """`luna-mega verify`: compares two models and prints a table.

    Args:
        argv: arguments without the program name; those of the process when None.

    Returns:
        Exit status: 0 the models agree within the tolerance, 1 they do not, or the input is at fault (one line about it
        on stderr).

    Raises:
        SystemExit: 2 on wrong usage, 0 after `--help`.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    random = {name: getattr(options, name) for name in ("batch", "length", "seed")}
    random = {name: value for name, value in random.items() if value is not None}
    if random and (options.inputs or options.text):
        parser.error(f"--{next(iter(random))} is of the random inputs; leave it out with --inputs and --text")
    of_checkpoints = options.head or options.layer_norm != "auto" or options.ema_convention != "auto"
    if of_checkpoints and not any(Path(path).is_file() for path in (options.a, options.b)):
        parser.error(
            "--head, --layer-norm and --ema-convention are for checkpoints; leave them out, both models are folders"
        )
    try:
        comparison = compare(
            options.a,
            options.b,
            inputs=options.inputs,
            texts=options.text,
            tolerance=options.tolerance,
            head=options.head,
            layer_norm=options.layer_norm,
            ema_convention=options.ema_convention,
            progress=not options.json,
            **random,
        )
    except (ConversionError, OSError) as error:
        print(f"luna-mega verify: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    if options.json:
        summary = {"largest": comparison.largest, "within": comparison.within}
        print(json.dumps(asdict(comparison) | summary, indent=2))
    else:
        print(comparison)
    return 0 if comparison.within else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="luna-mega verify",
        description="Runs two models on the same inputs, in float32, and prints the largest difference of every "
        "layer. Exit status 0: within the tolerance; 1: not, or the input is at fault.",
    )
    for name in "ab":
        parser.add_argument(name, metavar=name.upper(), help="a model folder, or a fairseq checkpoint to convert first")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--inputs", metavar="FILE", help="safetensors file with the model's inputs: input_ids [B, T], ..."
    )
    source.add_argument("--text", metavar="TEXT", nargs="+", default=[], help="texts for the tokenizer of A or B")
    parser.add_argument("--batch", metavar="N", type=_positive, help="random sequences (default: 2)")
    parser.add_argument("--length", metavar="N", type=_positive, help="their length (default: 64)")
    parser.add_argument("--seed", metavar="S", type=int, help="of the random sequences (default: 0)")
    parser.add_argument("--tolerance", metavar="T", type=float, default=1e-5, help="largest difference (default: 1e-5)")
    parser.add_argument("--head", metavar="NAME", help="classification head of a checkpoint (see luna-mega convert)")
    parser.add_argument(
        "--layer-norm", choices=CHOICES, default="auto", help="norm weights of a checkpoint (see luna-mega convert)"
    )
    parser.add_argument(
        "--ema-convention", choices=ema.CHOICES, default="auto", help="branch of a checkpoint (see luna-mega convert)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(f"{number} is not positive")
    return number
