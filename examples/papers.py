r"""Measure a table of a paper on this machine, and print it with the numbers of the paper.

    python examples/papers.py luna-table2
    python examples/papers.py mega-table2-speed
    python examples/papers.py luna-table2 --lengths 64 --size num_hidden_layers=1    a trial in seconds
    python examples/papers.py luna-table3 --data data
    python examples/papers.py luna-table5 --data data --bf16 true
    python examples/papers.py mega-figure4 --data data --tasks text --max_steps 100
    python examples/papers.py mega-figure6 --data data --bf16 true

`luna-table2` and `mega-table2-speed` are speed and memory of a training step relative to a Transformer. The models have
23 million parameters instead of the sizes of LRA's Text, a batch has one sequence, and the Transformer is a RoBERTa
with PyTorch's fused attention, whose memory is linear and which the papers did not have.

The others train a model of a recipe for each row, which takes days with the steps of the recipe. `--data` has a folder
for each task, the first part of the name of its recipe (examples/lra/prepare.py makes those of Long Range Arena);
further options are those of the script of the recipe. `mega-figure6` evaluates language models with longer contexts and
chunks than in training, also with other biases, seeds and recipes. Figures of a paper have no printed numbers. All
results are written to --output.
"""

import argparse
import importlib
import itertools
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

EXAMPLES = Path(__file__).resolve().parent
RECIPES = EXAMPLES / "recipes"
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
    """A table of scores: a script, its recipe and metric for each column, and the models.

    `printed` maps the name of a model to fields of its configuration, and to the printed score of each column.
    """

    script: str
    columns: dict[str, tuple[str, str]]
    printed: dict[str, tuple[dict[str, object], tuple[float | None, ...]]]


def lra(family: str, *tasks: str) -> dict[str, tuple[str, str]]:
    """Return the columns of tasks of Long Range Arena."""
    return {task: (f"lra/{task}_{family}", "test_accuracy") for task in tasks}


CLS, MEAN = {"pooling": "cls"}, {"pooling": "packed_mean"}
WMT14 = "translation/wmt14_ende_luna_tied"
ABLATIONS = {
    "luna-table3": Ablation(
        "lra.run_lra",
        lra("luna", "listops", "text", "retrieval"),
        {
            "Luna-16, [CLS]": ({"projection_length": 16} | CLS, (37.43, 65.74, 79.38)),
            "Luna-16, P": ({"projection_length": 16} | MEAN, (38.06, 65.81, 80.22)),
            "Luna-128, [CLS]": ({"projection_length": 128} | CLS, (38.01, 65.74, 79.55)),
            "Luna-128, P": ({"projection_length": 128} | MEAN, (38.27, 65.89, 80.27)),
            "Luna-256, [CLS]": ({"projection_length": 256} | CLS, (37.98, 65.78, 79.56)),
            "Luna-256, P": ({"projection_length": 256} | MEAN, (38.36, 66.07, 80.25)),
        },
    ),
    "luna-table5": Ablation(
        "run_translation",
        {"dev. BLEU": (WMT14, "eval_bleu"), "test BLEU": (WMT14, "test_bleu")},
        {
            "Non-Contextual": ({"projection_length": 16, "contextual_projection": "false"}, (24.4, 25.2)),
            "Contextual": ({"projection_length": 16}, (25.9, 27.3)),
        },
    ),
    "mega-figure4": Ablation(
        "lra.run_lra",
        lra("mega", "text", "image"),
        {"h = 0": ({"ema_projection_size": 0, "truncation": "null"}, (None, None))}
        | {f"h = {h}": ({"ema_projection_size": h}, (None, None)) for h in (1, 2, 4, 8, 16, 32)}
        | {
            f"chunks of {size}": ({"use_chunking": True, "chunk_size": size}, (None, None))
            for size in (16, 32, 64, 128, 256, 512)
        },
    ),
}
FIGURE6 = "mega-figure6"
BIASES = ("rotary", "rope", "alibi", "t5", "simple")


