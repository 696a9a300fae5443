"""Length of the pages of the site, and the first block of every guide."""

import tomllib

from tests.docs.blocks import ROOT, read

# Notes on an operator.
EXCEPTIONS = {"kernels/moving_average/README.md"}


def pages(entry: object) -> list[str]:
    """Return the pages in an entry of the navigation."""
    if isinstance(entry, str):
        return [entry]
    entries = entry.values() if isinstance(entry, dict) else entry
    return [page for below in entries for page in pages(below)]


with (ROOT / "docs" / "site" / "zensical.toml").open("rb") as file:
    NAVIGATION = {name: below for part in tomllib.load(file)["project"]["nav"] for name, below in part.items()}


def words(page: str) -> int:
    return len((ROOT / page).read_text(encoding="utf-8").split())


def test_navigation():
    assert list(NAVIGATION) == ["Home", "Get started", "Guides", "Models", "Reference", "Project"]
    documents = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "kernels").glob("*/README.md")]
    assert {page.relative_to(ROOT).as_posix() for page in documents} <= set(pages(NAVIGATION))


def test_pages_have_at_most_2000_words():
    # Pages of papers are tables of all equations and experiments.
    guides = [page for page in pages(NAVIGATION) if not page.startswith("docs/papers/")]
    assert {page for page in guides if words(page) > 2000} == EXCEPTIONS


def test_guides_start_with_a_block():
    for page in pages(NAVIGATION["Guides"]):
        lines, first = (ROOT / page).read_text(encoding="utf-8").splitlines(), read(page)[0]
        assert first.language in ("bash", "python"), page
        assert len(" ".join(lines[: first.line - 2]).split()) <= 120, page


def test_changes_of_a_version_are_at_most_20():
    versions = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1:]
    assert len(versions) >= 3
    for version in versions:
        assert version.count("\n- ") <= 20, version.partition("\n")[0]
