"""Table of students beside their teachers, and beside the same models trained from nothing.

    python studies/distill_report.py outputs/distilled outputs/nothing --output_dir outputs/distillation

The script reads what run_distill.py wrote, and runs of the same models from nothing, in the folders or in the folders
in them. Folders are called NAME-SEED: runs that differ in the seed alone share their rows, and a figure is their mean
with its standard deviation. "Above its teacher" is the student's loss minus its teacher's. A model from nothing is
compared with the teacher of its seed, where all students have one teacher, and has to be scored on the same examples.
Tokens and seconds of a teacher are those in its own folder.
"""

import argparse
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from summaries import mean_and_spread, read_json, read_summaries

from luna_mega.training.arguments import fail
from luna_mega.training.report import show

DISTILLATION = "distillation"
# Column -> entry of a point.
COLUMNS = {
    "tokens": "tokens",
    "of the teacher's": "share",
    "seconds": "seconds",
    "loss": "loss",
    "above its teacher": "above",
    "accuracy": "accuracy",
    "agreement": "agreement",
}
Point = dict[str, Any]  # scores of one run after a step of a stage: student, seed, stage, step, and the columns


def strip_seed(folder: Path, seed: int) -> str:
    """Return NAME of NAME-SEED."""
    return folder.name.removesuffix(f"-{seed}")


def teacher_of(summary: dict[str, Any]) -> str:
    """Return the folder, or the name on the Hub, of the teacher of a run of run_distill.py."""
    return summary["model"].rpartition(" from ")[2]


def read_alone(folder: Path, summary: dict[str, Any]) -> list[Point]:
    """Return the evaluations of a run without a teacher; the last one is that of its end."""
    points: dict[int, Point] = {}
    for entry in read_json(folder / "trainer_state.json").get("log_history", []):
        if "eval_loss" in entry or "train_loss" in entry:
            point = points.setdefault(entry["step"], {"stage": "from nothing", "step": entry["step"]})
            point |= {"tokens": entry.get("num_input_tokens_seen"), "seconds": entry.get("train_seconds")}
            point |= {name: entry[f"eval_{name}"] for name in ("loss", "accuracy") if f"eval_{name}" in entry}
    if not points:
        fail(f"{folder}/trainer_state.json tells of no training")
    points[max(points)] |= {name: summary[f"eval_{name}"] for name in ("loss", "accuracy") if f"eval_{name}" in summary}
    return [point for point in points.values() if "loss" in point]


def read_teacher(summary: dict[str, Any], scores: dict[str, float]) -> Point:
    """Return the scores of a run's teacher, with its tokens and seconds where its folder tells them."""
    path, seed = teacher_of(summary), summary["seed"]
    folder, spent = Path(path), {}
    if (folder / "all_results.json").is_file() and (folder / "trainer_state.json").is_file():
        own = read_json(folder / "all_results.json")
        last = own if own["task"] == DISTILLATION else next(iter(read_alone(folder, own)[::-1]), {})
        spent = {name: last.get(name) for name in ("tokens", "seconds")}
    name = strip_seed(folder, seed) if folder.is_dir() else path
    return {"student": name, "stage": "teacher", "step": 0, "seed": seed, "share": None, **spent, **scores}


def compare(point: Point, teacher: Point | None) -> Point:
    """Return a point with its distance from a teacher, and its share of the teacher's tokens."""
    if teacher is None:
        return point
    tokens, own = point.get("tokens"), teacher.get("tokens")
    share = None if tokens is None or not own else tokens / own
    above = point["loss"] - teacher["loss"] if "loss" in point else None
    return point | {"teacher": teacher["student"], "share": share, "above": above}


def read_points(folders: list[str]) -> list[Point]:
    """Return the points in the order of the table: each teacher with its students, then models from nothing."""
    runs = []
    for folder, summary in read_summaries(folders):
        if "eval_loss" in summary:
            runs.append((folder, summary))
        else:
            print(f"left out, it has no evaluation at the end: {folder}")
    teachers: dict[tuple[str, int], Point] = {}
    students, used = [], set()
    for folder, summary in runs:
        if summary["task"] == DISTILLATION:
            stages = read_json(folder / "stages.json")
            if not (stages.get("teacher") and stages.get("rows")):
                fail(f"{folder}/stages.json has no scores of the teacher, or none of the student")
            teacher = read_teacher(summary, stages["teacher"])
            teachers[teacher["student"], summary["seed"]] = teacher
            used.add(Path(teacher_of(summary)).resolve())
            about = {"student": strip_seed(folder, summary["seed"]), "seed": summary["seed"]}
            students += [compare(about | row, teacher) for row in stages["rows"]]
    if not students:
        fail(f"{' '.join(folders)}: there is no student that run_distill.py has scored")
    names, alone = list(dict.fromkeys(name for name, _ in teachers)), []
    for folder, summary in runs:
        if summary["task"] != DISTILLATION and folder.resolve() not in used:
            if not summary["model"].endswith("from scratch"):
                print(f"left out, it began neither from a teacher nor from nothing: {folder}")
                continue
            teacher = teachers.get((names[0], summary["seed"])) if len(names) == 1 else None
            about = {"student": strip_seed(folder, summary["seed"]), "seed": summary["seed"]}
            alone += [compare(about | point, teacher) for point in read_alone(folder, summary)]
    ordered = []
    for name in names:
        ordered += [point for (own, _), point in teachers.items() if own == name]
        ordered += [point for point in students if point["teacher"] == name]
    return ordered + alone


def cell(points: Iterable[Point], name: str) -> str:
    """Return a figure of the table, over the seeds; nothing where no run has it."""
    values = [point[name] for point in points if point.get(name) is not None]
    if not values:
        return ""
    if name in ("tokens", "seconds"):
        return show(round(statistics.mean(values)))
    if name == "share":
        return f"{100 * statistics.mean(values):.3g} %"
    if name in ("accuracy", "agreement"):
        return mean_and_spread([100 * value for value in values], 1) + " %"
    return mean_and_spread(values, 3)


def make_table(points: list[Point]) -> list[list[str]]:
    """Return header and rows: a row for the scores of runs of one name after the same step of a stage."""
    groups: dict[tuple, list[Point]] = {}
    for point in points:
        key = tuple(point.get(name) for name in ("teacher", "student", "stage", "step"))
        groups.setdefault(key, []).append(point)
    several = sum(stage == "teacher" for _, _, stage, _ in groups) > 1
    table = [["model", "stage", *COLUMNS, "seeds"]]
    for (teacher, student, stage, _), same in groups.items():
        name = f"{student} of {teacher}" if several and teacher else student
        seeds = ", ".join(str(seed) for seed in sorted(point["seed"] for point in same))
        table.append([name, stage, *(cell(same, column) for column in COLUMNS.values()), seeds])
    return table


def main(argv: list[str] | None = None) -> dict[str, str]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="DIR", help="outputs of runs, or folders of them")
    parser.add_argument("--output_dir", type=Path, default=Path("distillation"), help="folder for report.md")
    arguments = parser.parse_args(argv)
    header, *rows = make_table(read_points(arguments.folders))
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in [header, ["---"] * len(header), *rows])
    path = arguments.output_dir / "report.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table, encoding="utf-8")
    print(table)
    return {"report": str(path)}


if __name__ == "__main__":
    main()