def main(argv: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.allow_abbrev = False  # --seed is an option of the scripts, not --seeds
    parser.add_argument("name", choices=[*TABLES, *ABLATIONS, FIGURE6], help="the table or figure")
    parser.add_argument("--lengths", type=int, nargs="+", help="other lengths than those of the table")
    parser.add_argument("--size", nargs="+", default=[], metavar="FIELD=VALUE", help="other sizes of the models")
    parser.add_argument("--rounds", type=int, default=3, help="number of repetitions, of which the fastest counts")
    parser.add_argument("--data", type=Path, help="folder with a folder of data for each task: listops, wmt14, ...")
    parser.add_argument("--tasks", nargs="+", help="only these tasks")
    parser.add_argument("--recipe", type=Path, default=RECIPES / "clm" / "wikitext103_mega.yaml", help=f"of {FIGURE6}")
    parser.add_argument("--biases", nargs="+", choices=BIASES, default=["rotary"], help=f"biases of {FIGURE6}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42], help=f"seeds of {FIGURE6}")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2456, 4911, 9823, 24557, 49114], help="in tokens")
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 1024, 2048, 3072], help="chunks of the test")
    parser.add_argument("--last_share", type=float, default=1.0, help=f"last share of the test tokens of {FIGURE6}")
    parser.add_argument("--output", type=Path, help="JSON file; default: outputs/papers/NAME.json")
    options, more = parser.parse_known_args(argv)
    output = options.output or Path("outputs/papers", f"{options.name}.json")
    if options.name in TABLES:
        if more:
            parser.error(f"unrecognized arguments: {' '.join(more)}")
        lines = measure(TABLES[options.name], options, output)
    elif options.data is None or not options.data.is_dir():
        columns = [(options.recipe, "")] if options.name == FIGURE6 else ABLATIONS[options.name].columns.values()
        needed = ", ".join(dict.fromkeys(task_of(recipe) for recipe, _ in columns))
        parser.error(f"{options.name} requires --data, a folder with {needed}")
    elif options.name in ABLATIONS:
        known = sorted({task_of(recipe) for recipe, _ in ABLATIONS[options.name].columns.values()})
        if unknown := sorted({*(options.tasks or ())} - {*known}):
            parser.error(f"--tasks {' '.join(unknown)}: {options.name} has {', '.join(known)}")
        lines = train(ABLATIONS[options.name], options, output, more)
    else:
        lines = extrapolate(options, output, more)
    text = report.join(lines)
    print(f"\n{options.name}, in parentheses the paper:\n\n{text}")
    return text


def task_of(recipe: str | Path) -> str:
    """Return the task of a recipe, the name of its folder of data."""
    return Path(recipe).stem.split("_")[0]


def read_recipe(recipe: Path) -> dict[str, Any]:
    """Return the values of a recipe and of those that it extends."""
    values = yaml.safe_load(recipe.read_text(encoding="utf-8-sig"))
    base = values.pop("recipe", None)
    return (read_recipe(recipe.parent / base) if base else {}) | values


def run_recipe(script: str, recipe: Path, fields: dict[str, object], *options: object) -> dict[str, float]:
    """Run a script with a recipe and further fields of the configuration; return its metrics."""
    overrides = [
        read_recipe(recipe).get("config_overrides", ""),
        *(f"{field}={value}" for field, value in fields.items()),
    ]
    command = ["--recipe", recipe, "--config_overrides", ",".join(filter(None, overrides)), *options]
    return importlib.import_module(script).main([*map(str, command)])


def measure(table: Table, options: argparse.Namespace, output: Path) -> list[list[str]]:
    """Measure speed and memory, and return the lines of the table."""
    lengths = options.lengths or table.lengths
    limits = ["--rounds", str(options.rounds), "--time-limit", "600", "--output", str(output)]
    for length in lengths:
        if run.main(["encoders", "--variants", *table.printed, *limits, "--size", f"n={length}", *options.size]):
            sys.exit(1)
    return make_lines(table, lengths, report.read(output))


