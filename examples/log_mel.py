"""Evaluate a logistic regression on log-mel features of audio clips, as a baseline for the results of run_audio.py.

    python examples/log_mel.py --dataset_path data/fsdd --audio_column pcm16 --split test

The features are the means over each tenth of a clip of 40 log-mel bands (25 ms every 10 ms); settings are not tuned.
"""

from luna_mega_cli.script_options import check_names

check_names(__name__)  # before the imports, which take seconds

import json
import time
from dataclasses import dataclass

import numpy as np
from run_audio import read_clip
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function
from transformers.hf_argparser import HfArg

from luna_mega import training as lib


@dataclass
class DataArguments(lib.SourceArguments):
    audio_column: str = HfArg(default="audio", help="clips: audio files, lists of numbers, or bytes of 16-bit samples")
    rate_column: str = HfArg(default="sampling_rate", help="column with the sampling rate, for lists and bytes")
    label_column: str = HfArg(default="label", help="column with the labels: names or ids")
    split: str = HfArg(default="test", help="split to evaluate; the classifier is trained on the split train")


def features(clip: np.ndarray, rate: int, bands: int = 40, parts: int = 10) -> np.ndarray:
    """Return the features `[parts * bands]` of samples `[T]`."""
    window, size = round(0.025 * rate), 1 << (round(0.025 * rate) - 1).bit_length()
    filters = mel_filter_bank(size // 2 + 1, bands, 0.0, rate / 2, rate)
    options = {"fft_length": size, "mel_filters": filters, "log_mel": "log", "mel_floor": 1e-8}
    clip = np.pad(clip, (0, max(0, rate // 8 - len(clip))))  # at least one window in each part
    mel = spectrogram(clip, window_function(window), window, round(0.01 * rate), **options)
    return np.concatenate([part.mean(1) for part in np.array_split(mel, parts, axis=1)])


def main(argv: list[str] | None = None) -> dict[str, float]:
    (data,) = lib.parse_arguments((DataArguments,), argv)
    start, columns = time.perf_counter(), [data.audio_column, data.label_column]
    splits = lib.load_splits({"train": None, data.split: None}, data, columns=columns)
    with lib.one_line():  # scikit-learn raises an error for a single class
        inputs = {name: [features(*read_clip(row, data)) for row in split] for name, split in splits.items()}
        labels = {name: [str(label) for label in split[data.label_column]] for name, split in splits.items()}
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(inputs["train"], labels["train"])
    score = float(model.score(inputs[data.split], labels[data.split]))
    print(json.dumps(metrics := {"accuracy": score, "seconds": time.perf_counter() - start}))
    return metrics


if __name__ == "__main__":
    main()
