"""Weights and scores of the page of `luna-mega demo`."""

import copy

import pytest
import torch

from luna_mega import MegaConfig, MegaForMaskedLM, MegaModel
from luna_mega.demo.views import Demo
from luna_mega.errors import ConversionError
from luna_mega.kernels.api import complex_ema, damped_ema

TEXT = "An eel, a cat and 1 mole"


@pytest.mark.parametrize("family", ["Luna", "Mega", "Megalodon"])
def test_classes(folder, family):
    classes = Demo(folder(f"{family}ForSequenceClassification", num_labels=3)).score(TEXT)
    assert classes.keys() == {"LABEL_0", "LABEL_1", "LABEL_2"} and sum(classes.values()) == pytest.approx(1)


@pytest.mark.parametrize("family", ["Luna", "Mega"])
def test_mask_predictions(folder, family):
    demo = Demo(folder(f"{family}ForMaskedLM"))
    found = demo.score("a <mask> b")
    ids = demo.tokenizer("a <mask> b", return_tensors="pt").input_ids
    expected = demo.model(ids).logits[0, 2].softmax(-1).max().item()
    assert max(found.values()) == pytest.approx(expected) and 0 < sum(found.values()) < 1
    for text in ("a b", "<mask> <mask>"):
        with pytest.raises(ValueError, match="must contain <mask> exactly once"):
            demo.score(text)


@pytest.mark.parametrize("name", ["LunaForMaskedLM", "MegaForSequenceClassification", "LunaForCausalLM"])
def test_a_text_has_a_limit(folder, name):
    demo = Demo(folder(name))
    long = "a" * 3_000_000
    for answer in (demo.look, lambda text: list(demo.write(text)) if name == "LunaForCausalLM" else demo.score(text)):
        with pytest.raises(ValueError, match="3,000,000 characters, but the limit is 50,000; shorten"):
            answer(long)


@pytest.mark.parametrize(
    "name", ["LunaForCausalLM", "MegaForCausalLM", "MegalodonForCausalLM", "LunaForConditionalGeneration"]
)
def test_text_is_streamed(folder, name):
    demo = Demo(folder(name, **{} if "Megalodon" in name else {"initializer_range": 0.3}))
    parts = list(demo.write("ab", max_new_tokens=12))
    assert parts == sorted(parts, key=len)
    ids = demo.tokenizer("ab", return_tensors="pt").input_ids
    out = demo.model.generate(ids, max_new_tokens=12, do_sample=False)[0]
    expected = demo.tokenizer.decode(out if demo.is_translator else out[2:], skip_special_tokens=True)
    assert parts[-1:] == ([expected] if expected else [])
    assert list(demo.write("ab", max_new_tokens=5, temperature=1.5)) != []
    with pytest.raises(ValueError, match="the text is empty"):
        next(demo.write("  "))


