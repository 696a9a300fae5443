"""Compile the launches of every Triton backend for several targets, without a GPU, and report their resource usage.

This is a script because a process that interprets kernels cannot compile them:
`TRITON_INTERPRET=0 python tests/kernels/aot.py [op ...] [--arch 90] [--every] [--json FILE] [--budgets]`.

The launches are those of `aot_calls.py`, and are compiled unchanged. `--every` also compiles its further dtypes and
sizes: for sm_80 and sm_90 with all configurations that tuning may select, for targets with less shared memory with the
default ones.
"""

import argparse
import csv
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path

import sass
import torch
import triton
import tritons
from aot_calls import CALLS
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from luna_mega.kernels.common import triton_choice, triton_launch

HERE = Path(__file__).resolve().parent
TARGETS = {
    80: triton_launch.Target((8, 0), 108, 163 * 1024),
    89: triton_launch.Target((8, 9), 128, 99 * 1024),
    90: triton_launch.Target((9, 0), 132, 227 * 1024),
    120: triton_launch.Target((12, 0), 170, 99 * 1024),
}
MAIN_TARGETS = 80, 90
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
TYPES |= {torch.int32: "i32", torch.int64: "i64", torch.bool: "i1", torch.uint8: "u8"}
# Resource limits of the kernels, with all versions of `tritons`. `test_aot.py` fails if a kernel exceeds them.
BUDGETS = HERE / "aot_budgets.csv"
# Tensor core instructions and their prefixes in PTX.
INSTRUCTIONS = {"wgmma": r"wgmma\.mma_async", "mma": r"mma\.sync"}
COLUMNS = ("registers", "stack", "spills", "shared", *INSTRUCTIONS)
KEY = ("op", "kernel", "case", "arch")


def _run_all(kernel, key, configurations, run):
    return [run(configuration) for configuration in configurations][0]


def recorded(calls: dict[str, Callable], arch: int) -> Iterator[tuple[str, triton_launch.Launch]]:
    """Yield (case, launch) for every kernel that the calls launch."""
    for name, call in calls.items():
        with triton_launch.recording(TARGETS[arch]) as launches:
            call()
        for launch in launches:
            yield name, launch


def launches(op: str, arch: int, every: bool = False) -> Iterator[tuple[bool, str, triton_launch.Launch]]:
    """Yield (is default, case, launch) for the main calls of an op, and for those at the limits of a target.

    With `every`, also for other dtypes, and for all configurations that tuning may select on the main targets.
    """
    is_main, calls = arch in MAIN_TARGETS, CALLS[op]
    edges = {name: call for name, (target, call) in calls.edges.items() if target == arch}
    default = calls.main | edges if is_main else edges
    yield from ((True, *launch) for launch in recorded(default, arch))
    if every:
        further = default | {f"{call.args} {call.keywords}": call for call in calls.further} | calls.main
        with triton_choice.choosing(_run_all) if is_main else nullcontext():
            yield from ((False, *launch) for launch in recorded(further, arch))


def keys_of_lengths(op: str) -> list[list[str]]:
    """Return the keys of the kernels that are compiled for each of the lengths."""
    keys = []
    for length in CALLS[op].lengths:
        calls = {str(index): partial(call, length=length) for index, call in enumerate(CALLS[op].of_length)}
        keys.append(sorted({compile_launch(launch, 90)[0] for _, launch in recorded(calls, 90)}))
    return keys


def compile_launch(launch: triton_launch.Launch, arch: int):
    """Return a key that identifies a launch, and a function that compiles it as Triton's launcher does.

    None and 1 become constants; pointers and multiples of 16 are specialized.
    """
    names, signature, constants, attributes = launch.kernel.arg_names, {}, {}, {}
    values = dict(zip(names, launch.arguments, strict=False)) | launch.constants
    for index, name in enumerate(names):
        value, any_number = values[name], launch.kernel.params[index].do_not_specialize
        if name in launch.constants or value is None or (type(value) is int and value == 1 and not any_number):
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(index,)] = f"*{TYPES[value.dtype]}", [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not any_number:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, **launch.options}
    key = repr((launch.kernel.fn.__name__, signature, constants, attributes, options))
    return key, lambda: triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def report(compiled) -> dict:
    """Return the resource usage and the faults of a compiled kernel.

    The resources are registers and stack bytes per thread, spills, shared memory bytes and tensor core instructions.
    The instructions are counted in PTX: `ptxas` emits at least one for each.
    """
    code = sass.disassemble(compiled.asm["cubin"])
    usage = sass.disassemble(compiled.asm["cubin"], "cuobjdump", "-res-usage")
    registers, stack, static = map(int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage).groups())
    spills = len(re.findall(r"\b(LDL|STL)\b", code)) if stack else 0
    wgmma, mma = (len(re.findall(rf"\b{name}\b", compiled.asm["ptx"])) for name in INSTRUCTIONS.values())
    used = registers, stack, spills, compiled.metadata.shared + static, wgmma, mma
    # Tensor cores truncate float32 to TF32, so operands must be rounded first.
    tf32 = re.search(r"mma\S*\.tf32", compiled.asm["ptx"])
    cut_off = tf32 is not None and "cvt.rna.tf32" not in compiled.asm["ptx"]
    faults = {"cut_off": cut_off, "unwritten": sass.unwritten_reads(code), "narrow": narrow_sums(compiled.asm["ttir"])}
    return dict(zip(COLUMNS, used, strict=True)) | faults


