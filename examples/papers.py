r"""Measure a table of a paper on this machine, and print it with the numbers of the paper.

    python examples/papers.py luna-table2
    python examples/papers.py mega-table2-speed
    python examples/papers.py luna-table2 --lengths 64 --size num_hidden_layers=1    a trial in seconds
    python examples/papers.py luna-table3 --data data
    python examples/papers.py mega-figure4 --data data --tasks text --max_steps 100

`luna-table2` and `mega-table2-speed` are speed and memory of a training step relative to a Transformer. The models have
23 million parameters instead of the sizes of LRA's Text, a batch has one sequence, and the Transformer is a RoBERTa
with PyTorch's fused attention, whose memory is linear and which the papers did not have.

`luna-table3` and `mega-figure4` train a model of the recipe of Long Range Arena for each number, which takes days with
the steps of the recipe. `--data` has a folder for each task (examples/lra/prepare.py); further options are those of
examples/lra/run_lra.py. Figures of a paper have no printed numbers. All results are written to --output.
"""

import argparse
import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

EXAMPLES = Path(__file__).resolve().parent
sys.path[:0] = [str(EXAMPLES.parent / "benchmarks"), str(EXAMPLES)]
import report
import run


@dataclass(frozen=True)
class Table:
    """A table: lengths, and for each variant of the case `encoders` its printed name, speeds and memory."""

    lengths: tuple[int, ...]
    printed: dict[str, tuple[str, tuple[float, ...], tuple[float, ...]]]


TABLES = {
    "luna-table2": Table(
        (1024, 2048, 3072, 4096),
        {
            "roberta_sdpa": ("Transformer", (1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0)),
            "luna_16": ("Luna-16", (1.2, 1.8, 3.7, 5.5), (0.44, 0.23, 0.17, 0.10)),
            "luna_128": ("Luna-128", (1.1, 1.7, 3.4, 5.1), (0.49, 0.28, 0.21, 0.14)),
            "luna_256": ("Luna-256", (1.1, 1.7, 3.3, 4.9), (0.60, 0.33, 0.23, 0.16)),
        },
    ),
    "mega-table2-speed": Table(
        (4096,),
        {
            "roberta_sdpa": ("XFM", (1.0,), (1.0,)),
            "mega": ("Mega", (2.9,), (0.31,)),
            "mega_chunk_128": ("Mega-chunk", (5.5,), (0.13,)),
        },
    ),
}


@dataclass(frozen=True)
class Ablation:
    """A table of accuracies: printed name -> fields of the configuration, and the printed accuracy of each task."""

    family: str
    tasks: tuple[str, ...]
    printed: dict[str, tuple[dict[str, object], tuple[float | None, ...]]]


CLS, MEAN = {"pooling": "cls"}, {"pooling": "packed_mean"}
ABLATIONS = {
    "luna-table3": Ablation(
        "luna",
        ("listops", "text", "retrieval"),
        {
            "Luna-16, [CLS]": ({"projection_length": 16} | CLS, (37.43, 65.74, 79.38)),
            "Luna-16, P": ({"projection_length": 16} | MEAN, (38.06, 65.81, 80.22)),
            "Luna-128, [CLS]": ({"projection_length": 128} | CLS, (38.01, 65.74, 79.55)),
            "Luna-128, P": ({"projection_length": 128} | MEAN, (38.27, 65.89, 80.27)),
            "Luna-256, [CLS]": ({"projection_length": 256} | CLS, (37.98, 65.78, 79.56)),
            "Luna-256, P": ({"projection_length": 256} | MEAN, (38.36, 66.07, 80.25)),
        },
    ),
    "mega-figure4": Ablation(
        "mega",
        ("text", "image"),
        {"h = 0": ({"ema_projection_size": 0, "truncation": "null"}, (None, None))}
        | {f"h = {h}": ({"ema_projection_size": h}, (None, None)) for h in (1, 2, 4, 8, 16, 32)}
        | {
            f"chunks of {size}": ({"use_chunking": True, "chunk_size": size}, (None, None))
            for size in (16, 32, 64, 128, 256, 512)
        },
    ),
}


