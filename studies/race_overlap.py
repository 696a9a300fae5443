"""Share of the questions of RACE that the overlap of words answers, and the length of the options.

    python studies/race_overlap.py --dataset_config middle --output_dir outputs/overlap

The overlap is the sliding window of MCTest (Richardson et al. 2013, algorithm 1). It needs no training, and a model
that does no better has not learned to read.
"""

import argparse
import math
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from transformers import EvalPrediction

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from common.multiple_choice import TASKS, DataArguments, load_split
from common.report import print_table, save_json
from run_race import make_metrics

TASK = TASKS["race"]


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def overlap(passage: list[str], query: set[str]) -> float:
    """Return the greatest sum of log(1 + 1 / count), over words of `query`, in a window as long as the query."""
    counts = Counter(passage)
    weights = [math.log1p(1 / counts[word]) if word in query else 0.0 for word in passage]
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    size = min(len(query), len(passage))
    return float((sums[size:] - sums[: len(sums) - size]).max())


def score_options(row: dict[str, Any]) -> list[float]:
    """Return the overlap of the passage with the question and each of its options."""
    passage, question = words(row["article"]), words(row["question"])
    return [overlap(passage, {*question, *words(option)}) for option in row["options"]]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset_path", nargs="+", help="local folders instead of the Hub")
    parser.add_argument("--dataset_config", help="configuration on the Hub: middle, high")
    parser.add_argument("--split", choices=("validation", "test"), default="validation")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder for summary.json")
    arguments = parser.parse_args(argv)
    data = DataArguments(dataset_path=arguments.dataset_path, dataset_config=arguments.dataset_config)
    split = load_split(arguments.split, TASK, data, None)
    metrics, answers = make_metrics(split, TASK), np.array([TASK.letters.index(answer) for answer in split["answer"]])
    lengths = np.array([[len(option) for option in options] for options in split["options"]])
    summary: dict[str, Any] = {"task": "race", "metric": "eval_accuracy", "model": "sliding window", "parameters": 0}
    scores = {"eval": np.array([score_options(row) for row in split]), "longest": lengths, "shortest": -lengths}
    for name, values in scores.items():
        found = metrics(EvalPrediction(predictions=values, label_ids=answers))
        summary |= {f"{name}_{metric}": value for metric, value in found.items()}
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    save_json(summary, arguments.output_dir / "summary.json")
    print_table("RACE by the overlap of words, and by the longest or shortest option", summary)
    return summary


if __name__ == "__main__":
    main()
