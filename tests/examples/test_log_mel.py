"""The baseline of audio classification separates tones by pitch and by order."""

import numpy as np
import pytest

from tests.examples.runs import assert_error, write

RATE = 4000


def clip(pitches, seed):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(700, 900, len(pitches))
    parts = [np.sin(2 * np.pi * pitch * np.arange(n) / RATE) for pitch, n in zip(pitches, lengths, strict=True)]
    return (draw.uniform(0.2, 0.9) * 32767 * np.concatenate(parts)).astype("<i2").tobytes()


@pytest.mark.parametrize("kinds", [{"low": (300, 300), "high": (900, 900)}, {"up": (300, 900), "down": (900, 300)}])
def test_baseline(script, tmp_path, kinds):
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
