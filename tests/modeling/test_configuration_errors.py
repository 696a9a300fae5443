"""Invalid configurations raise a one-sentence error that names the field and its value.

Fields can be read and set by the names that the other configurations have for them.
"""

import re

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from luna_mega import LunaConfig, LunaForMaskedLM, MegaConfig, MegalodonConfig
from luna_mega._register import CONFIGS

from . import luna, mega, megalodon_decoders

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
