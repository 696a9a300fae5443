"""Converted Luna translation models against the original, through the command line and the Auto classes.

The tests compare hidden and packed states of every layer, logits, cross-attention, the label-smoothed loss, gradients,
stepwise decoding with its states, and fairseq's generated tokens, with the tolerance of each `meta.json`.
"""

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.trainer_pt_utils import LabelSmoother

from tests.marks import slow_but
from tests.parity.original import Original
from tests.parity.test_mega_seq2seq_fixtures import score

ORIGINALS = ["luna/s2s_lnemb_learned_fixlen", "luna/s2s_tied", "luna/s2s_untied_prenorm"]
PAD, END = 1, 2
SEARCHES = {
    "greedy": {"num_beams": 1, "min_new_tokens": 1},
    "beam4": {"num_beams": 4, "min_new_tokens": 1, "length_penalty": 1.0},
    "beam5_lp06": {"num_beams": 5, "min_new_tokens": 3, "length_penalty": 0.6},
}


@pytest.fixture(params=ORIGINALS)
def original(request, parity_folder, outputs):
    return Original(parity_folder(*request.param.split("/")), outputs)


@pytest.fixture
def model(original):
    return original.load(AutoModelForSeq2SeqLM)


@torch.no_grad()
def test_model(original, model, parity):
    io, tolerance = original.io, original.tight
    for batch in original.meta["batches"]:
        source, target = io[f"{batch}.src_tokens"], io[f"{batch}.prev_output_tokens"]
        real, real_target = source != PAD, target != PAD
        rows = io[f"{batch}.enc.p_padding_mask"] == 0 if f"{batch}.enc.p_padding_mask" in io else None
        output = model.luna(source, decoder_input_ids=target, output_hidden_states=True, output_attentions=True)
        for side, states, packed, keep in (
            ("enc", output.encoder_hidden_states, output.encoder_packed_hidden_states, real),
            ("dec", output.decoder_hidden_states, output.packed_hidden_states, real_target),
        ):
            # The last state is after the final norm here, and before it in the original.
            layers = len(states) - (model.config.pre_norm and 1)
            for index in range(layers):
                name = f"{batch}.{side}.hidden.{index}"
                if index or side == "dec":  # the original has nonzero values at padding, which is masked in any case
                    parity.check(f"{name}.x", states[index], io[f"{name}.x"], keep=keep, **tolerance)
                if f"{name}.p" in io:
                    parity.check(f"{name}.p", packed[index], io[f"{name}.p"], keep=rows, **tolerance)
        parity.check(
            f"{batch}.enc.x", output.encoder_last_hidden_state, io[f"{batch}.enc.out.x"], keep=real, **tolerance
        )
        packed = output.encoder_packed_last_hidden_state
        parity.check(f"{batch}.enc.p", packed, io[f"{batch}.enc.out.p"], keep=rows, **tolerance)
        weights = output.cross_attentions[-1].mean(dim=1)
        expected = io[f"{batch}.dec.attn_last_layer_head_mean"]
        parity.check(f"{batch}.attention", weights, expected, keep=real_target, **tolerance)
        logits = model.lm_head(output.last_hidden_state)
        parity.check(f"{batch}.logits", logits, io[f"{batch}.logits"], keep=real_target, **tolerance)


def test_loss_and_gradients(original, model, parity):
    io = original.io
    source, target = io["A.src_tokens"], io["A.target"]
    labels = target.masked_fill(target == PAD, -100)
    given, count = io["A.prev_output_tokens"], (labels != -100).sum()
    made = model.prepare_decoder_input_ids_from_labels(labels)
    assert torch.equal(made[given != PAD], given[given != PAD])
    output = model(source, labels=labels)
    parity.check("loss", output.loss.reshape(1), io["A.obj.loss"], **original.tight)
    parity.check("nll", output.loss.reshape(1) * count, io["A.obj.nll_loss_sum"], **original.tight)
    smooth = LabelSmoother(epsilon=0.1)({"logits": output.logits}, labels) * count
    parity.check("smoothed", smooth.reshape(1), io["A.obj.label_smoothed_loss_sum"], **original.tight)
    logits = model(source, decoder_input_ids=given).logits
    cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    original.add_gradients(model)
    original.check_gradients(parity)


