"""Invalid configurations raise a one-sentence error that names the field and its value.

Fields can be read and set by the names that the other configurations have for them.
"""

import copy
import json
import pickle
import re
from itertools import product

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM
from transformers.models.auto import modeling_auto

import luna_mega
import luna_mega_cli
from luna_mega import LunaConfig, LunaForMaskedLM, LunaSeq2SeqConfig, MegaConfig, MegalodonConfig
from luna_mega._register import CONFIGS
from tests.modeling import decoders, luna, mega, megalodon_decoders
from tests.modeling.contract import FACTORIES
from tests.modeling.decoders import TRANSLATING, make_plain, padded, source, target

IMAGES = {"input_type": "patches", "image_size": 32, "patch_size": 8, "max_positions": 16}
IMAGES |= {"relative_positional_bias": "simple"}
BASES = {
    "luna": (luna, {}),
    "luna seq2seq": (luna, {"is_encoder_decoder": True}),
    "mega": (mega, {}),
    "mega untied": (mega, {"is_decoder": True, "tie_word_embeddings": False}),
    "mega values": (mega, {"input_type": "values"}),
    "mega images": (mega, IMAGES),
    "mega seq2seq": (mega, {"is_encoder_decoder": True}),
    "megalodon": (megalodon_decoders, {}),
}
# Fields and a text: the message names the first field and its value, and contains the text.
BOTH = [
    {"input_type": "pixels"},
    {"pooling": "max"},
    {"pair_features": "sum"},
    {"classifier_activation": "tanhh"},
    {"classifier_num_layers": -1},
]
BOTH_SEQ2SEQ = [
    {"decoder_start_token_id": 40},
    ({"is_decoder": True}, "omit is_decoder"),
    {"input_type": "values"},
    {"num_decoder_layers": 0},
    {"decoder_vocab_size": 9, "share_encoder_decoder_embeddings": True},
    {"tie_word_embeddings": False, "share_encoder_decoder_embeddings": True},
]
OF_IMAGES = [
    ({"image_size": 32}, "image_size=32 requires input_type='patches', got '(tokens|values)'; omit it"),
    {"patch_size": 8},
    {"use_absolute_position_embeddings": False},
]
OF_TOKENS = [
    ({"embedding_size": 8}, "embedding_size=8 requires input_type='tokens', got '(values|patches)'; omit it"),
    {"adaptive_input_cutoffs": [9]},
]
INVALID = {
    "luna": [
        *BOTH,
        {"hidden_size": 25},
        {"num_pack_attention_heads": 5},
        {"position_embedding_type": "rotary"},
        {"hidden_act": "gleu"},
        {"hidden_act": {}},
        {"projection_length": 0},
        {"projection_length": "long"},
        {"dropout": 1.0},
        {"word_dropout": 1.0},
        {"layerdrop": 1e9},
        {"layer_norm_eps": -1.0},
        {"causal_activation": "relu"},
        ({"pool_padding": True}, "pool_padding"),
        ({"unpad_inputs": True, "pooling": "mean", "pool_padding": True}, "pool_padding"),
        {"hidden_size": 2, "num_attention_heads": 1, "position_embedding_type": "sinusoidal"},
        {"contextual_projection": True, "is_decoder": True},
        {"add_cross_attention": True},
        ({"input_type": "values", "is_decoder": True}, "decoder"),
        {"embedding_size": 8, "is_decoder": True},
        {"embedding_size": 0},
        {"type_vocab_size": -1},
        luna.VALUES | {"type_vocab_size": 2},
        ({"num_channels": 2}, "num_channels=2 requires input_type='values', got 'tokens'"),
        {"hidden_size": 10**18, "num_attention_heads": 1},
        {"max_position_embeddings": 2**31},
    ],
    "luna seq2seq": [
        *BOTH_SEQ2SEQ,
        ({"num_decoder_attention_heads": 7}, "hidden_size .* num_attention_heads"),
        {"max_target_positions": 10**12},
        {"type_vocab_size": 2},
    ],
    "mega": [
        *BOTH,
        {"attention_activation": "gelu"},
        {"normalization_type": "norm"},
        {"relative_positional_bias": "alibi"},
        {"activation": "gleu"},
        {"activation": {}},
        {"chunk_size": -1, "use_chunking": True},
        {"chunk_size": 0, "use_chunking": True},
        {"chunk_size": 10**9, "use_chunking": True},
        {"shared_representation_size": 13},
        {"num_attention_heads": 2},
        {"ema_shift": True, "bidirectional": False},
        ({"bidirectional": True, "is_decoder": True}, "bidirectional=False"),
        {"add_cross_attention": True},
        {"dropout_prob": 1.0},
        {"ema_projection_size": -1},
        ({"ema_projection_size": 0, "truncation": 9}, "no moving average; omit truncation=9"),
        ({"ema_projection_size": 0, "ema_shift": True}, "no moving average; omit ema_shift=True"),
        {"classifier_dropout": -0.1},
        {"ema_beta_range": -1.0},
        {"hidden_size": "wide"},
        {"truncation": 10**18},
        {"num_hidden_layers": 10**10},
        {"unpad_inputs": True, "padded_batch_statistics": True},
        {"drop_path_rate": 1.0},
        *OF_IMAGES,
        ({"num_channels": 1}, "num_channels=1 requires input_type='values' or 'patches', got 'tokens'; omit it"),
    ],
    "mega values": [*OF_IMAGES, *OF_TOKENS],
    "mega untied": [
        {"adaptive_softmax_cutoffs": [20, 10]},
        {"adaptive_softmax_cutoffs": [40]},
        {"adaptive_softmax_cutoffs": []},
        ({"adaptive_softmax_cutoffs": [10, 20, 30], "adaptive_softmax_factor": 4}, "last of 4 bands"),
        ({"adaptive_softmax_cutoffs": [10], "tie_word_embeddings": True}, "tie_word_embeddings=False"),
        {"tie_adaptive_projections": True, "adaptive_input_cutoffs": [9], "adaptive_softmax_cutoffs": [9]},
    ],
    "mega images": [
        *OF_TOKENS,
        {"patch_size": 7},
        {"max_positions": 20},
        ({"is_decoder": True}, "input_type='patches'"),
        {"unpad_inputs": True},
        {"num_channels": 0},
    ],
    "mega seq2seq": [
        *BOTH_SEQ2SEQ,
        ({"adaptive_input_cutoffs": [9], "adaptive_softmax_cutoffs": [9]}, "no adaptive vocabulary"),
        {"embedding_size": 7},
        ({"decoder_shared_representation_size": 5}, "shared_representation_size`, got 5"),
        {"decoder_ema_projection_size": -1},
        ({"decoder_chunk_size": 2**20 + 1}, "chunk_size .* 1048576"),
    ],
    "megalodon": [
        {"shared_representation_size": 10},
        {"value_size": 21},
        {"norm_num_groups": 5},
        {"chunk_size": 0},
        {"rope_theta": 0.0},
        {"initializer": "zeros"},
        ({"is_decoder": False}, "must be True"),
        ({"add_cross_attention": True}, "must be False"),
        {"input_type": "values"},
        ({"output_size": 7, "tie_word_embeddings": True}, "vocab_size=30"),
        {"dropout_prob": 1.0},
    ],
}


