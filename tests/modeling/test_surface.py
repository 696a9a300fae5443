"""The models have the surface that `surface.json` records; a deliberate change regenerates it, see `surface.py`."""

import json

import pytest

from . import surface

TABLES = json.loads(surface.TABLES.read_text(encoding="utf-8"))


@pytest.mark.parametrize("table", ["signatures", "configurations", "paths"])
def test_surface(table):
    assert getattr(surface, table)() == TABLES[table]


def test_weights():
    found = surface.weights()
    assert {name: entry[:2] for name, entry in found.items()} == {k: v[:2] for k, v in TABLES["weights"].items()}
    for name, (*_, total) in found.items():
        assert total == pytest.approx(TABLES["weights"][name][2], rel=1e-6), name


def test_outputs():
    found = surface.outputs()
    assert found.keys() == TABLES["outputs"].keys()
    for name, layouts in found.items():
        assert layouts == {key: pytest.approx(value, rel=1e-7) for key, value in TABLES["outputs"][name].items()}, name
