"""Table of models by what they learn in pretraining, for tokens and for time, and by their results when fine-tuned.

    python studies/compare.py outputs/pretrained outputs/finetuned --output_dir outputs/comparison

The script reads what run_mlm.py or run_clm.py and the scripts that fine-tune their models wrote, in the folders or in
the folders in them. Folders are called NAME-SEED: runs that differ in the seed alone make one row of the table, NAME.
A fine-tuned model belongs to the row of the folder that it began from; one that began from nothing has a row of its
own.
"""

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from summaries import mean_and_spread, read_json, read_summaries

from luna_mega.training.arguments import fail
from luna_mega.training.report import show

plt.rcParams["text.parse_math"] = False  # names may contain $

# Task of a pretraining run -> the tokens that the model predicts.
PRETRAINING = {"masked language model": "masked tokens", "causal language model": "next tokens"}
IN_PERCENT = ("accuracy", "matthews_correlation", "combined_score")


@dataclass
class Curve:
    """Evaluations of one pretraining run: `[N]` tokens, seconds of training, losses and accuracies, in order.

    A causal model is not asked for its accuracy, which is NaN then.
    """

    tokens: np.ndarray
    seconds: np.ndarray
    loss: np.ndarray
    accuracy: np.ndarray

    @classmethod
    def of(cls, folder: Path) -> "Curve":
        """Read the evaluations of a run from the state that Trainer saved."""
        names = ("num_input_tokens_seen", "train_seconds", "eval_loss")
        history = read_json(folder / "trainer_state.json").get("log_history", [])
        entries = [entry for entry in history if all(name in entry for name in names)]
        points = [[*(entry[name] for name in names), entry.get("eval_accuracy", np.nan)] for entry in entries]
        if not points:
            fail(f"{folder}/trainer_state.json has no evaluations: pretrain with --eval_strategy steps")
        return cls(*np.array(points).T)

    def at(self, axis: str, place: float) -> tuple[float, float]:
        """Return loss and accuracy, in percent, where `axis` ("tokens" or "seconds") is at `place`."""
        position = getattr(self, axis)
        return float(np.interp(place, position, self.loss)), 100 * float(np.interp(place, position, self.accuracy))


@dataclass
class Run:
    """One run: the name of its row, its summary and, for pretraining, its curve."""

    row: str
    summary: dict[str, Any]
    curve: Curve | None = None

    @property
    def task(self) -> str:
        return self.summary["task"]

    @property
    def score(self) -> float:
        """Return the main figure of a task, in percent where it is a share or a correlation."""
        name = self.summary["metric"]
        return self.summary[name] * (100 if name.endswith(IN_PERCENT) else 1)


def strip_seed(name: str) -> str:
    """Return NAME of NAME-SEED."""
    return re.sub(r"-\d+$", "", name)


def read_runs(folders: list[str]) -> list[Run]:
    """Return the runs of the folders; a run without an evaluation at its end is named and left out."""
    runs = []
    for folder, summary in read_summaries(folders):
        if summary.get("metric") not in summary:
            print(f"left out, it has no evaluation at the end: {folder}")
        elif summary["task"] in PRETRAINING:
            runs.append(Run(strip_seed(folder.name), summary, Curve.of(folder)))
        else:
            scratch = summary["model"].endswith("from scratch")
            row = summary["model"] if scratch else strip_seed(Path(summary["model"]).name)
            runs.append(Run(row, summary))
    if not runs:
        fail(f"{' '.join(folders)}: no run was evaluated at its end")
    if PRETRAINING.keys() <= {run.task for run in runs}:
        fail("losses of masked and of causal language models cannot be compared: make a table of each")
    return runs


def cell(values: list[float], digits: int = 1, unit: str = "") -> str:
    return mean_and_spread(values, digits) + unit if values else "–"


def make_table(runs: list[Run]) -> list[list[str]]:
    """Return header and rows: the models in the order of their names, pretraining first and then the tasks.

    "At equal tokens" and "at equal time" are the tokens and the seconds after which the shortest run of all ended.
    """
    curves = [run.curve for run in runs if run.curve]
    places = {axis: min((getattr(curve, axis)[-1] for curve in curves), default=0.0) for axis in ("tokens", "seconds")}
    tasks = sorted({run.task for run in runs if not run.curve})
    table = [["model", "parameters", "tokens/s in training"]]
    for kind in {run.task for run in runs if run.curve}:
        table[0] += [f"{PRETRAINING[kind]} after {show(int(places['tokens']))} tokens"]
        table[0] += [f"after {places['seconds'] / 60:.1f} minutes"]
    table[0] += tasks
    for row in sorted({run.row for run in runs}):
        own = [run for run in runs if run.row == row]
        pretrained = [run for run in own if run.curve]
        speeds = [run.summary["tokens_per_second"] for run in pretrained or own if "tokens_per_second" in run.summary]
        cells = [row, show(own[0].summary["parameters"]), show(float(np.mean(speeds))) if speeds else "–"]
        for axis, place in places.items() if curves else ():
            found = [run.curve.at(axis, place) for run in pretrained]
            losses, accuracies = ([point[index] for point in found] for index in (0, 1))
            asked = not np.isnan(accuracies).any()
            cells.append(cell(losses, 2) + (f", {cell(accuracies, 1, ' %')}" if found and asked else ""))
        cells += [cell([run.score for run in own if run.task == task]) for task in tasks]
        table.append(cells)
    return table


def draw(runs: list[Run], path: Path) -> None:
    """Draw the accuracy at masked tokens, or the loss of next ones, over minutes and over tokens, a line a run."""
    rows = sorted({run.row for run in runs if run.curve})
    colors = dict(zip(rows, plt.cm.tab10.colors * len(rows), strict=False))
    axes: dict[str, tuple[str, Callable[[Curve], np.ndarray]]] = {
        "minutes of training": lambda curve: curve.seconds / 60,
        "millions of tokens": lambda curve: curve.tokens / 1e6,
    }
    causal = any(run.curve and np.isnan(run.curve.accuracy).any() for run in runs)
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True, sharey=True)
    for panel, (label, position) in zip(panels, axes.items(), strict=True):
        named = set()
        for run in runs:
            if run.curve:
                name = None if run.row in named else run.row
                height = run.curve.loss if causal else 100 * run.curve.accuracy
                panel.plot(position(run.curve), height, color=colors[run.row], label=name, alpha=0.8)
                named.add(run.row)
        panel.set(xlabel=label)
        panel.grid(alpha=0.3)
    panels[0].set(ylabel="loss of next tokens" if causal else "accuracy at masked tokens in %")
    panels[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> dict[str, str]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="DIR", help="outputs of runs, or folders of them")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("comparison"), help="folder for report.md and report.png"
    )
    arguments = parser.parse_args(argv)
    runs, output = read_runs(arguments.folders), arguments.output_dir
    header, *rows = make_table(runs)
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in [header, ["---"] * len(header), *rows])
    output.mkdir(parents=True, exist_ok=True)
    written = {"report": str(output / "report.md")}
    if any(run.curve for run in runs):
        written["plot"] = str(output / "report.png")
        draw(runs, Path(written["plot"]))
        table += "\n![What the models learn over minutes and over tokens](report.png)\n"
    Path(written["report"]).write_text(table, encoding="utf-8")
    print(table)
    return written


if __name__ == "__main__":
    main()
