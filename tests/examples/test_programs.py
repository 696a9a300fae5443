"""Programs other than the training scripts: the demo, and baselines that do not use the models."""

import re

import numpy as np
import pytest
import torch

from tests.examples.contract import reviews
from tests.examples.runs import write


@pytest.fixture
def demo(script, monkeypatch):
    """Return the demo with few sentences; it sets the number of threads and progress bars of the process."""
    module, threads = script("demo"), torch.get_num_threads()
    load = module.load_sentences
    monkeypatch.setattr(module, "load_sentences", lambda seed: {k: v.select(range(64)) for k, v in load(seed).items()})
    monkeypatch.setattr(module, "disable_progress_bars", lambda: None)
    monkeypatch.setattr(module, "disable_progress_bar", lambda: None)
    yield module
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_every_step_in_the_folder_of_an_earlier_run(demo, with_code, tmp_path, capsys):
    torch.set_num_threads(2)
    (tmp_path / "models" / "converted" / "old").mkdir(parents=True)
    results = demo.main(["--num_train_epochs=1", "--output_dir", str(tmp_path)])
    assert torch.get_num_threads() == 1
    printed = capsys.readouterr().out
    assert re.findall(r"^(\d)\. ", printed, re.MULTILINE) == list("123456")
    assert len(re.findall(r"^  \d+ s$", printed, re.MULTILINE)) == 6
    assert "within 1e-05 of the largest value" in printed
    assert all(f"{name} {value:.3f}" in printed for name, value in results.items())
    assert not (tmp_path / "models" / "converted" / "old").exists()
    assert {file.name for file in tmp_path.iterdir()} == {"accuracy.png", "models"}


@pytest.mark.parametrize("kind", ["texts", "pairs", "scores"])
def test_bag_of_words(script, tmp_path, kind):
    for split, size in (("train", 40), ("validation", 20)):
        rows = reviews(size, size)
        if kind != "texts":
            rows = [row | {"other": row["text"] if row["label"] else "nothing in common here"} for row in rows]
        if kind == "scores":
            rows = [row | {"label": row["label"] * 4.5 + 0.5} for row in rows]
        write(rows, tmp_path / "data" / f"{split}.jsonl")
    columns = ["text"] if kind == "texts" else ["text", "other"]
    metrics = script("bag_of_words").main(["--dataset_path", str(tmp_path / "data"), "--text_columns", *columns])
    if kind == "scores":
        assert metrics["pearson"] > 0.99 and metrics["spearmanr"] > 0.7
    else:
        assert metrics["accuracy"] == metrics["f1"] == metrics["matthews_correlation"] == 1.0


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
