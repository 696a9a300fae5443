"""Features specific to Megalodon: precision, windows, another output size, and errors."""

import pytest
import torch

from luna_mega import MegalodonForCausalLM
from tests.modeling.contract import on_device
from tests.modeling.decoders import padded
from tests.modeling.megalodon_decoders import make, tiny_config


@pytest.mark.parametrize("logit", [40.0, 20.0, -40.0])
def test_decays_near_one_and_zero_are_finite(logit):
    """Decays that round to 0 or 1 have finite outputs and gradients; the original computes the logarithm of 0."""
    model = make(dtype=torch.float32)
    for block in model.megalodon.layers:
        block.mega.cema.alpha.data.fill_(logit)
        block.mega.cema.delta.data.fill_(logit)
    ids = padded([11, 7], 11, "left")[0]
    output = model(ids, labels=ids)
    output.loss.backward()
    assert output.logits.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@torch.no_grad()
@pytest.mark.parametrize("autocast", [False, True])
def test_states_in_half_precision(autocast):
    """In half precision, statistics (float64) and averages (float32) of 100 steps equal those of one call."""
    model, ids = make(dtype=torch.float32, num_hidden_layers=1), torch.randint(3, 30, (2, 100))
    model = model if autocast else model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        complete, steps = model(ids, use_cache=True).cache, None
        for column in ids.split(1, dim=1):
            steps = model(column, cache=steps, use_cache=True).cache
    for cache in (complete, steps):
        assert {x.dtype for layer in cache.layers for x in (layer.norm_mean, layer.norm_variance)} == {torch.float64}
        assert {layer.average.dtype for layer in cache.layers} == {torch.float32}
    for name in ("norm_mean", "norm_variance"):  # statistics of the embeddings, which are equal in both
        torch.testing.assert_close(getattr(steps.layers[0], name), getattr(complete.layers[0], name), rtol=0, atol=1e-6)


# Initializer -> the deviation of a matrix [64, 192], and the largest number in deviations (of uniform ones 3**0.5).
INITIALIZERS = {"he": (576**-0.5, 3.9), "bert": (0.02, 3.9), "xavier": (128**-0.5, 3**0.5), "none": (576**-0.5, 3**0.5)}


@pytest.mark.parametrize("initializer", INITIALIZERS)
def test_initializers(initializer):
    config = tiny_config(hidden_size=192, shared_representation_size=64, initializer=initializer)
    weight = MegalodonForCausalLM(config).megalodon.layers[0].mega.wz.weight
    found = weight.std().item(), (weight.abs().max() / weight.std()).item()
    assert found == pytest.approx(INITIALIZERS[initializer], rel=0.1)


def test_sensitive_parameters_stay_in_float32(tmp_path):
    model = make(dtype=torch.float32)
    model.megalodon.rope.freqs.mul_(1.01)  # frequencies of a checkpoint may differ from the computed ones
    model.save_pretrained(tmp_path)
    loaded = MegalodonForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    wide = {name for name, x in loaded.state_dict().items() if x.dtype == torch.float32}
    assert wide == {name for name in model.state_dict() if ".cema." in name or name.endswith("rope.freqs")}
    assert torch.equal(loaded.megalodon.rope.freqs, model.megalodon.rope.freqs)


@torch.no_grad()
def test_windows_start_after_8_chunks():
    """Windows change results only in evaluation, in one call, and after 8 chunks; later steps are supported."""
    plain, windowed = make(), make(windowed_statistics=True)
    short, long = padded([32], 32, "none")[0], padded([43], 43, "none")[0]
    torch.testing.assert_close(windowed(short).logits, plain(short).logits)
    torch.testing.assert_close(windowed.train()(long).logits, plain.train()(long).logits)
    windowed.eval(), plain.eval()
    difference = (windowed(long).logits - plain(long).logits).abs().amax(-1)[0]
    assert difference[:32].max() < 1e-9 and (difference[32:] > 1e-6).all()
    past = windowed(long, use_cache=True).cache
    assert past.get_seq_length() == 43 and (past.layers[0].position == 43).all()
    assert (past.layers[0].norm_count == past.layers[-1].final_count).all() and past.layers[0].norm_count[0] == 24 + 3
    assert windowed(short[:, :1], cache=past).logits.isfinite().all()
    expected, tokens = windowed(long).logits, windowed.generate(long, do_sample=False, max_new_tokens=4)
    with on_device():  # `generate` passes a mask of ones
        torch.testing.assert_close(windowed(long, torch.ones_like(long)).logits, expected, rtol=0, atol=0)
        assert windowed.generate(long, do_sample=False, max_new_tokens=4).equal(tokens)


def test_unsupported_window_options_raise():
    model = make(windowed_statistics=True)
    ids, mask = padded([43, 9], 43, "left")
    with pytest.raises(
        ValueError, match="does not support padding or padding-free batches after 8 chunks of 4 positions"
    ):
        model(ids, mask)
    past = model(ids[:, :9], use_cache=True).cache
    with pytest.raises(ValueError, match="requires the first 33 positions, more than 8 chunks of 4, in one call"):
        model(ids[:1].expand(2, -1)[:, 9:33], cache=past)
    with pytest.raises(ValueError, match="`output_hidden_states` .*, or set it to False"):
        model(ids[:1], output_hidden_states=True)


@torch.no_grad()
def test_an_output_layer_of_another_size():
    model = make(output_size=7)
    ids = padded([9, 4], 9, "right")[0].clamp(max=6)
    output = model(ids, labels=ids)
    assert output.logits.shape == (2, 9, 7) and output.loss.isfinite()
    beams = model.generate(ids[:1], num_beams=3, do_sample=False, max_new_tokens=5)
    assert beams.max() < 7
    with pytest.raises(NotImplementedError, match="a vocabulary of 30 tokens with output_size=7 scores"):
        model.resize_token_embeddings(40)


@pytest.mark.parametrize("tied", [False, True])
def test_an_output_layer_of_the_size_of_the_vocabulary_is_resized(tied, tmp_path):
    model = make(output_size=30, tie_word_embeddings=tied)
    model.resize_token_embeddings(40)
    model.save_pretrained(tmp_path)
    loaded = MegalodonForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.scores == len(loaded.lm_head.weight) == len(loaded.megalodon.embed_tokens.weight) == 40
