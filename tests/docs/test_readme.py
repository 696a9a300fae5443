"""The README: its length, links and first screen."""

import os
import re
import subprocess

import yaml
from markdown_it import MarkdownIt

from tests.docs.blocks import ROOT, read

README = (ROOT / "README.md").read_text(encoding="utf-8")
FOLDERS = ("docs", "examples", "kernels", "tests")
TABLE_PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for page in [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
)


def links(text: str) -> list[str]:
    """Return the targets of all links and images in Markdown."""
    tokens = [child for token in MarkdownIt().enable("table").parse(text) for child in token.children or ()]
    targets = [token.attrs.get("href") or token.attrs.get("src") for token in tokens]
    return [target for target in targets if target]


def test_length():
    assert len(README.split()) <= 1000
    for block in read("README.md"):
        assert block.code.count("\n") <= 16, f"{block} is longer than 16 lines"


def test_links_are_relative_and_files_exist():
    targets = [target for target in links(README) if not target.startswith("https://arxiv.org/")]
    assert len(targets) > 20
    assert [target for target in targets if not (ROOT / target.partition("#")[0]).is_file()] == []


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


def test_no_page_names_an_address_of_the_repository():
    for page in [*TABLE_PAGES, "setup.cfg", "CITATION.cff"]:
        assert "/luna-mega/luna-mega" not in (ROOT / page).read_text(encoding="utf-8"), page


def test_the_first_block_has_the_commands_that_ci_runs():
    """The first screen has `make demo` and the test command of a newcomer in `.ci/run`."""
    block = read("README.md")[0]
    assert block.line <= 22 and block.language == "bash"
    demo, test, install = (line.partition("#")[0].strip() for line in block.code.splitlines())
    assert demo == "make demo" and install.startswith("pip install ")
    assert re.search(
        rf'^part ".*" newcomer {test.removeprefix("make ")}$',
        (ROOT / ".ci" / "run").read_text(encoding="utf-8"),
        re.MULTILINE,
    )


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
