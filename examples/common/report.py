"""What a run leaves behind: speed and memory while it trains, a summary as table and JSON, the curve as PNG."""

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib

try:
    import resource
except ImportError:  # Windows
    resource = None

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from transformers import TrainerCallback


def peak_memory_gb(device: torch.device) -> float | None:
    """Peak memory of the process so far in GB: of the accelerator on CUDA, else resident (None where unknown)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


class SpeedCallback(TrainerCallback):
    """Counts the seconds and the tokens of this call of `Trainer.train`, evaluation and saving left out.

    Tokens come from the Trainer, so `include_num_input_tokens_seen` has to be "non_padding" or "all".
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.tokens = 0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._tokens_before = state.num_input_tokens_seen  # above 0 when a checkpoint is resumed

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._step_start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.seconds += time.perf_counter() - self._step_start
        self.tokens = state.num_input_tokens_seen - self._tokens_before


def show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else str(value)


def print_table(title: str, rows: dict[str, Any]) -> None:
    """Prints `rows` as two columns below `title`; None is left out."""
    rows = {name.replace("_", " "): value for name, value in rows.items() if value is not None}
    width = max(map(len, rows))
    print(f"\n{title}")
    for name, value in rows.items():
        print(f"  {name:<{width}}  {show(value)}")


def print_columns(title: str, columns: dict[str, dict[str, Any]]) -> None:
    """Prints `columns`, which have the same rows, side by side below `title`."""
    first = next(iter(columns.values()))
    table = [
        ["", *columns],
        *([name.replace("_", " "), *(show(rows[name]) for rows in columns.values())] for name in first),
    ]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    print(f"\n{title}")
    for cells in table:
        print("  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip())


def save_json(content: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def plot_curve(histories: dict[str, list[dict[str, float]]], metrics: list[str], title: str, path: Path) -> None:
    """Draws the losses and the evaluated `metrics` (as the Trainer logs them, "eval_accuracy") over the steps.

    `histories`: the Trainer's `log_history` of each run, by what the legend calls it ("" for a single one).
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
