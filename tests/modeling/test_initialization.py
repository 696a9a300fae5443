"""The default `initializer_range` of Luna, and models that learn with it."""

import json

import pytest
import torch

from luna_mega import LunaConfig, LunaForSequenceClassification, LunaModel, LunaSeq2SeqConfig

TINY = {"vocab_size": 200, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.mark.parametrize("config_class", [LunaConfig, LunaSeq2SeqConfig])
@pytest.mark.parametrize(
    ("width", "expected"), [(64, 128**-0.5), (128, 0.0625), (510, 1020**-0.5), (512, 0.02), (1024, 0.02)]
)
def test_default_of_a_width(config_class, width, expected, tmp_path):
    config = config_class(hidden_size=width, num_attention_heads=2)
    assert config.initializer_range == config.encoder_config.initializer_range == pytest.approx(expected)
    assert config.decoder_config.initializer_range == config.initializer_range
    config.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert stored["initializer_range"] == config.initializer_range
    config.initializer_range = 0.07
    config.save_pretrained(tmp_path)
    assert config_class.from_pretrained(tmp_path).initializer_range == 0.07


def test_a_changed_width():
    config = LunaConfig()
    config.update_from_string("hidden_size=128,num_attention_heads=4")
    assert config.initializer_range == 0.0625
    config.update_from_string("hidden_size=64,initializer_range=0.3")
    config.update_from_string("hidden_size=128")
    assert config.initializer_range == 0.3
    with pytest.raises(ValueError, match="hidden_size must be at least 1, got 0"):
        LunaConfig(hidden_size=0)


@pytest.mark.parametrize("value", [None, 0.02])
def test_new_heads_have_the_value_of_the_folder(value, tmp_path):
    """Folders of earlier versions and of the converters store 0.02."""
    torch.manual_seed(0)
    config = LunaConfig(hidden_size=64, initializer_range=value, **TINY)
    LunaModel(config).save_pretrained(tmp_path)
    model = LunaForSequenceClassification.from_pretrained(tmp_path, num_labels=50)
    new = [p for name, p in model.named_parameters() if not name.startswith("luna.") and p.ndim == 2]
    assert new and all(abs(p.std() / config.initializer_range - 1) < 0.1 for p in new)


def test_a_default_luna_learns(import_benchmark):
    """With a deviation of 0.02, the accuracy after 150 steps is 28 % (12.5 % is chance)."""
    program = import_benchmark("initialization")
    torch.manual_seed(1)
    model = program.make("luna", "find", 64, None)
    steps, accuracy = program.train(model, program.find, seed=1, steps=80, rate=2e-3)
    assert steps < 80 and accuracy >= 0.95
