"""Drawings of docs/how_it_works.md are results of the operators."""

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
