from dataclasses import replace

import pytest

from luna_mega.convert.formats.registry import register_format, registered_formats
from tests.convert.folders import find_format


def test_early_luna_bert(convert, make):
    state = make.bert()
    state["model"] = {key.replace("encoder.", "decoder.", 1): tensor for key, tensor in state["model"].items()}
    convert(state)
    assert "'decoder.' is today's 'encoder.'" in convert.screen


def test_signatures_are_disjoint():
    signatures = [fmt.facts.stacks for fmt in registered_formats()]
    assert len(set(signatures)) == len(signatures) and all(signatures)
    assert find_format("luna_seq2seq").facts.stacks == {("luna", "encoder"), ("luna", "decoder")}


def test_overlapping_formats_raise():
    class Other(type(find_format("mega_lra"))):
        facts = replace(find_format("mega_lra").facts, name="other")

    with pytest.raises(ValueError, match="'other' has the same stacks as 'mega_lra'"):
        register_format(Other())


@pytest.mark.parametrize("field", ["args", "model"])
def test_fields_without_a_value(convert, make, field):
    assert f"field '{field}' is None" in convert.error(make.bert() | {field: None})
