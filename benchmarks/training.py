"""Training: tokens per second of Mega, Megalodon, Luna, Llama and GPT-2 of equal size.

    OMP_NUM_THREADS=1 python benchmarks/training.py [--lengths 512 4096] [--dtype bfloat16]
    OMP_NUM_THREADS=1 python benchmarks/training.py --memory [--lengths 512 4096]

A step is the forward and backward pass of one sequence without dropout. Its floor is the time of the products with all
weights, of which each takes one in the forward and two in the backward pass, in the same run; attention and moving
averages are not in it. The steps of all models take turns; a figure is the median. With `--memory` the peak memory of a
step beside the weights is measured, in a process for each.
"""

import argparse
import itertools
import multiprocessing
import statistics

import torch
from decoding import MODELS, VOCABULARY, clock, matrices, parameters
from measure import peak, reset_peak
from transformers import PreTrainedModel, logging

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build(name: str, longest: int, dtype: str) -> PreTrainedModel:
    """Return a model without dropout."""
    make, inner = MODELS[name]
    return make(inner, longest).eval().to(DTYPES[dtype])


def step(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Run the forward and backward pass."""
    model(ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad()


def memory(name: str, length: int, dtype: str) -> float:
    """Return the peak megabytes of a step."""
    model = build(name, length, dtype)
    for size in (64, length):  # the first loads what PyTorch loads when it is needed
        base = reset_peak("cpu")
        step(model, torch.randint(1, VOCABULARY, (1, size)))
    return (peak("cpu") - base) / 2**20


def multiply(weights: list[torch.Tensor], length: int) -> None:
    """Multiply as the weights `[rows, columns]` of linear layers do in the forward and backward pass."""
    for weight in weights:
        rows, columns = weight.shape
        x, grad = weight.new_ones(length, columns), weight.new_ones(length, rows)
        x @ weight.T
        grad @ weight
        grad.T @ x


def main(arguments: list[str] | None = None) -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help="measure the peak memory in place of the time")
    options = parser.parse_args(arguments)
    logging.set_verbosity_error()
    if options.memory:
        print("| n | model | peak, MB |\n|---|---|---|")
        for length, name in itertools.product(options.lengths, options.models):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(f"| {length:,} | {name} | {pool.apply(memory, (name, length, options.dtype)):,.0f} |", flush=True)
        return
    torch.manual_seed(0)
    models = {name: build(name, max(options.lengths), options.dtype) for name in options.models}
    print("| n | model | parameters (M) | tokens a second | step, s | floor, s | floor / step |")
    print("|---|---|---|---|---|---|---|")
    for length in options.lengths:
        ids = torch.randint(1, VOCABULARY, (1, length))
        seconds = {name: ([], []) for name in models}
        for index in range(options.rounds + 1):  # the first warms up
            for name, model in models.items():
                weights = [x.detach() for x in matrices(model)]
                times = (
                    clock(lambda model=model, ids=ids: step(model, ids)),
                    clock(lambda weights=weights, length=length: multiply(weights, length)),
                )
                for kept, time in zip(seconds[name], times, strict=True):
                    kept += [time] if index else []
        for name, model in models.items():
            whole, floor = map(statistics.median, seconds[name])
            cells = [f"{length:,}", name, f"{parameters(model) / 1e6:.1f}", f"{length / whole:,.0f}"]
            cells += [f"{whole:.2f}", f"{floor:.2f}", f"{floor / whole:.2f}"]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
