"""Names of BERT's configuration: each has an effect on the configurations of all families, or raises an error."""

import dataclasses
import json
import re

import pytest
import torch
from torch import nn
from transformers import AutoConfig, BertConfig, RobertaConfig

import luna_mega
from luna_mega import LunaConfig, LunaModel, LunaSeq2SeqConfig, MegaConfig, MegalodonConfig, MegaSeq2SeqConfig

CONFIGS = [LunaConfig, LunaSeq2SeqConfig, MegaConfig, MegaSeq2SeqConfig, MegalodonConfig]
# Another value than the default of every family. The last names are those of earlier versions of transformers.
VALUES = {
    "vocab_size": 77, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 40,
    "hidden_act": "relu", "hidden_dropout_prob": 0.37, "attention_probs_dropout_prob": 0.36,
    "max_position_embeddings": 99, "type_vocab_size": 5, "initializer_range": 0.3, "layer_norm_eps": 3e-4,
    "pad_token_id": 3, "bos_token_id": 4, "eos_token_id": 5, "use_cache": False, "classifier_dropout": 0.35,
    "is_decoder": True, "add_cross_attention": True, "tie_word_embeddings": False, "output_hidden_states": True,
    "return_dict": False, "dtype": torch.float16, "chunk_size_feed_forward": 3, "is_encoder_decoder": True,
    "id2label": {0: "a", 1: "b", 2: "c"}, "problem_type": "regression",
    "output_attentions": True, "num_labels": 7, "per_layer_config": {0: {"intermediate_size": 8}},
    "tie_last_hidden_states": True, "position_embedding_type": "relative_key", "gradient_checkpointing": True,
}  # fmt: skip
UNSET = {"transformers_version", "architectures", "label2id"}  # written by transformers
SIDES = {"is_decoder", "add_cross_attention"}
NOWHERE = {"per_layer_config", "tie_last_hidden_states", "position_embedding_type", "gradient_checkpointing"}
# Names that raise an error in a constructor. A default that is the only value has no other.
RAISE = {
    LunaConfig: {*NOWHERE, "is_encoder_decoder", "add_cross_attention"},
    LunaSeq2SeqConfig: {*NOWHERE, *SIDES, "type_vocab_size"},
    MegaConfig: {*NOWHERE, "is_encoder_decoder", "add_cross_attention", "num_attention_heads", "layer_norm_eps"},
    MegaSeq2SeqConfig: {*NOWHERE, *SIDES, "num_attention_heads", "layer_norm_eps"},
    MegalodonConfig: {
        *NOWHERE, "is_encoder_decoder", "add_cross_attention", "hidden_act", "initializer_range",
        "max_position_embeddings", "type_vocab_size",
    },
}  # fmt: skip
BASE = {LunaConfig: {"num_attention_heads": 4}, LunaSeq2SeqConfig: {"num_attention_heads": 4}}
BASE |= {MegalodonConfig: {"norm_num_groups": 4}}
ALIASES = [(config_class, name) for config_class in CONFIGS for name in config_class.attribute_map]


def test_every_name_has_a_value():
    names = {item.name for config_class in (BertConfig, RobertaConfig) for item in dataclasses.fields(config_class)}
    assert names - UNSET <= VALUES.keys()


@pytest.mark.parametrize("config_class", CONFIGS)
def test_names_of_bert(config_class, tmp_path):
    config_class(**BASE.get(config_class, {})).save_pretrained(tmp_path)
    raised = set()
    for name, value in VALUES.items():
        fields = BASE.get(config_class, {}) | {name: value}
        try:
            config = config_class(**fields)
        except ValueError as error:
            assert re.search(rf"{name}.*(;|requires|must|has no)", str(error)), error
            raised.add(name)
            continue
        own = config_class.attribute_map.get(name, name)
        assert own in config_class.__dataclass_fields__ or isinstance(getattr(config_class, own), property), name
        assert getattr(config, name) == getattr(config, own) == value, name
        assert name == own or name not in config.to_dict()
        if name not in SIDES:  # Mega's folders store a direction, which a decoder does not support
            loaded = AutoConfig.from_pretrained(tmp_path, **{name: value})
            assert getattr(loaded, own) == value, name
    assert raised == RAISE[config_class]
    for name in raised & config_class.absent_fields.keys():
        config_class(**BASE.get(config_class, {}), **{name: config_class.absent_fields[name][0]})
        with pytest.raises(ValueError, match=f"`{name}`, got .*; "):
            config_class.from_pretrained(tmp_path, **{name: VALUES[name]})


