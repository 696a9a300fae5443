"""OpenVINO through transformers' exporter: encoders, prompts and steps, for lengths that the export did not use."""

import pytest
import torch
from transformers import exporters

from tests.ecosystem.programs import compare, quiet
from tests.modeling import luna, mega
from tests.modeling.decoders import make
from tests.modeling.samples import make_inputs

pytest.importorskip("openvino", reason="openvino is not installed")

MODELS = {
    "luna": lambda: luna.make("ForMaskedLM", num_hidden_layers=1, max_position_embeddings=320),
    "mega": lambda: mega.make("ForMaskedLM", num_hidden_layers=1, max_positions=320),
    "luna causal": lambda: make("luna: softplus", num_hidden_layers=1),
    "mega causal, chunks": lambda: make("mega: laplace chunks", num_hidden_layers=1),
}
# By default, OpenVINO multiplies in bfloat16 if the processor supports it.
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}


class Runner:
    """Copy the inputs of a program, because an output that aliases an input may point to freed memory."""

    def __init__(self, runner):
        self.runner, self.metadata = runner, runner.metadata

    def __call__(self, **inputs):
        return self.runner(share_inputs=False, **inputs)


def export(model, sample):
    exporter = exporters.OpenVINOExporter()
    if model.can_generate():
        return exporter.export_for_generation(model, sample, exporters.OpenVINOConfig(dynamic=True, stateful=False))
    shapes = {name: dict.fromkeys(range(x.dim()), torch.export.Dim.DYNAMIC) for name, x in sample.items()}
    return exporter.export(model, sample, exporters.OpenVINOConfig(dynamic_shapes=shapes))


@pytest.mark.parametrize("name", MODELS)
def test_programs_return_the_scores_of_the_model(name):
    model = MODELS[name]().float().eval()
    side = "left" if model.config.is_decoder else "right"
    with quiet():
        exported = export(model, make_inputs(model, [33, 17], side))
    runners = {part: Runner(runner) for part, runner in exported.to(device="cpu", config=EXACT).runners.items()}
    for lengths in ([17], [48, 24], [300, 150, 300]):
        inputs = make_inputs(model, lengths, side)
        assert compare(model, runners, inputs) <= 1e-5 * model(**inputs).logits.abs().max()
