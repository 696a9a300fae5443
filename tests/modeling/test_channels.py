"""Real-valued inputs with several channels, `[B, T, C]`."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForAudioClassification, Wav2Vec2FeatureExtractor, pipeline

from luna_mega import (
    LunaConfig,
    LunaForSequenceClassification,
    LunaForTokenClassification,
    MegaConfig,
    MegaForSequenceClassification,
    MegaForTokenClassification,
)
from tests.modeling.samples import make_inputs

LUNA = {"num_attention_heads": 2, "intermediate_size": 16, "projection_length": 4, "max_position_embeddings": 100}
MEGA = {"intermediate_size": 16, "shared_representation_size": 8, "nffn_hidden_size": 16, "ema_projection_size": 2}
FAMILIES = {
    "luna": (LunaConfig, LunaForSequenceClassification, LunaForTokenClassification, LUNA),
    "mega": (MegaConfig, MegaForSequenceClassification, MegaForTokenClassification, MEGA),
}


def make(family: str, channels: int | None = 3, head: int = 1, **fields):
    config_class, *heads, sizes = FAMILIES[family]
    fields = {"hidden_size": 16, "num_hidden_layers": 2, "input_type": "values", "pooling": "mean"} | sizes | fields
    torch.manual_seed(0)
    config = config_class(**fields if channels is None else {"num_channels": channels} | fields)
    return heads[head - 1](config).eval()


def embedding(model) -> torch.nn.Module:
    return next(module for name, module in model.named_modules() if name.endswith("value_embeddings"))


@pytest.mark.parametrize("family", FAMILIES)
def test_one_channel(family):
    """The parameters and results do not change; `[B, T, 1]` is `[B, T]`."""
    values = torch.randn(2, 10)
    default, one = make(family, None), make(family, 1)
    shapes = {name: x.shape for name, x in embedding(default).state_dict().items()}
    assert shapes == {"weight": (16,), "bias": (16,)} and default.config.num_channels == 1
    for inputs in (values, values[..., None]):
        torch.testing.assert_close(one(input_values=inputs).logits, default(input_values=values).logits, rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_channels(family, tmp_path):
    """A saved model has its channels; a folder of Mega before 0.5 has one, whatever it saved for images."""
    model, values = make(family, 3), torch.randn(2, 10, 3)
    model.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()) and loaded(input_values=values).logits.equal(model(input_values=values).logits)
    for side in ("left", "right"):
        inputs = make_inputs(model, [9, 4], side)
        torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits)
    assert type(model.config).from_dict(model.config.to_dict()).num_channels == 3
    make(family, 1).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    old = json.loads(file.read_text(encoding="utf-8")) | ({"num_channels": 3} if family == "mega" else {})
    file.write_text(json.dumps(old), encoding="utf-8")
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()) and loaded.config.num_channels == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_channels_are_their_sum(family):
    """Channels with the weights of one channel have the outputs of their sum."""
    one, three = make(family, 1), make(family, 3)
    weights = one.state_dict()
    name = next(name for name in weights if name.endswith("value_embeddings.weight"))
    three.load_state_dict(weights | {name: weights[name][:, None].expand(-1, 3)})
    values, mask = torch.randn(2, 10, 3), torch.tensor([[1] * 10, [1] * 6 + [0] * 4])
    expected = one(input_values=values.sum(-1), attention_mask=mask).logits
    torch.testing.assert_close(three(input_values=values, attention_mask=mask).logits, expected)


@pytest.mark.parametrize("unpad", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("channels", [3, 16])  # 16 = hidden_size
def test_padding(family, unpad, channels):
    """Padding on either side, gaps and NaN at padding do not affect outputs and gradients."""
    model = make(family, channels, head=2, unpad_inputs=unpad)
    values = torch.randn(1, 6, channels)
    expected = model(input_values=values).logits
    for columns in (range(6), range(4, 10), (0, 2, 3, 5, 6, 9)):
        padded, mask = torch.full((1, 10, channels), float("nan")), torch.zeros(1, 10, dtype=torch.long)
        padded[:, list(columns)], mask[:, list(columns)] = values, 1
        logits = model(input_values=padded, attention_mask=mask).logits
        torch.testing.assert_close(logits[:, list(columns)], expected, rtol=1e-4, atol=1e-5)
    logits.sum().backward()
    assert embedding(model).weight.grad.isfinite().all() and embedding(model).weight.grad.abs().sum() > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings(family):
    model, values = make(family), torch.randn(2, 10, 3)
    expected = model(input_values=values).logits
    logits = model(inputs_embeds=embedding(model)(values)).logits
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("shape", [(2, 10), (2, 10, 1), (2, 10, 4), (2, 3, 10), (2, 10, 3, 1), (10,)])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_shapes(family, shape):
    with pytest.raises(ValueError, match=r"`input_values` must have the shape \[B, T, 3\]"):
        make(family)(input_values=torch.randn(shape))
    with pytest.raises(ValueError, match=r"`input_values` must have the shape \[B, T\]"):
        make(family, 1)(input_values=torch.randn(2, 10, 3))


@pytest.mark.parametrize("family", FAMILIES)
def test_audio_classification(family, tmp_path):
    """The folder of run_audio.py works with the class and the pipeline for audio."""
    model = make(family, 1, num_labels=2, id2label={0: "no", 1: "yes"})
    model.save_pretrained(tmp_path)
    extractor = Wav2Vec2FeatureExtractor(sampling_rate=1000, return_attention_mask=True)
    extractor.save_pretrained(tmp_path)
    assert type(AutoModelForAudioClassification.from_pretrained(tmp_path)) is type(model)
    clip = np.random.default_rng(0).standard_normal(80).astype(np.float32)
    found = pipeline("audio-classification", model=str(tmp_path))(clip)
    scores = model(**extractor(clip, sampling_rate=1000, return_tensors="pt")).logits.softmax(-1)[0]
    assert {part["label"]: part["score"] for part in found} == pytest.approx(
        dict(zip(["no", "yes"], scores.tolist(), strict=True)), abs=1e-6
    )
