"""Time of the variants of a case, which take turns: on a machine whose speed drifts, ratios that `run.py` would blur.

    python benchmarks/turns.py encoders --lengths 512 4096 --threads 1
    python benchmarks/turns.py encoders --lengths 512 --variants mega_chunk_128 roberta_sdpa --passes forward

All variants are in one process, so memory is not measured. A figure is the median in milliseconds. The number in
brackets divides it by the first variant's.
"""

import argparse
import statistics

import torch
from cases import CASES
from decoding import clock


def run(work, gradient: bool) -> float:
    """Return the milliseconds of a forward pass without gradient, or of a forward and a backward pass."""

    def passes():
        with torch.set_grad_enabled(gradient):
            outputs = work.forward()
        if gradient:
            torch.autograd.grad(outputs, work.leaves, [torch.ones_like(x) for x in outputs], allow_unused=True)

    return 1000 * clock(passes)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("case", choices=[name for name, case in CASES.items() if len(case.variants) > 1])
    parser.add_argument("--lengths", type=int, nargs="+", help="these lengths n of the case only")
    parser.add_argument("--variants", nargs="+", help="in this order; default all")
    parser.add_argument("--passes", nargs="+", choices=("forward", "both"), default=("forward", "both"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 = as PyTorch chooses")
    arguments = parser.parse_args(argv)
    case = CASES[arguments.case]
    variants = arguments.variants or list(case.variants)
    if unknown := set(variants) - set(case.variants):
        parser.error(f"no variant {', '.join(sorted(unknown))}; there are {', '.join(case.variants)}")
    sizes = [size for size in case.sizes if arguments.lengths is None or size.get("n") in arguments.lengths]
    if not sizes:
        parser.error(f"{case.name} has no length of {arguments.lengths}")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    print(f"| size | pass | {' | '.join(variants)} |\n{'|---' * (2 + len(variants))}|")
    for size in sizes:
        works = {name: case.variants[name](torch.device("cpu"), torch.float32, **size) for name in variants}
        for name in arguments.passes:
            times = {variant: [] for variant in variants}
            for index in range(arguments.rounds + 1):  # the first warms up
                for variant, work in works.items():
                    times[variant] += [run(work, name == "both")] if index else []
            medians = [statistics.median(values) for values in times.values()]
            cells = [f"{median:,.1f} ({median / medians[0]:.2f})" for median in medians]
            label = " ".join(f"{field} = {value:,}" for field, value in size.items())
            print(f"| {label} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
