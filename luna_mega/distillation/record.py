"""Record of a distillation: scores of the student after each stage, as JSON and for the model card."""

import json
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard
from huggingface_hub.errors import HTTPError
from transformers import TrainingArguments

from luna_mega.distillation.recipe import DistillArguments, Done
from luna_mega.distillation.stages import StageTrainer
from luna_mega.escaping import code, markdown
from luna_mega.training.report import show

STAGES = ("copy", "calibrate", "align", "distill")


class Record:
    """Rows of `stages.json`: scores of the student, and the tokens and seconds of all stages until then.

    Tokens are counted in calibration, alignment and distillation. Seconds include the teacher's.
    """

    def __init__(self, training: TrainingArguments, resumed: bool):
        self.path, self.is_first = Path(training.output_dir, "stages.json"), training.process_index == 0
        self.rows: list[dict[str, Any]] = []
        self.teacher: dict[str, float] = {}
        if resumed and self.path.is_file():
            self.rows = json.loads(self.path.read_text(encoding="utf-8-sig"))["rows"]

    def say(self, text: str) -> None:
        if self.is_first:
            print(text, flush=True)

    def spent(self) -> dict[str, float]:
        """Return the tokens and seconds of all stages so far."""
        last = self.rows[-1] if self.rows else {"tokens": 0, "seconds": 0.0}
        return {name: last[name] for name in ("tokens", "seconds")}

    def add(self, stage: str, entries: list[dict[str, float]]) -> None:
        """Add entries of a stage: step, tokens and seconds of that stage, and scores; and save all rows."""
        self.rows = [row for row in self.rows if STAGES.index(row["stage"]) < STAGES.index(stage)]
        before, names = self.spent(), ("loss", "accuracy", "agreement")
        for entry in entries:
            spent = {name: before[name] + entry[name] for name in before}
            scores = {name: entry[name] for name in names if name in entry}
            self.rows.append({"stage": stage, "step": entry["step"], **spent, **scores})
        if self.is_first:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"teacher": self.teacher, "rows": self.rows}, indent=2)
            self.path.write_text(text + "\n", encoding="utf-8")
        self.say(
            f"stage {stage}: " + ", ".join(f"{name} {show(x)}" for name, x in self.rows[-1].items() if name != "stage")
        )

    def add_row(self, stage: str, done: Done, scores: dict[str, float]) -> None:
        """Add a stage without training, and the scores of the student after it."""
        self.add(stage, [{"step": 0, "tokens": done.tokens, "seconds": done.seconds, **scores}])

    def add_training(self, trainer: StageTrainer) -> None:
        """Add the logged evaluations and the end of a stage."""
        entries: dict[int, dict[str, float]] = {}
        for logged in trainer.state.log_history:
            if "eval_loss" in logged or "train_loss" in logged:
                entry = entries.setdefault(logged["step"], {"step": logged["step"]})
                entry |= {"tokens": logged["num_input_tokens_seen"], "seconds": logged["train_seconds"]}
                entry |= {name.removeprefix("eval_"): x for name, x in logged.items() if name.startswith("eval_")}
        self.add(trainer.stage, list(entries.values()))

    @property
    def summary(self) -> dict[str, Any]:
        """Entries of the summary: the teacher's scores, and tokens and seconds of all stages."""
        return (
            {f"teacher_{name}": value for name, value in self.teacher.items()}
            | self.spent()
            | {"stages": str(self.path)}
        )

    @property
    def table(self) -> str:
        """The teacher and the end of every stage, as Markdown."""
        names = ("tokens", "seconds", "loss", "accuracy", "agreement")
        ends = {row["stage"]: row for row in self.rows}
        lines = [" | ".join(["", *names]), " | ".join(["---"] * (1 + len(names)))]
        for name, row in ({"teacher": self.teacher} | ends).items():
            lines.append(" | ".join([name, *(show(row[key]) if key in row else "" for key in names)]))
        return "\n".join(f"| {line} |" for line in lines)


def license_of(teacher: str) -> str | None:
    """Return the license in the card of a model, in its folder or on the Hub; None if it is unknown."""
    try:
        file = Path(teacher, "README.md")
        license = (ModelCard.load(file) if Path(teacher).is_dir() else ModelCard.load(teacher)).data.license
    except (HTTPError, OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    return license if isinstance(license, str) else None


def describe_distillation(model: DistillArguments, record: Record) -> dict[str, Any]:
    """Return the entries of the model card: teacher, license and the results of the stages."""
    license = license_of(model.teacher)
    licensed = f"Its card names the license {markdown(license)}." if license else "No license of it is known."
    name = Path(model.teacher).resolve().name if Path(model.teacher).exists() else model.teacher
    text = (
        f"The teacher is {code(name)}. {licensed} The table compares the teacher and the student after each stage on "
        "the same validation examples, with the tokens and seconds of all stages so far. Agreement is the share of "
        f"predictions that equal the teacher's.\n\n{record.table}"
    )
    return {"origin": "distilled", "sections": {"Distillation": text}}