def test_generation_stops_with_its_reader_and_at_the_last_position(folder, monkeypatch):
    demo = Demo(folder("LunaForCausalLM", initializer_range=0.3))
    calls, generate = [], demo.model.generate
    monkeypatch.setattr(demo.model, "generate", lambda **options: calls.append(options) or generate(**options))
    list(demo.write("a" * 40, max_new_tokens=1000))
    assert calls[0]["max_new_tokens"] == 8
    with pytest.raises(ValueError, match="48 tokens, but the model has 48 positions"):
        next(demo.write("a" * 48))
    steps, forward = [], demo.model.forward
    monkeypatch.setattr(demo.model, "forward", lambda *args, **kwargs: steps.append(1) or forward(*args, **kwargs))
    reader = demo.write("a b c", max_new_tokens=40, temperature=1.0)
    next(reader)
    reader.close()
    assert len(steps) <= 40
    monkeypatch.setattr(demo.model, "generate", lambda **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(demo.write("a"))


@pytest.mark.parametrize("name", ["LunaForMaskedLM", "LunaForCausalLM", "LunaForConditionalGeneration"])
def test_weights_of_luna(folder, name):
    demo = Demo(folder(name))
    found = demo.look(TEXT)
    count = len(found.tokens)
    assert "".join(found.tokens) == TEXT.replace(" ", "␣")
    assert found.unpack.shape == (2, 4, count, 4) and torch.allclose(found.unpack.sum(-1), torch.ones(2, 4, count))
    if name == "LunaForCausalLM":
        assert found.pack is None
        return
    assert found.pack.shape == (2, 2, 4, count)
    assert found.through(1, 3).sum().item() == pytest.approx(1) and found.through(1, 3).shape == (count,)
    assert len(demo.look(TEXT * 9).tokens) == 48  # the positions of the model


@pytest.mark.parametrize("name", ["MegaForMaskedLM", "MegaForCausalLM", "MegalodonForCausalLM"])
def test_attention_of_mega_is_in_its_chunks(folder, name):
    found = Demo(folder(name)).look(TEXT[:21])
    position = torch.arange(21)
    inside = position[:, None] // 8 == position // 8
    if name.endswith("CausalLM"):
        inside &= position[:, None] >= position
    assert found.chunk == 8 and found.attention.shape == (2, 21, 21)
    assert ((found.attention > 0) == inside).all() and torch.allclose(found.attention.sum(-1), torch.ones(2, 21))
    assert len(Demo(folder(name)).look("a" * 600).tokens) == 512


@pytest.mark.parametrize("name", ["MegaForMaskedLM", "MegaForCausalLM"])
def test_kernels_equal_the_impulse_response(folder, name):
    demo = Demo(folder(name))
    kernels = demo.kernels(1, 20)
    average = demo.model.base_model.layers[1].mega_layer.ema_gate
    impulse = torch.zeros(1, 20, 16)
    impulse[:, 0 if demo.model.config.is_decoder else 19] = 1
    logits = (average.damping_factor, average.decay_factor, average.ema_expansion_matrix)
    with torch.no_grad():
        found = damped_ema(impulse, *(x.squeeze(-1) for x in logits), average.kernel_projection_matrix)[0].T
    expected = kernels[0] if len(kernels) == 1 else kernels[1].flip(-1)
    if len(kernels) == 2:
        expected[:, -1] += kernels[0][:, 0]
    torch.testing.assert_close(found, expected)


def test_kernels_of_a_complex_average(folder):
    """The kernel contains the weights of tokens, by linearity: a weighted sum over distances is the average."""
    demo = Demo(folder("MegalodonForCausalLM"))
    kernels, states = demo.kernels(1, 20), torch.randn(1, 20, 16)
    average = demo.model.base_model.layers[1].mega.cema
    parameters = (average.alpha[..., 0], average.delta[..., 0], average.theta[:, 0, 0], average.gamma)
    expected = complex_ema(states, *parameters)[0, -1]
    torch.testing.assert_close((kernels[0] * states[0].flip(0).T).sum(1), expected)
    assert kernels.shape == (1, 16, 20)


def test_unsupported_models_raise(folder, tokenizer, tmp_path):
    def fails(path):
        with pytest.raises(ConversionError) as raised:
            Demo(path)
        return str(raised.value)

    assert "no such folder" in fails(tmp_path / "nowhere")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 24}
    config = MegaConfig(vocab_size=40, **sizes)
    MegaModel(config).save_pretrained(tmp_path / "body")
    assert "contains a MegaModel; the demo supports the tasks fill-mask" in fails(tmp_path / "body")
    MegaForMaskedLM(config).save_pretrained(tmp_path / "small")
    assert "no tokenizer" in fails(tmp_path / "small")
    tokenizer.save_pretrained(tmp_path / "small")
    bare = copy.deepcopy(tokenizer)
    bare.mask_token = None
    MegaForMaskedLM(MegaConfig(vocab_size=261, **sizes)).save_pretrained(tmp_path / "bare")
    bare.save_pretrained(tmp_path / "bare")
    assert "the tokenizer has no mask token" in fails(tmp_path / "bare")
    assert "the tokenizer has token id 260" in fails(tmp_path / "small")
