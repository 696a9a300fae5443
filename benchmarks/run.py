"""Measures the ops and models of the registry against their baselines, all in one run.

    python benchmarks/run.py                              everything (about 20 minutes on 2 cores)
    python benchmarks/run.py --quick                      a few sizes
    python benchmarks/run.py luna_attention               one case
    python benchmarks/run.py --device cuda --dtype bfloat16    on a GPU, with the Triton kernels

Prints a table and writes results.json, results.csv and one plot for each case into --output. Where the variants of a
case do not agree, nothing is measured.
"""

import argparse
import csv
import dataclasses
import datetime
import json
import multiprocessing
import platform
import sys
from pathlib import Path

import torch
from cases import CASES
from floors import rates
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
            if difference := agree(case.name, size, arguments.device, arguments.dtype):
                print(f"parity fails, so nothing is measured: {difference}", file=sys.stderr)
                return 1
    peaks = rates(arguments.device, arguments.dtype)
    rows = _measure_all(cases, arguments)
    for row in rows:
        row |= _per_second(CASES[row["case"]], row, peaks, getattr(torch, arguments.dtype).itemsize)
    _write(rows, peaks, arguments)
    for case in cases:
        _print_table(case, [row for row in rows if row["case"] == case.name])
    return 0


def _measure_all(cases, arguments):
    """Measure everything, on a CPU each in a process of its own, so that none sees another's memory.

    These processes are forked from a server that has loaded the modules and run nothing. A GPU counts memory itself.
    """
    rows = [
        {"case": case.name, **size, "variant": variant}
        for case in cases
        for size, variant in case.measurements(arguments.device, arguments.quick)
    ]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["measure"])
    for row in tqdm(rows, unit="measurement"):
        size = {name: value for name, value in row.items() if name not in ("case", "variant")}
        work = (row["case"], row["variant"], size, arguments.device, arguments.dtype, arguments.threads)
        if arguments.device == "cuda":
            row |= measure(*work)
            torch.cuda.empty_cache()
        else:
            with context.Pool(1) as pool:
                row |= pool.apply(measure, work)
    return rows


def _per_second(case, row, peaks, width):
    """Return the GB/s and TFLOP/s that the algorithm needs at least, and their percentage of the machine's limit."""
    if case.floor is None or "error" in row:
        return {}
    sizes = {name: value for name, value in row.items() if name in SIZES}
    forward, backward = case.floor(width, **sizes)
    result = {}
    for name, floor in (("forward", forward), ("backward", backward)):
        seconds = row[f"{name}_ms"] / 1000
        result[f"{name}_gb_per_s"] = floor.bytes / seconds / 1e9
        result[f"{name}_tflop_per_s"] = (floor.flops + floor.float32) / seconds / 1e12
        result[f"{name}_percent_of_floor"] = 100 * peaks.milliseconds(floor) / row[f"{name}_ms"]
    return result


def _write(rows, peaks, arguments):
    arguments.output.mkdir(parents=True, exist_ok=True)
    versions = {"torch": torch.__version__, "transformers": transformers_version, "luna_mega": luna_mega.__version__}
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{platform.machine()} CPU"
    about = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "device": device,
        "dtype": arguments.dtype,
        "threads": arguments.threads or torch.get_num_threads(),
        "rates": dataclasses.asdict(peaks),
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


SIZES = ("b", "l", "n", "directions", "function", "chunk", "causal", "masked", "shared", "values")


def _key(row, without=()):
    return tuple((field, row[field]) for field in SIZES if field in row and field not in without)


def _print_table(case, rows):
    ours = {_key(row): row for row in rows if row["variant"] == case.ours}
    print(f"\n{case.name}: median ms and peak MB; ratios: {case.ours} against the row's variant (above 1: we win)")
    passes = ("forward", "backward", "both")
    columns = " ".join(f"{name + ' ms':>11} {'MB':>7}" for name in passes)
    print(
        f"{'size':40} {'variant':18} {columns}   ratios{'' if case.floor is None else 31 * ' ' + 'GB/s TFLOP/s %floor'}"
    )
    for row in rows:
        mine, size = ours[_key(row)], " ".join(f"{name}={value}" for name, value in _key(row))
        line = f"{size:40} {row['variant']:18} "
        if "error" in row:
            print(f"{line}{row['error']}")
            continue
        line += " ".join(f"{row[f'{name}_ms']:11.3f} {row[f'{name}_mb']:7.0f}" for name in passes)
        ratios = []
        if row is not mine and "error" not in mine:
            fields = ("forward_ms", "backward_ms", "both_ms", "both_mb")
            ratios = [f"{row[name] / max(mine[name], 1e-9):7.2f}x" for name in fields]
        line += f"   {' '.join(ratios):35}"
        for name in () if case.floor is None else passes[:2]:
            values = [row[f"{name}_{field}"] for field in ("gb_per_s", "tflop_per_s", "percent_of_floor")]
            line += " {:7.0f} {:7.2f} {:6.1f}".format(*values)
        print(line)


def _plot(case, rows, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    plotted = (("both_ms", "forward + backward, ms"), ("both_mb", "peak memory, MB"))
    rows = [row for row in rows if "error" not in row]
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
