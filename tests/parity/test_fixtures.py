"""Tests compare every fixture of the repository and of `FIXTURES`."""

import re
from pathlib import Path

import pytest


@pytest.mark.parametrize("family", ["luna", "mega"])
def test_every_fixture_is_tested(parity_folder, family):
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parents[1].rglob("*.py"))
    listed = set(re.findall(r'"(?:\w+/)?(\w+)"', sources))
    names = parity_folder.names(family)
    assert [name for name in names if not {name, re.sub("^(hf|raw_mha|raw_causal)_", "", name)} & listed] == []
