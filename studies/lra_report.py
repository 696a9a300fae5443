"""Table of runs of Long Range Arena beside the figures of the papers, with their speed.

    python studies/lra_report.py outputs/text outputs/image --output_dir outputs/report

The script reads what `examples/lra/run_lra.py` wrote, in the folders or in the folders in them. It writes a table with
the papers' figures beside it, and draws accuracy over speed and over time.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from lra.tasks import TASKS
from summaries import mean_and_spread, read_json, read_summaries

from luna_mega.training.arguments import fail
from luna_mega.training.report import show

plt.rcParams["text.parse_math"] = False  # names may contain $

# Test accuracies of the papers on the whole tasks: Table 1 of Luna, Table 2 of Mega.
PAPERS = {
    "Transformer": (36.37, 64.27, 57.46, 42.44, 71.40, None),
    "Luna-16": (37.43, 65.74, 79.38, 46.39, 78.36, None),
    "Luna-128": (38.01, 65.74, 79.55, 47.47, 78.89, None),
    "Luna-256": (37.98, 65.78, 79.56, 47.86, 78.55, None),
    "Mega": (63.14, 90.43, 91.25, 90.44, 96.01, 97.98),
    "Mega-chunk": (58.76, 90.19, 90.97, 85.80, 94.41, 93.81),
}
# Entries of the summary that the runs of one row share.
_SAME = (
    "task", "variant", "convention", "max_length", "train_samples", "config_overrides", "learning_rate", "batch",
    "steps", "parameters", "self_pretraining_steps", "hardware",
)  # fmt: skip
_HEADER = (
    "task", "model", "paper", "here", "seeds", "length", "training rows", "updates x batch", "minutes", "parameters",
    "examples/s", "peak GB", "hardware",
)  # fmt: skip


def read_runs(folders: list[str]) -> list[dict[str, Any]]:
    """Return the summaries of training runs in the folders, each with its `curve`; the script ends where is none."""
    found = [(folder, run) for folder, run in read_summaries(folders) if run.get("task") in TASKS and "steps" in run]
    runs = [run | {"curve": read_curve(folder, run.get("self_pretraining_seconds", 0.0))} for folder, run in found]
    if not runs:
        fail(f"{' '.join(folders)}: there is no all_results.json of a training run of run_lra.py")
    return runs


def read_curve(folder: Path, before: float) -> list[tuple[float, float]]:
    """Return minutes of training, with the seconds `before` it, and accuracy in percent of all evaluations of a run."""
    file = folder / "trainer_state.json"
    history = read_json(file).get("log_history", []) if file.is_file() else []
    evaluated = [entry for entry in history if {"train_seconds", "eval_accuracy"} <= entry.keys()]
    return [((before + entry["train_seconds"]) / 60, 100 * entry["eval_accuracy"]) for entry in evaluated]


def group_runs(runs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the runs in groups that differ in the seed alone, in the order of the benchmark."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: (list(TASKS).index(run["task"]), run["variant"], run["seed"])):
        groups.setdefault(tuple(run.get(name) for name in _SAME), []).append(run)
    return list(groups.values())


def mean(group: list[dict[str, Any]], name: str) -> float | None:
    values = [run[name] for run in group if run.get(name) is not None]
    return statistics.mean(values) if values else None


def score(group: list[dict[str, Any]]) -> tuple[str, list[float]]:
    """Return the split that is reported, the test split where all runs have it, and the accuracies in percent."""
    name = "test_accuracy" if all("test_accuracy" in run for run in group) else "eval_accuracy"
    return name.removesuffix("_accuracy"), [100 * run[name] for run in group if name in run]


def paper_figure(run: dict[str, Any]) -> float | None:
    """Return the figure of the paper, where the run has the rows and the length of the benchmark."""
    task = TASKS[run["task"]]
    whole = (run["train_samples"] or 0) >= task.rows and run["max_length"] >= task.max_length
    return PAPERS[run["variant"]][list(TASKS).index(run["task"])] if whole and run["variant"] in PAPERS else None


def table_row(group: list[dict[str, Any]]) -> list[str]:
    """Return the cells of a group of runs."""
    first, (split, scores), paper = group[0], score(group), paper_figure(group[0])
    here = f"{mean_and_spread(scores)} %" + ("" if split == "test" else " (validation)") if scores else "–"
    seconds = (mean(group, "train_seconds") or 0.0) + (mean(group, "self_pretraining_seconds") or 0.0)
    speed, memory = mean(group, "examples_per_second"), mean(group, "peak_memory_gb")
    return [
        first["task"],
        first["variant"] + (" (self-pretrained)" if first["self_pretraining_steps"] else ""),
        "–" if paper is None else f"{paper:.2f} %",
        here,
        ", ".join(str(run["seed"]) for run in group),
        show(first["max_length"]),
        show(first["train_samples"]),
        f"{show(first['steps'])} x {first['batch']}",
        f"{seconds / 60:.1f}",
        show(first["parameters"]),
        "–" if speed is None else show(speed),
        "–" if memory is None else f"{memory:.2f}",
        first["hardware"],
    ]


def draw(groups: list[list[dict[str, Any]]], path: Path) -> None:
    """Draw accuracy over speed, with the peak memory as area, and below the curves of the runs; a column a task."""
    tasks = [task for task in TASKS if any(group[0]["task"] == task for group in groups)]
    models = sorted({group[0]["variant"] for group in groups})
    figure, axes = plt.subplots(2, len(tasks), figsize=(5 * len(tasks), 8), constrained_layout=True, squeeze=False)
    for task, speeds, curves in zip(tasks, *axes, strict=True):
        for group in (group for group in groups if group[0]["task"] == task):
            name = group[0]["variant"]
            color = f"C{models.index(name)}"
            speed, memory, (_, scores) = mean(group, "examples_per_second"), mean(group, "peak_memory_gb"), score(group)
            if speed is not None and scores:
                speeds.scatter(speed, statistics.mean(scores), s=200 * (memory or 1.0), alpha=0.5, color=color)
                if len(scores) > 1:
                    speeds.errorbar(speed, statistics.mean(scores), statistics.stdev(scores), color=color, capsize=3)
                speeds.annotate(name, (speed, statistics.mean(scores)), ha="center", va="center", fontsize=8)
            for run in group:
                label = name if run is group[0] else None
                curves.plot(*zip(*run["curve"], strict=True) if run["curve"] else ((), ()), color=color, label=label)
        speeds.margins(0.25)
        speeds.set(title=task, xlabel="examples a second, training", ylabel="accuracy in %")
        curves.set(xlabel="minutes of training", ylabel="accuracy on the validation rows in %")
        curves.legend()
        speeds.grid(alpha=0.3)
        curves.grid(alpha=0.3)
    figure.suptitle("Accuracy and speed; the area of a disc is the peak memory")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def write_report(folders: list[str], output: Path) -> dict[str, Any]:
    """Write `report.md` and `report.png`, print the table, and return the paths."""
    groups = group_runs(read_runs(folders))
    rows = [_HEADER, ["---"] * len(_HEADER), *map(table_row, groups)]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    output.mkdir(parents=True, exist_ok=True)
    text, plot = output / "report.md", output / "report.png"
    draw(groups, plot)
    text.write_text(f"{table}\n![Accuracy over speed, and over minutes]({plot.name})\n", encoding="utf-8")
    print(table)
    return {"report": str(text), "plot": str(plot)}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="DIR", help="outputs of runs, or folders of them")
    parser.add_argument("--output_dir", type=Path, default=Path("report"), help="folder for report.md and report.png")
    arguments = parser.parse_args(argv)
    return write_report(arguments.folders, arguments.output_dir)


if __name__ == "__main__":
    main()
