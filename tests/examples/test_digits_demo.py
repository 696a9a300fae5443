import json

import numpy as np
import pytest
from transformers import AutoModelForSequenceClassification


@pytest.fixture
def demo(script):
    return script("digits_demo")


def test_one_epoch(demo, tmp_path, capsys):
    output = tmp_path / "digits"
    summary = demo.main(["--epochs", "1", "--min_accuracy", "0.2", "--output_dir", str(output)])
    assert json.loads((output / "summary.json").read_text()) == summary
    assert (output / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "test accuracy" in capsys.readouterr().out

    # The reported accuracy is that of the saved model.
    _, test_set = demo.load_data(seed=0)
    predicted = demo.predict(AutoModelForSequenceClassification.from_pretrained(output), test_set).argmax(-1)
    assert summary["test_accuracy"] == pytest.approx((predicted == np.array(test_set["labels"])).mean())


def test_too_low_an_accuracy_is_a_failure_and_the_folder_can_be_used_again(demo, tmp_path):
    arguments = ["--epochs", "0.1", "--output_dir", str(tmp_path)]
    for _ in range(2):
        with pytest.raises(SystemExit, match="test accuracy 0.* is below 0.95"):
            demo.main(arguments)
    assert not list(tmp_path.glob("checkpoint-*"))


def test_folder_with_other_files_is_left_alone(demo, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match="holds other files than an earlier run"):
        demo.main(["--output_dir", str(tmp_path)])
    with pytest.raises(SystemExit, match="holds other files"):
        demo.main(["--output_dir", str(tmp_path / "notes.txt")])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_split_is_stratified_and_the_values_are_pixels(demo):
    train_set, test_set = demo.load_data(seed=0)
    assert (len(train_set), len(test_set)) == (1437, 360)
    assert set(np.bincount(test_set["labels"])) <= {35, 36, 37}
    values = np.array(train_set["input_values"])
    assert values.shape == (1437, 64)
    assert (values.min(), values.max()) == (-1.0, 1.0)
    assert test_set["labels"][:] != demo.load_data(seed=1)[1]["labels"][:]
