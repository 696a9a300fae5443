"""Converted Mega language models against the original, by command line and Auto classes.

Compared are hidden states, features, logits, log-probabilities, the loss and the gradients of all parameters, for
sequences in one call, token by token, in segments and with a longer chunk, within the tolerance of each `meta.json`.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from luna_mega_cli import main

CASES = [
    "07_lm_enwik8_tied_rotary_chunk",
    "07_lm_enwik8_tied_rotary_chunk_notmultiple",
    "07_lm_postnorm_laplace_simple_trunc",
    "07_lm_relu2_simple_chunk_untied_projin",
    "08_lm_adaptive_tied_factor2_base",
    "08_lm_adaptive_tied_noproj",
    "08_lm_adaptive_untied",
    "08_lm_wt103_adaptive_tied",
]
PAD = 1


class Case:
    def __init__(self, folder, output):
        assert main(["convert", str(folder / "checkpoint.pt"), "--output", str(output)]) == 0
        self.io, self.meta = load_file(folder / "io.safetensors"), json.loads((folder / "meta.json").read_text())
        self.report = json.loads((output / "conversion_report.json").read_text())
        self.folder, self.model = output, self.load(output)
        tolerance = self.meta["tolerance"]
        self.tight = {"atol": tolerance["atol"], "rtol": tolerance["rtol"]}
        self.loose = {"atol": tolerance["grad_atol"], "rtol": tolerance["grad_rtol"]}
        self.adaptive = self.model.config.adaptive_softmax_cutoffs is not None

    @staticmethod
    def load(folder, **fields):
        model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **fields)
        assert not loading["missing_keys"] and not loading["mismatched_keys"] and not loading["unexpected_keys"]
        return model.eval()

    @torch.no_grad()
    def stream(self, length=None):
        """The features of the streams, processed in segments of `length` with a cache (None: at once)."""
        past, features = None, []
        for segment in self.io["stream_tokens"].split(length or self.io["stream_tokens"].shape[1], dim=1):
            output = self.model.mega(segment, past_key_values=past)
            past = output.past_key_values
            features.append(output.last_hidden_state)
        return torch.cat(features, dim=1)


@pytest.fixture(params=CASES)
def case(request, parity_folder, tmp_path):
    return Case(parity_folder("mega", request.param), tmp_path / "model")


def test_model(case, parity):
    model, io, states = case.model, case.io, []
    hooks = [
        module.register_forward_hook(lambda module, args, output: states.append(output))
        for module in (model.mega.embedding_dropout, *model.mega.layers)
    ]
    tokens, target = io["src_tokens"], io["target"]
    length, keep = tokens.shape[1], tokens != PAD
    features = model.mega(tokens, use_cache=False).last_hidden_state
    for hook in hooks:
        hook.remove()
    for index, actual in enumerate(states):  # the original fills chunks up with padding
        parity.check(f"hidden.{index}", actual, io[f"hidden.{index}"][:, :length], keep=keep, **case.tight)
    assert f"hidden.{len(states)}" not in io
    parity.check("features", features, io["features"], keep=keep, **case.tight)
    logits = model(tokens).logits
    if not case.adaptive:
        parity.check("logits", logits, io["logits"], keep=keep, **case.tight)
    parity.check("lprobs", logits.log_softmax(-1), io["lprobs"], keep=keep, **case.tight)
    labels = target.masked_fill(target == PAD, -100)
    one = torch.tensor(1)  # results in a sum instead of a mean
    nll = model(tokens, shift_labels=labels, num_items_in_batch=one).loss
    parity.check("nll", nll, io["nll_sum_from_lprobs"], **case.tight)
    if case.adaptive:
        model = case.load(case.folder, legacy_adaptive_loss=True)
    loss = model(tokens, shift_labels=labels, num_items_in_batch=one).loss
    parity.check("loss_sum", loss, io["loss_sum"], **case.tight)
    loss.backward()
    check_gradients(case, parity, dict(model.named_parameters()))


def check_gradients(case, parity, parameters):
    expected = {name.removeprefix("grad."): value for name, value in case.io.items() if name.startswith("grad.")}
    gradients = {
        row["source"]: parameters[row["target"]].grad for row in case.report["mapped"] if row["target"] in parameters
    }
    assert expected.keys() == gradients.keys()
    for name, value in expected.items():
        parity.check(f"grad.{name}", gradients[name], value, **case.loose)


def test_streams(case, parity):
    io, config, chunk = case.io, case.model.config, case.model.config.attention_chunk
    length, longer = io["stream_tokens"].shape[1], case.meta.get("eval_chunk")
    segments = {
        "stream_features_parallel": (chunk, None),
        "stream_features_token_by_token": (chunk, 1),
        "stream_features_segments_x1": (chunk, chunk),
        "stream_features_segments_x2": (chunk, 2 * (chunk or 0)),
        f"stream_features_eval_chunk_{longer}": (longer, None),
        f"stream_features_eval_chunk_{longer}_segments_x2": (longer, 2 * (longer or 0)),
    }
    if "stream_eval_positional_scores" in io:
        with torch.no_grad():
            scores = case.model(io["stream_tokens"]).logits.log_softmax(-1)
        scores = scores.gather(2, io["stream_target"][..., None])[..., 0]
        parity.check("positional scores", scores, io["stream_eval_positional_scores"], **case.tight)
    recorded = {name for name in io if name.startswith("stream_features_")}
    assert recorded <= segments.keys()
    for name in recorded:
        # The original's steps never truncate the average; here they match the parallel form.
        expected = name if config.truncation >= length else "stream_features_parallel"
        config.chunk_size, segment = segments[name][0] or -1, segments[name][1]
        parity.check(name, case.stream(segment), io[expected], **case.tight)


def test_every_fixture_is_tested(parity_folder):
    names = parity_folder.names("mega")
    assert {name for name in names if name[:2] in ("07", "08")} <= set(CASES)
