"""Export model folders to ONNX programs, and compare the programs with the models (`luna-mega onnx`)."""

import copy
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel, exporters
from transformers.exporters.utils import decompose_for_generation

from luna_mega.errors import ConversionError, install, reason
from luna_mega.hub.folder import ModelFolder, length_limit, load_tokenizer, read_folder
from luna_mega.hub.output import check_new_file, check_output, complete_output
from luna_mega.hub.samples import borders, make_inputs

TOLERANCE = 1e-4
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_OUTPUTS = ("logits", "start_logits", "end_logits", "last_hidden_state", "pooler_output")


@dataclass(frozen=True)
class OnnxReport:
    """Record of an export: the programs, and their largest difference from the model."""

    model_class: str
    programs: tuple[str, ...]
    difference: float
    output: Path

    def __str__(self) -> str:
        programs = ", ".join(self.programs)
        return f"{self.model_class}: {programs}\nlargest difference {self.difference:.1e}; written to {self.output}"


def export_onnx(folder: str | Path, output: str | Path, opset: int | None = None) -> OnnxReport:
    """Export a model folder to ONNX, for any batch and length (images: one size), and compare it with the model.

    A model that generates is exported as programs `prefill` and `decode`, an encoder-decoder also as `encoder`, and
    other classes as `model`. The comparison runs three inputs: shorter than P or a chunk, of a length that is not a
    multiple of either, and a batch with padding.

    Args:
        folder: Folder of `save_pretrained` or `luna-mega convert`.
        output: Folder to write, absent or empty, or for one program a new file `*.onnx`.
        opset: Version of the ONNX operators, 18 or later. None = default of the exporter.

    Raises:
        ConversionError: The folder, the output, the opset or the installation is invalid, or a difference exceeds
            1e-4. Nothing is written to `output`.
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise ConversionError(f"{', '.join(missing)} not installed; run {install('onnx')}")
    if opset is not None and opset < 18:
        raise ConversionError(f"--opset {opset}: the version of ONNX operators must be at least 18")
    source = read_folder(folder)
    _check_class(source)
    single, name = Path(output).suffix == ".onnx", source.model_class.__name__
    if single and source.model_class.can_generate():
        raise ConversionError(f"{output}: {name} is exported as several programs; use a folder for --output")
    target, step = check_new_file(output) if single else check_output(output), "exported"
    try:
        with _quiet():
            model, (sample, *others) = source.load(dtype=torch.float32), _batches(source)
            exported = _export(model, sample, opset)
            with complete_output(target) as place:
                if single:
                    import onnx_ir

                    onnx_ir.save(exported.program, str(place))
                else:
                    exported.save_pretrained(place)
                step = "run by onnxruntime"
                runners = exported.to(device="cpu").runners
                difference = torch.tensor([compare(model, runners, inputs) for inputs in others]).max().item()
                if not difference <= TOLERANCE:
                    raise ConversionError(
                        f"{source.path}: onnxruntime differs from the model by {difference:.1e}, more than "
                        f"{TOLERANCE:g}; nothing was written"
                    )
    except (ConversionError, OSError):
        raise
    except Exception as error:  # torch.export, torch.onnx, transformers and onnxruntime raise many types of errors
        cause = reason(error.__cause__ or error)
        raise ConversionError(f"{source.path}: {name} cannot be {step}, opset {opset or 'default'}: {cause}") from error
    return OnnxReport(name, tuple(exported.components), difference, target)


def _check_class(folder: ModelFolder) -> None:
    config, name = folder.config, folder.model_class.__name__
    decodes = config.is_encoder_decoder or config.is_decoder and not name.endswith("Classification")
    if getattr(config, "adaptive_input_cutoffs", None) or getattr(config, "adaptive_softmax_cutoffs", None):
        problem = f"{name} with an adaptive vocabulary selects bands by the tokens, which ONNX does not support; export"
        problem += " a model without adaptive_input_cutoffs and adaptive_softmax_cutoffs"
    elif config.add_cross_attention and not config.is_encoder_decoder:
        problem = "a decoder with cross-attention requires its encoder; export the encoder-decoder"
    elif decodes and not folder.model_class.can_generate():
        problem = f"{name} has no head; export the class that generates"
    else:
        return
    raise ConversionError(f"{folder.path}: {problem}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress exporter messages that are meant for developers."""
    level, silence = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stdout(silence), redirect_stderr(silence):
            yield
    finally:
        logging.disable(level)


