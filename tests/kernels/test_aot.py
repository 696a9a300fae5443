"""Every kernel with its default configuration compiles for several targets within the limits of `aot_budgets.csv`."""

import csv
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

HERE = Path(__file__).resolve().parent
MOST = ("registers", "stack", "spills", "shared")


OPS = (
    "complex_ema", "damped_ema", "gated_attention", "luna_attention", "luna_causal_attention", "segment_pack",
    "timestep_norm",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_budgets(op, tmp_path, repo_root):
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(repo_root)}
    command = [sys.executable, HERE / "aot.py", op, "--json", tmp_path / "report.json"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    print(run.stdout)
    assert run.returncode == 0, run.stderr[-4000:]
    content = json.loads((tmp_path / "report.json").read_text())
    rows, (keys, *of_other_lengths) = content["kernels"], content["lengths"][op]
    assert all(other == keys for other in of_other_lengths), "another length of sequences compiles other kernels"
    with open(HERE / "aot_budgets.csv", newline="") as file:
        budgets = {(row["kernel"], row["case"], row["arch"]): row for row in csv.DictReader(file) if row["op"] == op}
    used = {(row["kernel"], row["case"], str(row["arch"])): row for row in rows}
    assert used.keys() == budgets.keys(), "run tests/kernels/aot.py --budgets and check the differences"
    for key, row in used.items():
        allowed = budgets[key]
        for column in MOST:
            assert row[column] <= int(allowed[column]), f"{key}: {row[column]} {column}, {allowed[column]} allowed"
        for column in ("wgmma", "mma"):
            assert (row[column] > 0) >= (int(allowed[column]) > 0), f"{key}: no {column} instruction is left"
        assert row["shared"] <= row["available"], f"{key}: {row['shared']} bytes of shared memory do not exist"
        assert not row["cut_off"], f"{key}: float32 is cut off to TF32, not rounded"


def test_the_limits_of_a_device_are_its_own(monkeypatch):
    """An RTX 5090 has a higher compute capability than an H100, but less than half of its shared memory."""
    import torch

    from luna_mega.kernels.common import triton_launch

    card = types.SimpleNamespace(major=12, minor=0, multi_processor_count=170, shared_memory_per_block_optin=101376)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    target = triton_launch.target(torch.device("cuda"))
    assert target == ((12, 0), 170, 101376) and not target.large and triton_launch.Target().large
