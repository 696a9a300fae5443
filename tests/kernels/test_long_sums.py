"""Sums over 9,000 positions with a mean of 12 in 16 bits are accurate. They exceed the range of float16."""

import pytest
import torch

from luna_mega.kernels.common.comparison import ROUNDING, row_error
from tests.kernels.backends import NATIVE
from tests.kernels.calls import OPERATORS, WIDE, Sizes

LENGTH, MEAN = 9_000, 12.0
MASK = torch.arange(LENGTH)[None] >= 7
AVERAGES = ["damped_ema", "complex_ema", "diagonal_ssm"]
ATTENTION = ["luna_pack", "gated_attention", "gated_attention_step"]  # the causal reference stores the sums of each row
ROWS = [("torch", name, {}) for name in (*AVERAGES, *ATTENTION, "luna_causal_attention", "timestep_norm")]
ROWS += [("reference", name, {}) for name in ATTENTION] + [("torch", "luna_pack", {"dropout": 1e-9})]
ROWS += [pytest.param(*NATIVE.values, name, {}, marks=NATIVE.marks) for name in AVERAGES]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("backend", "operator", "options"), ROWS)
def test_sums_over_many_positions(backend, operator, options, dtype):
    call = OPERATORS[operator].make(Sizes(1, LENGTH, 1, 8, 4, 4, 16, 2, 8))
    leaves = {key: x + MEAN if key in ("x", "context", "key", "value") else x for key, x in call.leaves.items()}
    # Scores are small, so that all positions have about the same weight.
    leaves |= {key: leaves[key] / 9 for key in ("rows", "query") if key in leaves and "causal" not in operator}
    if operator == "gated_attention":
        leaves["query"] = leaves["query"][:, :3]
    leaves = {key: x.to(torch.float32 if key in WIDE else dtype) for key, x in leaves.items()}
    options = options | ({} if "_step" in operator else {"mask": MASK})
    exact = call.run(**{key: x.double() for key, x in leaves.items()}, **options, backend="torch")
    for actual, expected in zip(call.run(**leaves, **options, backend=backend), exact, strict=True):
        if actual is not None:
            assert row_error(actual, expected) <= ROUNDING[dtype] / 4
