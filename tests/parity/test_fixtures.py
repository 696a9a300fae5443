"""Tests compare every fixture of the repository and of `FIXTURES`."""

import json
import re
from pathlib import Path

import pytest


@pytest.mark.parametrize("family", ["luna", "mega", "megalodon"])
def test_every_fixture_is_tested(parity_folder, family):
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parents[1].rglob("*.py"))
    listed = set(re.findall(r'"(?:\w+/)?(\w+)"', sources))
    names = parity_folder.names(family)
    assert [name for name in names if not {name, re.sub("^(hf|raw_mha|raw_causal)_", "", name)} & listed] == []


def test_license_and_repository_of_each_fixture(repo_root):
    """They are in `meta.json`, with the commit or the file of the code, and in the table of the page."""
    page = (repo_root / "docs" / "parity.md").read_text(encoding="utf-8").partition("## Sources of the fixtures")[2]
    files = list((repo_root / "tests" / "parity" / "fixtures").glob("*/*/meta.json"))
    assert len(files) == 25
    for file in files:
        meta = json.loads(file.read_text(encoding="utf-8"))
        version = meta.get("commit") or re.search(r"[0-9a-f]{40}|4\.\d+\.\d+", meta["source"])[0]
        (row,) = [row for row in page.splitlines() if f"({meta['repository']})" in row and version[:7] in row]
        assert row.endswith(f" | {meta['license']} |") and meta["license"] in ("MIT", "Apache-2.0"), file
        assert "source" in meta or f"`{meta['file']}`" in row, file