def main(argv: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*TABLES, *ABLATIONS], help="the table")
    parser.add_argument("--lengths", type=int, nargs="+", help="other lengths than those of the table")
    parser.add_argument("--size", nargs="+", default=[], metavar="FIELD=VALUE", help="other sizes of the models")
    parser.add_argument("--rounds", type=int, default=3, help="number of repetitions, of which the fastest counts")
    parser.add_argument("--data", type=Path, help="folder with a folder of data for each task")
    parser.add_argument("--tasks", nargs="+", help="only these tasks")
    parser.add_argument("--output", type=Path, help="JSON file; default: outputs/papers/NAME.json")
    options, more = parser.parse_known_args(argv)
    output = options.output or Path("outputs/papers", f"{options.name}.json")
    if options.name in ABLATIONS:
        if options.data is None or not options.data.is_dir():
            parser.error(f"{options.name} requires --data, a folder with {', '.join(ABLATIONS[options.name].tasks)}")
        lines = train(ABLATIONS[options.name], options, output, more)
    elif more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    else:
        lines = measure(TABLES[options.name], options, output)
    text = report.join(lines)
    print(f"\n{options.name}, in parentheses the paper:\n\n{text}")
    return text


def measure(table: Table, options: argparse.Namespace, output: Path) -> list[list[str]]:
    """Measure speed and memory, and return the lines of the table."""
    lengths = options.lengths or table.lengths
    limits = ["--rounds", str(options.rounds), "--time-limit", "600", "--output", str(output)]
    for length in lengths:
        if run.main(["encoders", "--variants", *table.printed, *limits, "--size", f"n={length}", *options.size]):
            sys.exit(1)
    return make_lines(table, lengths, report.read(output))


def train(table: Ablation, options: argparse.Namespace, output: Path, more: list[str]) -> list[list[str]]:
    """Train and test a model for each number, and return the lines of the table."""
    script, results = importlib.import_module("lra.run_lra"), {}
    tasks = [task for task in table.tasks if options.tasks is None or task in options.tasks]
    lines = [["test accuracy (%)", *tasks]]
    for number, (name, (fields, accuracies)) in enumerate(table.printed.items()):
        cells = []
        for task in tasks:
            recipe = EXAMPLES / "recipes" / "lra" / f"{task}_{table.family}.yaml"
            overrides = yaml.safe_load(recipe.read_text(encoding="utf-8-sig")).get("config_overrides", "")
            overrides = ",".join([*filter(None, [overrides]), *(f"{field}={value}" for field, value in fields.items())])
            command = ["--recipe", str(recipe), "--dataset_path", str(options.data / task)]
            command += [
                "--config_overrides",
                overrides,
                "--output_dir",
                str(output.with_suffix("") / f"{task}-{number}"),
            ]
            accuracy = 100 * script.main([*command, *more])["test_accuracy"]
            results.setdefault(name, {})[task] = accuracy
            printed = accuracies[table.tasks.index(task)]
            cells.append(f"{accuracy:.2f}" + (f" ({printed:.2f})" if printed else ""))
        lines.append([name, *cells])
        output.write_text(json.dumps({"options": more, "test accuracy": results}, indent=1) + "\n", encoding="utf-8")
    return lines


def make_lines(table: Table, lengths: tuple[int, ...], rows: list[report.Row]) -> list[list[str]]:
    """Return the lines of the table in the form of the paper."""
    found = {(row["variant"], row["size"]["n"]): row for row in rows}
    base = next(iter(table.printed))
    lines = [["speed / memory", *(f"{n:,} tokens" for n in lengths)]]
    for variant, (name, speeds, memories) in table.printed.items():
        cells = []
        for n in lengths:
            mine, other = found[variant, n], found[base, n]
            ratios = f"{other['both_ms'] / mine['both_ms']:.1f}", f"{mine['both_mb'] / other['both_mb']:.2f}"
            if n in table.lengths:
                index = table.lengths.index(n)
                ratios = f"{ratios[0]} ({speeds[index]:.1f})", f"{ratios[1]} ({memories[index]:.2f})"
            cells.append(" / ".join(ratios))
        lines.append([name, *cells])
    return lines


if __name__ == "__main__":
    main()
