"""Encoder-decoders have separate model types and configuration classes; the type of one side raises an error."""

import copy
import json
import pickle
import re

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSeq2SeqLM,
)
from transformers.models.auto import modeling_auto

import luna_mega
import luna_mega_cli
from tests.modeling.decoders import TRANSLATING, make_plain, padded, source, target

PRESETS = {"luna": lambda config: config.wmt(30), "mega": lambda config: config.wmt_en_de(30)}


class Family:
    """The public classes of a family, as attributes."""

    def __init__(self, name):
        self.name, self.prefix = name, name.capitalize()

    def __getattr__(self, ending):
        return getattr(luna_mega, self.prefix + ending)

    def __str__(self):
        return self.name


FAMILIES = [Family(name) for name in TRANSLATING]


@pytest.fixture(params=FAMILIES, ids=str)
def family(request):
    return request.param


def with_encoder(family, **fields):
    return make_plain(family.name, is_encoder_decoder=True, dtype=torch.float32, **fields)


def test_transformers_mappings_distinguish_the_types(family):
    """Each type is in the right table; tools such as lm-eval look up sequence-to-sequence models first."""
    seq2seq, causal = (
        getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES") for kind in ("SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM")
    )
    own = f"{family.name}_seq2seq"
    assert seq2seq[own] == family.ForConditionalGeneration.__name__ and family.name not in seq2seq
    assert causal[family.name] == family.ForCausalLM.__name__ and own not in causal
    assert modeling_auto.MODEL_MAPPING_NAMES[own] == family.Seq2SeqModel.__name__
    assert type(AutoConfig.for_model(own)) is family.Seq2SeqConfig


def test_configuration_classes(family):
    for config in (family.Seq2SeqConfig(), *map(PRESETS[family.name], (family.Config, family.Seq2SeqConfig))):
        assert type(config) is family.Seq2SeqConfig and config.is_encoder_decoder
        assert type(family.Seq2SeqConfig.from_dict(config.to_dict())) is family.Seq2SeqConfig
        for same in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
            assert type(same) is family.Seq2SeqConfig and same.to_dict() == config.to_dict()
        for side in (config.encoder_config, config.decoder_config):
            assert type(side) is family.Config and side.model_type == family.name and not side.is_encoder_decoder


def wrong_type(family):
    return (
        f"`is_encoder_decoder=True` requires {family.prefix}Seq2SeqConfig, not {family.prefix}Config; "
        f'in a config.json, set "model_type": "{family.name}_seq2seq"'
    )


def test_is_encoder_decoder_requires_the_class_of_encoder_decoders(family, tmp_path):
    make_plain(family.name).config.save_pretrained(tmp_path)
    for make in (
        lambda: family.Config(is_encoder_decoder=True),
        lambda: AutoConfig.for_model(family.name, is_encoder_decoder=True),
        lambda: family.Config.from_dict({"model_type": family.name, "is_encoder_decoder": True}),
    ):
        with pytest.raises(StrictDataclassError, match=re.escape(wrong_type(family))):
            make()
    # transformers validates assigned fields only before saving
    assigned = family.Config()
    assigned.is_encoder_decoder = True
    own = type("OwnConfig", (family.Config,), {"model_type": "own"})(is_encoder_decoder=True)
    for config in (assigned, own, AutoConfig.from_pretrained(tmp_path, is_encoder_decoder=True)):
        with pytest.raises(StrictDataclassError, match=re.escape(wrong_type(family))):
            config.save_pretrained(tmp_path)
        for cls in (family.ForConditionalGeneration, family.Seq2SeqModel):
            with pytest.raises(ValueError, match=f"{cls.__name__} requires a {family.prefix}Seq2SeqConfig"):
                cls(config)


@torch.no_grad()
def test_encoder_decoder_folder_of_an_early_type_loads_after_an_edit(family, tmp_path, capsys):
    model = with_encoder(family)
    inputs = source(model, 2) | target(model, padded([5, 4], 5, "left")[0])
    model.save_pretrained(tmp_path)
    content = (tmp_path / "config.json").read_text(encoding="utf-8")
    config = json.loads(content)
    assert config["model_type"] == f"{family.name}_seq2seq" and config["is_encoder_decoder"] is True
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": family.name}), encoding="utf-8")
    capsys.readouterr()
    classes = (AutoConfig, family.Config, family.Seq2SeqConfig, AutoModelForSeq2SeqLM, AutoModel)
    for cls in (*classes, family.ForConditionalGeneration, family.Seq2SeqModel):
        with pytest.raises((ValueError, StrictDataclassError), match=re.escape(wrong_type(family))):
            cls.from_pretrained(tmp_path)
    for command in (["verify", str(tmp_path), str(tmp_path / "config.json")], ["bundle", str(tmp_path)]):
        assert luna_mega_cli.main(command) == 1
        message = capsys.readouterr().err
        assert wrong_type(family) in message and message.count("\n") == 1
    assert not list(tmp_path.glob("*.py"))
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    found = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    torch.testing.assert_close(found(**inputs).logits, model(**inputs).logits)


def test_encoder_or_decoder_is_a_separate_model(family, tmp_path):
    model = with_encoder(family)
    model.config.auto_map = {"AutoModel": "auto_x.Seq2SeqModel"}
    for name, side in (("encoder", model.get_encoder()), ("decoder", model.get_decoder())):
        side.save_pretrained(tmp_path / name)
        loaded, info = AutoModel.from_pretrained(tmp_path / name, output_loading_info=True)
        assert type(loaded) is family.Model and not {key for key in info["missing_keys"] if "pooler" not in key}
        assert loaded.config.model_type == family.name and not loaded.config.auto_map


def test_subclass_of_a_user(family):
    own = type("OwnConfig", (family.Seq2SeqConfig,), {"model_type": "own"})
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1}
    config = own(**sizes | ({"num_attention_heads": 2} if family.name == "luna" else {}))
    assert type(config) is own and type(config.encoder_config) is family.Config
    assert type(PRESETS[family.name](own)) is own
    assert family.ForConditionalGeneration(config).config.model_type == "own"


def test_bad_input(family, tmp_path):
    with pytest.raises(StrictDataclassError, match=f"got `is_encoder_decoder=False`; use {family.prefix}Config"):
        family.Seq2SeqConfig(is_encoder_decoder=False)
    make_plain(family.name).save_pretrained(tmp_path / "side")
    message = f"has `model_type` '{family.name}', but {family.prefix}Seq2SeqConfig requires '{family.name}_seq2seq'"
    with pytest.raises(ValueError, match=message):
        family.ForConditionalGeneration.from_pretrained(tmp_path / "side")
    with_encoder(family).save_pretrained(tmp_path / "both")
    message = f"has `model_type` '{family.name}_seq2seq', but {family.prefix}Config requires '{family.name}'"
    with pytest.raises(ValueError, match=message):
        family.Model.from_pretrained(tmp_path / "both")
    with pytest.raises(ValueError, match=f"is an encoder or a decoder.*{family.prefix}Seq2SeqModel"):
        family.Model(family.Seq2SeqConfig())
