"""Length of the pages, and the first block of every guide."""

import re

import pytest

from tests.docs.blocks import DOCS, ROOT, read

# Tables of measurements with the commands that reproduce them.
RESULTS = {"docs/distillation_results.md", "docs/performance.md", "docs/results.md"}


def guides() -> list[str]:
    """Return the pages in the section `Guides` of the navigation."""
    navigation = (ROOT / "docs" / "site" / "zensical.toml").read_text(encoding="utf-8")
    section = navigation.partition('"Guides" = [')[2].partition('"Models" = [')[0]
    return re.findall(r'"(docs/\w+\.md)"', section)


@pytest.mark.parametrize("page", sorted(set(DOCS) - RESULTS))
def test_pages_have_at_most_2000_words(page):
    assert len((ROOT / page).read_text(encoding="utf-8").split()) <= 2000


@pytest.mark.parametrize("page", guides())
def test_guides_start_with_a_block(page):
    before = (ROOT / page).read_text(encoding="utf-8").partition("```")[0]
    assert read(page) and len(before.split()) <= 120
