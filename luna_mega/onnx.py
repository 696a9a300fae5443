"""Export of model folders to ONNX programs, with a comparison (`luna-mega onnx`)."""

import copy
import io
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, exporters
from transformers.exporters.utils import decompose_for_generation

from luna_mega.compat import CACHE_NAME, WRITES_EXPORT_FOLDERS
from luna_mega.errors import ConversionError, install
from luna_mega.hub.folder import ModelFolder, length_limit, read_folder, read_tokenizer
from luna_mega.hub.output import check_new_file, check_output, complete_output
from luna_mega.hub.samples import borders, make_inputs
from luna_mega.inspection.verify import quiet_transformers

# Oldest operator set that the exporter of PyTorch writes.
OLDEST_OPSET = 18
TOLERANCE = 1e-4
RUNS = 3
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True)
class Check:
    """A comparison of a program and the model: shape of the first input, largest difference, seconds of both."""

    program: str
    shape: tuple[int, ...]
    difference: float
    onnxruntime: float
    torch: float


@dataclass(frozen=True)
class OnnxReport:
    """Record of an export and its checks."""

    model_class: str
    output: Path
    checks: tuple[Check, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.model_class}, float32",
            f"{'program':<10}{'input':<14}{'difference':>12}{'onnxruntime':>14}{'torch':>12}",
        ]
        for check in self.checks:
            shape = " x ".join(map(str, check.shape))
            times = f"{check.onnxruntime * 1e3:>11.2f} ms{check.torch * 1e3:>9.2f} ms"
            lines.append(f"{check.program:<10}{shape:<14}{check.difference:>12.1e}{times}")
        largest = max(check.difference for check in self.checks)
        return "\n".join([*lines, f"largest difference {largest:.1e}; written to {self.output}"])


def export_onnx(folder: str | Path, output: str | Path, opset: int | None = None, progress: bool = False) -> OnnxReport:
    """Export a model folder to ONNX, for any batch and length (images: one size), and compare it with the model.

    A model that generates is exported as programs `prefill` and `decode`, an encoder-decoder also as `encoder`, and
    other classes as `model`. The comparison runs three inputs: shorter than P or a chunk, of a length that is not a
    multiple of either, and a batch with padding.

    Args:
        folder: Folder of `save_pretrained` or `luna-mega convert`.
        output: Folder to write, absent or empty, or for one program a new file `*.onnx`.
        opset: Version of the ONNX operators, 18 or later. None = default of the exporter.
        progress: Show a progress bar of the three steps on stderr if it is a terminal.

    Raises:
        ConversionError: The folder, the output, the opset or the installation is invalid, or a difference exceeds
            1e-4. Nothing is written to `output`.
    """
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise ConversionError(f"{', '.join(missing)} not installed; run {install('onnx')}")
    if not WRITES_EXPORT_FOLDERS:
        raise ConversionError(f"this version of transformers does not write export folders; run {install('onnx')}")
    if opset is not None and opset < OLDEST_OPSET:
        raise ConversionError(f"--opset {opset}: the version of ONNX operators must be at least {OLDEST_OPSET}")
    source = read_folder(folder)
    _check_class(source)
    single = Path(output).suffix == ".onnx"
    if single and source.model_class.can_generate():
        raise ConversionError(
            f"{output}: {source.model_class.__name__} is exported as several programs; use a folder for --output"
        )
    target = check_new_file(output) if single else check_output(output)
    # Created before stderr is redirected.
    bar = tqdm(desc="export, write, compare", total=3, file=sys.stderr, disable=None if progress else True, delay=1)
    with bar, _quiet():
        model = source.load(dtype=torch.float32)
        try:
            exported = _export(model, source, opset)
            for program in (part.program for part in exported.components.values()):
                # Quantization by onnxruntime changes the weights, and fails if their shapes are recorded as well.
                for weight in program.graph.initializers.values():
                    weight.shape = weight.type = None
                    weight.metadata_props.clear()
        except Exception as error:  # torch.export, torch.onnx and transformers raise many types of errors
            reason = str(error.__cause__ or error).strip().partition("\n")[0]
            raise ConversionError(
                f"{source.path}: {type(model).__name__} cannot be exported with opset {opset or 'by default'}: {reason}"
            ) from error
        bar.update()
        with complete_output(target) as place:
            if single:
                import onnx_ir

                onnx_ir.save(exported.program, str(place))
            else:
                exported.save_pretrained(place)
            bar.update()
            try:
                checks = tuple(_checks(model, source, exported))
            except Exception as error:  # raised by onnxruntime
                reason = str(error).strip().partition("\n")[0]
                raise ConversionError(f"{source.path}: onnxruntime cannot run the programs: {reason}") from error
            bar.update()
            worst = max(checks, key=lambda check: check.difference)
            if not worst.difference <= TOLERANCE:
                raise ConversionError(
                    f"{source.path}: onnxruntime differs from the model by {worst.difference:.1e} ({worst.program}, "
                    f"input {list(worst.shape)}), more than {TOLERANCE:g}; nothing was written"
                )
    return OnnxReport(type(model).__name__, target, checks)


