"""Compare a model folder with outputs that the original code recorded (`luna-mega verify`)."""

import hashlib
import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from luna_mega.convert.report import REPORT_NAME
from luna_mega.convert.tensors import few
from luna_mega.errors import ConversionError, errors_of, reason
from luna_mega.hub.folder import ModelFolder, read_folder, read_json, stacks
from luna_mega.hub.output import check_path
from luna_mega.modeling_common.heads import LMHead
from luna_mega.modeling_common.masks import find_mask

_INPUTS = (
    "input_ids", "attention_mask", "token_type_ids", "position_ids", "input_values", "pixel_values", "pair_input_ids",
    "pair_attention_mask", "pair_input_values", "decoder_input_ids", "decoder_attention_mask", "encoder_hidden_states",
    "encoder_attention_mask", "packed_states", "packed_mask",
)  # fmt: skip
_OTHERS = re.compile("loss|.*attentions|.*mask|cache|past_key_values")  # in the outputs, but not compared
_SLICE = 2**22  # numbers compared at a time, because all logits can need more memory than the model

# The shape of an output, and the function that returns its positions `[:, part]`.
Output = tuple[list[int], Callable[[slice], torch.Tensor]]


@dataclass(frozen=True)
class Verification:
    """Differences between a model and the outputs that the original code recorded.

    `outputs` has for every output the largest absolute `difference` and the `largest` absolute value of the record.
    Padding is not compared.
    """

    folder: str
    record: str
    source: str
    model_class: str
    inputs: dict[str, list[int]]
    outputs: dict[str, dict[str, float]]
    tolerance: float

    @property
    def within(self) -> bool:
        """Return whether all differences are within the tolerance, see `verify`."""
        return all(row["difference"] <= self.tolerance * row["largest"] for row in self.outputs.values())

    def __str__(self) -> str:
        lines = [
            f"folder   {self.folder} ({self.model_class})",
            f"record   {self.record} ({self.source})",
            f"inputs   {', '.join(f'{name} {shape}' for name, shape in self.inputs.items())}",
            f"\n{'output':<32}{'difference':>12}{'largest':>12}",
        ]
        lines += [f"{name:<32}{row['difference']:>12.1e}{row['largest']:>12.1e}" for name, row in self.outputs.items()]
        difference, largest = (max(row[name] for row in self.outputs.values()) for name in ("difference", "largest"))
        verdict = f"{'within' if self.within else 'MORE THAN'} {self.tolerance:g} of the largest value"
        return "\n".join([*lines, f"\nlargest difference {difference:.1e}, largest output {largest:.1e}: {verdict}"])


@torch.no_grad()
def verify(folder: str | Path, recorded: str | Path, *, tolerance: float = 1e-5) -> Verification:
    """Run a model in evaluation mode on recorded inputs, and compare its outputs with the recorded ones.

    The model runs in float64 if a tensor of the record is float64, else in float32.

    Args:
        folder: Model folder.
        recorded: Safetensors file with inputs and outputs of the original code, and the SHA-256 of its checkpoint. The
            guide of the command has the names of the tensors, and programs that write the file.
        tolerance: Largest allowed difference, as a fraction of the largest absolute value of an output.

    Raises:
        ConversionError: The folder or the file is invalid, the file was recorded from another checkpoint, or the
            comparison cannot fail because an output is constant.
    """
    opened = read_folder(folder)
    shapes, dtype, metadata = _open(recorded)
    with errors_of(recorded):
        _check_source(opened, metadata)
    model = opened.load(dtype=dtype)
    with errors_of(recorded):
        inputs, outputs, packed_mask = _run(model, recorded, shapes)
        rows = {}
        for name, output in outputs.items():
            if output[0] != shapes[name]:
                raise ConversionError(
                    f"{name} has shape {shapes[name]}, but {output[0]} in {folder}; record it with the batch first and "
                    "without the padding of chunks"
                )
            keep = _kept(name, shapes[name], inputs, packed_mask, model.config)
            rows[name] = _compare(recorded, name, output, keep, tolerance, single=len(outputs) == 1)
    return Verification(
        folder=str(folder),
        record=str(recorded),
        source=metadata.get("source", "source not stated"),
        model_class=type(model).__name__,
        inputs={name: list(tensor.shape) for name, tensor in inputs.items()},
        outputs=rows,
        tolerance=tolerance,
    )


def _open(path: str | Path) -> tuple[dict[str, list[int]], torch.dtype, dict[str, str]]:
    """Return the shapes of the recorded tensors, the dtype for the model, and the metadata."""
    if check_path(path).is_file():
        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                dtypes = {tensor.get_dtype() for tensor in tensors.values()}
                dtype = torch.float64 if "F64" in dtypes else torch.float32
                return {name: x.get_shape() for name, x in tensors.items()}, dtype, file.metadata() or {}
        except SafetensorError:
            pass
    raise ConversionError(
        f"{path}: not a file of recorded outputs; write one with the original code, see docs/conversion.md#verify"
    )


def _read(path: str | Path, name: str, part: slice | None = None) -> torch.Tensor:
    """Return the positions `part` of a tensor. The file is opened for each part so that its memory can be released."""
    with safe_open(path, "pt") as file:
        return file.get_tensor(name) if part is None else file.get_slice(name)[:, part]


def _check_source(folder: ModelFolder, metadata: Mapping[str, str]) -> None:
    """Raise `ConversionError` unless the record has the SHA-256 of the converted checkpoint or of the weights."""
    if (report := folder.path / REPORT_NAME).is_file():
        source = read_json(report).get("source")
        own = [source.get("sha256") if isinstance(source, dict) else None]
    else:
        own = []
        for file in folder.files:
            with file.open("rb") as content:
                own.append(hashlib.file_digest(content, "sha256").hexdigest())
    recorded = metadata.get("sha256")
    if recorded is None or recorded not in own:
        origin = "without a SHA-256" if recorded is None else f"from a checkpoint with the SHA-256 {recorded}"
        raise ConversionError(
            f"recorded {origin}, but {folder.path} is of {own[0]}; record the "
            "outputs of that checkpoint, with `sha256` in the metadata"
        )


