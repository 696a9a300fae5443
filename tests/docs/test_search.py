"""Search finds the page of a subject first: by its headings, and on the site if `make docs` built it before."""

import json
import re
import shutil
import subprocess

import pytest

from tests.docs.blocks import ROOT
from tests.docs.test_length import GENERATED, NAVIGATION, pages

SITE = ROOT / "build" / "docs" / "site"
FOUND = {
    "run the tests": "docs/development.md#run-the-tests",
    "chunk_size": "docs/mega.md#choose-chunk_size-and-the-attention-function",
    "slow": "docs/troubleshooting.md#slow-on-a-busy-cpu-or-in-a-container-with-a-quota",
    "how it works": "docs/how_it_works.md",
    "streaming": "docs/distributed.md#streaming",
}


def split(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def headings() -> list[tuple[str, str]]:
    """Return the address and the heading of every section in the navigation; the title of a page has its address."""
    found = []
    for page in pages(NAVIGATION):
        if page not in (GENERATED, "CHANGELOG.md"):  # build.py excludes the latter from the search
            text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.M | re.S)
            title, *sections = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            names = [re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-") for name in sections]
            found += [(page, title), *zip([f"{page}#{name}" for name in names], sections, strict=True)]
    return found


@pytest.mark.parametrize("query", FOUND)
def test_headings(query):
    """Among the headings with all words of a query, the one that has them earliest, and then the shortest, is first."""
    words = split(query)
    ranked = [
        (split(heading).index(words[0]), len(heading), address)
        for address, heading in headings()
        if set(words) <= set(split(heading))
    ]
    assert min(ranked)[2] == FOUND[query]


def test_built_site():
    """The search of the site, which is a script, returns the same pages."""
    index = SITE / "search.json"
    newest = max(file.stat().st_mtime for file in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*")])
    if not index.is_file() or index.stat().st_mtime < newest:
        pytest.skip("the site is not built from these pages: make docs")
    if not (node := shutil.which("node")):
        pytest.skip("node is not installed")
    command = [node, str(ROOT / "tests" / "docs" / "search.js"), str(SITE), *FOUND]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    first = {query: addresses[0] for query, addresses in json.loads(done.stdout).items()}
    assert first == {query: address.replace(".md", ".html") for query, address in FOUND.items()}
