"""Write a table of runs, which share a row if their folders NAME-SEED differ only in the seed.

    python studies/report.py models outputs/pretrained outputs/finetuned --output_dir outputs/models
    python studies/report.py students outputs/distilled outputs/scratch --output_dir outputs/students
    python studies/report.py lra outputs/text outputs/image --output_dir outputs/lra

`models` compares pretraining at equal tokens and at equal time, and the results of the fine-tuned models. `students`
compares the stages of `run_distill.py` with the teacher, and with the same models trained from scratch. `lra` compares
runs of `run_lra.py` with the papers. Each folder contains the output of a run, or of several runs in subfolders.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from lra.tasks import TASKS

from luna_mega.training.arguments import fail
from luna_mega.training.report import show

plt.rcParams["text.parse_math"] = False  # names may contain $

Table = list[list[str]]
PREDICTED = {"masked language model": "masked tokens", "causal language model": "next tokens"}
PERCENT = ("accuracy", "agreement", "matthews_correlation", "combined_score")
HISTORY = {
    "num_input_tokens_seen": "tokens",
    "train_seconds": "seconds",
    "eval_loss": "loss",
    "eval_accuracy": "accuracy",
}
# Column of the table of students -> entry of a point.
STUDENT_COLUMNS = {
    "tokens": "tokens", "of the teacher's": "share", "seconds": "seconds", "loss": "loss",
    "above its teacher": "above", "accuracy": "accuracy", "agreement": "agreement",
}  # fmt: skip
# Test accuracy in Table 1 of the Luna paper and Table 2 of the Mega paper.
PAPERS = {
    "Transformer": (36.37, 64.27, 57.46, 42.44, 71.40, None),
    "Luna-16": (37.43, 65.74, 79.38, 46.39, 78.36, None),
    "Luna-128": (38.01, 65.74, 79.55, 47.47, 78.89, None),
    "Luna-256": (37.98, 65.78, 79.56, 47.86, 78.55, None),
    "Mega": (63.14, 90.43, 91.25, 90.44, 96.01, 97.98),
    "Mega-chunk": (58.76, 90.19, 90.97, 85.80, 94.41, 93.81),
}
LRA_KEYS = [
    "task", "variant", "convention", "max_length", "train_samples", "config_overrides", "learning_rate", "batch",
    "steps", "parameters", "self_pretraining_steps", "hardware",
]  # fmt: skip


def read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        fail(f"{file} cannot be read: {error}")
    if not isinstance(content, dict):
        fail(f"{file} cannot be read: it contains no names and values")
    return content


def read_runs(folders: list[str]) -> list[dict[str, Any]]:
    """Return the results of all runs, with their `folder` and their `name` without the seed."""
    runs = []
    for folder in map(Path, folders):
        own = folder / "all_results.json"
        found = [own] if own.is_file() else sorted(folder.glob("*/all_results.json"))
        if not found:
            fail(f"{folder}: there is no all_results.json of a run in it or in its subfolders")
        runs += [
            read_json(file) | {"folder": file.parent, "name": re.sub(r"-\d+$", "", file.parent.name)} for file in found
        ]
    return runs


def read_history(folder: Path) -> pd.DataFrame:
    """Return step, tokens, seconds, loss and accuracy of each evaluation, and of the end of training."""
    file = folder / "trainer_state.json"
    log = pd.DataFrame(read_json(file).get("log_history", []) if file.is_file() else [])
    log = log.reindex(columns=["step", "train_loss", *HISTORY]).rename(columns=HISTORY)
    return log[log.loss.notna() | log.train_loss.notna()]


def spread(values: pd.Series, digits: int = 1, unit: str = "", missing: str = "–") -> str:
    """Return the mean and, of several values, the standard deviation: 75.1 ± 0.4."""
    values = pd.Series(values, dtype=float).dropna()
    if values.empty:
        return missing
    deviation = f" ± {values.std():.{digits}f}" if len(values) > 1 else ""
    return f"{values.mean():.{digits}f}{deviation}{unit}"


def finished(runs: list[dict[str, Any]], metric: str | None = None) -> list[dict[str, Any]]:
    """Return the runs that have the result `metric`, by default their main one; print the others."""
    found = []
    for run in runs:
        if (metric or run.get("metric")) in run:
            found.append(run)
        else:
            print(f"skipped, because it has no evaluation at the end: {run['folder']}")
    return found


def models(runs: list[dict[str, Any]], output: Path) -> tuple[Table, str | None]:
    """Return one row per model: pretraining at equal tokens and at equal time, then the fine-tuning tasks."""
    curves, rows = [], []
    for run in finished(runs):
        metric = run["metric"]
        row = {"row": run["name"], "score": run[metric] * (100 if metric.endswith(PERCENT) else 1)} | run
        if run["task"] in PREDICTED:
            curve = read_history(run["folder"]).dropna(subset=["tokens", "seconds", "loss"])
            if curve.empty:
                fail(f"{run['folder']}/trainer_state.json has no evaluations; pretrain with --eval_strategy steps")
            curves.append(curve.assign(run=len(rows), row=row["row"]))
        else:
            scratch = run["model"].endswith("from scratch")
            row["row"] = run["model"] if scratch else re.sub(r"-\d+$", "", Path(run["model"]).name)
        rows.append(row)
    if not rows:
        fail("no run was evaluated at its end")
    frame = pd.DataFrame(rows).reindex(columns=["row", "task", "score", "parameters", "tokens_per_second"])
    kinds = sorted(set(frame.task) & PREDICTED.keys())
    if len(kinds) > 1:
        fail("losses of masked and of causal language models cannot be compared; make a table of each")
    places = {axis: min((curve[axis].iloc[-1] for curve in curves), default=0) for axis in ("tokens", "seconds")}
    for axis, place in places.items():
        for name in ("loss", "accuracy"):
            values = {curve.run.iloc[0]: np.interp(place, curve[axis], curve[name]) for curve in curves}
            frame[f"{name} at {axis}"] = pd.Series(values, dtype=float)
    tasks = sorted(set(frame.task) - PREDICTED.keys())
    header = ["model", "parameters", "tokens/s in training"]
    for kind in kinds:
        header.append(f"{PREDICTED[kind]} after {show(int(places['tokens']))} tokens")
        header.append(f"after {places['seconds'] / 60:.1f} minutes")
    table = [header + tasks]
    for name, own in frame.groupby("row"):
        pretrained = own[own.task.isin(PREDICTED)]
        speed = (own if pretrained.empty else pretrained).tokens_per_second.mean()
        cells = [name, show(int(own.parameters.iloc[0])), "–" if np.isnan(speed) else show(float(speed))]
        for axis in places if kinds else ():
            losses, accuracies = (pretrained[f"{metric} at {axis}"] for metric in ("loss", "accuracy"))
            share = spread(100 * accuracies, unit=" %", missing="")
            cells.append(spread(losses, 2) + (f", {share}" if share else ""))
        table.append(cells + [spread(own[own.task == task].score) for task in tasks])
    if not curves:
        return table, None
    causal = kinds == ["causal language model"]
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    names = [curve.row.iloc[0] for curve in curves]
    axes = (("seconds", 60, "minutes of training"), ("tokens", 1e6, "millions of tokens"))
    for panel, (axis, unit, label) in zip(panels, axes, strict=True):
        for index, curve in enumerate(curves):
            height = curve.loss if causal else 100 * curve.accuracy
            name = names[index] if names[index] not in names[:index] else None
            panel.plot(curve[axis] / unit, height, color=f"C{names.index(names[index])}", label=name)
        panel.set(xlabel=label, ylabel="loss of next tokens" if causal else "accuracy at masked tokens in %")
    panels[0].legend()
    figure.savefig(output / "report.png", dpi=120)
    return table, "Learning curves over minutes and over tokens"


def student_cell(points: pd.DataFrame, name: str) -> str:
    """Return one figure of the table of students, over the seeds."""
    values = points[name].dropna().astype(float)
    if values.empty:
        return ""
    if name in ("tokens", "seconds"):
        return show(round(values.mean()))
    if name == "share":
        return f"{100 * values.mean():.3g} %"
    return spread(100 * values, 1, " %") if name in PERCENT else spread(values, 3)


def read_training(run: dict[str, Any]) -> pd.DataFrame:
    """Return the evaluations of a run without a teacher; the last one has the scores of its results."""
    points = read_history(run["folder"]).groupby("step").last().reset_index()
    if points.empty:
        fail(f"{run['folder']}/trainer_state.json has no training steps")
    for name in ("loss", "accuracy"):
        points.loc[points.index[-1], name] = run.get(f"eval_{name}")
    return points.dropna(subset=["loss"])


def read_teacher(run: dict[str, Any], scores: dict[str, float]) -> dict[str, Any]:
    """Return the scores of the teacher of a run, with its tokens and seconds if its folder contains them."""
    path = run["model"].rpartition(" from ")[2]
    folder, spent = Path(path), {}
    if (folder / "all_results.json").is_file() and (folder / "trainer_state.json").is_file():
        own = read_json(folder / "all_results.json") | {"folder": folder}
        last = own if own["task"] == "distillation" else read_training(own).iloc[-1]
        spent = {name: last.get(name) for name in ("tokens", "seconds")}
    name = re.sub(r"-\d+$", "", folder.name) if folder.is_dir() else path
    return {"student": name, "stage": "teacher", "step": 0, "seed": run["seed"], **spent, **scores}


def students(runs: list[dict[str, Any]], output: Path) -> tuple[Table, None]:
    """Return the stages of each student after its teacher, then the models trained from scratch."""
    runs = finished(runs, "eval_loss")
    teachers, points, used = {}, [], set()
    for run in (run for run in runs if run["task"] == "distillation"):
        stages = read_json(run["folder"] / "stages.json")
        if not (stages.get("teacher") and stages.get("rows")):
            fail(f"{run['folder']}/stages.json has no scores of the teacher, or none of the student")
        teacher = read_teacher(run, stages["teacher"])
        teachers[teacher["student"], run["seed"]] = teacher
        used.add(Path(run["model"].rpartition(" from ")[2]).resolve())
        about = {"teacher": teacher["student"], "student": run["name"], "seed": run["seed"]}
        points += [about | row for row in stages["rows"]]
    if not points:
        fail("there is no student that run_distill.py has evaluated")
    names = list(dict.fromkeys(name for name, _ in teachers))
    # Teacher after teacher, each followed by its students.
    points = [point for name in names for point in (
        *(teacher for (own, _), teacher in teachers.items() if own == name),
        *(point for point in points if point["teacher"] == name),
    )]  # fmt: skip
    for run in (run for run in runs if run["task"] != "distillation" and run["folder"].resolve() not in used):
        if not run["model"].endswith("from scratch"):
            print(f"skipped, because it has no teacher and was not trained from scratch: {run['folder']}")
            continue
        about = {"student": run["name"], "seed": run["seed"], "stage": "from scratch"}
        if len(names) == 1 and (names[0], run["seed"]) in teachers:
            about["teacher"] = names[0]
        points += [about | point for point in read_training(run).to_dict("records")]
    frame = pd.DataFrame(points).reindex(
        columns=["teacher", "student", "stage", "step", "seed", "tokens", "seconds", "loss", "accuracy", "agreement"]
    )
    baseline = [teachers.get((teacher, seed), {}) for teacher, seed in zip(frame.teacher, frame.seed, strict=True)]
    frame["share"] = frame.tokens / pd.Series([own.get("tokens") for own in baseline], dtype=float)
    frame["above"] = frame.loss - pd.Series([own.get("loss") for own in baseline], dtype=float)
    table = [["model", "stage", *STUDENT_COLUMNS, "seeds"]]
    for (teacher, student, stage, _), same in frame.groupby(
        ["teacher", "student", "stage", "step"], sort=False, dropna=False
    ):
        name = f"{student} of {teacher}" if len(names) > 1 and isinstance(teacher, str) else student
        cells = [student_cell(same, column) for column in STUDENT_COLUMNS.values()]
        table.append([name, stage, *cells, ", ".join(map(str, sorted(same.seed)))])
    return table, None


def paper_figure(run: dict[str, Any]) -> float | None:
    """Return the accuracy in the paper if the run has the rows and the length of the benchmark."""
    task = TASKS[run["task"]]
    full = (run["train_samples"] or 0) >= task.rows and run["max_length"] >= task.max_length
    return PAPERS[run["variant"]][list(TASKS).index(run["task"])] if full and run["variant"] in PAPERS else None


def lra(runs: list[dict[str, Any]], output: Path) -> tuple[Table, str]:
    """Return runs of Long Range Arena with the figures of the papers, in the order of the benchmark."""
    runs = [run for run in runs if run.get("task") in TASKS and "steps" in run]
    if not runs:
        fail("there is no all_results.json of a training run of run_lra.py")
    frame = pd.DataFrame(runs)
    names = ["train_seconds", "self_pretraining_seconds", "examples_per_second", "peak_memory_gb"]
    frame = frame.reindex(columns=list(dict.fromkeys([*frame, *LRA_KEYS, *names, "test_accuracy", "eval_accuracy"])))
    frame["minutes"] = (frame.train_seconds.fillna(0) + frame.self_pretraining_seconds.fillna(0)) / 60
    frame["order"] = frame.task.map(list(TASKS).index)
    frame = frame.sort_values(["order", "variant", "seed"])
    header = ["task", "model", "paper", "here", "seeds", "length", "training rows", "updates x batch", "minutes"]
    table = [[*header, "parameters", "examples/s", "peak GB", "hardware"]]
    tasks, variants = list(frame.task.unique()), sorted(frame.variant.unique())
    figure, axes = plt.subplots(2, len(tasks), figsize=(5 * len(tasks), 8), layout="constrained", squeeze=False)
    for _, group in frame.groupby(LRA_KEYS, sort=False, dropna=False):
        first = group.iloc[0]
        tested = group.test_accuracy.notna().all()
        scores = 100 * (group.test_accuracy if tested else group.eval_accuracy)
        paper, speed, memory = paper_figure(first), group.examples_per_second.mean(), group.peak_memory_gb.mean()
        table.append([
            first.task,
            first.variant + (" (self-pretrained)" if first.self_pretraining_steps else ""),
            "–" if paper is None else f"{paper:.2f} %",
            spread(scores, unit=" %" if tested else " % (validation)"),
            ", ".join(map(str, group.seed)),
            show(int(first.max_length)),
            show(int(first.train_samples)),
            f"{show(int(first.steps))} x {first.batch}",
            f"{group.minutes.mean():.1f}",
            show(int(first.parameters)),
            "–" if np.isnan(speed) else show(float(speed)),
            "–" if np.isnan(memory) else f"{memory:.2f}",
            first.hardware,
        ])  # fmt: skip
        speeds, curves = axes[:, tasks.index(first.task)]
        color = f"C{variants.index(first.variant)}"
        speeds.scatter(speed, scores.mean(), s=200 * np.nan_to_num(memory, nan=1.0), alpha=0.5, color=color)
        speeds.errorbar(speed, scores.mean(), scores.std(), color=color, capsize=3)
        if not np.isnan([speed, scores.mean()]).any():
            speeds.annotate(first.variant, (speed, scores.mean()), ha="center", va="center", fontsize=8)
        for index, (_, run) in enumerate(group.iterrows()):
            curve = read_history(run.folder).dropna(subset=["seconds", "accuracy"])
            minutes = (np.nan_to_num(run.self_pretraining_seconds) + curve.seconds) / 60
            curves.plot(minutes, 100 * curve.accuracy, color=color, label=None if index else first.variant)
    for task, speeds, curves in zip(tasks, *axes, strict=True):
        speeds.margins(0.25)
        speeds.set(title=task, xlabel="examples per second in training", ylabel="accuracy in %")
        curves.set(xlabel="minutes of training", ylabel="validation accuracy in %")
        curves.legend()
    figure.suptitle("Accuracy and speed; the area of a disc is the peak memory")
    figure.savefig(output / "report.png", dpi=100)
    return table, "Accuracy over speed and over minutes"


def main(argv: list[str] | None = None) -> dict[str, str]:
    tables = {function.__name__: function for function in (models, students, lra)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=tables)
    parser.add_argument("folders", nargs="+", metavar="DIR", help="outputs of runs, or folders that contain them")
    parser.add_argument("--output_dir", type=Path, default=Path("report"), help="folder for report.md and report.png")
    arguments = parser.parse_args(argv)
    runs, output = read_runs(arguments.folders), arguments.output_dir
    output.mkdir(parents=True, exist_ok=True)
    (header, *rows), plot = tables[arguments.table](runs, output)
    plt.close("all")
    text = "".join(f"| {' | '.join(cells)} |\n" for cells in [header, ["---"] * len(header), *rows])
    print(text)
    (output / "report.md").write_text(text + (f"\n![{plot}](report.png)\n" if plot else ""), encoding="utf-8")
    paths = {"report": str(output / "report.md")}
    return paths | ({"plot": str(output / "report.png")} if plot else {})


if __name__ == "__main__":
    main()
