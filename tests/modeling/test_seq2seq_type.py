"""Encoder-decoders have a `model_type` of their own; what was written before they had it is read, and saved as new."""

import copy
import json
import logging
import pickle

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
)
from transformers.models.auto import modeling_auto
from transformers.utils.logging import warning_once

import luna_mega
from luna_mega import cli
from luna_mega.hub.folder import read_folder
from tests.modeling.decoders import TRANSLATING, make_plain, padded, source, target

PRESETS = {"luna": lambda config: config.wmt(30), "mega": lambda config: config.wmt_en_de(30)}


class Family:
    """The classes of a family."""

    def __init__(self, name):
        self.name, self.prefix = name, name.capitalize()

    def __getattr__(self, ending):
        return getattr(luna_mega, self.prefix + ending)


@pytest.fixture(params=TRANSLATING)
def family(request):
    return Family(request.param)


@pytest.fixture
def warnings(caplog):
    """Function that returns the logged warnings; a warning that was given once is given again."""
    warning_once.cache_clear()
    caplog.set_level(logging.WARNING)
    yield lambda: [record.getMessage() for record in caplog.records if "model_type" in record.getMessage()]
    warning_once.cache_clear()


def age(folder, family):
    """Write into config.json what earlier versions wrote."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    assert config["model_type"] == f"{family.name}_seq2seq" and config["is_encoder_decoder"] is True
    file.write_text(json.dumps(config | {"model_type": family.name}))
    return folder


def with_encoder(family, **fields):
    return make_plain(family.name, is_encoder_decoder=True, dtype=torch.float32, **fields)


def test_transformers_mappings_distinguish_the_types(family):
    """lm-eval and others ask for the type in the table of sequence-to-sequence models first."""
    seq2seq, causal = (
        getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES") for kind in ("SEQ_TO_SEQ_CAUSAL_LM", "CAUSAL_LM")
    )
    own = f"{family.name}_seq2seq"
    assert seq2seq[own] == family.ForConditionalGeneration.__name__ and family.name not in seq2seq
    assert causal[family.name] == family.ForCausalLM.__name__ and own not in causal
    assert modeling_auto.MODEL_MAPPING_NAMES[own] == family.Seq2SeqModel.__name__
    assert type(AutoConfig.for_model(own)) is family.Seq2SeqConfig
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForCausalLM.from_config(family.Seq2SeqConfig())
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForSeq2SeqLM.from_config(family.Config())


def test_new_configuration_does_not_warn(family, warnings):
    for config in (family.Seq2SeqConfig(), PRESETS[family.name](family.Config)):
        assert type(config) is family.Seq2SeqConfig and config.is_encoder_decoder
        assert type(family.Seq2SeqConfig.from_dict(config.to_dict())) is family.Seq2SeqConfig
        for same in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
            assert type(same) is family.Seq2SeqConfig and same.to_dict() == config.to_dict()
        for side in (config.encoder_config, config.decoder_config):
            assert type(side) is family.Config and side.model_type == family.name and not side.is_encoder_decoder
    assert not warnings()


@pytest.mark.parametrize("way", ["constructor", "for_model", "assignment", "keyword", "dictionary"])
def test_an_encoder_decoder_of_the_old_configuration_becomes_a_new_one(family, way, warnings, tmp_path):
    if way == "constructor":
        config = family.Config(is_encoder_decoder=True)
    elif way == "for_model":
        config = AutoConfig.for_model(family.name, is_encoder_decoder=True)
    elif way == "assignment":
        config = family.Config()
        config.is_encoder_decoder = True
    elif way == "keyword":
        family.Config().save_pretrained(tmp_path)
        config = AutoConfig.from_pretrained(tmp_path, is_encoder_decoder=True)
    else:
        config = family.Config.from_dict({"model_type": family.name, "is_encoder_decoder": True})
    assert type(config) is family.Seq2SeqConfig and config.model_type == f"{family.name}_seq2seq"
    assert config.to_dict() == family.Seq2SeqConfig().to_dict() | {"_name_or_path": config.name_or_path}
    family.Config(is_encoder_decoder=True)
    assert len(warnings()) == 1 and f"'{family.name}_seq2seq'" in warnings()[0]


@torch.no_grad()
def test_an_old_folder_loads_and_is_saved_as_new(family, warnings, tmp_path):
    model = with_encoder(family)
    inputs = source(model, 2) | target(model, padded([5, 4], 5, "left")[0])
    expected = model(**inputs).logits
    old = tmp_path / "old"
    model.save_pretrained(old)
    new = old.rename(tmp_path / "new")
    model.save_pretrained(old)
    age(old, family)
    for cls in (AutoConfig, family.Config, family.Seq2SeqConfig):
        assert type(cls.from_pretrained(old)) is family.Seq2SeqConfig
    for cls, loaded in (
        (AutoModelForSeq2SeqLM, family.ForConditionalGeneration),
        (family.ForConditionalGeneration, family.ForConditionalGeneration),
        (AutoModel, family.Seq2SeqModel),
        (family.Seq2SeqModel, family.Seq2SeqModel),
    ):
        found, info = cls.from_pretrained(old, output_loading_info=True)
        assert type(found) is loaded and not info["missing_keys"]
        if loaded is family.ForConditionalGeneration:
            assert torch.equal(found(**inputs).logits, expected)
    assert len(warnings()) == 1 and f"'{family.name}_seq2seq'" in warnings()[0]
    family.ForConditionalGeneration.from_pretrained(old).save_pretrained(tmp_path / "again")
    written = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "again", new)]
    assert written[0] == written[1]


def test_the_command_line_takes_an_old_folder_as_the_new_one(family, tmp_path, capsys):
    for name in ("old", "new"):
        with_encoder(family).save_pretrained(tmp_path / name)
    old, new = str(age(tmp_path / "old", family)), str(tmp_path / "new")
    assert read_folder(old).config.to_dict() == read_folder(new).config.to_dict()
    assert cli.main(["verify", old, new]) == cli.main(["info", old]) == 0
    assert "equal in every number" in capsys.readouterr().out
    assert cli.main(["bundle", old]) == 0
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    assert config["model_type"] == f"{family.name}_seq2seq"
    entry = f"auto_{family.name}_seq2seq"
    assert config["auto_map"] == {
        "AutoConfig": f"{entry}.{family.Seq2SeqConfig.__name__}",
        "AutoModel": f"{entry}.{family.Seq2SeqModel.__name__}",
        "AutoModelForSeq2SeqLM": f"{entry}.{family.ForConditionalGeneration.__name__}",
    }
    assert not (tmp_path / "old" / f"heads_{family.name}.py").exists()


def test_encoder_or_decoder_is_a_separate_model(family, tmp_path):
    model = with_encoder(family)
    model.config.auto_map = {"AutoModel": "auto_x.Seq2SeqModel"}
    for name, side in (("encoder", model.get_encoder()), ("decoder", model.get_decoder())):
        side.save_pretrained(tmp_path / name)
        loaded, info = AutoModel.from_pretrained(tmp_path / name, output_loading_info=True)
        assert type(loaded) is family.Model and not {key for key in info["missing_keys"] if "pooler" not in key}
        assert loaded.config.model_type == family.name and not getattr(loaded.config, "auto_map", None)


def test_tokenizer_in_the_same_folder_loads(family, tmp_path, tokenizer):
    with_encoder(family).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    classes = []
    for folder in (tmp_path, age(tmp_path, family)):
        classes.append(type(AutoTokenizer.from_pretrained(folder)))
    assert classes[0] is classes[1]


def test_user_subclass_keeps_its_type(family, warnings):
    own = type("OwnConfig", (family.Config,), {"model_type": "own"})
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1}
    config = own(is_encoder_decoder=True, **sizes | ({"num_attention_heads": 2} if family.name == "luna" else {}))
    assert type(config) is type(config.encoder_config) is own
    model = family.ForConditionalGeneration(config)
    assert model.config.model_type == "own" and not warnings()


def test_bad_input(family, tmp_path):
    with pytest.raises(StrictDataclassError, match=rf"is_encoder_decoder=False: use {family.prefix}Config"):
        family.Seq2SeqConfig(is_encoder_decoder=False)
    make_plain(family.name).save_pretrained(tmp_path)
    with pytest.raises(StrictDataclassError, match=rf"is_encoder_decoder=False: use {family.prefix}Config"):
        family.ForConditionalGeneration.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"is one side only.*{family.prefix}Seq2SeqModel"):
        family.Model(family.Seq2SeqConfig())
