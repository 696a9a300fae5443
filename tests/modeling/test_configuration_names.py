"""Fields of a configuration can be read and set by the names that the other configurations have for them."""

import pytest

from luna_mega import LunaConfig, MegaConfig, MegalodonConfig
from luna_mega._register import CONFIGS

SHARED = ["d_model", "dropout", "dropout_prob", "attention_dropout", "attention_probs_dropout_prob"]


@pytest.mark.parametrize("config_class", CONFIGS.values(), ids=CONFIGS)
def test_other_names(config_class):
    for name, field in config_class.attribute_map.items():
        config = config_class()
        assert getattr(config, name) == getattr(config, field)
        assert name not in config.to_dict()


@pytest.mark.parametrize("config_class", [LunaConfig, MegaConfig, MegalodonConfig])
@pytest.mark.parametrize("name", SHARED)
def test_shared_names(config_class, name, tmp_path):
    value = 96 if name == "d_model" else 0.25
    config = config_class(**{name: value})
    config.save_pretrained(tmp_path)
    assert getattr(config_class.from_pretrained(tmp_path), name) == value