@pytest.mark.parametrize(("config_class", "name"), ALIASES)
def test_two_names_of_a_field(config_class, name, tmp_path, caplog):
    """A folder prefers the family's own name. Arguments must agree."""
    own = config_class.attribute_map[name]
    default = getattr(config_class(), own)
    value = "relu" if isinstance(default, str) else default * 2 if default else 0.25
    assert getattr(config_class(**{name: default, own: default}), own) == default
    message = f"`{own}` and `{name}` are the same field of {config_class.__name__}, got .*; pass only one of them"
    with pytest.raises(ValueError, match=message):
        config_class(**{name: value, own: default})
    config_class().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        AutoConfig.from_pretrained(tmp_path, **{own: default, name: value})
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({name: value} | fields), encoding="utf-8")
    config = AutoConfig.from_pretrained(tmp_path)
    assert getattr(config, own) == default and name not in config.to_dict()
    assert f"`{name}` is ignored" in caplog.text


def test_a_name_that_only_warns(caplog):
    for config_class in CONFIGS:
        config_class(chunk_size_feed_forward=97)
        has_effect = issubclass(config_class, LunaConfig)
        assert (f"=97 has no effect in {config_class.__name__}," not in caplog.text) == has_effect


@pytest.mark.parametrize("config_class", CONFIGS)
def test_folders_with_names_that_the_family_does_not_have(config_class, caplog):
    fields = {name: VALUES[name] for name in config_class.absent_fields}
    config = config_class.from_dict(BASE.get(config_class, {}) | fields)
    assert config.to_dict() == config_class(**BASE.get(config_class, {})).to_dict()
    assert all(f"`{name}` is ignored" in caplog.text for name in fields)


@pytest.mark.parametrize("config_class", CONFIGS)
def test_derived_fields_follow_every_name(config_class):
    """`d_model` is read before fields that are derived from `hidden_size`."""
    config = config_class(**BASE.get(config_class, {}), d_model=64)
    assert config.to_dict() == config_class(**BASE.get(config_class, {}), hidden_size=64).to_dict()


@pytest.mark.parametrize("config_class", [LunaConfig, MegaConfig, MegalodonConfig])
@pytest.mark.parametrize("name", ["hidden_dropout_prob", "attention_probs_dropout_prob", "layer_norm_eps"])
def test_values_reach_the_modules(config_class, name):
    if name in config_class.absent_fields:
        return
    fields = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, name: VALUES[name]}
    model = getattr(luna_mega, config_class.__name__.replace("Config", "Model"))(config_class(**fields, **BASE_SIZES))
    assert any(VALUES[name] in values(module) for module in model.modules())


BASE_SIZES = {"num_attention_heads": 1, "norm_num_groups": 4}


def values(module: nn.Module) -> list[object]:
    return [value for value in vars(module).values() if isinstance(value, float | int)]


def test_configurations_of_users():
    """Subclasses check names like the class; their own constructors receive the names that users pass."""

    class Plain(LunaConfig):
        pass

    class Own(LunaConfig):
        def __init__(self, hidden_dropout_prob=0.1, **fields):
            super().__init__(dropout=hidden_dropout_prob / 2, **fields)

    assert Plain(hidden_dropout_prob=0.3).dropout == 0.3
    with pytest.raises(ValueError, match="`dropout` and `hidden_dropout_prob` are the same field of Plain"):
        Plain(hidden_dropout_prob=0.3, dropout=0.2)
    assert Own(hidden_dropout_prob=0.3).dropout == 0.15


def test_a_model_is_loaded_with_names_of_bert(tmp_path):
    LunaModel(LunaConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(
        tmp_path
    )
    model = LunaModel.from_pretrained(tmp_path, hidden_dropout_prob=0.2)
    assert model.embeddings.dropout.p == model.config.dropout == 0.2
