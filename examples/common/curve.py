"""The curve of losses and metrics as PNG."""

import itertools
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

plt.rcParams["text.parse_math"] = False  # names of folders may contain $


def plot_curve(histories: dict[str, list[dict[str, float]]], metrics: list[str], title: str, path: Path) -> None:
    """Draw the losses and the evaluated `metrics` (as Trainer logs them, "eval_accuracy") over the steps.

    `histories` holds the Trainer's `log_history` of each run by its name in the legend ("" for a single run).
    """
    figure, (loss_axis, metric_axis) = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for axis, keys in ((loss_axis, ["loss", "eval_loss"]), (metric_axis, metrics)):
        for (name, history), key in itertools.product(histories.items(), keys):
            points = [(entry["step"], entry[key]) for entry in history if key in entry]
            if points:
                axis.plot(*zip(*points, strict=True), marker=".", label=f"{name} {key}".strip())
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