@pytest.mark.parametrize("base", BASES)
def test_invalid_fields(base):
    family, fixed = BASES[base]
    for row in INVALID[base]:
        fields, text = row if isinstance(row, tuple) else (row, None)
        (name, value), *_ = fields.items()
        with pytest.raises((ValueError, TypeError, StrictDataclassError)) as error:
            family.tiny_config(**fixed | fields)
        message = str(error.value)
        assert isinstance(error.value, ValueError) == ("Validation error for field" not in message)
        assert "validator" not in message and "\n" not in message.partition("Validation error for field")[0], row
        assert re.search(rf"\b{name}\b" if text is None else text, message), row
        assert text is not None or value == {} or str(value) in message, row


def test_folder_of_another_model_raises(tmp_path):
    mega.tiny_config().save_pretrained(tmp_path)
    for load in (LunaConfig.from_pretrained, LunaForMaskedLM.from_pretrained):
        with pytest.raises(ValueError, match="`model_type` 'mega', but LunaConfig requires 'luna'"):
            load(tmp_path)


def test_custom_configuration_reads_folders_of_its_base_type(tmp_path):
    own = type("OwnConfig", (LunaConfig,), {"model_type": "own_luna"})
    luna.tiny_config(projection_length=7).save_pretrained(tmp_path)
    config = own.from_pretrained(tmp_path)
    assert (config.model_type, config.projection_length) == ("own_luna", 7)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_update_from_string_derives_fields_again(model_type):
    heads = 1 if model_type.startswith("mega") else 4
    config = AutoConfig.for_model(model_type)
    expected = AutoConfig.for_model(model_type, hidden_size=64, num_attention_heads=heads)
    config.update_from_string(f"hidden_size=64,num_attention_heads={heads}")
    assert config.to_dict() == expected.to_dict()


