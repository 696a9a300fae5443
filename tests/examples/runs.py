"""Helpers shared by the tests of several example scripts."""

import io
import json
import random
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

QUIET = ["--use_cpu", "--disable_tqdm", "true", "--logging_steps", "1"]
# A Luna for tests of errors and files that need no training.
TINY = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16,projection_length=4"


def sentence(good: bool, draw: random.Random) -> str:
    """Return a review whose last word determines its class."""
    words = ["the", draw.choice(["film", "book", "play"]), "was", *["so"] * draw.randrange(6)]
    return " ".join([*words, draw.choice(["fine", "lovely", "superb"] if good else ["poor", "awful", "dull"])])


def write(examples: list[dict], path: Path) -> Path:
    """Write a split in the format of the suffix and return its folder."""
    path.parent.mkdir(exist_ok=True)
    frame = pd.DataFrame(examples)
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    elif path.suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_json(path, orient="records", lines=True)
    return path.parent


def write_splits(make: Callable[..., list[dict]], folder: Path, **sizes: int) -> Path:
    """Write splits of these sizes, with file names as on the Hub, from `make(size, seed)`; return their folder."""
    for name, size in sizes.items():
        write(make(size, seed=size), folder / f"{name}-00000-of-00001.parquet")
    return folder


def wav(samples: np.ndarray, rate: int = 16_000) -> bytes:
    """Return a WAV file of 16-bit samples."""
    file = io.BytesIO()
    with wave.open(file, "wb") as clip:
        clip.setparams((1, 2, rate, 0, "NONE", ""))
        clip.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()


def assert_error(run: Callable, message: str, *arguments: object, output: Path | None = None) -> None:
    """Check that a script exits with one line that matches `message`, before it creates the folder `output`."""
    with pytest.raises(SystemExit, match=message) as error:
        run(*arguments)
    assert "\n" not in str(error.value)
    assert output is None or not output.exists()


def log_history(output: Path) -> list[dict]:
    """Return the log of a run."""
    return json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]


def steps(output: Path) -> int:
    """Return the number of steps of a run."""
    return json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]