@torch.no_grad()
@pytest.mark.parametrize("original", slow_but(ORIGINALS[:1], ORIGINALS), indirect=True)
def test_steps(original, model, parity):
    """Single steps have the original's logits; batch C also has its states, which are sums instead of means."""
    io, tolerance = original.io, original.tight
    for batch in original.meta["incremental_vs_teacher_forced_max_abs_diff"]:
        source, target = io[f"{batch}.src_tokens"], io[f"{batch}.prev_output_tokens"]
        given, past, logits = {"input_ids": source}, None, []
        for token in target.split(1, dim=1):
            output = model(**given, decoder_input_ids=token, cache=past, use_cache=True)
            given, past = {}, output.cache
            logits.append(output.logits)
        logits = torch.cat(logits, dim=1)
        parity.check(f"{batch}.inc", logits, io[f"{batch}.inc.logits"], keep=target != PAD, **tolerance)
    layers = zip(past.self_attention_cache.layers, past.cross_attention_cache.layers, strict=True)
    for index, (causal, cross) in enumerate(layers):
        steps = causal.tensors["count"][:, None, None, None]
        states = {
            "self_attn.prev_pquery": causal.tensors["pack_query"].transpose(1, 2)
            * causal.tensors["key_mean"].shape[2] ** -0.5,
            "self_attn.prev_key_accum_mat": causal.tensors["key_mean"] * steps,
            "self_attn.prev_value_accum_mat": causal.tensors["value_mean"] * steps,
            "encoder_attn.prev_key": cross.tensors["key"].transpose(1, 2),
            "encoder_attn.prev_value": cross.tensors["value"].transpose(1, 2),
        }
        for name, state in states.items():
            parity.check(name, state, io[f"C.inc.state.layer{index}.{name}"], **tolerance)


@torch.no_grad()
@pytest.mark.parametrize("original", slow_but(ORIGINALS[:1], ORIGINALS), indirect=True)
def test_reordering(original, model, parity):
    io = original.io
    source, tokens, order = io["C.src_tokens"][:1].expand(3, -1), io["reorder.tokens"], torch.tensor([2, 0, 0])
    past = model(source, decoder_input_ids=tokens[:, :-1], use_cache=True).cache
    past.reorder_cache(order)
    output = model(decoder_input_ids=tokens[order, -1:], cache=past, use_cache=True)
    parity.check("reordered", output.logits, io["reorder.logits_after"], **original.tight)


@pytest.mark.covering(1)
@torch.no_grad()
@pytest.mark.parametrize("search", SEARCHES)
def test_generate(original, model, parity, search):
    """`generate` returns the tokens and scores of fairseq, with the settings of docs/generation.md."""
    io, words = original.io, [token for token in range(model.lm_head.out_features) if token != PAD]
    batches = {key.split(".")[0] for key in io if f".{search}.tokens" in key}
    assert batches
    for batch in batches:
        source, expected = io[f"{batch}.src_tokens"], io[f"{batch}.{search}.tokens"].flatten(0, 1)
        longest = source.shape[1] + 5 if search == "beam5_lp06" else 14
        beams = SEARCHES[search]["num_beams"]
        output = model.generate(
            source,
            **SEARCHES[search],
            num_return_sequences=beams,
            max_length=longest + 2,
            # Like forced_eos_token_id, but the last </s> keeps its own probability.
            forced_eos_token_id=None,
            prefix_allowed_tokens_fn=lambda row, ids, longest=longest: [END] if len(ids) == longest + 1 else words,
            return_dict_in_generate=True,
            output_scores=True,
        )
        tokens = output.sequences[:, 1:]
        assert torch.equal(tokens, expected[:, : tokens.shape[1]]) and (expected[:, tokens.shape[1] :] == PAD).all()
        scores = score(model, source, output.sequences) if beams == 1 else output.sequences_scores
        parity.check(f"{batch}.scores", scores, io[f"{batch}.{search}.scores"].flatten(), **original.tight)


@pytest.mark.parametrize("original", slow_but(ORIGINALS[1:], ORIGINALS), indirect=True)
def test_a_sentence_through_both_languages(original, model):
    folder = original.convert()
    source = AutoTokenizer.from_pretrained(folder)
    target = AutoTokenizer.from_pretrained(folder, subfolder="target") if (folder / "target").is_dir() else source
    words = [line.split()[0] for line in (folder / "dict.txt").read_text(encoding="utf-8").splitlines()][:4]
    inputs = source([" ".join(words), words[0] + " unheard-of"], return_tensors="pt", padding=True)
    assert inputs["input_ids"].tolist() == [[4, 5, 6, 7, END], [4, 3, END, PAD, PAD]]
    tokens = model.generate(**inputs, max_length=9)
    assert target.batch_decode(tokens, skip_special_tokens=True)[0].split()
