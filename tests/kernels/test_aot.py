"""Every kernel as it is shipped compiles for sm_80 and sm_90, and uses no more than `aot_budgets.csv` allows."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

HERE = Path(__file__).resolve().parent
# Bytes of one block, less the 1 KB that the driver keeps.
SHARED_MEMORY = {"80": 163 * 1024, "90": 227 * 1024}
MOST = ("registers", "stack", "spills", "shared")


@pytest.mark.parametrize("op", ["damped_ema", "gated_attention", "luna_attention", "luna_causal_attention"])
def test_budgets(op, tmp_path, repo_root):
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(repo_root)}
    command = [sys.executable, HERE / "aot.py", op, "--json", tmp_path / "report.json"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    print(run.stdout)
    assert run.returncode == 0, run.stderr[-4000:]
    rows = json.loads((tmp_path / "report.json").read_text())["kernels"]
    with open(HERE / "aot_budgets.csv", newline="") as file:
        budgets = {(row["kernel"], row["case"], row["arch"]): row for row in csv.DictReader(file) if row["op"] == op}
    used = {(row["kernel"], row["case"], str(row["arch"])): row for row in rows}
    assert used.keys() == budgets.keys(), "run tests/kernels/aot.py --budgets and look at what changed"
    for key, row in used.items():
        allowed = budgets[key]
        for column in MOST:
            assert row[column] <= int(allowed[column]), f"{key}: {row[column]} {column}, {allowed[column]} allowed"
        for column in ("wgmma", "mma"):
            assert (row[column] > 0) >= (int(allowed[column]) > 0), f"{key}: no {column} instruction is left"
        assert row["shared"] <= SHARED_MEMORY[key[2]], f"{key}: {row['shared']} bytes of shared memory do not exist"
