"""Measure what the native library is for, and compare it with targets: `python benchmarks/acceptance.py`.

Takes about 8 minutes on an idle machine. Writes `results/<processor>.json`, from which `docs/site/plots.py` draws plots
and fills tables of the documentation, and prints the table of targets. "0.5.0" is the backend `torch`, which computes
what that version did. Times are minima of variants that alternate in one process.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from report import FOLDER, Row, join, read, results_file, size_text


class Target(NamedTuple):
    """Ratio of the times of two variants.

    Args:
        name: words of the table.
        case: case of `cases.py`.
        size: fields of the size.
        over, under: the variants; `NAME:2` has two threads, others one.
        asked: `>=` or `<=`, and the limits of the forward pass and of both passes, or of the only pass.
        options: further options of `run.py`.
    """

    name: str
    case: str
    size: str
    over: str
    under: str
    asked: str
    options: str = ""


TARGETS = [
    Target(*(cell.strip() for cell in line.split("|")))
    for line in """
    S4D's formula / now, 8 x 4,096 positions | diagonal_ssm | real=0 b=8 n=4096 d=256 | s4d | luna_mega | >= 50 25
    0.5.0 / now, damped average with skip | damped_ema | b=8 n=512 d=256 directions=1 | torch | luna_mega | >= 4 4
    0.5.0 / now, two directions | damped_ema | b=8 n=512 d=256 directions=2 | torch | luna_mega | >= 3.3 3.3
    0.5.0 / now, complex average | complex_ema | b=8 n=512 d=256 | torch | luna_mega | >= 4 3.5
    0.5.0 / now, 1 x 64 positions | damped_ema | b=1 n=64 d=256 directions=1 | torch | luna_mega | >= 2 2.5
    one thread / two, 8 x 4,096 positions | damped_ema | b=8 n=4096 d=256 directions=1 | luna_mega | luna_mega:2 | >= 1.5
    Mega / RoBERTa, 512 tokens | encoders | n=512 num_hidden_layers=4 | mega_chunk_128 | roberta_sdpa | <= .92 .95
    Mega / RoBERTa, 4,096 tokens | encoders | n=4096 num_hidden_layers=4 | mega_chunk_128 | roberta_sdpa | <= .46 .43
    512 tokens, oneDNN | encoders | n=512 num_hidden_layers=4 | mega_chunk_128 | roberta_sdpa | <= .87 .83 | --products=onednn
    BERT / Mega, `Trainer` | trainer | n=128 | bert | mega | >= .85
    Megalodon / Llama, decoding step | decoding | n=600 b=1 | megalodon_512 | llama_sdpa | <= 1.3
    Mega / Llama, decoding step | decoding | n=600 b=1 | mega_chunk_512 | llama_sdpa | <= 1.0
    0.5.0 / now with AVX2 | damped_ema | b=8 n=512 d=256 directions=1 | torch | luna_mega | >= 2 2 | --instructions=avx2
    """.strip().splitlines()  # noqa: E501
]
# Measured with every target of a case, if they are installed.
OTHERS = {"damped_ema": ["original", "transformers", "copy"], "complex_ema": ["original", "copy"]}
# The curves of docs/operators.md.
CURVES = ["diagonal_ssm", "--time-limit=3", "--rounds=20"]


def old(variant: str) -> str:
    """Return the variant that computes the same as version 0.5.0 does."""
    name, colon, threads = variant.partition(":")
    new = {"luna_mega": "torch"} | {model: f"{model}@torch" for model in (name,) if model.startswith("mega")}
    return new.get(name, name) + colon + threads


def command(target: Target) -> list[str]:
    """Return the arguments of `run.py` that measure a target."""
    pair = [target.over, target.under]
    names, _, threads = zip(*(variant.partition(":") for variant in (*pair, *map(old, pair))), strict=True)
    variants = dict.fromkeys((*names, *(OTHERS.get(target.case, []) if ":" not in target.under else [])))
    options = ["--threads", "1", *sorted({*threads} - {""}), *target.options.split()]
    return [target.case, "--size", *target.size.split(), "--variants", *variants, *options]


def ratios(rows: list[Row], target: Target, over: str, under: str) -> list[float]:
    """Return the ratio of each pass."""
    given = dict(option.removeprefix("--").split("=") for option in target.options.split())
    wanted = {"instructions": None, "products": None, "case": target.case} | given
    rows = [row for row in rows if "error" not in row and wanted.items() <= row.items()]
    times = []
    for variant in (over, under):
        name, _, threads = variant.partition(":")
        found = [row for row in rows if (row["variant"], row["threads"]) == (name, int(threads or 1))]
        row = next(row for row in found if size_text(row) == target.size)
        names = [name for name in ("forward", "both") if f"{name}_ms" in row]
        times.append([row[f"{name}_ms"] for name in names[-len(target.asked.split()) + 1 :]])
    return [x / y for x, y in zip(*times, strict=True)]


def lines(rows: list[Row]) -> list[list[str]]:
    """Return the table of targets, forward pass and both passes; the last column marks those that are not reached."""
    lines = [["ratio of times", "size", "0.5.0", "asked", "now", ""]]
    for target in TARGETS:
        sign, *limits = target.asked.split()
        try:
            now = ratios(rows, target, target.over, target.under)
            before = ratios(rows, target, old(target.over), old(target.under))
        except StopIteration:
            lines.append([target.name, target.size, "", target.asked, "not measured", ""])
            continue
        reached = [x >= float(y) if sign == ">=" else x <= float(y) for x, y in zip(now, limits, strict=True)]
        before, now = (", ".join(f"{ratio:.3g}" for ratio in figures) for figures in (before, now))
        lines.append([target.name, target.size, before, target.asked, now, "" if all(reached) else "missed"])
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", default=[""], help="measure only targets whose text contains a word")
    parser.add_argument("--output", type=Path, default=results_file(), help="JSON file of the results")
    parser.add_argument("--rounds", default="100", help="maximum number of repetitions; 0 = print earlier results")
    arguments = parser.parse_args(argv)
    commands = [command(target) for target in TARGETS if any(word in str(target) for word in arguments.words)]
    for options in [CURVES, *commands] if arguments.words == [""] else commands:
        options = ["--rounds", arguments.rounds, *options, "--output", str(arguments.output)]
        if arguments.rounds != "0":
            subprocess.run([sys.executable, str(FOLDER / "run.py"), *options], check=True)
    print(join(lines(read(arguments.output))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