# The exporters cast inputs to the dtype of the model, but statistics of Megalodon's norms are float64.
@patch("transformers.exporters.utils.cast_leaf_tensors", lambda inputs, **_: inputs)
def _export(model: PreTrainedModel, sample: dict[str, torch.Tensor], opset: int | None) -> Any:
    """Return the `ExportedModel` with a dynamic batch size and dynamic lengths."""
    exporter, config = exporters.OnnxExporter(), exporters.OnnxConfig(dynamic=True, opset_version=opset)
    exported = (exporter.export_for_generation if model.can_generate() else exporter.export)(
        model, dict(sample), config
    )
    if model.config.is_encoder_decoder:
        exported.components["encoder"] = exporter.export(model.get_encoder(), sample, config).components["model"]
    for component in exported.components.values():
        graph = component.program.graph
        for value in graph.inputs:  # the exporter renames an input that is also an output
            value.name = value.name.removeprefix("input.")
        # Quantization by onnxruntime changes the weights, and fails if their shapes are recorded as well.
        for weight in graph.initializers.values():
            weight.shape = weight.type = None
            weight.metadata_props.clear()
    return exported


@torch.no_grad()
def compare(model: PreTrainedModel, runners: Mapping[str, Any], inputs: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of exported programs from the model, except at padding; NaN if there is one."""
    parts = decompose_for_generation(model, inputs) if model.can_generate() else {"model": (model, inputs)}
    if model.config.is_encoder_decoder:
        parts["encoder"] = (model.get_encoder(), inputs)
    found, actual = [], {}
    for name, (part, given) in parts.items():
        traced = {key: value for key, value in given.items() if key in runners[name].metadata.kwargs}
        if name == "decode":  # the cache of the previous program, `prefill`
            traced["cache"] = actual["cache"]
        actual, expected = runners[name](**copy.deepcopy(traced)), part(**given)  # the model changes a cache in place
        mask = given.get("decoder_attention_mask", given.get("attention_mask"))
        for key in filter(expected.__contains__, _OUTPUTS):
            difference = (expected[key] - actual[key]).abs()
            masked = mask is not None and difference.shape[: mask.dim()] == mask.shape
            found.append(difference[mask.bool()].max() if masked else difference.max())
    return torch.stack(found).max().item()


def _batches(folder: ModelFolder) -> list[dict[str, torch.Tensor]]:
    """Return random inputs for the export and, with other lengths, for the comparison.

    They are arguments of `forward` or `generate`; if the folder has a tokenizer, only those that it returns.
    """
    tokenizer = load_tokenizer(folder.path) if (folder.path / "tokenizer_config.json").is_file() else None
    period, limit, decodes = borders(folder.config)[-1], length_limit(folder.config), folder.config.is_decoder
    if limit is not None:
        period = min(period, max(2, (limit - 2) // 2))
    short, batches = max(1, period // 2), []
    for lengths in ([period + 1, (period + 2) // 2], [short], [period + short + 1], [2 * period, period, 2 * period]):
        # A prompt ends at the start of its continuation.
        options = {"side": "left"} if decodes else {"gaps": len(lengths) > 2}
        batch = make_inputs(folder, lengths, processor=tokenizer, seed=sum(lengths), **options)
        if tokenizer is not None and "token_type_ids" not in tokenizer.model_input_names:
            batch.pop("token_type_ids", None)
        batches.append({name: value for name, value in batch.items() if not name.startswith("decoder_")})
    return batches
