"""run_audio.py: formats and rates of clips, augmentation, and models that do not fit."""

from importlib.util import find_spec

import numpy as np
import pytest
from datasets import Audio, Dataset

from tests.examples.contract import RATE, SCRIPTS, clips as rows, tone
from tests.examples.runs import assert_error, wav

RUN = ["run_audio", "--audio_column", "clip"]
NEW = ["--do_train", "--max_steps", 1, *SCRIPTS["run_audio"].model]


def encode(script, split: Dataset, rate: int, **options) -> list[np.ndarray]:
    module = script("run_audio")
    data = module.DataArguments(**options)
    extractor = module.Wav2Vec2FeatureExtractor(sampling_rate=rate)
    return [np.array(clip) for clip in module.encode_split(split, "test", data, extractor, {"0": 0})["input_values"]]


def test_bytes_equal_lists_and_resampling_keeps_the_tone(script):
    samples = [tone("low", 400, 0.3, rate) for rate in (RATE, RATE // 2)]
    coded = [(32768 * clip).astype("<i2") for clip in samples]
    raw = [{"audio": clip.tobytes(), "sampling_rate": RATE} for clip in coded]
    lists = [{"audio": (clip / 32768).tolist(), "sampling_rate": RATE} for clip in coded]
    a, b = (encode(script, Dataset.from_list(kind), RATE)[0] for kind in (raw, lists))
    np.testing.assert_allclose(a, b, atol=1e-6)
    assert a.mean() == pytest.approx(0, abs=1e-5) and a.std() == pytest.approx(1, abs=1e-3)
    (half,) = encode(script, Dataset.from_list(raw[:1]), RATE // 2, max_seconds=0.3)
    assert len(half) == 150
    expected = samples[1][:150] / samples[1][:150].std()
    np.testing.assert_allclose(half[20:-20], expected[20:-20], atol=0.05)


def test_augmentation(script):
    module = script("run_audio")
    numbers = np.random.default_rng(0)
    clip = numbers.standard_normal(500).astype(np.float32)

    def augment(**options) -> np.ndarray:
        return module.augment(clip, RATE, module.DataArguments(**options), numbers)

    np.testing.assert_array_equal(augment(), clip)
    lengths = {len(augment(random_shift=0.05)) for _ in range(50)}
    assert 450 <= min(lengths) < 480 and 520 < max(lengths) <= 550
    lengths = {len(augment(random_speed=0.1)) for _ in range(50)}
    assert 454 <= min(lengths) < 480 and 520 < max(lengths) <= 556
    gains = [augment(random_gain=6).std() / clip.std() for _ in range(50)]
    assert 0.5 <= min(gains) < 0.7 and 1.4 < max(gains) <= 2.0
    noise = [(augment(random_noise=0.5) - clip).std() / clip.std() for _ in range(50)]
    assert min(noise) < 0.1 and 0.4 < max(noise) < 0.6

    split = Dataset.from_dict({"input_values": [clip, clip], "labels": [0, 1]})
    moved = module.augment_split(split, RATE, module.DataArguments(random_noise=0.1), 0)
    first, second = (row["input_values"] for row in moved)
    moved.set_epoch(1)
    assert (second != first).any() and (moved[0]["input_values"] != first).any()


def test_audio_files(run, tmp_path):
    """Embedded files are decoded if a decoder is installed; else the error names the package to install."""
    files = [{"bytes": wav(np.frombuffer(row["clip"], "<i2"), RATE), "path": None} for row in rows(8, seed=0)]
    split = Dataset.from_dict({"clip": files, "label": [0, 1] * 4}).cast_column("clip", Audio())
    split.to_parquet(tmp_path / "files" / "train.parquet")
    arguments = [*NEW, "--dataset_path", tmp_path / "files", "--output_dir", tmp_path / "out"]
    if find_spec("torchcodec"):
        assert run(*arguments)["train_samples"] == 8
    else:
        assert_error(run, "torchcodec", *arguments)
