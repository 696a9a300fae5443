r"""Measure an efficiency table of a paper on this machine, and print it with the numbers of the paper.

    python examples/papers.py luna-table2
    python examples/papers.py mega-table2-speed
    python examples/papers.py luna-table2 --lengths 64 --size num_hidden_layers=1    a trial in seconds

Speed and memory of a training step are relative to a Transformer. The models have 23 million parameters instead of the
sizes of LRA's Text, a batch has one sequence, and the Transformer is a RoBERTa with PyTorch's fused attention, whose
memory is linear and which the papers did not have. All figures are written to --output.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
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


def main(argv: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=TABLES, help="the table")
    parser.add_argument("--lengths", type=int, nargs="+", help="other lengths than those of the table")
    parser.add_argument("--size", nargs="+", default=[], metavar="FIELD=VALUE", help="other sizes of the models")
    parser.add_argument("--rounds", type=int, default=3, help="number of repetitions, of which the fastest counts")
    parser.add_argument("--output", type=Path, help="JSON file; default: outputs/papers/NAME.json")
    options = parser.parse_args(argv)
    table, output = TABLES[options.name], options.output or Path("outputs/papers", f"{options.name}.json")
    lengths = options.lengths or table.lengths
    limits = ["--rounds", str(options.rounds), "--time-limit", "600", "--output", str(output)]
    for length in lengths:
        if run.main(["encoders", "--variants", *table.printed, *limits, "--size", f"n={length}", *options.size]):
            sys.exit(1)
    text = report.join(make_lines(table, lengths, report.read(output)))
    print(f"\n{options.name}, in parentheses the paper:\n\n{text}")
    return text


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