def _run(
    model: PreTrainedModel, recorded: str | Path, shapes: Mapping[str, list[int]]
) -> tuple[dict[str, torch.Tensor], dict[str, Output], torch.Tensor | None]:
    """Run a model on the recorded inputs; return these, the outputs that are recorded, and the mask of P."""
    parameters = inspect.signature(model.forward).parameters
    known = [name for name in _INPUTS if name in parameters]
    inputs = {name: _read(recorded, name) for name in known if name in shapes}
    inputs = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    try:
        outputs, packed_mask = _outputs(model, inputs)
    except (ValueError, IndexError, RuntimeError, TypeError) as error:
        raise ConversionError(f"the model cannot read {', '.join(inputs) or 'no inputs'}: {reason(error)}") from error
    possible = ", ".join(dict.fromkeys(re.sub(r"\d+$", "N", name) for name in outputs))
    if unknown := sorted(shapes.keys() - inputs.keys() - outputs.keys()):
        raise ConversionError(
            f"{few(unknown)}: not in a {type(model).__name__}, which has the inputs {', '.join(known)} and the outputs "
            f"{possible}; rename or remove it"
        )
    if shapes.keys() <= inputs.keys():
        raise ConversionError(f"no outputs; record at least one of {possible}")
    return inputs, {name: output for name, output in outputs.items() if name in shapes}, packed_mask


def _outputs(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> tuple[dict[str, Output], torch.Tensor | None]:
    """Return the outputs of a model and of its body by name, and the mask of the rows of P."""
    body, states, of_words = model.base_model, [], isinstance(model, LMHead)
    found: dict[str, Output] = {}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config.use_cache = False  # the cache of a large decoder needs more memory than its weights
            module.config.tie_last_hidden_states = False  # the states of the last layer are those before the final norm
    hook = body.register_forward_hook(lambda module, args, output: states.append(output))
    result = (body if of_words else model)(**inputs, output_hidden_states=True)
    hook.remove()
    for key, value in {**states[0], **result}.items():
        named = {f"{key}.{index}": x for index, x in enumerate(value)} if isinstance(value, tuple) else {key: value}
        for name, tensor in named.items():
            if isinstance(tensor, torch.Tensor) and not _OTHERS.fullmatch(key):
                found[name] = (list(tensor.shape), lambda part, tensor=tensor: tensor[:, part])
    if of_words:
        last = result.last_hidden_state

        def score(part: slice) -> torch.Tensor:
            result.last_hidden_state = last[:, part]
            return model(**inputs).logits

        body.forward = lambda *args, **kwargs: result
        found["logits"] = ([*last.shape[:2], score(slice(1)).shape[2]], score)
    return found, states[0].get("packed_mask")


def _kept(
    name: str, shape: list[int], inputs: Mapping[str, torch.Tensor], packed_mask: torch.Tensor | None, config: Any
) -> torch.Tensor | None:
    """Return the bool mask `[B, T]` of the positions of an output that are compared; None = one row per sequence."""
    if len(shape) < 3 and name not in ("start_logits", "end_logits"):
        return None
    mask = packed_mask
    if "packed" not in name:
        decodes = config.is_encoder_decoder and not name.startswith("encoder_")
        ids, mask = (inputs.get(f"{'decoder_' * decodes}{kind}") for kind in ("input_ids", "attention_mask"))
        if mask is None and ids is not None:
            mask = find_mask(ids, stacks(config).get("decoder" if decodes else "encoder", config))
        mask = None if mask is None else mask.bool().flatten(0, -2)
        if mask is not None and getattr(config, "drop_first_token", False):
            mask = mask[:, 1:] & mask[:, :-1]  # for padding on both sides
    return torch.ones(shape[:2], dtype=torch.bool) if mask is None else mask.bool()


def _compare(
    path: str | Path, name: str, output: Output, keep: torch.Tensor | None, tolerance: float, single: bool
) -> dict[str, float]:
    """Return the largest difference and the largest recorded value of an output at the positions of a mask.

    A record without variation raises an error, because the output of a wrong model may not vary either. One number is
    only compared if there are other outputs.
    """
    shape, compute = output
    step = max(1, _SLICE * shape[1] // max(1, math.prod(shape)))
    first, count, difference, largest, spread = None, 0, 0.0, 0.0, 0.0
    for start in range(0, shape[1], step):
        part = slice(start, start + step)
        ours, theirs = compute(part), _read(path, name, part).double()
        if keep is not None:
            ours, theirs = ours[keep[:, part]], theirs[keep[:, part]]
        if not theirs.numel():
            continue
        for values, place in ((theirs, "the record"), (ours, "the model")):
            if not values.isfinite().all():
                raise ConversionError(f"{name} has NaN or Inf in {place}; record other inputs, or convert again")
        first, count = theirs[0] if first is None else first, count + len(theirs)
        difference = max(difference, (ours - theirs).abs().max().item())
        largest = max(largest, theirs.abs().max().item())
        spread = max(spread, (theirs - (first if count > 1 else theirs.min())).abs().max().item())
    if not count:
        raise ConversionError(f"{name} has only padding; record inputs with `attention_mask` 1")
    if spread <= tolerance * largest and (single or count > 1 or first.numel() > 1):
        raise ConversionError(
            f"{name} is constant: it varies by {spread:.1e}, not by more than the tolerance; record different inputs"
        )
    return {"difference": difference, "largest": largest}
