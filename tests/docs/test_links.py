"""Links and drawings of the pages."""

import importlib.util
import os
import re
import subprocess
import tomllib

import pytest
import yaml
from markdown_it import MarkdownIt

from tests.docs.blocks import PAGES, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def links(text: str) -> list[str]:
    """Return the targets of all links and images in Markdown."""
    tokens = [child for token in MarkdownIt().enable("table").parse(text) for child in token.children or ()]
    targets = [token.attrs.get("href") or token.attrs.get("src") for token in tokens]
    return [target for target in targets if target]


def test_links_are_relative_and_files_exist():
    targets = [target for target in links(README) if not target.startswith("https://arxiv.org/")]
    assert len(targets) > 20
    assert [target for target in targets if not (ROOT / target.partition("#")[0]).is_file()] == []


@pytest.mark.parametrize("page", PAGES)
def test_named_tests_exist(page):
    """Pages name files of tests, and after `::` their functions; `::test` is in the file that is named before it."""
    path, missing = "", []
    for span in re.findall(r"`([^`\n]+)`", (ROOT / page).read_text(encoding="utf-8")):
        file, separator, function = span.partition("::")
        if re.fullmatch(r"tests/[\w/.]+", file):
            missing += [file] * (not (ROOT / file).exists())
            path = file
        if separator and not re.search(rf"^def {function}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE):
            missing.append(span)
    assert missing == []


def test_links_of_a_release_are_absolute(tmp_path):
    """The release workflow replaces the links for the package index, which does not have the files."""
    (tmp_path / "README.md").write_text(README, encoding="utf-8")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
    (step,) = [step for step in workflow["jobs"]["sdist"]["steps"] if "README.md absolute" in step.get("name", "")]
    names = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "owner/name", "GITHUB_REF_NAME": "v1.0"}
    subprocess.run(["bash", "-e", "-c", step["run"]], cwd=tmp_path, env=os.environ | names, check=True)
    page = "https://github.com/owner/name/blob/v1.0"
    expected = [target if "://" in target else f"{page}/{target}" for target in links(README)]
    expected = [f"{target}?raw=true" if target.endswith((".svg", ".png")) else target for target in expected]
    assert links((tmp_path / "README.md").read_text(encoding="utf-8")) == expected


def test_every_page_is_in_the_navigation():
    with (ROOT / "docs" / "site" / "zensical.toml").open("rb") as file:
        listed = set(pages(tomllib.load(file)["project"]["nav"]))
    documents = {page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert documents | {"docs/cli.md"} <= listed  # the page of the command line is written when the site is built


def pages(entry: object) -> list[str]:
    """Return the pages in an entry of the navigation."""
    if isinstance(entry, str):
        return [entry]
    entries = entry.values() if isinstance(entry, dict) else entry
    return [page for below in entries for page in pages(below)]


FIGURES = ROOT / "docs" / "figures"
NUMBER = re.compile(r"-?\d*\.\d+")
spec = importlib.util.spec_from_file_location("drawings", ROOT / "docs" / "site" / "drawings.py")
drawings = importlib.util.module_from_spec(spec)
spec.loader.exec_module(drawings)
DRAWN = drawings.draw()


def weights(svg: str) -> list[str]:
    """Return the numbers that a drawing shows."""
    return re.findall(r">(-?\d?\.\d\d)<", svg)


def test_drawings_are_on_the_page():
    page = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    assert {file.stem for file in FIGURES.iterdir()} == set(DRAWN) == set(re.findall(r"\(figures/(\w+)\.svg\)", page))


@pytest.mark.parametrize("name", DRAWN)
def test_drawings_are_results_of_the_operators(name):
    """`python docs/site/drawings.py` writes them; the last digit may differ on other processors."""
    stored = (FIGURES / f"{name}.svg").read_text(encoding="utf-8")
    assert NUMBER.sub("", stored) == NUMBER.sub("", DRAWN[name])
    pairs = zip(weights(stored), weights(DRAWN[name]), strict=True)
    assert all(abs(float(one) - float(other)) < 0.011 for one, other in pairs)
