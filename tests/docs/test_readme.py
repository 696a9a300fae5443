"""The README as a package index displays it, and the files that contain the address of the repository."""

import configparser
import re

import yaml
from markdown_it import MarkdownIt

from tests.docs.blocks import ROOT, read

README = (ROOT / "README.md").read_text(encoding="utf-8")
FOLDERS = ("docs", "examples", "kernels", "tests")
TABLE_PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for page in [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
)


def project_urls() -> dict[str, str]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["metadata"]["project_urls"].strip().splitlines()
    return dict(line.split(" = ") for line in lines)


def links(text: str) -> list[str]:
    """Return the targets of all links and images in Markdown."""
    tokens = [child for token in MarkdownIt().enable("table").parse(text) for child in token.children or ()]
    targets = [token.attrs.get("href") or token.attrs.get("src") for token in tokens]
    return [target for target in targets if target]


def test_length():
    assert len(README.split()) <= 1000
    for block in read("README.md"):
        assert block.code.count("\n") <= 16, f"{block} is longer than 16 lines"


def test_links_are_absolute_and_files_exist():
    source = project_urls()["Source"]
    targets = links(README)
    assert len(targets) > 20
    for target in targets:
        assert target.startswith("https://"), target
        if target.startswith(source):
            file = target.removeprefix(f"{source}/blob/main/").partition("#")[0].partition("?")[0]
            assert (ROOT / file).is_file(), target


def test_every_file_names_the_same_repository():
    source = project_urls()["Source"]
    assert f"git clone {source}\n" in README
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["repository-code"] == source and len(citation["references"]) == 3
    owner = source.rpartition("/")[0]
    for page in TABLE_PAGES:
        found = re.findall(r"https://github\.com/[\w-]+/luna-mega\b", (ROOT / page).read_text(encoding="utf-8"))
        assert all(url.startswith(owner) for url in found), page


def test_rows_of_a_table_have_equal_numbers_of_columns():
    for page in TABLE_PAGES:
        table, inside_code = None, False
        for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), start=1):
            inside_code ^= line.lstrip().startswith("```")
            cells = len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line))) - 1
            if inside_code or not line.startswith("|"):
                table = None
            else:
                table = table or cells
                assert cells == table >= 1, f"{page}:{number}: {cells} cells in a table of {table} columns"
