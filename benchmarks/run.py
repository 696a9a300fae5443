"""Measure ops and models of the table, and what they are compared with, in turn in one process.

    python benchmarks/run.py                              everything
    python benchmarks/run.py --quick                      the first size of every case
    python benchmarks/run.py damped_ema diagonal_ssm      some cases
    python benchmarks/run.py damped_ema --size b=1 n=2048 states=4    other sizes
    python benchmarks/run.py encoders --lengths 512 4096 --variants roberta_sdpa mega_chunk_128 mega_chunk_128@torch
    python benchmarks/run.py diagonal_ssm --threads 1 2   the same with two threads, in turn
    python benchmarks/run.py damped_ema --instructions avx2    as on a processor without AVX-512
    PYTHONPATH=DIR python benchmarks/run.py damped_ema    also Mega's code, with transformers 4.46 in DIR
    python benchmarks/run.py memory --rounds 0            peak memory; the time is that of the first call
    python benchmarks/run.py --device cuda --dtype bfloat16    on a GPU, with the Triton kernels

Prints a table for each case: the milliseconds of a forward pass without gradients and of forward and backward pass
(minima; on a GPU, medians), and the peak memory of the latter. The first variant is the baseline of the ratios. All
figures are written to --output. Nothing is measured if the variants of a case do not agree, or if compared models
differ in size.
"""

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path

import torch
import transformers
from cases import CASES, Case, Size
from measure import agree, limit_memory, measure
from report import Row, commit, join, machine, results_file, size_text, write

from luna_mega.kernels.api import explain
from luna_mega.kernels.recurrence import native

# Option -> level of the native library, and the environment of PyTorch's kernels, MKL and oneDNN.
INSTRUCTIONS = {
    "avx512": (2, "avx512", "AVX512", "AVX512_CORE"),
    "avx2": (1, "avx2", "AVX2", "AVX2"),
    "baseline": (0, "default", "SSE4_2", "SSE41"),
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"cases to run (default: all): {', '.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help="the first size of every case only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="numbers of CPU threads")
    parser.add_argument("--lengths", type=int, nargs="+", help="only these lengths n")
    parser.add_argument("--size", nargs="+", default=[], metavar="FIELD=VALUE", help="replace fields of all sizes")
    parser.add_argument(
        "--variants", nargs="+", help="variants, the baseline first; `torch` or `NAME@torch`: a backend"
    )
    parser.add_argument("--rounds", type=int, default=100, help="maximum number of repetitions")
    parser.add_argument("--time-limit", type=float, default=30.0, help="maximum seconds of a variant, as predicted")
    parser.add_argument("--instructions", choices=INSTRUCTIONS, help="instruction set on x86-64 (default: the best)")
    parser.add_argument("--products", choices=("onednn",), help="library of float32 products, where it is faster")
    parser.add_argument("--output", type=Path, help="JSON file (default: that of the processor in outputs/benchmarks)")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    arguments.clock = "cpu" if arguments.threads == [1] else "wall"  # processor time of one thread
    arguments.output = arguments.output or Path("outputs/benchmarks") / results_file().name
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.instructions:
        level, *names = INSTRUCTIONS[arguments.instructions]
        libraries = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
        wanted = dict(zip(libraries, names, strict=True))
        if not wanted.items() <= os.environ.items():  # the libraries read them when they are loaded
            command = [sys.executable, __file__, *(sys.argv[1:] if argv is None else argv)]
            return subprocess.run(command, env=os.environ | wanted).returncode
        if native.library is not None:
            native.library.moving_average_level(level)
    if arguments.products:
        importlib.import_module("luna_mega.training").use_onednn("cpu")
    cases, tables, rows = [CASES[name] for name in arguments.cases or CASES], [], []
    for case in cases:
        for size in case.check:
            if difference := agree(case, size, arguments.device, arguments.dtype):
                print(f"variants disagree, so nothing is measured: {difference}", file=sys.stderr)
                return 1
    for case in cases:
        found, rates = [], {}
        for size in sizes(case, arguments):
            measured = measure(case, size, arguments.variants or list(case.variants), arguments, rates)
            counts = [row["parameters"] for row in measured if "parameters" in row]
            if counts and max(counts) > 1.05 * min(counts):
                print(f"models differ by more than 5 %, so no time is printed: {case.name} {counts}", file=sys.stderr)
                return 1
            found += measured
        if found:
            tables.append(f"\n## {case.name}\n\n{table(found)}")
            print(tables[-1], flush=True)
        rows += found
    write(arguments.output, about(arguments, argv), rows)
    return 0


def sizes(case: Case, arguments: argparse.Namespace) -> list[Size]:
    """Return the sizes that the options select, without repetition."""
    given = dict(text.split("=") for text in arguments.size)
    given = {name: int(value) if value.lstrip("-").isdigit() else value for name, value in given.items()}
    known = case.gpu if arguments.device == "cuda" else case.sizes
    found = [size | given for size in (known[:1] if arguments.quick else known)]
    found = [size for number, size in enumerate(found) if size not in found[:number]]
    return [size for size in found if arguments.lengths is None or size.get("n") in arguments.lengths]


ROOT = f"{Path(__file__).resolve().parent.parent}/"


def about(arguments: argparse.Namespace, argv: list[str] | None) -> Row:
    """Return the machine, versions and options of a run."""
    names = ("device", "dtype", "clock", "instructions", "products")
    return {
        **machine(),
        "commit": commit(),
        "command": " ".join(["python benchmarks/run.py", *(sys.argv[1:] if argv is None else argv)]).replace(ROOT, ""),
        "torch": torch.__version__,  # with the build, which the version of the distribution may lack
        "transformers": transformers.__version__,
        **({"gpu": torch.cuda.get_device_name()} if arguments.device == "cuda" else {}),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "fp32_precision": torch.backends.mkldnn.matmul.fp32_precision,
        "backend": explain("damped_ema", device=arguments.device),
        **{name: getattr(arguments, name) for name in names},
    }


def table(rows: list[Row]) -> str:
    """Return a Markdown table with one row for each size, variant and number of threads."""
    lines = [["size", "variant", "threads", "forward (ms)", "both (ms)", "both (ns per element)", "memory (MB)"]]
    first = {}
    for row in rows:
        size = size_text(row)
        base = first.setdefault(size, row)
        times = [row.get("error", "")] * ("error" in row) or [_time(row, base, name) for name in ("forward", "both")]
        rate = f"{1e6 * row['both_ms'] / row['elements']:.2f}" if "both_ms" in row else ""
        memory = f"{row['both_mb']:,.0f}" if "both_mb" in row else ""
        lines.append([size, row["variant"], str(row["threads"]), *times, *[""] * (2 - len(times)), rate, memory])
    return join(lines)


def _time(row: Row, base: Row, name: str) -> str:
    """Return milliseconds, and the time of the baseline divided by them."""
    if (time := row.get(f"{name}_ms")) is None:
        return ""
    ratio = f" ({base[f'{name}_ms'] / time:.2f}x)" if row is not base and f"{name}_ms" in base else ""
    return f"{time:,.2f}{ratio}"


if __name__ == "__main__":
    if not torch.cuda.is_available():  # the address space of CUDA is larger than the memory
        limit_memory()
    sys.exit(main())
