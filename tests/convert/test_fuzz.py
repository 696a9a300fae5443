"""Checkpoints of every format with invalid args or with weights of an invalid type."""

import argparse
import random

import numpy
import pytest
import torch

from tests.convert.folders import find_format
from tests.convert.fuzz import BUILDERS, build, changed, survives

TRIES = 500 // len(BUILDERS)
NAN, INFINITY = float("nan"), float("inf")
VALUES = (
    *(None, True, False, 0, 1, 2, 3, -1, -7, 10**9, 2**31, 10**18, -(10**18), 10**5000),
    *(0.0, 0.5, -0.1, 1.5, 1e9, 1e300, NAN, INFINITY, -INFINITY, 2 + 1j),
    *("", "False", "no", "0", "12", "12,20", "gelu", "mp", "cls", "\x1b[31m", "a\nb", "# head", "x" * 10000, "../../x"),
    *([], [0], [True], [0.5, 0.5], (), (1, 2), {}, {"a": 1}, {1, 2}, {"a"}, b"x", [[[1]]], ["x" * 500]),
    *(numpy.float64(0.1), numpy.int64(3), numpy.bool_(True), numpy.float32(NAN)),
    *(torch.tensor(3), torch.tensor(True), torch.zeros(2), torch.tensor(NAN), argparse.Namespace(a=1)),
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("damaged", ["args", "weights"])
@pytest.mark.parametrize("kind", BUILDERS)
def test_damaged_content(tmp_path, kind, damaged):
    state, draw = build(BUILDERS[kind]), random.Random(7)
    assert survives(state, tmp_path, kind)
    names = sorted({row.name for row in find_format(kind.partition(",")[0]).table} | vars(state["args"]).keys())
    kept = 0
    for _ in range(TRIES):
        if damaged == "args":
            found = {name: draw.choice(VALUES) for name in draw.sample(names, draw.choice((1, 1, 1, 2)))}
            other = changed(state, **found)
        else:
            tensors = dict(state["model"])
            found = draw.choice(list(tensors)), draw.choice(list(DAMAGES))
            DAMAGES[found[1]](tensors, found[0])
            other = state | {"model": tensors}
        kept += survives(other, tmp_path, found)
    assert 0 < kept < TRIES


def replaced(change):
    def damage(tensors, key):
        tensors[key] = change(tensors[key])

    return damage


def renamed(change):
    def damage(tensors, key):
        tensors[change(key)] = tensors.pop(key)

    return damage


def added(change):
    def damage(tensors, key):
        tensors[change(key)] = tensors[key]

    return damage


DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.int8, torch.bool)
DTYPES += (torch.uint8, torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64)
DAMAGES = {
    **{f"as {dtype}": replaced(lambda tensor, dtype=dtype: tensor.to(dtype)) for dtype in DTYPES},
    "NaN": replaced(lambda tensor: torch.full(tensor.shape, NAN)),
    "infinity": replaced(lambda tensor: torch.full(tensor.shape, INFINITY)),
    "a number": replaced(lambda tensor: torch.tensor(1.0)),
    "nothing in it": replaced(lambda tensor: torch.zeros(0)),
    "no row": replaced(lambda tensor: torch.zeros(0, 16)),
    "a row more": replaced(lambda tensor: torch.cat([tensor, tensor]) if tensor.dim() else tensor[None]),
    "a dimension more": replaced(lambda tensor: tensor[None]),
    "flat": replaced(lambda tensor: tensor.flatten()),
    "turned": replaced(lambda tensor: tensor.t() if tensor.dim() == 2 else tensor),
    "one number everywhere": replaced(lambda tensor: torch.ones(()).expand(tensor.shape)),
    "sparse": replaced(lambda tensor: tensor.to_sparse() if tensor.dim() else tensor),
    "meta": replaced(lambda tensor: tensor.to("meta")),
    "conjugate": replaced(lambda tensor: tensor.to(torch.complex64).conj()),
    "negative": replaced(torch._neg_view),
    "a parameter": replaced(lambda tensor: torch.nn.Parameter(tensor) if tensor.is_floating_point() else tensor),
    "quantized": replaced(lambda tensor: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8)),
    "nested": replaced(lambda tensor: torch.nested.nested_tensor([tensor.flatten(), tensor.flatten()[:1]])),
    "a list": replaced(lambda tensor: tensor.flatten()[:3].tolist()),
    "None": replaced(lambda tensor: None),
    "text": replaced(lambda tensor: "weights"),
    "missing": lambda tensors, key: tensors.pop(key),
    "another name": renamed(lambda key: f"{key}.more"),
    "another layer": renamed(lambda key: key.replace(".0.", ".99.")),
    "one more": added(lambda key: f"more.{key}"),
    "one more layer": added(lambda key: key.replace(".1.", ".2.")),
    "a name of two lines": added(lambda key: f"{key}\n# head"),
    "a number as name": added(lambda key: 3),
}
