"""Measures the ops and models of the registry against their baselines, all in one run.

    python benchmarks/run.py                          everything (about 15 minutes on 2 cores)
    python benchmarks/run.py --quick                  a few sizes
    python benchmarks/run.py luna_attention           one case

Prints a table and writes results.json, results.csv and one plot for each case into --output. Nothing is measured while
the variants of a case do not agree.
"""

import argparse
import csv
import datetime
import json
import multiprocessing
import platform
import sys
from pathlib import Path

import torch
from cases import CASES
from measure import agree, measure
from tqdm import tqdm
from transformers import __version__ as transformers_version

import luna_mega


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default all")
    parser.add_argument("--quick", action="store_true", help="a few sizes only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 = as PyTorch chooses")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"))
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    cases = [CASES[name] for name in arguments.cases or CASES]
    for case in cases:
        for size in case.parity:
            if difference := agree(case.name, size, arguments.device):
                print(f"parity fails, so nothing is measured: {difference}", file=sys.stderr)
                return 1
    rows = _measure_all(cases, arguments)
    _write(rows, arguments)
    for case in cases:
        _print_table(case, [row for row in rows if row["case"] == case.name])
    return 0


def _measure_all(cases, arguments):
    """A fresh process for every measurement, forked from a server that has loaded the modules and run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["measure"])
    rows = [
        {"case": case.name, **size, "variant": variant}
        for case in cases
        for size in (case.quick if arguments.quick else case.sizes)
        for variant in case.variants
    ]
    settings = (arguments.device, arguments.dtype, arguments.threads)
    for row in tqdm(rows, unit="measurement"):
        size = {name: value for name, value in row.items() if name not in ("case", "variant")}
        with context.Pool(1) as pool:
            row |= pool.apply(measure, (row["case"], row["variant"], size, *settings))
    return rows


def _write(rows, arguments):
    arguments.output.mkdir(parents=True, exist_ok=True)
    versions = {"torch": torch.__version__, "transformers": transformers_version, "luna_mega": luna_mega.__version__}
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{platform.machine()} CPU"
    about = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "device": device,
        "dtype": arguments.dtype,
        "threads": arguments.threads or torch.get_num_threads(),
        "versions": versions,
    }
    (arguments.output / "results.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1))
    fields = list(dict.fromkeys(field for row in rows for field in row))
    with open(arguments.output / "results.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(rows)
    for name in dict.fromkeys(row["case"] for row in rows):
        _plot(CASES[name], [row for row in rows if row["case"] == name], arguments.output / f"{name}.png")
    print(json.dumps(about))


def _key(row, without=()):
    return tuple(
        (field, row[field])
        for field in ("b", "l", "n", "directions", "function", "chunk")
        if field in row and field not in without
    )


def _print_table(case, rows):
    ours = {_key(row): row for row in rows if row["variant"] == case.ours}
    print(f"\n{case.name}: median ms and peak MB; ratios: {case.ours} against the row's variant (above 1: we win)")
    columns = " ".join(f"{name:>10}" for name in ("forward", "both", "memory"))
    print(f"{'size':34} {'variant':14} {columns}   {columns}")
    for row in rows:
        mine = ours[_key(row)]
        ratios = [f"{row[f] / max(mine[f], 1e-9):9.2f}x" for f in ("forward_ms", "both_ms", "memory_mb")]
        size = " ".join(f"{name}={value}" for name, value in _key(row))
        figures = f"{row['forward_ms']:10.1f} {row['both_ms']:10.1f} {row['memory_mb']:10.0f}"
        print(f"{size:34} {row['variant']:14} {figures}   {' '.join(ratios) if row is not mine else ''}")


def _plot(case, rows, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    plotted = (("both_ms", "forward + backward, ms"), ("memory_mb", "peak memory, MB"))
    for axis, (field, title) in zip(axes, plotted, strict=True):
        for line in dict.fromkeys((row["variant"], *_key(row, without="n")) for row in rows):
            points = [(row["n"], row[field]) for row in rows if (row["variant"], *_key(row, without="n")) == line]
            label = " ".join([line[0], *(f"{name}={value}" for name, value in line[1:])])
            axis.plot(*zip(*points, strict=True), "-o" if line[0] == case.ours else "--s", label=label)
        axis.set(xscale="log", yscale="log", xlabel="length n", ylabel=title, title=case.name)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
