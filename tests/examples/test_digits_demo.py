import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, TrainerState

from luna_mega.training.runs import ProgressBar


@pytest.fixture
def demo(script):
    return script("digits_demo")


@pytest.mark.slow
def test_both_models_train(demo, tmp_path, capsys):
    output = tmp_path / "digits"
    summary = demo.main(["--epochs", "0.2", "--min_accuracy", "0", "--output_dir", str(output)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for name in ("luna", "mega"):
        assert ["eval_accuracy", "=", f"{summary[name]['eval_accuracy']:.4f}"] in lines

    # The saved model has the reported accuracy.
    _, test_set = demo.load_data(seed=0)
    for name in ("luna", "mega"):
        model = AutoModelForSequenceClassification.from_pretrained(output / name)
        assert model.config.model_type == name
        logits = model(input_values=torch.tensor(test_set["input_values"][:])).logits
        right = logits.argmax(-1) == torch.tensor(test_set["labels"][:])
        assert summary[name]["eval_accuracy"] == pytest.approx(right.float().mean().item())
    assert model.config.attention_chunk == 16


@pytest.fixture
def few(demo, monkeypatch):
    """Reduce the data of the demo to a few digits."""
    parts = [split.select(range(count)) for split, count in zip(demo.load_data(seed=0), (64, 32), strict=True)]
    monkeypatch.setattr(demo, "load_data", lambda seed: parts)
    return demo


def test_low_accuracy_fails_and_the_folder_can_be_reused(few, tmp_path):
    arguments = ["--epochs", "0.5", "--output_dir", str(tmp_path)]
    for _ in range(2):
        with pytest.raises(SystemExit, match="luna: test accuracy 0.* is below 0.92"):
            few.main([*arguments, "--model_type", "luna"])
        assert (tmp_path / "luna" / "all_results.json").is_file()
    assert not list(tmp_path.glob("*/checkpoint-*"))


def test_one_thread_and_the_progress_without_the_first_step(few, tmp_path, capsys):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        few.main(["--epochs=2", "--min_accuracy=0", "--model_type=luna", "--output_dir", str(tmp_path)])
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    assert "| 1/4 [00:00<?, ?it/s]" in capsys.readouterr().err


@pytest.mark.parametrize("first", [1, 11])
def test_progress_of_a_new_and_of_a_resumed_run(first, capsys):
    bar, state = ProgressBar(), TrainerState(max_steps=20)
    bar.on_train_begin(None, state, None)
    for state.global_step in range(first, 21):
        bar.on_step_end(None, state, None)
    bar.on_train_end(None, state, None)
    shown = capsys.readouterr().err
    assert f"| {first}/20 [00:00<?, ?it/s]" in shown and "| 20/20 [00:00<00:00" in shown


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--learning_rate=nan", "--learning_rate nan must be a finite number"),
        ("--min_accuracy=nan", "--min_accuracy nan must be a finite number"),
        ("--epochs=-1", "--epochs -1.0 must be at least 0"),
        ("--model_type=bert", "--model_type bert must be one of luna, mega, both"),
        ("--learning_rate=1e30", "no model was saved"),
    ],
)
def test_no_model_that_diverged(few, tmp_path, option, message):
    with pytest.raises(SystemExit, match=message):
        few.main(["--epochs=2", "--model_type=luna", "--output_dir", str(tmp_path / "out"), option])
    assert not list(tmp_path.rglob("model.safetensors"))


def test_split_is_stratified_and_the_values_are_pixels(demo):
    train_set, test_set = demo.load_data(seed=0)
    assert (len(train_set), len(test_set)) == (1437, 360)
    assert set(np.bincount(test_set["labels"])) <= {35, 36, 37}
    values = np.array(train_set["input_values"])
    assert values.shape == (1437, 64)
    assert (values.min(), values.max()) == (-1.0, 1.0)
    assert test_set["labels"][:] != demo.load_data(seed=1)[1]["labels"][:]