def _check_class(folder: ModelFolder) -> None:
    config, name = folder.config, folder.model_class.__name__
    reason = None
    if getattr(config, "adaptive_input_cutoffs", None) or getattr(config, "adaptive_softmax_cutoffs", None):
        reason = (
            f"{name} with an adaptive vocabulary selects bands by the tokens, which ONNX does not support; export a "
            "model without adaptive_input_cutoffs and adaptive_softmax_cutoffs"
        )
    elif config.add_cross_attention and not config.is_encoder_decoder:
        reason = "a decoder with cross-attention requires its encoder; export the encoder-decoder"
    elif (config.is_encoder_decoder or config.is_decoder and not name.endswith("Classification")) and (
        not folder.model_class.can_generate()
    ):
        reason = f"{name} has no head; export the class that generates"
    if reason is not None:
        raise ConversionError(f"{folder.path}: {reason}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress messages of the exporters for developers."""
    with ExitStack() as stack:
        stack.enter_context(quiet_transformers())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for redirect in (redirect_stdout, redirect_stderr):
            stack.enter_context(redirect(io.StringIO()))
        level = logging.root.manager.disable
        logging.disable(logging.WARNING)
        stack.callback(logging.disable, level)
        yield


# The exporters cast inputs to the dtype of the model, but statistics of Megalodon's norms are float64.
@patch("transformers.exporters.utils.cast_leaf_tensors", lambda inputs, **_: inputs)
def _export(model: PreTrainedModel, folder: ModelFolder, opset: int | None) -> Any:
    """Return the `ExportedModel`, with dynamic batch and lengths."""
    exporter, config = exporters.OnnxExporter(), {"dynamic": True, "opset_version": opset}
    period = _period(folder)
    sample = _inputs(folder, [period + 1, (period + 2) // 2])
    if not model.can_generate():
        shapes = {  # images have one size
            name: dict.fromkeys(range(1 if name == "pixel_values" else x.dim()), torch.export.Dim.DYNAMIC)
            for name, x in sample.items()
        }
        exported = exporter.export(model, sample, exporters.OnnxConfig(dynamic_shapes=shapes, **config))
        for value in exported.program.graph.inputs:  # the exporter renames an input that is also an output
            value.name = value.name.removeprefix("input.")
        return exported
    exported = exporter.export_for_generation(model, dict(sample), exporters.OnnxConfig(**config))
    if model.config.is_encoder_decoder:
        encoder = exporter.export(model.get_encoder(), sample, exporters.OnnxConfig(**config))
        exported.components["encoder"] = encoder.components["model"]
    return exported


def _checks(model: PreTrainedModel, folder: ModelFolder, exported: Any) -> Iterator[Check]:
    """Run the programs and the model on inputs that differ from the sample inputs of the export."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = torch.get_num_threads()
    runners, period = exported.to(device="cpu", session_options=options).runners, _period(folder)
    short, long = max(1, period // 2), 2 * period
    for lengths, gaps in (([short], False), ([period + short + 1], False), ([long, period, long], True)):
        results, inputs = {}, _inputs(folder, lengths, gaps=gaps and not folder.config.is_decoder)
        for name, (part, given) in _parts(model, inputs).items():
            check, results[name] = _compare(name, part, runners[name], given, results)
            yield check


def _parts(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> dict[str, tuple[PreTrainedModel, dict]]:
    """Return the model and the inputs of every program."""
    if not model.can_generate():
        return {"model": (model, inputs)}
    encoder = {"encoder": (model.get_encoder(), inputs)} if model.config.is_encoder_decoder else {}
    return encoder | decompose_for_generation(model, inputs)


@torch.no_grad()
def _compare(
    name: str, model: PreTrainedModel, runner: Any, inputs: dict[str, Any], earlier: dict[str, Any]
) -> tuple[Check, Any]:
    """Return the check of a program, and its results; `earlier` has the results of previous programs."""
    traced = {key: value for key, value in inputs.items() if key in runner.metadata.kwargs}
    if "encoder_outputs" in traced:
        traced["encoder_outputs"] = earlier["encoder"]
    if name == "decode":
        traced[CACHE_NAME] = earlier["prefill"][CACHE_NAME]
    seconds, results = {}, {}
    for side, run, given in (("torch", model, inputs), ("onnxruntime", runner, traced)):
        seconds[side] = []
        for _ in range(RUNS):
            fresh = copy.deepcopy(given)  # the model changes a cache in place
            start = time.perf_counter()
            results[side] = run(**fresh)
            seconds[side].append(time.perf_counter() - start)
    first = next(value for key, value in inputs.items() if key.endswith(("input_ids", "_values")))
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    check = Check(
        name,
        tuple(first.shape),
        _difference(results["torch"], results["onnxruntime"], None if mask is None else mask.bool()),
        min(seconds["onnxruntime"]),
        min(seconds["torch"]),
    )
    return check, results["onnxruntime"]


def _difference(expected: Any, actual: Any, mask: torch.Tensor | None) -> float:
    """Return the largest difference of the results, except at padding."""
    largest = 0.0
    for name in ("logits", "start_logits", "end_logits", "last_hidden_state", "pooler_output"):
        if (reference := expected.get(name)) is None:
            continue
        difference = (reference - actual[name]).abs()
        if mask is not None and difference.shape[: mask.dim()] == mask.shape:
            difference = difference[mask]
        # `max` would ignore NaN.
        largest = torch.maximum(torch.tensor(largest), difference.max()).item()
    return largest


def _inputs(folder: ModelFolder, lengths: list[int], **options: Any) -> dict[str, torch.Tensor]:
    """Return random inputs of `forward` or `generate`: the ones that the tokenizer of the folder returns, if any."""
    tokenizer = read_tokenizer(folder.path) if (folder.path / "tokenizer_config.json").is_file() else None
    if folder.config.is_decoder:  # a prompt ends at the start of its continuation
        options["side"] = "left"
    inputs = make_inputs(folder, lengths, processor=tokenizer, seed=sum(lengths), **options)
    if tokenizer is not None and "token_type_ids" not in tokenizer.model_input_names:
        inputs.pop("token_type_ids", None)
    return {name: value for name, value in inputs.items() if not name.startswith("decoder_")}


def _period(folder: ModelFolder) -> int:
    """Return the length that fills P or a chunk, or half of the maximum length."""
    period, limit = borders(folder.config)[-1], length_limit(folder.config)
    return period if limit is None else min(period, max(2, (limit - 2) // 2))
