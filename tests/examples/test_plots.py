"""Plots and the progress of training runs."""

import json

import pytest
from transformers import TrainerState

from luna_mega.training.plots import plot_losses
from luna_mega.training.trainer import ProgressBar


def test_names_are_not_formulas(tmp_path):
    pytest.importorskip("matplotlib")
    history = [{"step": 3, "train_loss": 2.0}, {"step": 3, "eval_loss": 1.0, "eval_bleu": 5.0}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}), encoding="utf-8")
    plot_losses({"$x_{": tmp_path}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_plot_of_losses(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    history = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}, {"step": 2, "eval_loss": 1.5}]
    history += [{"step": 2, "eval_accuracy": 0.5, "eval_runtime": 9.0, "eval_samples_per_second": 1.0}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}), encoding="utf-8")
    drawn = {}
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file: drawn.update({file: figure}))
    plot_losses({"a": tmp_path, "b": tmp_path}, "losses.png")
    axes, accuracy = drawn["losses.png"].axes
    points = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert points["a, training"] == points["b, training"] == [[1, 2], [2, 1]]
    assert points["a, evaluation loss"] == [[2, 1.5]] and axes.get_xlabel() == "steps"
    assert all(step == int(step) for panel in (axes, accuracy) for step in panel.get_xticks())
    assert accuracy.lines[1].get_xydata().tolist() == [[2, 0.5]] and accuracy.get_ylabel() == "accuracy"
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history[3:]}), encoding="utf-8")
    with pytest.raises(ValueError, match="trainer_state.json has no loss"):
        plot_losses({"a": tmp_path}, "losses.png")


@pytest.mark.parametrize("first", [1, 11])
def test_progress_of_a_new_and_of_a_resumed_run(first, capsys):
    bar, state = ProgressBar(), TrainerState(max_steps=20)
    bar.on_train_begin(None, state, None)
    for state.global_step in range(first, 21):
        bar.on_step_end(None, state, None)
    bar.on_train_end(None, state, None)
    shown = capsys.readouterr().err
    assert f"| {first}/20 [00:00<?, ?it/s]" in shown and "| 20/20 [00:00<00:00" in shown
