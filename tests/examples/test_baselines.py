"""Baselines: a bag of words, log-mel features, and a classifier with S4D's layer."""

import random
import re

import numpy as np
import pytest
import torch

from tests.examples.contract import reviews
from tests.examples.runs import assert_error, sentence, write


def pairs(size: int, seed: int, score: bool) -> list[dict]:
    draw = random.Random(seed)
    found = []
    for _ in range(size):
        first, same = sentence(True, draw), draw.random() < 0.5
        found.append({"text": first, "other": first if same else "nothing in common here", "label": int(same)})
    return [row | {"label": row["label"] * 4.5 + 0.5} for row in found] if score else found


@pytest.mark.parametrize("kind", ["texts", "pairs", "scores"])
def test_bag_of_words(script, tmp_path, kind):
    for split, size in (("train", 40), ("validation", 20)):
        made = reviews(size, size) if kind == "texts" else pairs(size, size, kind == "scores")
        write(made, tmp_path / "data" / f"{split}.jsonl")
    columns = ["text"] if kind == "texts" else ["text", "other"]
    metrics = script("bag_of_words").main(["--dataset_path", str(tmp_path / "data"), "--text_columns", *columns])
    if kind == "scores":
        assert metrics["pearson"] > 0.99 and metrics["spearmanr"] > 0.7
    else:
        assert metrics["accuracy"] == metrics["f1"] == metrics["matthews_correlation"] == 1.0


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ([("a film", 0), ("a book", 1)], [("a film", -1)], "--split test: rows of this split .* have no label"),
        ([("a film", 0), ("a book", 0)], [("a film", 0)], "at least 2 classes"),
        ([("!", 0), ("?", 1)], [("!", 0)], "empty vocabulary"),
    ],
)
def test_data_without_a_bag_of_words(script, tmp_path, train, test, message):
    for name, pairs in (("train", train), ("test", test)):
        write([{"text": text, "label": label} for text, label in pairs], tmp_path / "data" / f"{name}.jsonl")
    options = ["--dataset_path", str(tmp_path / "data"), "--split", "test"]
    assert_error(script("bag_of_words").main, message, options)


RATE = 4000


def clip(pitches, seed):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(700, 900, len(pitches))
    parts = [np.sin(2 * np.pi * pitch * np.arange(n) / RATE) for pitch, n in zip(pitches, lengths, strict=True)]
    return (draw.uniform(0.2, 0.9) * 32767 * np.concatenate(parts)).astype("<i2").tobytes()


@pytest.mark.parametrize("kinds", [{"low": (300, 300), "high": (900, 900)}, {"up": (300, 900), "down": (900, 300)}])
def test_log_mel(script, tmp_path, kinds):
    for split, seeds in (("train", range(20)), ("test", range(20, 30))):
        rows = [
            {"audio": clip(pitches, seed), "sampling_rate": RATE, "label": name}
            for seed in seeds
            for name, pitches in kinds.items()
        ]
        write(rows, tmp_path / f"{split}.parquet")
    assert script("log_mel").main(["--dataset_path", str(tmp_path)])["accuracy"] == 1.0


def test_a_single_class(script, tmp_path):
    for split in ("train", "test"):
        write([{"audio": clip((300,), 0), "sampling_rate": RATE, "label": "a"}] * 2, tmp_path / f"{split}.parquet")
    assert_error(lambda: script("log_mel").main(["--dataset_path", str(tmp_path)]), "at least 2 classes")


def test_losses_of_s4d_do_not_change(script):
    """Ten training steps of S4D's layer have the same losses with FFT and with `diagonal_ssm`."""
    losses = script("s4d_classifier").compare(300, batch=2, channels=8, states=4, steps=10)
    assert losses["FFT"][0] - losses["FFT"][-1] > 1e-4
    torch.testing.assert_close(losses["diagonal_ssm"], losses["FFT"], rtol=1e-5, atol=0)


def test_s4d_classifier(script, capsys):
    main = script("s4d_classifier").main
    main(["--steps=20", "--length=60"])
    assert re.search(r"step 20: loss \d\.\d+\naccuracy on 300 new waves: \d+\.\d%\n", capsys.readouterr().out)


@pytest.mark.slow
def test_s4d_classifier_learns(script):
    torch.manual_seed(0)
    assert script("s4d_classifier").train(120, 2048) > 0.95
