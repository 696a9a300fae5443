"""Plots of training runs."""

import json
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure
from transformers.trainer import TRAINER_STATE_NAME

# Ends of the names of logged values that are not metrics of a model.
_COSTS = ("_runtime", "_per_second", "_time", "_loss")


def plot_losses(runs: Mapping[str, str | Path], file: str | Path) -> None:
    """Plot the losses and, in other panels, the evaluation metrics of runs over their steps.

    Args:
        runs: Name -> output folder with the `trainer_state.json` that `Trainer` saves. Training losses are lines, and
            evaluations have points. If no training loss was logged, its mean over the run is shown.
        file: Image to write, with any suffix that matplotlib supports.

    Raises:
        ValueError: A folder has no logged loss.
    """
    logs = {}
    for name, folder in runs.items():
        logs[name] = json.loads(Path(folder, TRAINER_STATE_NAME).read_text(encoding="utf-8-sig"))["log_history"]
        if not any(_curve(logs[name], key) for key in ("loss", "train_loss", "eval_loss")):
            raise ValueError(f"{folder}: {TRAINER_STATE_NAME} has no loss; train with a smaller --logging_steps")
    keys = dict.fromkeys(key for log in logs.values() for row in log for key in row if key.startswith("eval_"))
    losses = [key for key in keys if key.endswith("_loss")]
    metrics = [key for key in keys if not key.endswith(_COSTS)]
    figure = Figure(figsize=(5 * (1 + len(metrics)), 4), layout="constrained")
    panels = figure.subplots(1, 1 + len(metrics), squeeze=False)[0]
    own_panels = dict(zip(metrics, panels[1:], strict=True))  # all losses are in the first panel
    for index, (name, log) in enumerate(logs.items()):
        trained = "loss" if _curve(log, "loss") else "train_loss"
        for key in (trained, *losses, *metrics):
            if points := _curve(log, key):
                label = f"{name}, {'training' if key == trained else key.replace('eval_', 'evaluation ')}"
                style = {"marker": "" if key == "loss" else "o", "color": f"C{index}", "label": label}
                own_panels.get(key, panels[0]).plot(*zip(*points, strict=True), **style)
    for axes, key in zip(panels, ["loss", *metrics], strict=True):
        axes.set(xlabel="steps", ylabel=key.removeprefix("eval_"))
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        for text in axes.legend().get_texts():
            text.set_parse_math(False)  # names may contain $
    figure.savefig(file)


def _curve(log: list[dict[str, float]], key: str) -> list[tuple[int, float]]:
    """Return the steps and values of `key`."""
    return [(row["step"], row[key]) for row in log if key in row]
