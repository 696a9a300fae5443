"""Drawings and numbers of docs/how_it_works.md are results of the operators and figures of docs/performance.md."""

import importlib.util
import re

import pytest

from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
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
    assert {file.stem for file in FIGURES.iterdir()} == set(DRAWN) == set(re.findall(r"\(figures/(\w+)\.svg\)", PAGE))


@pytest.mark.parametrize("name", DRAWN)
def test_drawings_are_results_of_the_operators(name):
    """`python docs/site/drawings.py` writes them; the last digit may differ on other processors."""
    stored = (FIGURES / f"{name}.svg").read_text(encoding="utf-8")
    assert NUMBER.sub("", stored) == NUMBER.sub("", DRAWN[name])
    pairs = zip(weights(stored), weights(DRAWN[name]), strict=True)
    assert all(abs(float(one) - float(other)) < 0.011 for one, other in pairs)


def test_numbers_of_the_text_are_in_the_drawings():
    described = re.findall(r"!\[([^\]]*)\]\(figures/(\w+)\.svg\)", PAGE)
    for alt, name in described:
        shown = {f"{float(number):.2f}" for number in weights(DRAWN[name])}
        assert alt and set(re.findall(r"-?\d\.\d\d", alt)) <= shown, name
    counted = {name: int(count) for alt, name in described for count in re.findall(r": (\d+) weights", alt)}
    assert counted == {"attention_luna": 24, "attention_mega": 18, "attention_megalodon": 12}
    assert {name: len(weights(DRAWN[name])) for name in counted} == counted


def test_costs():
    table = PAGE.split("## Costs")[1].split("## ")[0]
    n, rows = 16384, 128
    scores = [f"{count / 1e6:.1f} million" for count in (n * n, 2 * rows * n, rows * n)]
    assert scores == re.findall(r"[\d.]+ million", table)
    measured = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    figures = re.findall(r"\d+\.\d+x|\d+,\d{3} bytes|[\d.]+ ms|[\d.]+ MiB", table)
    assert len(figures) == 11
    for figure in figures:
        assert figure.removesuffix(" bytes").removesuffix(" ms").removesuffix(" MiB") in measured, figure
