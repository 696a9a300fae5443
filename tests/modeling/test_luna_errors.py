"""What does not fit is refused in one sentence that names the field and the way out."""

import pytest
import torch

from luna_mega import LunaConfig, LunaForMaskedLM

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


@pytest.mark.parametrize(
    "change, message",
    [
        ({"input_ids": torch.zeros(0, 5, dtype=torch.long), "attention_mask": None}, "batch is empty: 0 sequences"),
        ({"input_ids": torch.zeros(2, 0, dtype=torch.long), "attention_mask": None}, "2 sequences of length 0"),
        ({"input_ids": None}, "exactly one of input_ids and inputs_embeds"),
        ({"inputs_embeds": torch.zeros(2, 9, 24)}, "exactly one of input_ids and inputs_embeds"),
        ({"input_values": torch.zeros(2, 9)}, "input_type='tokens'"),
        (
            {"attention_mask": torch.ones(2, 8)},
            r"attention_mask must have the shape \[2, 9\] of the input, got \[2, 8\]",
        ),
        ({"attention_mask": torch.ones(2, 1, 9, 9)}, "attention_mask must have the shape"),
        ({"token_type_ids": torch.zeros(2, 9)}, "Luna models take no token_type_ids"),
        ({"is_causal": True}, "Luna models take no is_causal"),
    ],
)
def test_inputs(change, message):
    model = make("Model")
    with pytest.raises(ValueError, match=message):
        model(**head_inputs("Model", [9, 4]) | change)


def test_sequence_longer_than_the_positions():
    with pytest.raises(ValueError, match="length 49 exceed the 48 learned positions.*truncate"):
        make("Model")(**head_inputs("Model", [49]))
    make("Model", position_embedding_type="sinusoidal")(**head_inputs("Model", [49]))


def test_pairs_of_different_batches():
    inputs = head_inputs("ForSequencePairClassification", [9, 4])
    inputs["pair_input_ids"], inputs["pair_attention_mask"] = inputs["pair_input_ids"][:1], None
    with pytest.raises(ValueError, match="first input has 2 sequences and the second 1"):
        make("ForSequencePairClassification")(**inputs)


def test_pairs_have_no_position_ids():
    inputs = head_inputs("ForSequencePairClassification", [9, 4])
    with pytest.raises(ValueError, match="leave position_ids out"):
        make("ForSequencePairClassification")(**inputs, position_ids=inputs["input_ids"])


def test_multiple_choice_without_options():
    with pytest.raises(ValueError, match=r"input_ids \[B, options, T\].*got \[2, 9\]"):
        make("ForMultipleChoice")(**head_inputs("Model", [9, 4]))


def test_values_have_no_vocabulary():
    for head in ("ForMaskedLM", "ForMultipleChoice", "ForQuestionAnswering"):
        with pytest.raises(ValueError, match=f"Luna{head} needs input_type='tokens', got 'values'"):
            make(head, input_type="values")
    model = make("Model", input_type="values")
    for change in (
        lambda: model.set_input_embeddings(torch.nn.Embedding(3, 24)),
        lambda: model.resize_token_embeddings(9),
    ):
        with pytest.raises(ValueError, match="LunaModel needs input_type='tokens'"):
            change()
    with pytest.raises(ValueError, match="exactly one of input_values and inputs_embeds"):
        model(**head_inputs("Model", [9]))


def test_unsupported_attention_implementation():
    with pytest.raises(ValueError, match="[Ff]lash"):
        LunaForMaskedLM._from_config(tiny_config(), attn_implementation="flash_attention_2")
