"""Invalid configurations raise a one-sentence error that names the field and how to fix it."""

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from luna_mega import LunaConfig, LunaForMaskedLM, MegaConfig
from luna_mega._register import CONFIGS

from . import luna, mega

BOTH = [
    ({"input_type": "pixels"}, "input_type must be one of tokens, values"),
    ({"pooling": "max"}, "pooling must be one of cls, mean"),
    ({"pair_features": "sum"}, "pair_features must be one of"),
    ({"classifier_activation": "tanhh"}, "classifier_activation must be .*, got 'tanhh'"),
    ({"pad_token_id": None}, r"pad_token_id must be a token .*, got None"),
    ({"pad_token_id": 40}, r"pad_token_id must be a token of the vocabulary \(0 to 39\), got 40"),
    ({"classifier_num_layers": -1}, "classifier_num_layers must be at least 0, got -1"),
]
LUNA = [
    ({"hidden_size": 25}, r"hidden_size \(25\) must be divisible by num_attention_heads \(4\)"),
    ({"num_pack_attention_heads": 5}, r"divisible by num_pack_attention_heads \(5\)"),
    ({"position_embedding_type": "rotary"}, "position_embedding_type must be one of"),
    ({"hidden_act": "gleu"}, "hidden_act must be .*, got 'gleu'"),
    ({"projection_length": 0}, "projection_length must be at least 1"),
    ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ({"layerdrop": 1e9}, r"layerdrop must be in \[0, 1\), got 1000000000.0"),
    ({"layer_norm_eps": -1.0}, "layer_norm_eps must be a number of at least 0, got -1.0"),
    ({"hidden_act": {}}, "hidden_act"),
    ({"pool_padding": True}, "pool_padding applies to pooling 'mean' and 'packed_mean', not to 'cls'"),
    (
        {"hidden_size": 2, "num_attention_heads": 1, "position_embedding_type": "sinusoidal"},
        "hidden_size of at least",
    ),
]
MEGA = [
    ({"attention_activation": "gelu"}, "attention_activation must be one of softmax, laplace, relu2, got 'gelu'"),
    ({"normalization_type": "norm"}, "normalization_type must be one of layernorm, .* got 'norm'"),
    ({"relative_positional_bias": "alibi"}, "relative_positional_bias must be one of rotary, simple, got 'alibi'"),
    ({"activation": "gleu"}, "activation must be .*, got 'gleu'"),
    ({"use_chunking": True}, "use_chunking needs a chunk_size of at least 1, got -1"),
    ({"use_chunking": True, "chunk_size": 0}, "use_chunking needs a chunk_size of at least 1, got 0"),
    ({"shared_representation_size": 13}, "an even `shared_representation_size`, got 13"),
    ({"num_attention_heads": 2}, "`num_attention_heads` must be 1 for Mega, got 2"),
    ({"ema_shift": True, "bidirectional": False}, "ema_shift=True requires bidirectional=True"),
    ({"is_decoder": True, "bidirectional": True}, "is_decoder=True requires bidirectional=False"),
    ({"add_cross_attention": True}, "add_cross_attention=True requires is_decoder=True"),
    ({"dropout_prob": 1.0}, r"dropout_prob must be in \[0, 1\), got 1.0"),
    ({"ema_projection_size": 0}, "ema_projection_size must be at least 1, got 0"),
    ({"classifier_dropout": -0.1}, r"classifier_dropout must be in \[0, 1\), got -0.1"),
    ({"ema_beta_range": -1.0}, "ema_beta_range must be a number of at least 0, got -1.0"),
    ({"hidden_size": "wide"}, "hidden_size"),
    ({"activation": {}}, "activation"),
]


@pytest.mark.parametrize(
    "family, fields, message",
    [*((luna, *case) for case in BOTH + LUNA), *((mega, *case) for case in BOTH + MEGA)],
)
def test_configuration(family, fields, message):
    with pytest.raises(Exception, match=message):  # transformers 5.20 wraps the ValueError
        family.tiny_config(**fields)


def test_folder_of_another_model_raises(tmp_path):
    mega.tiny_config().save_pretrained(tmp_path)
    message = "has `model_type` 'mega', but LunaConfig requires 'luna'; load it with an Auto class"
    for load in (LunaConfig.from_pretrained, LunaForMaskedLM.from_pretrained):
        with pytest.raises(ValueError, match=message):
            load(tmp_path)


def test_custom_configuration_reads_folders_of_its_base_type(tmp_path):
    own = type("OwnConfig", (LunaConfig,), {"model_type": "own_luna"})
    luna.tiny_config(projection_length=7).save_pretrained(tmp_path)
    config = own.from_pretrained(tmp_path)
    assert (config.model_type, config.projection_length) == ("own_luna", 7)


SIZES = [
    (luna, {"hidden_size": 10**18, "num_attention_heads": 1}, "hidden_size must be at most 2147483647"),
    (luna, {"max_position_embeddings": 2**31}, "max_position_embeddings must be at most 2147483647, got 2147483648"),
    (luna, {"is_encoder_decoder": True, "max_target_positions": 10**12}, "max_target_positions must be at most"),
    (mega, {"truncation": 10**18}, "truncation must be at most 2147483647"),
    (mega, {"use_chunking": True, "chunk_size": 10**9}, "chunk_size must be at most 1048576, got 1000000000"),
    (mega, {"is_encoder_decoder": True, "decoder_chunk_size": 2**20 + 1}, "chunk_size must be at most 1048576"),
    (mega, {"num_hidden_layers": 10**10}, "num_hidden_layers must be at most"),
]


@pytest.mark.parametrize("family, fields, message", SIZES)
def test_sizes_have_bounds(family, fields, message):
    with pytest.raises(Exception, match=message):  # transformers 5.20 wraps the ValueError
        family.tiny_config(**fields)


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
    with pytest.raises(
        StrictDataclassError, match=r"hidden_size \(50\) must be divisible by num_attention_heads \(12\)"
    ):
        LunaConfig().update_from_string("hidden_size=50")
