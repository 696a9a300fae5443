"""The table of students and their teachers, checked against figures computed by hand."""

import json
from pathlib import Path

import pytest

from tests.examples.runs import assert_error

DISTILLED = {"task": "distillation", "metric": "eval_loss", "eval_loss": 1.0}
SCRATCH = {"task": "masked language model", "metric": "eval_perplexity", "model": "luna from scratch"}


@pytest.fixture
def write(tmp_path):
    """Write the files of a run: its summary, and the log or the stages."""

    def files(name: str, summary: dict, log: tuple = (), stages: dict | None = None) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "all_results.json").write_text(json.dumps(summary))
        names = ("step", "num_input_tokens_seen", "train_seconds", "eval_loss", "eval_accuracy")
        history = [{"loss": 9.0, "step": 1}, *(dict(zip(names, entry, strict=True)) for entry in log)]
        history.append({"step": 20, "num_input_tokens_seen": 2000, "train_seconds": 40.0, "train_loss": 5.0})
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
        if stages:
            (folder / "stages.json").write_text(json.dumps(stages))
        return folder

    return files


@pytest.fixture
def student(write):
    """Write a run of run_distill.py with two seeds; all results of the second except the teacher's are 0.2 worse."""

    def runs(name: str, teacher: str, rows: list[dict]) -> None:
        for seed in (1, 2):
            worse = 0.2 * (seed - 1)
            stages = {"teacher": {"loss": 4.0, "accuracy": 0.3}}
            stages["rows"] = [row | {"loss": row["loss"] + worse, "seconds": 10.0 * seed} for row in rows]
            model = f"luna from {teacher.format(seed)}"
            write(f"out/{name}-{seed}", DISTILLED | {"model": model, "seed": seed}, stages=stages)

    return runs


COPIED = {"stage": "copy", "step": 0, "tokens": 0, "loss": 7.0, "accuracy": 0.1, "agreement": 0.2}
CALIBRATED = {"stage": "calibrate", "step": 0, "tokens": 10, "loss": 5.0}
ALIGNED = [{"stage": "align", "step": step, "tokens": 400 * step, "loss": 4.5 - step / 4} for step in (1, 2)]


def read(report, folder: Path, output: Path) -> list[list[str]]:
    path = report.main(["students", str(folder), "--output_dir", str(output)])["report"]
    return [line.strip("|\n ").split(" | ") for line in Path(path).read_text().splitlines()]


def test_table(script, write, student, tmp_path, capsys):
    report = script("report")
    for seed in (1, 2):
        baseline = SCRATCH | {"model": "roberta from scratch", "seed": seed, "eval_loss": 4.0}
        write(f"out/teacher-{seed}", baseline, [(20, 2000, 35.0, 4.1, 0.3)])
    student("luna-64", str(tmp_path / "out" / "teacher-{}"), [COPIED, CALIBRATED, *ALIGNED])
    log = [(10, 1000, 15.0, 6.5, 0.2), (20, 2000, 30.0, 6.1, 0.25)]
    write("out/luna-nothing-2", SCRATCH | {"seed": 2, "eval_loss": 6.0, "eval_accuracy": 0.25}, log)
    write("out/tuned-1", SCRATCH | {"model": "out/luna-64-1", "seed": 1, "eval_loss": 1.0})
    write("out/unfinished-1", SCRATCH | {"seed": 1})
    table = read(report, tmp_path / "out", tmp_path / "report")
    assert table[0][:2] == ["model", "stage"] and table[0][2:] == [*report.STUDENT_COLUMNS, "seeds"]
    assert table[2:] == [
        ["teacher", "teacher", "2,000", "", "40", "4.000 ± 0.000", "", "30.0 ± 0.0 %", "", "1, 2"],
        ["luna-64", "copy", "0", "0 %", "15", "7.100 ± 0.141", "3.100 ± 0.141", "10.0 ± 0.0 %", "20.0 ± 0.0 %", "1, 2"],
        ["luna-64", "calibrate", "10", "0.5 %", "15", "5.100 ± 0.141", "1.100 ± 0.141", "", "", "1, 2"],
        ["luna-64", "align", "400", "20 %", "15", "4.350 ± 0.141", "0.350 ± 0.141", "", "", "1, 2"],
        ["luna-64", "align", "800", "40 %", "15", "4.100 ± 0.141", "0.100 ± 0.141", "", "", "1, 2"],
        ["luna-nothing", "from scratch", "1,000", "50 %", "15", "6.500", "2.500", "20.0 %", "", "2"],
        ["luna-nothing", "from scratch", "2,000", "100 %", "40", "6.000", "2.000", "25.0 %", "", "2"],
    ]
    said = capsys.readouterr().out
    assert (
        f"skipped, because it has no teacher and was not trained from scratch: {tmp_path / 'out' / 'tuned-1'}" in said
    )
    assert f"skipped, because it has no evaluation at the end: {tmp_path / 'out' / 'unfinished-1'}" in said


def test_several_teachers(script, write, student, tmp_path):
    """One of them is on the Hub, without training details; models trained from scratch then have no teacher."""
    report = script("report")
    write("other-1", SCRATCH | {"model": "roberta from scratch", "seed": 1, "eval_loss": 4.0})
    student("luna", "FacebookAI/roberta-base", [ALIGNED[0]])
    student("mega", str(tmp_path / "other-1"), [ALIGNED[1]])
    write("out/scratch-1", SCRATCH | {"seed": 1, "eval_loss": 6.0})
    rows = read(report, tmp_path / "out", tmp_path / "report")[2:]
    assert [row[:4] for row in rows] == [
        ["FacebookAI/roberta-base", "teacher", "", ""],
        ["luna of FacebookAI/roberta-base", "align", "400", ""],
        ["other", "teacher", "2,000", ""],
        ["mega of other", "align", "800", "40 %"],
        ["scratch", "from scratch", "2,000", ""],
    ]


def test_unsupported_inputs_raise(script, write, student, tmp_path):
    report = script("report")

    def assert_message(message: str, folder: Path) -> None:
        assert_error(lambda: report.main(["students", str(folder)]), message)

    assert_message("there is no all_results.json of a run", tmp_path / "nowhere")
    assert_message(
        "there is no student that run_distill.py has evaluated",
        write("scratch-1", SCRATCH | {"seed": 1, "eval_loss": 1}),
    )
    folder = write("luna-1", DISTILLED | {"model": "luna from x", "seed": 1}, stages={"teacher": {}, "rows": []})
    assert_message("stages.json has no scores of the teacher, or none of the student", folder)
    (folder / "stages.json").unlink()
    assert_message("stages.json cannot be read", folder)
