"""Programs other than the training scripts: the demo, and baselines that do not use the models."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.docs.blocks import ROOT
from tests.examples.contract import reviews
from tests.examples.runs import write


@pytest.mark.slow
def test_demo_in_the_folder_of_an_earlier_run(tmp_path):
    """Every step succeeds, and Luna and Mega are better than a bag of words where the order of words decides."""
    (tmp_path / "models" / "converted" / "old").mkdir(parents=True)
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--output_dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(\d)\. ", done.stdout, re.MULTILINE) == list("123456")
    assert "within 1e-05 of the largest value" in done.stdout and "model.safetensors" in done.stdout
    results = json.loads((tmp_path / "accuracy.json").read_text(encoding="utf-8"))
    assert all(results[name] > results["bag of words"] + 0.1 for name in ("luna", "mega"))
    assert f"mega {results['mega']:.3f}" in done.stdout.splitlines()[-1]
    assert not (tmp_path / "models" / "converted" / "old").exists()
    assert {file.name for file in tmp_path.iterdir()} == {"accuracy.json", "accuracy.png", "models"}


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [("texts", "csv"), ("texts", "jsonl"), ("pairs", "jsonl"), ("scores", "csv"), ("scores", "jsonl")],
)
def test_bag_of_words(script, tmp_path, kind, suffix):
    for split, size in (("train", 40), ("validation", 20)):
        rows = reviews(size, size)
        if kind != "texts":
            rows = [row | {"other": row["text"] if row["label"] else "nothing in common here"} for row in rows]
        if kind == "scores":
            rows = [row | {"label": row["label"] * 4.5 + 0.5} for row in rows]
        write(rows, tmp_path / "data" / f"{split}.{suffix}")
    columns = ["text"] if kind == "texts" else ["text", "other"]
    metrics = script("bag_of_words").main(["--dataset_path", str(tmp_path / "data"), "--text_columns", *columns])
    if kind == "scores":
        assert metrics["pearson"] > 0.99 and metrics["spearmanr"] > 0.7
    else:
        assert metrics["accuracy"] == metrics["f1"] == metrics["matthews_correlation"] == 1.0


@pytest.mark.parametrize("name", ["luna-table2", "mega-table2-speed"])
def test_table_of_a_paper(script, name, tmp_path):
    """The table has the form of the paper, and the ratios of the measured rows."""
    papers = script("papers")
    options = ["--lengths", "64", "--rounds", "1", "--size", "num_hidden_layers=1"]
    text = papers.main([name, *options, "--output", str(tmp_path / "rows.json")])
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert cells[0] == ["speed / memory", "64 tokens"] and cells[2][1] == "1.0 / 1.00"
    assert [line[0] for line in cells[2:]] == [printed[0] for printed in papers.TABLES[name].printed.values()]
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))[0]["rows"]
    for row, line in zip(rows[1:], cells[3:], strict=True):
        ratios = rows[0]["both_ms"] / row["both_ms"], row["both_mb"] / rows[0]["both_mb"]
        assert line[1] == f"{ratios[0]:.1f} / {ratios[1]:.2f}"


def test_recipes_of_a_table(script, tmp_path, monkeypatch, capsys):
    """Recipes inherit the configuration; `--seed` is an option of the script of the recipe."""
    papers, called = script("papers"), []
    (tmp_path / "base.yaml").write_text("config_overrides: hidden_size=16\n", encoding="utf-8")
    (tmp_path / "tiny.yaml").write_text("recipe: base.yaml\nmax_steps: 1\n", encoding="utf-8")
    monkeypatch.setattr(script("run_clm"), "main", called.append)
    papers.run_recipe("run_clm", tmp_path / "tiny.yaml", {"chunk_size": 8})
    assert called[0][-1] == "hidden_size=16,chunk_size=8"
    monkeypatch.setattr(papers, "run_recipe", lambda *call: called.append(call) or {"test_accuracy": 0.5})
    options = ["--data", str(tmp_path), "--output", str(tmp_path / "out.json"), "--tasks", "text", "--seed", "7"]
    papers.main(["luna-table3", *options])
    assert called[-1][-2:] == ("--seed", "7")
    with pytest.raises(SystemExit):
        papers.main(["luna-table3", "--data", str(tmp_path), "--tasks", "txt"])
    assert "--tasks txt: luna-table3 has listops, retrieval, text" in capsys.readouterr().err


RATE = 4000


def clip(pitches: tuple[int, int], seed: int) -> bytes:
    """Return two tones one after the other."""
    draw = np.random.default_rng(seed)
    parts = [np.sin(2 * np.pi * pitch * np.arange(draw.integers(700, 900)) / RATE) for pitch in pitches]
    return (draw.uniform(0.2, 0.9) * 32767 * np.concatenate(parts)).astype("<i2").tobytes()


def test_log_mel(script, tmp_path):
    """Classes differ in the order of two tones."""
    kinds = {"up": (300, 900), "down": (900, 300)}
    for split, seeds in (("train", range(20)), ("test", range(20, 30))):
        rows = [{"audio": clip(pitches, seed), "label": name} for seed in seeds for name, pitches in kinds.items()]
        write([row | {"sampling_rate": RATE} for row in rows], tmp_path / f"{split}.parquet")
    assert script("log_mel").main(["--dataset_path", str(tmp_path)])["accuracy"] == 1.0


def test_s4d(script, capsys):
    """Ten training steps of S4D's layer have the same losses with FFT and with `diagonal_ssm`; the script trains it."""
    losses = script("s4d_classifier").compare(300, batch=2, channels=8, states=4, steps=10)
    assert losses["FFT"][0] - losses["FFT"][-1] > 1e-4
    torch.testing.assert_close(losses["diagonal_ssm"], losses["FFT"], rtol=1e-5, atol=0)
    script("s4d_classifier").main(["--steps=20", "--length=60"])
    assert re.search(r"step 20: loss \d\.\d+\naccuracy on 300 new waves: \d+\.\d%\n", capsys.readouterr().out)
