"""Adds to a model's card how well the models do that were fine-tuned from it.

    python examples/card_results.py --model outputs/luna --runs outputs/luna-sst2-1 outputs/luna-sst2-2

The README.md in the folder of the model gets a section with a row for each task, in place of an earlier one. Runs of
one task share a row, with the mean and the standard deviation over their seeds.
"""

import argparse
import re
from pathlib import Path
from typing import Any

from common.arguments import fail
from common.summaries import mean_and_spread, read_summaries
from huggingface_hub import ModelCard

from luna_mega.escaping import markdown
from luna_mega.hub.card import FILE_NAME

TITLE, BEHIND = "Fine-tuned", "Training"


def read_runs(folders: list[str], model: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the summaries by task and metric; the script ends where a run did not begin from the model."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for folder, summary in read_summaries(folders):
        if Path(summary.get("model", "")).resolve() != model.resolve():
            fail(f"{folder} did not begin from {model}, but from {summary.get('model')}: leave it out")
        if summary.get("metric") not in summary:
            fail(f"{folder} has no evaluation at its end: run it with --do_eval true, or leave it out")
        groups.setdefault((summary["task"], summary["metric"]), []).append(summary)
    return groups


def make_section(groups: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
    """Return the text of the section."""
    lines = ["| task | metric | result | seeds |", "| --- | --- | --- | --- |"]
    for (task, metric), runs in sorted(groups.items()):
        result = mean_and_spread([run[metric] for run in runs], 4)
        seeds = ", ".join(str(run["seed"]) for run in sorted(runs, key=lambda run: run["seed"]))
        lines.append(f"| {markdown(task)} | {markdown(metric.removeprefix('eval_'))} | {result} | {seeds} |")
    table = "\n".join(lines)
    return f"## {TITLE}\n\nThe results of models that began from these weights, on validation examples.\n\n{table}\n\n"


def add_section(text: str, section: str) -> str:
    """Return the text of a card with a section in it, in place of one with the same title."""
    parts = [part for part in re.split(r"(?m)^(?=## )", text) if not part.startswith(f"## {TITLE}\n")]
    place = next((index for index, part in enumerate(parts) if part.startswith(f"## {BEHIND}\n")), len(parts))
    return "".join([*parts[:place], section, *parts[place:]])


def main(argv: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model, with its card")
    parser.add_argument("--runs", nargs="+", required=True, metavar="DIR", help="outputs of runs, or folders of them")
    arguments = parser.parse_args(argv)
    path = arguments.model / FILE_NAME
    if not path.is_file():
        fail(f"{path} is not there: give the output folder of a training")
    section = make_section(read_runs(arguments.runs, arguments.model))
    card = ModelCard.load(path)
    card.text = add_section(card.text, section)
    card.save(path)
    print(section)
    return str(path)


if __name__ == "__main__":
    main()