def narrow_sums(ttir: str) -> list[str]:
    """Return the matrix products and reductions that accumulate in 16 bits."""
    product, reduction = r"tt\.dot .*-> tensor<[^>]*x(?:bf16|f16)", r"^ *\}\) : \(.*tensor<[^>]*x(?:bf16|f16)"
    return re.findall(rf"{product}|{reduction}", ttir, re.MULTILINE)


def report_versions(options: list[str]) -> list[dict]:
    """Return the reports of this script with all versions of Triton."""
    rows = []
    for version in (*tritons.OLDER, tritons.NEWEST):
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [sys.executable, __file__, *options, "--json", file.name]
            subprocess.run(command, env=tritons.environment(version), check=True)
            rows += json.load(file)["kernels"]
    return rows


def write_budgets(rows: list[dict]) -> None:
    """Replace the limits of the reported ops and targets by the largest values of these reports.

    The limits of tensor core instructions are minima.
    """
    replaced = {(row["op"], str(row["arch"])) for row in rows}
    with open(BUDGETS, encoding="utf-8", newline="") as file:
        kept = [row for row in csv.DictReader(file) if (row["op"], row["arch"]) not in replaced]
    table = {tuple(row[name] for name in KEY): {name: int(row[name]) for name in COLUMNS} for row in kept}
    for row in rows:
        key = tuple(str(row[name]) for name in KEY)
        old = table.get(key, row)
        table[key] = {name: (min if name in INSTRUCTIONS else max)(row[name], old[name]) for name in COLUMNS}
    with open(BUDGETS, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*KEY, *COLUMNS))
        writer.writerows((*key, *limits.values()) for key, limits in sorted(table.items()))


def reports(op: str, arch: int, every: bool):
    """Compile the kernels of an op; print and yield their reports."""
    seen, variants = set(), Counter()
    for default, case, launch in launches(op, arch, every):
        key, compile_it = compile_launch(launch, arch)
        if key in seen:
            continue
        seen.add(key)
        start, kernel = time.perf_counter(), launch.kernel.fn.__name__
        used = report(compile_it())
        variants[kernel, case] += 1
        if variants[kernel, case] > 1:  # the forward and backward passes of a case may launch the same kernel
            case += f" ({variants[kernel, case]})"
        label, seconds = f"{op} {kernel}, {case}", time.perf_counter() - start
        print(f"{label:<72} sm_{arch}", *(f"{used[c]:>9}" for c in COLUMNS), f"{seconds:7.1f}", flush=True)
        for fault in used["unwritten"]:
            print(f"    reads a register that was never written: {fault}")
        available = TARGETS[arch].shared_memory
        yield {
            "op": op, "kernel": kernel, "case": case, "arch": arch, "default": default, "available": available,
            **used,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ops", nargs="*", default=[], help=f"ops (default: all): {', '.join(CALLS)}")
    parser.add_argument("--arch", type=int, choices=TARGETS, action="append")
    parser.add_argument("--every", action="store_true", help="compile further dtypes and all configurations")
    parser.add_argument("--json", type=Path, help="file that the reports are written to")
    parser.add_argument("--budgets", action="store_true", help="write aot_budgets.csv with all versions of Triton")
    arguments = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("needs TRITON_INTERPRET=0")
    if arguments.budgets:
        options = [f"--arch={arch}" for arch in arguments.arch or ()]
        write_budgets(report_versions([*arguments.ops, *options]))
        return
    print(
        f"Triton {triton.__version__}\n{'kernel, case':<72} arch ", *(f"{column:>9}" for column in COLUMNS), "seconds"
    )
    ops, rows = arguments.ops or CALLS, []
    for op, arch in product(ops, arguments.arch or TARGETS):
        rows += reports(op, arch, arguments.every)
    if arguments.json:
        lengths = {op: keys_of_lengths(op) for op in ops}
        content = {"triton": triton.__version__, "kernels": rows, "lengths": lengths}
        arguments.json.write_text(json.dumps(content, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
