"""Plots of training runs."""

import json
from collections.abc import Mapping
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME


def plot_losses(runs: Mapping[str, str | Path], file: str | Path) -> None:
    """Plot the losses of runs over their steps.

    Args:
        runs: Name -> output folder with the `trainer_state.json` that `Trainer` saves. Training losses are lines, and
            evaluation losses points.
        file: Image to write, with any suffix that matplotlib supports.

    Raises:
        ValueError: A folder has no logged loss.
    """
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    axes = figure.subplots()
    for index, (name, folder) in enumerate(runs.items()):
        history = json.loads(Path(folder, TRAINER_STATE_NAME).read_text(encoding="utf-8-sig"))["log_history"]
        found = {key: [(row["step"], row[key]) for row in history if key in row] for key in ("loss", "eval_loss")}
        if not any(found.values()):
            raise ValueError(f"{folder}: {TRAINER_STATE_NAME} has no loss; train with a smaller --logging_steps")
        for (key, points), style in zip(found.items(), ("-", "o"), strict=True):
            label = f"{name}, {'training' if key == 'loss' else 'evaluation'}"
            axes.plot(*zip(*points, strict=True), style, color=f"C{index}", label=label) if points else None
    axes.set(xlabel="steps", ylabel="loss")
    axes.legend()
    figure.savefig(file)
