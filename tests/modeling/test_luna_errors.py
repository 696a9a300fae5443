"""Invalid fields and inputs raise a one-sentence error that names the field and how to fix it."""

import pytest

from luna_mega import LunaConfig

from .luna import head_inputs, make


def test_configuration_checks_types():
    with pytest.raises(Exception, match="projection_length"):
        LunaConfig(projection_length="long")


def test_sequence_longer_than_the_positions():
    with pytest.raises(ValueError, match="length 49 exceeds the 48 learned positions.*truncate"):
        make("Model")(**head_inputs("Model", [49]))
    make("Model", position_embedding_type="sinusoidal")(**head_inputs("Model", [49]))


def test_pairs_have_no_position_ids():
    inputs = head_inputs("ForSequencePairClassification", [9, 4])
    with pytest.raises(ValueError, match="omit `position_ids`"):
        make("ForSequencePairClassification")(**inputs, position_ids=inputs["input_ids"])