def test_update_from_string_keeps_fields_that_were_set():
    config = LunaConfig(num_pack_attention_heads=6, num_labels=5)
    config.update_from_string("hidden_size=96,num_attention_heads=4")
    assert (config.num_pack_attention_heads, config.classifier_hidden_size, config.num_labels) == (6, 96, 5)
    mega = MegaConfig()
    mega.update_from_string("hidden_size=64,max_position_embeddings=99,embedding_size=32,is_decoder=true")
    assert (mega.embedding_size, mega.max_positions, mega.bidirectional) == (32, 99, False)


def test_update_from_string_checks_the_new_configuration():
    with pytest.raises(StrictDataclassError, match=r"hidden_size \(50\) .* num_attention_heads \(12\)"):
        LunaConfig().update_from_string("hidden_size=50")


@pytest.mark.parametrize("base", ["luna", "mega", "mega values", "mega images", "mega seq2seq"])
def test_saved_configurations_have_the_fields_of_all_inputs(base, tmp_path):
    family, fixed = BASES[base]
    config = family.tiny_config(**fixed)
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).input_type == config.input_type


def test_a_chunk_size_without_chunks_warns(caplog):
    MegaConfig(chunk_size=97, use_chunking=True)
    MegaConfig(chunk_size=97, legacy_bias_table=True, relative_positional_bias="simple")
    MegaConfig()
    assert not caplog.records
    MegaConfig(chunk_size=97)
    assert "chunk_size=97 has no effect without use_chunking=True" in caplog.text


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


IDS = torch.tensor([[2, 5, 6, 7, 8], [2, 8, 7, 6, 5]])


@pytest.mark.parametrize(
    ("family", "name"), [*product(decoders.FAMILIES, ("is_decoder", "add_cross_attention")), ("luna", "first_position")]
)
def test_fields_that_determine_the_modules_cannot_be_changed(family, name):
    """`EncoderDecoderModel` sets `add_cross_attention` of a decoder without the modules, which ignored the source."""
    model = copy.deepcopy(decoders.make_plain(family))
    setattr(model.config, name, not getattr(model.config, name) if name != "first_position" else 5)
    with pytest.raises(ValueError, match=f"`config.{name}` has been changed to .*; create it with this value"):
        model(IDS)


@pytest.mark.parametrize("name", ["mega decoder", "mega seq2seq", "megalodon decoder"])
def test_a_changed_chunk(name, tmp_path):
    """It has the same effect in the model, in its encoder and decoder, and in the saved folder."""
    model = FACTORIES[name]()
    inputs = dict.fromkeys(("input_ids", "decoder_input_ids")[: 1 + model.config.is_encoder_decoder], IDS)
    before = model(**inputs).logits
    model.config.update({"use_chunking": True, "chunk_size": 3})
    changed = model(**inputs).logits
    assert not torch.equal(changed, before)
    model.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path)(**inputs).logits, changed)


PRESETS = {"luna": lambda config: config.wmt(30), "mega": lambda config: config.wmt_en_de(30)}


class Family:
    """The public classes of a family, as attributes."""

    def __init__(self, name):
        self.name, self.prefix = name, name.capitalize()

    def __getattr__(self, ending):
        return getattr(luna_mega, self.prefix + ending)

    def __str__(self):
        return self.name


PUBLIC = [Family(name) for name in TRANSLATING]


@pytest.fixture(params=PUBLIC, ids=str)
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