def train(table: Ablation, options: argparse.Namespace, output: Path, more: list[str]) -> list[list[str]]:
    """Train and test each model with each recipe, and return the lines of the table."""
    tasks = options.tasks or {task_of(recipe) for recipe, _ in table.columns.values()}
    columns = {name: column for name, column in table.columns.items() if task_of(column[0]) in tasks}
    scores: dict[str, dict[str, float]] = {}
    for number, (name, (fields, _)) in enumerate(table.printed.items()):
        scores[name] = {}
        for recipe in dict.fromkeys(recipe for recipe, _ in columns.values()):
            folder = output.with_suffix("") / f"{task_of(recipe)}-{number}"
            paths = ["--dataset_path", options.data / task_of(recipe), "--output_dir", folder]
            metrics = run_recipe(table.script, RECIPES / f"{recipe}.yaml", fields, *paths, *more)
            scores[name] |= {
                column: metrics[metric] * (100 if metric == "test_accuracy" else 1)
                for column, (other, metric) in columns.items()
                if other == recipe
            }
        write(output, {"options": more, "scores": scores})
    lines = [["score", *columns]]
    for name, found in scores.items():
        printed = dict(zip(table.columns, table.printed[name][1], strict=True))
        cells = [f"{found[column]:.2f}" + (f" ({printed[column]})" if printed[column] else "") for column in columns]
        lines.append([name, *cells])
    return lines


def extrapolate(options: argparse.Namespace, output: Path, more: list[str]) -> list[list[str]]:
    """Train a language model for each bias and seed; return its scores with other contexts and chunks than in training.

    A model that `output` has from an earlier call is not trained again.
    """
    evaluation, data = importlib.import_module("eval_lm"), options.data / task_of(options.recipe)
    unit = read_recipe(options.recipe).get("tokenization")
    metric, results = "bits_per_token" if unit in ("byte", "char") else "perplexity", []
    for bias, seed in itertools.product(options.biases, options.seeds):
        folder = output.with_suffix("") / f"{bias}-{seed}"
        if not (folder / "all_results.json").is_file():
            paths = ["--dataset_path", data, "--output_dir", folder, "--seed", seed]
            run_recipe("run_clm", options.recipe, {"relative_positional_bias": bias}, *paths, *more)
        paths = ["--model_name_or_path", folder, "--dataset_path", data, "--output_dir", folder / "scores"]
        lengths = ["--split", "test", "--last_share", options.last_share, "--eval_context", *options.contexts]
        if bias != "simple":  # its table has the length of the chunks in training
            lengths += ["--chunk_size", *options.chunks]
        scores = evaluation.main([*map(str, [*paths, *lengths])])
        results += [{"bias": bias, "seed": seed} | score for score in scores]
        write(output, {"recipe": options.recipe.name, "metric": metric, "options": more, "scores": results})
    return make_lines_of_biases(results, metric)


def make_lines_of_biases(results: list[dict[str, Any]], metric: str) -> list[list[str]]:
    """Return the mean and the standard deviation of a metric over the seeds, by bias, context and chunk."""
    groups: dict[tuple[str, int], dict[int, list[float]]] = {}
    for row in results:
        chunks = groups.setdefault((row["bias"], row["context"]), {})
        chunks.setdefault(row["chunk"], []).append(row[metric])
    sizes = sorted({row["chunk"] for row in results})
    lines = [[f"bias, context ({metric.replace('_', ' ')})", *(f"chunks of {size:,}" for size in sizes)]]
    for (bias, context), chunks in groups.items():
        cells = []
        for size in sizes:
            values = chunks.get(size, [])
            spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.3f}{spread}" if values else "")
        lines.append([f"{bias}, {context:,}", *cells])
    return lines


def write(output: Path, results: dict[str, Any]) -> None:
    """Write results with the machine and the date."""
    results = report.machine() | results
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


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
