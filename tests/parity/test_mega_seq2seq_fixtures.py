"""Converted Mega translation models against the original, through the command line and the Auto classes.

The tests compare hidden states, logits, cross-attention, the label-smoothed loss, gradients, stepwise decoding, and
fairseq's generated tokens, with the tolerance of each `meta.json`.
"""

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.trainer_pt_utils import LabelSmoother

from tests.parity.original import originals

CASES = [
    "09_mt_softmax_shared",
    "10_mt_laplace_shared",
    "10_mt_relu2_rotary_prenorm_chunk_unshared",
    "15_flash_mt_softmax_trunc0",
]
PAD, END = 1, 2
BEAMS = {"gen_beam1_lenpen1": (1, 1.0), "gen_beam4_lenpen1": (4, 1.0), "gen_beam4_lenpen0.5": (4, 0.5)}


@pytest.fixture
def model(original):
    return original.load(AutoModelForSeq2SeqLM)


cases = originals("mega", CASES)
few = originals("mega", CASES[1:] + CASES[:1], fast=2)


@cases
def test_model(original, model, parity):
    io, states = original.io, {}

    def keep(name):
        return lambda module, args, output: states.__setitem__(name, output)

    modules = {f"{side}_hidden.0": getattr(model.mega, side).embedding_dropout for side in ("encoder", "decoder")}
    for side in ("encoder", "decoder"):
        layers = enumerate(getattr(model.mega, side).layers, start=1)
        modules |= {f"{side}_hidden.{index}": layer for index, layer in layers}
    hooks = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    source, target = io["src_tokens"], io["prev_output_tokens"]
    output = model(source, decoder_input_ids=target, use_cache=False)
    for hook in hooks:
        hook.remove()
    real = {"encoder": source != PAD, "decoder": target != PAD}
    assert torch.equal(real["encoder"], io["encoder_padding_mask"] == 0)
    for name, actual in states.items():
        if name in io:  # the original pads the last chunk
            side = name.split("_")[0]
            parity.check(name, actual, io[name][:, : actual.shape[1]], keep=real[side], **original.tight)
    assert {name for name in io if "_hidden." in name} <= states.keys()
    parity.check(
        "encoder_out", output.encoder_last_hidden_state, io["encoder_out"], keep=real["encoder"], **original.tight
    )
    parity.check("logits", output.logits, io["logits"], keep=real["decoder"], **original.tight)
    weights = model(source, decoder_input_ids=target, output_attentions=True, use_cache=False).cross_attentions
    parity.check("cross_attn", weights[-1][:, 0], io["cross_attn_last_layer"], keep=real["decoder"], **original.tight)
    check_loss(original, model, parity, output.logits)


def check_loss(original, model, parity, logits):
    io = original.io
    labels = io["target"].masked_fill(io["target"] == PAD, -100)
    count = (labels != -100).sum()
    real = io["prev_output_tokens"] != PAD
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(labels)[real], io["prev_output_tokens"][real])
    parity.check("nll_sum", model(io["src_tokens"], labels=labels).loss * count, io["nll_sum"], **original.tight)
    loss = LabelSmoother(epsilon=0.1)({"logits": logits}, labels) * count
    parity.check("loss_sum", loss, io["loss_sum"], **original.tight)
    loss.backward()
    original.add_gradients(model)
    original.check_gradients(parity, complete=False)  # the fixture has only the gradients of the first layers


@few
@torch.no_grad()
def test_steps(original, model, parity):
    io = original.io
    encoded = model.mega.encoder(io["src_tokens"])
    tokens, mask, past, logits = io["inc_prev_output_tokens"], io["src_tokens"] != PAD, None, []
    for token in tokens.split(1, dim=1):
        given = {"encoder_outputs": encoded, "attention_mask": mask, "cache": past}
        output = model(**given, decoder_input_ids=token, use_cache=True)
        past = output.cache
        logits.append(output.logits)
    parity.check("inc_logits_step", torch.cat(logits, 1), io["inc_logits_step"], **original.tight)
    parallel = model(io["src_tokens"], decoder_input_ids=tokens).logits
    parity.check("inc_logits_parallel", parallel, io["inc_logits_parallel"], **original.tight)


@pytest.mark.covering(1)
@cases
@pytest.mark.parametrize("name", BEAMS)
def test_generate(original, model, parity, name):
    """Beam search returns the tokens and scores of fairseq, with the settings of docs/generation.md."""
    io, (beams, penalty) = original.io, BEAMS[name]
    assert set(BEAMS) == {key.rpartition(".")[0] for key in io if key.startswith("gen_")}
    longest = original.meta["generation"]["max_len_b"]
    words = [token for token in range(model.lm_head.out_features) if token != PAD]
    output = model.generate(
        io["src_tokens"],
        num_beams=beams,
        num_return_sequences=beams,
        length_penalty=penalty,
        max_length=longest + 2,
        # Like forced_eos_token_id, but the last </s> keeps its own probability.
        forced_eos_token_id=None,
        prefix_allowed_tokens_fn=lambda row, ids: [END] if len(ids) == longest + 1 else words,
        return_dict_in_generate=True,
        output_scores=beams > 1,
    )
    expected = io[f"{name}.tokens"].flatten(0, 1)
    tokens = output.sequences[:, 1:]
    assert torch.equal(tokens, expected[:, : tokens.shape[1]]) and (expected[:, tokens.shape[1] :] == PAD).all()
    scores = output.sequences_scores if beams > 1 else score(model, io["src_tokens"], output.sequences)
    parity.check("scores", scores, io[f"{name}.scores"].flatten(), **original.tight)


def score(model, source, sequences):
    """Return the mean log-probability of the tokens of greedy search, which returns no scores."""
    tokens = sequences[:, 1:]
    with torch.no_grad():
        lprobs = model(source, decoder_input_ids=sequences[:, :-1]).logits.log_softmax(-1)
    lprobs = lprobs.gather(2, tokens[..., None])[..., 0].masked_fill(tokens == PAD, 0.0)
    return lprobs.sum(1) / (tokens != PAD).sum(1)


@few
def test_generation_config_and_tokenizers(original, model):
    """The conversion writes the options of `generate` and tokenizers for both languages."""
    config, folder = model.generation_config, original.convert()
    assert (config.num_beams, config.length_penalty, config.early_stopping) == (5, 1.0, True)
    assert (config.decoder_start_token_id, config.forced_eos_token_id, config.pad_token_id) == (END, END, PAD)
    assert config.suppress_tokens == [PAD] and config.max_length == 81
    symbols = {side: dictionary(folder, side) for side in ("source", "target")}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = " ".join(symbols["source"][:4])
    assert tokenizer(text).input_ids == [4, 5, 6, 7, END]
    separate = symbols["source"] != symbols["target"]
    assert (folder / "target").is_dir() is separate
    if separate:
        tokenizer_of_target = AutoTokenizer.from_pretrained(folder, subfolder="target")
    else:
        tokenizer_of_target = tokenizer
    tokens = model.generate(**tokenizer([text], return_tensors="pt"), max_length=8)
    decoded = tokenizer_of_target.batch_decode(tokens, skip_special_tokens=True)[0].split()
    assert decoded == [symbols["target"][token - 4] for token in tokens[0].tolist() if token > 3]


def dictionary(folder, side):
    path = folder / ("dict.target.txt" if side == "target" else "dict.txt")
    path = path if path.is_file() else folder / "dict.txt"
    return [line.split()[0] for line in path.read_text(encoding="utf-8").splitlines()]
