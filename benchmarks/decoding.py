"""Milliseconds per decoding step of Mega, Megalodon, Luna, Llama and GPT-2 of equal size.

    OMP_NUM_THREADS=1 python benchmarks/decoding.py [--contexts 128 512 4096 16384] [--batches 1 8 beams] [--json FILE]
    OMP_NUM_THREADS=1 python benchmarks/decoding.py --compile --contexts 512 --batches 1

The floor of a step is the time to read all weights of its matrix products and the state once, at the rate at which
matrix-vector products with these weights read them in the same run. `beams` means 4 sequences whose caches are
reordered before every step. The models take turns, and the median is printed.

Caches of Llama and GPT-2 are filled with random keys and values. The caches of the other models have a constant size
after a prompt of at most 1,024 tokens. The prompt ends in the middle of a chunk of Mega and Megalodon, because half of
the chunk is in use on average. Parameters exclude position tables, which grow with the context. With `--compile`, steps
use `torch.compile`, which needs a C++ compiler on a CPU; the seconds of the first three steps are printed, in which it
compiles.
"""

import argparse
import json
import statistics

import models
import torch
from measure import clock
from torch import nn
from transformers import DynamicCache, PreTrainedModel, logging

from luna_mega.compat import CACHE_NAME

CHUNK, LONGEST_PROMPT, PREFILL, ORDER = 512, 1024, 512, (0, 0, 1, 2)
MODELS = {
    "mega": models.mega_lm,
    "megalodon": models.megalodon_lm,
    "luna": models.luna_lm,
    "llama": models.llama,
    "gpt2": models.gpt2,
}


def matrices(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return the weights that a step multiplies by, `[rows, columns]` each."""
    return [x.weight for x in model.modules() if isinstance(x, nn.Linear) or type(x).__name__ == "Conv1D"]


def fill(model: PreTrainedModel, batch: int, context: int):
    """Return a cache of `context` positions, filled as described above."""
    config = model.config
    if config.model_type in ("llama", "gpt2"):
        past = DynamicCache(config=config)
        heads = config.num_attention_heads
        for layer in range(config.num_hidden_layers):
            past.update(*torch.randn(2, batch, heads, context, config.hidden_size // heads), layer)
        return past
    length = min(context, LONGEST_PROMPT)
    if config.model_type in ("mega", "megalodon"):
        length += (CHUNK // 2 - length) % CHUNK if context >= CHUNK else 0
    return model(torch.randint(1, models.VOCABULARY, (batch, length)), use_cache=True, logits_to_keep=1).cache


def state_bytes(past) -> int:
    """Return the bytes of a cache that a step must read."""
    if isinstance(past, DynamicCache):
        return sum(x.nbytes for layer in past.layers for x in (layer.keys, layer.values))
    return past.nbytes


def measure(
    decoders: dict[str, PreTrainedModel], batch: int, beams: bool, context: int, rounds: int, compiled: bool
) -> list[dict]:
    """Return a row for each model: milliseconds a step and of the floor, bytes of the cache."""
    runs, caches, bytes_read = {}, {}, {}
    token, order = torch.randint(1, models.VOCABULARY, (batch, 1)), torch.tensor(ORDER)
    vectors = {x.shape[1]: torch.randn(x.shape[1]) for model in decoders.values() for x in matrices(model)}
    for name, model in decoders.items():
        caches[name] = past = fill(model, batch, context)
        weights = matrices(model)
        bytes_read[name] = sum(x.nbytes for x in weights), state_bytes(past)

        call = torch.compile(model) if compiled else model

        def step(call=call, past=past):
            if beams:
                past.reorder_cache(order)
            call(token, use_cache=True, **{CACHE_NAME: past})

        if compiled:
            print(f"{name}: {clock(lambda step=step: [step() for _ in range(3)]):.0f} s to compile", flush=True)

        def read(weights=weights):
            for x in weights:
                torch.mv(x, vectors[x.shape[1]])

        runs[name], runs[name, "floor"] = step, read
    seconds = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(clock(run))
    rows = []
    for name in decoders:
        weights, state = bytes_read[name]
        floor = min(seconds[name, "floor"]) * (weights + state) / weights
        row = {"model": name, "context": context, "batch": "4 beams" if beams else str(batch)}
        row |= {"step_ms": 1e3 * statistics.median(seconds[name]), "floor_ms": 1e3 * floor, "cache_bytes": state}
        rows.append(row)
    return rows


def prefill(model: PreTrainedModel, rounds: int = 3) -> float:
    """Return tokens a second of a prompt."""
    ids = torch.randint(1, models.VOCABULARY, (1, PREFILL))
    return PREFILL / min(clock(lambda: model(ids, use_cache=True)) for _ in range(rounds))


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 512, 4096, 16384])
    parser.add_argument("--batches", nargs="+", default=["1", "8", "beams"], help="numbers of sequences, or beams")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="measure steps of torch.compile")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=argparse.FileType("w"))
    options = parser.parse_args(arguments)
    logging.set_verbosity_error()
    torch.manual_seed(0)
    if options.device == "cuda":
        torch.set_default_device("cuda")
    longest = max(*options.contexts, LONGEST_PROMPT) + CHUNK + options.rounds + 4
    decoders = {name: MODELS[name](longest).eval() for name in options.models}
    sizes = {name: models.count_parameters(model) for name, model in decoders.items()}
    if max(sizes.values()) > 1.05 * min(sizes.values()):
        raise ValueError(f"the models differ by more than 5 % in their parameters: {sizes}")
    for name, model in decoders.items():
        print(f"{name}: {sizes[name] / 1e6:.1f} M parameters, prefill of {PREFILL}: {prefill(model):.0f} tokens/s")
    print("\n| batch | context | model | step, ms | floor, ms | times the floor | cache, MiB |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for batch in options.batches:
        for context in options.contexts:
            beams = batch == "beams"
            size = len(ORDER) if beams else int(batch)
            rows += measure(decoders, size, beams, context, options.rounds, options.compile)
            for row in rows[-len(decoders) :]:
                share, size = row["step_ms"] / row["floor_ms"], row["cache_bytes"] / 2**20
                print(
                    f"| {row['batch']} | {context} | {row['model']} | {row['step_ms']:.2f} | {row['floor_ms']:.2f} | "
                    f"{share:.2f} | {size:.1f} |",
                    flush=True,
                )
    if options.json:
        json.dump({"parameters": sizes, "rows": rows}, options.json, indent=1)


if __name__ == "__main__":
    main()
