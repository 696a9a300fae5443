"""Number and length of the pages of the site, and the first block of every guide."""

import tomllib

from tests.docs.blocks import ROOT, read

# Written when the site is built, by docs/site/commands.py.
GENERATED = "docs/cli.md"
# Notes on an operator; a page with two programs of 20 lines; the changes of all versions.
EXCEPTIONS = {"kernels/moving_average/README.md", "docs/conversion.md", "CHANGELOG.md"}


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
    found, documents = pages(NAVIGATION), {page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert len(found) == len(set(found)) <= 35
    assert len(documents) <= 30 and documents | {GENERATED} <= set(found) and GENERATED not in documents


def test_notes_of_operators_are_linked():
    """Pages outside the navigation are found by a link of the page that describes their subject."""
    kernels = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    notes = [page.parent.name for page in (ROOT / "kernels").glob("*/README.md")]
    assert len(notes) >= 5 and [name for name in notes if f"(../kernels/{name}/README.md)" not in kernels] == []


def test_pages_have_at_most_2000_words():
    # Pages of papers are tables of all equations and experiments.
    notes = [page.relative_to(ROOT).as_posix() for page in (ROOT / "kernels").glob("*/README.md")]
    guides = [page for page in [*pages(NAVIGATION), *notes] if not page.startswith("docs/papers/")]
    assert {page for page in guides if page != GENERATED and words(page) > 2000} == EXCEPTIONS


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
