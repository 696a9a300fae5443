"""Links and drawings of the pages, the API reference, and the page of the command line."""

import ast
import dataclasses
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess

import pytest
import yaml
from markdown_it import MarkdownIt

import luna_mega_cli
from luna_mega import LunaConfig, MegaConfig, MegalodonConfig
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
    """Pages name files of tests, and after `::` their functions; `::test` is in the file that is named before it.

    A link to a function of a test is `FILE#FUNCTION`.
    """
    path, missing, text = "", [], (ROOT / page).read_text(encoding="utf-8")
    links_to_tests = re.findall(r"\]\((?:\.\./)+(tests/[\w/.#]+)\)", text)
    for span in [*re.findall(r"`([^`\n]+)`", text), *(link.replace("#", "::") for link in links_to_tests)]:
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


FIGURES = ROOT / "docs" / "figures"
NUMBER, WEIGHT = re.compile(r"-?\d*\.\d+"), re.compile(r">(-?\d?\.\d\d)<")


def load(name: str):
    """Import a script of docs/site, which is not a package."""
    spec = importlib.util.spec_from_file_location(f"site_{name}", ROOT / "docs" / "site" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_drawings_are_results_of_the_operators():
    """`python docs/site/drawings.py` writes them; the last digit may differ on other processors."""
    drawn, page = load("drawings").draw(), (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    stored = {file.stem: file.read_text(encoding="utf-8") for file in FIGURES.iterdir()}
    assert stored.keys() == drawn.keys() == set(re.findall(r"\(figures/(\w+)\.svg\)", page))
    for name, svg in drawn.items():
        assert NUMBER.sub("", stored[name]) == NUMBER.sub("", svg)
        found, expected = (list(map(float, WEIGHT.findall(text))) for text in (stored[name], svg))
        assert found == pytest.approx(expected, abs=0.011)


def test_figures_of_pages_are_measurements(monkeypatch, tmp_path):
    """`make figures` changes no page, and README has the means of the three runs of the demo."""
    for folder in ("docs", "benchmarks/results"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "README.md", tmp_path)
    plots = load("plots")
    monkeypatch.setattr(plots, "DOCS", tmp_path / "docs")
    plots.fill_pages()
    for page in PAGES:
        assert not page.startswith("docs") or (tmp_path / page).read_text("utf-8") == (ROOT / page).read_text("utf-8")
    assert (tmp_path / "README.md").read_text("utf-8") == README
    runs = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text("utf-8"))["test accuracy"]
    means = {name: sum(run[name] for run in runs) / len(runs) for name in ("bag of words", "luna", "mega")}
    text = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
    assert text.lower() in " ".join(README.lower().split())


@pytest.mark.parametrize("config", [LunaConfig, MegaConfig, MegalodonConfig])
def test_reference_has_every_field(config):
    """The API reference has the default of every field of a configuration."""
    family = config.__name__.removesuffix("Config").lower()
    file = ROOT / f"modeling_{family}" / f"configuration_{family}.py"
    source = ast.parse(load("docstrings").complete_docstrings(file.read_text(encoding="utf-8")))
    (text,) = (ast.get_docstring(node) for node in source.body if getattr(node, "name", "") == config.__name__)
    described = re.findall(r"^    ((?:\w+, )*\w+) \((.*), defaults to (.*?)\): ", text, re.MULTILINE)
    defaults = {name: values for names, _, values in described for name in names.split(", ")}
    for field in dataclasses.fields(config):
        if field.name in inspect.get_annotations(config):
            assert repr(field.default) in defaults[field.name], field.name


def test_reference_has_every_argument_of_a_head():
    """The API reference describes the arguments of every `forward` with labels."""
    checked = 0
    for file in ROOT.glob("modeling_*/*.py"):
        source = load("docstrings").complete_docstrings(file.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.name == "forward" and (text := ast.get_docstring(node)):
                arguments = {argument.arg for argument in [*node.args.args[1:], *node.args.kwonlyargs]}
                if arguments & {"labels", "start_positions"}:
                    checked += 1
                    assert arguments <= set(re.findall(r"^    (\w+): \S", text, re.MULTILINE)), file
    assert checked > 10


def test_page_of_the_command_line(capsys):
    """Every command has a section with the options of its help, its examples and a guide that exists."""
    sections = dict(re.findall(r"^## luna-mega (\w+)\n(.*?)(?=^## |\Z)", load("commands").make_page(), re.M | re.S))
    assert list(sections) == list(luna_mega_cli.COMMANDS)
    for name, section in sections.items():
        with pytest.raises(SystemExit):
            luna_mega_cli.main([name, "--help"])
        shown = set(re.findall(r"(?<![\w-])--[a-z-]+", capsys.readouterr().out.partition("examples:")[0])) - {"--help"}
        assert shown == set(re.findall(r"^\| `(--[a-z-]+)", section, re.MULTILINE)) != set()
        assert re.search(rf"```bash\n(luna-mega {name} .*\n)+```", section)
        assert (ROOT / "docs" / "api" / re.search(r"\[\w+\]\((.*?\.md)", section)[1]).is_file()
