"""Operators and launches per call, which determine the speed of small models on a GPU."""

import pytest
import torch

from tests.kernels import host_counts

pytestmark = [pytest.mark.triton, pytest.mark.skipif(torch.cuda.is_available(), reason="counts launches on the CPU")]


@pytest.mark.parametrize("cases", [host_counts.operator_cases, host_counts.model_cases])
def test_counts_are_within_their_budgets(triton_device, cases):
    for name, run in cases():
        counts, most = host_counts.measure(run), host_counts.BUDGETS[name]
        assert counts[0] <= most[0] and counts[1] <= most[1], f"{name}: {counts} operators and launches, at most {most}"
