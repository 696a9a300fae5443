"""What does not fit is refused in one sentence that names the field and the way out."""

import pytest
import torch

from luna_mega import LunaConfig

from .luna import head_inputs, make, tiny_config


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"hidden_size": 25}, r"hidden_size \(25\) must be divisible by num_attention_heads \(4\)"),
        ({"num_pack_attention_heads": 5}, r"divisible by num_pack_attention_heads \(5\)"),
        ({"pooling": "max"}, "pooling must be one of cls, mean"),
        ({"position_embedding_type": "rotary"}, "position_embedding_type must be one of"),
        ({"input_type": "pixels"}, "input_type must be one of tokens, values"),
        ({"pair_features": "sum"}, "pair_features must be one of"),
        ({"hidden_act": "gleu"}, "hidden_act is 'gleu'"),
        ({"classifier_activation": "tanhh"}, "classifier_activation is 'tanhh'"),
        ({"projection_length": 0}, "projection_length must be at least 1"),
        ({"classifier_num_layers": -1}, "classifier_num_layers must be at least 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"layerdrop": 1e9}, r"layerdrop must be in \[0, 1\), got 1000000000.0"),
        ({"layer_norm_eps": -1.0}, "layer_norm_eps must be a number of at least 0, got -1.0"),
        ({"hidden_act": {}}, "hidden_act"),
        ({"pad_token_id": None}, r"pad_token_id \(None\) must be a token"),
        ({"pad_token_id": 40}, r"pad_token_id \(40\) must be a token of the vocabulary \(0 to 39\)"),
        ({"pool_padding": True}, "pool_padding applies to pooling 'mean' and 'packed_mean', not to 'cls'"),
        (
            {"hidden_size": 2, "num_attention_heads": 1, "position_embedding_type": "sinusoidal"},
            "hidden_size of at least",
        ),
    ],
)
def test_configuration(fields, message):
    with pytest.raises(Exception, match=message):  # transformers 5.17 wraps the ValueError
        tiny_config(**fields)


def test_configuration_checks_types():
    with pytest.raises(Exception, match="projection_length"):
        LunaConfig(projection_length="long")


def test_no_token_types():
    with pytest.raises(ValueError, match="Luna models take no token_type_ids"):
        make("Model")(**head_inputs("Model", [9, 4]), token_type_ids=torch.zeros(2, 9))


def test_sequence_longer_than_the_positions():
    with pytest.raises(ValueError, match="length 49 exceed the 48 learned positions.*truncate"):
        make("Model")(**head_inputs("Model", [49]))
    make("Model", position_embedding_type="sinusoidal")(**head_inputs("Model", [49]))


def test_pairs_have_no_position_ids():
    inputs = head_inputs("ForSequencePairClassification", [9, 4])
    with pytest.raises(ValueError, match="leave position_ids out"):
        make("ForSequencePairClassification")(**inputs, position_ids=inputs["input_ids"])
