"""Converted Mega language models against the original, through the command line and the Auto classes.

The tests compare hidden states, features, logits, log-probabilities, the loss and all gradients, for sequences in one
call, token by token, in segments and with a longer chunk, with the tolerance of each `meta.json`.
"""

import torch
from transformers import AutoModelForCausalLM

from tests.parity.original import originals

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


@torch.no_grad()
def stream(model, tokens, length=None):
    """Return the features of the streams, computed in segments of `length` with a cache (None: in one call)."""
    past, features = None, []
    for segment in tokens.split(length or tokens.shape[1], dim=1):
        output = model.mega(segment, cache=past)
        past = output.cache
        features.append(output.last_hidden_state)
    return torch.cat(features, dim=1)


@originals("mega", CASES)
def test_model(original, parity):
    model, io, states = original.load(AutoModelForCausalLM), original.io, []
    adaptive = model.config.adaptive_softmax_cutoffs is not None
    hooks = [
        module.register_forward_hook(lambda module, args, output: states.append(output))
        for module in (model.mega.embedding_dropout, *model.mega.layers)
    ]
    tokens, target = io["src_tokens"], io["target"]
    length, keep = tokens.shape[1], tokens != PAD
    features = model.mega(tokens, use_cache=False).last_hidden_state
    for hook in hooks:
        hook.remove()
    for index, actual in enumerate(states):  # the original pads the last chunk
        parity.check(f"hidden.{index}", actual, io[f"hidden.{index}"][:, :length], keep=keep, **original.tight)
    assert f"hidden.{len(states)}" not in io
    parity.check("features", features, io["features"], keep=keep, **original.tight)
    logits = model(tokens).logits
    if not adaptive:
        parity.check("logits", logits, io["logits"], keep=keep, **original.tight)
    parity.check("lprobs", logits.log_softmax(-1), io["lprobs"], keep=keep, **original.tight)
    labels = target.masked_fill(target == PAD, -100)
    one = torch.tensor(1)  # makes the loss a sum instead of a mean
    nll = model(tokens, shift_labels=labels, num_items_in_batch=one).loss
    parity.check("nll", nll, io["nll_sum_from_lprobs"], **original.tight)
    if adaptive:
        model = original.load(legacy_adaptive_loss=True)
    loss = model(tokens, shift_labels=labels, num_items_in_batch=one).loss
    parity.check("loss_sum", loss, io["loss_sum"], **original.tight)
    loss.backward()
    original.add_gradients(model)
    original.check_gradients(parity)


@originals("mega", CASES[1:4] + CASES[-1:] + CASES[:1] + CASES[4:-1], fast=4)
def test_streams(original, parity):
    io, model = original.io, original.load()
    config, chunk = model.config, model.config.attention_chunk
    length, longer = io["stream_tokens"].shape[1], original.meta.get("eval_chunk")
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
            scores = model(io["stream_tokens"]).logits.log_softmax(-1)
        scores = scores.gather(2, io["stream_target"][..., None])[..., 0]
        parity.check("positional scores", scores, io["stream_eval_positional_scores"], **original.tight)
    recorded = {name for name in io if name.startswith("stream_features_")}
    assert recorded <= segments.keys()
    for name in recorded:
        # The original's steps never truncate the average; here, steps match the parallel form.
        expected = name if config.truncation >= length else "stream_features_parallel"
        config.chunk_size, segment = segments[name][0] or -1, segments[name][1]
        parity.check(name, stream(model, io["stream_tokens"], segment), io[expected], **original.tight)
