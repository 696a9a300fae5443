"""Export models with transformers' exporters, and compare the programs with the models."""

import copy
import io
import logging
import warnings
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import torch
from transformers import exporters
from transformers.exporters.utils import decompose_for_generation

from tests.modeling.samples import borders, length_limit, make_inputs

OUTPUTS = ("logits", "start_logits", "end_logits", "last_hidden_state", "pooler_output")


@contextmanager
def quiet():
    """Suppress exporter messages that are meant for developers."""
    level, silence = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stdout(silence), redirect_stderr(silence):
            yield
    finally:
        logging.disable(level)


def export_onnx(model, sample):
    """Return the `ExportedModel` with a dynamic batch size and dynamic lengths."""
    exporter, config = exporters.OnnxExporter(), exporters.OnnxConfig(dynamic=True)
    with quiet():
        exported = (exporter.export_for_generation if model.can_generate() else exporter.export)(
            model, dict(sample), config
        )
        if model.config.is_encoder_decoder:
            exported.components["encoder"] = exporter.export(model.get_encoder(), sample, config).components["model"]
    return exported


@torch.no_grad()
def compare(model, runners, inputs):
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
        for key in filter(expected.__contains__, OUTPUTS):
            difference = (expected[key] - actual[key]).abs()
            masked = mask is not None and difference.shape[: mask.dim()] == mask.shape
            found.append(difference[mask.bool()].max() if masked else difference.max())
    return torch.stack(found).max().item()


def batches(model, tokenizer=None):
    """Return random inputs for the export and, with other lengths, for the comparison.

    They are arguments of `forward` or `generate`; with a tokenizer, only those that it returns.
    """
    period, limit, decodes = borders(model.config)[-1], length_limit(model.config), model.config.is_decoder
    if limit is not None:
        period = min(period, max(2, (limit - 2) // 2))
    short, found = max(1, period // 2), []
    for lengths in ([period + 1, (period + 2) // 2], [short], [period + short + 1], [2 * period, period, 2 * period]):
        # A prompt ends at the start of its continuation.
        options = {"side": "left"} if decodes else {"gaps": len(lengths) > 2}
        batch = make_inputs(model, lengths, processor=tokenizer, seed=sum(lengths), **options)
        if tokenizer is not None and "token_type_ids" not in tokenizer.model_input_names:
            batch.pop("token_type_ids", None)
        found.append({name: value for name, value in batch.items() if not name.startswith("decoder_")})
    return found
