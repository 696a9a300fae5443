"""Measure ops and models of the registry and their baselines in one run.

    python benchmarks/run.py                              everything (about 40 minutes on 2 cores)
    python benchmarks/run.py --quick                      the first size of every case
    python benchmarks/run.py luna_attention               one case
    python benchmarks/run.py encoders --lengths 512 16384 --time-limit 120
    python benchmarks/run.py timestep_norm --turns 21     alternating variants, for machines whose speed drifts
    python benchmarks/run.py decoding --turns 15 --threads 1 --lengths 512     milliseconds of a decoding step
    python benchmarks/run.py memory --device cuda --lengths 131072     peak bytes per token of a training step
    python benchmarks/run.py ssm ssm_real --threads 1 --lengths 512 4096     state space models
    python benchmarks/run.py --device cuda --dtype bfloat16    on a GPU, with the Triton kernels

Prints the tables and writes them to results.md in --output, all figures to results.json and results.csv, and one plot
for each case. Nothing is measured if the variants of a case do not agree, or if compared models differ in size.
"""

import argparse
import csv
import dataclasses
import datetime
import json
import multiprocessing
import os
import platform
import sys
from pathlib import Path

import torch
from cases import CASES
from floors import rates
from measure import agree, limit_memory, measure, parameters, take_turns
from tables import SIZES, markdown, plot
from tqdm import tqdm
from transformers import __version__ as transformers_version

import luna_mega


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"cases to run (default: all): {', '.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help="the first size of every case only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 = as PyTorch chooses")
    parser.add_argument("--lengths", type=int, nargs="+", help="measure only these lengths n")
    parser.add_argument("--time-limit", type=float, help="maximum seconds of a row; CPU only")
    parser.add_argument(
        "--turns", type=int, metavar="N", help="alternate the variants N times on the CPU; print times only"
    )
    parser.add_argument(
        "--variants", nargs="+", help="variants for --turns, the baseline of the ratios first; default all"
    )
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"))
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if arguments.time_limit is not None and arguments.device == "cuda":
        parser.error("--time-limit is only supported on a CPU, where each row has a separate process; remove it")
    cases = [CASES[name] for name in arguments.cases or CASES]
    if arguments.variants and not arguments.turns:
        parser.error("--variants requires --turns")
    for case in cases if arguments.variants else ():
        if unknown := set(arguments.variants) - case.variants.keys():
            parser.error(f"{case.name} has no variant {', '.join(unknown)}; it has {', '.join(case.variants)}")
    if arguments.turns:
        return _print_turns(cases, arguments)
    rows = _rows(cases, arguments)
    if not rows:
        parser.error(f"no case has a length of {arguments.lengths}")
    counts = {case.name: parameters(case.name) for case in cases if case.unit is not None}
    for name, count in counts.items():
        if max(count.values()) > 1.05 * min(count.values()):
            print(f"models differ by more than 5 %, so nothing is measured: {name} {count}", file=sys.stderr)
            return 1
    for case in cases:
        for size in case.parity:
            if difference := agree(case.name, size, arguments.device, arguments.dtype):
                print(f"parity fails, so nothing is measured: {difference}", file=sys.stderr)
                return 1
    peaks = rates(arguments.device, arguments.dtype)
    _measure_all(rows, arguments)
    for row in rows:
        if row["case"] in counts:
            row["parameters"] = counts[row["case"]][row["variant"]]
        row |= _per_second(CASES[row["case"]], row, peaks, getattr(torch, arguments.dtype).itemsize)
    _write(rows, peaks, arguments)
    return 0


def _rows(cases, arguments):
    return [
        {"case": case.name, **size, "variant": variant}
        for case in cases
        for size, variant in case.measurements(arguments.device, arguments.quick)
        if arguments.lengths is None or size.get("n") in arguments.lengths
    ]


def _print_turns(cases, arguments):
    """Print the medians of alternating variants, and their ratios to the first variant."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    for case in cases:
        variants = arguments.variants or list(case.variants)
        print(f"\n| {case.name} | pass (ms) | {' | '.join(variants)} |\n{'|---' * (2 + len(variants))}|")
        for size in case.sizes[:1] if arguments.quick else case.sizes:
            if arguments.lengths and size.get("n") not in arguments.lengths:
                continue
            label = " ".join(f"{field} = {value:,}" for field, value in size.items())
            for name, medians in take_turns(case, variants, size, arguments.dtype, arguments.turns).items():
                cells = [f"{median:,.1f} ({median / medians[0]:.2f})" for median in medians]
                print(f"| {label} | {name} | {' | '.join(cells)} |", flush=True)
    return 0


def _measure_all(rows, arguments):
    """Measure all rows; on a CPU, each row in a separate process, because memory is measured per process.

    The processes are forked from a server that has only loaded the modules.
    """
    context = multiprocessing.get_context("forkserver")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # before Python 3.13 the server does not inherit sys.path
    context.set_forkserver_preload(["measure"])
    for row in tqdm(rows, unit="measurement"):
        size = {name: value for name, value in row.items() if name not in ("case", "variant")}
        work = (row["case"], row["variant"], size, arguments.device, arguments.dtype, arguments.threads)
        if arguments.device == "cuda":
            row |= measure(*work)
            torch.cuda.empty_cache()
        else:
            with context.Pool(1, initializer=limit_memory) as pool:
                try:
                    row |= pool.apply_async(measure, work).get(arguments.time_limit)
                except multiprocessing.TimeoutError:
                    row["error"] = f"more than {arguments.time_limit:g} s"


def _per_second(case, row, peaks, width):
    """Return the GB/s and TFLOP/s that the algorithm needs at least, and the floor in percent of the measured time."""
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
    (arguments.output / "results.json").write_text(
        json.dumps({"about": about, "rows": rows}, indent=1), encoding="utf-8"
    )
    fields = list(dict.fromkeys(field for row in rows for field in row))
    with open(arguments.output / "results.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(rows)
    text = f"`{about['command']}`\n\n{json.dumps(about)}\n"
    for name in dict.fromkeys(row["case"] for row in rows):
        case, found = CASES[name], [row for row in rows if row["case"] == name]
        plot(case, found, arguments.output / f"{name}.png")
        text += f"\n## {name}\n\n{markdown(case, found)}"
    (arguments.output / "results.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    sys.exit(main())
