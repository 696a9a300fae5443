"""The models have the surface recorded in `surface.json`. Run `surface.py` after a deliberate change."""

import json

import pytest
import torch
from torch import nn

from . import surface

TABLES = json.loads(surface.TABLES.read_text(encoding="utf-8"))


def is_recorded(item):
    """Return whether the installed torch initializes a model with the recorded numbers.

    For Megalodon, newer versions of torch draw truncated normal numbers by rejection; older versions do not.
    """
    drawn = []
    for draw in (torch.Tensor.normal_, nn.init.trunc_normal_):
        torch.manual_seed(0)
        drawn.append(draw(torch.empty(1)))
    return "megalodon" not in item[0] or drawn[0].equal(drawn[1])


@pytest.mark.parametrize("table", ["signatures", "configurations"])
def test_surface(table):
    assert getattr(surface, table)() == TABLES[table]


def test_weights():
    found = surface.weights()
    assert {name: entry[:2] for name, entry in found.items()} == {k: v[:2] for k, v in TABLES["weights"].items()}
    for name, (*_, total) in filter(is_recorded, found.items()):
        assert total == pytest.approx(TABLES["weights"][name][2], rel=1e-6), name


def test_outputs():
    # Without AVX, the normal numbers that torch draws in float32 differ from the recorded ones by up to 1.3e-6.
    limit = 1e-5 if torch.backends.cpu.get_cpu_capability() == "DEFAULT" else 1e-7
    found = surface.outputs()
    assert found.keys() == TABLES["outputs"].keys()
    for name, numbers in filter(is_recorded, found.items()):
        assert numbers == pytest.approx(TABLES["outputs"][name], rel=limit), name
