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
import time
from collections.abc import Callable

import torch
from torch import nn
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    logging,
)

from luna_mega import (
    LunaConfig,
    LunaForCausalLM,
    MegaConfig,
    MegaForCausalLM,
    MegalodonConfig,
    MegalodonForCausalLM,
)
from luna_mega.compat import CACHE_NAME

VOCABULARY, WIDTH, LAYERS, HEADS, CHUNK, ROWS = 8000, 512, 6, 8, 512, 32
LONGEST_PROMPT, PREFILL, ORDER = 1024, 512, (0, 0, 1, 2)


def mega(inner: int, longest: int) -> PreTrainedModel:
    """Return Mega as the paper has it for language, with `inner` units in the feed-forward layers."""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": 2 * WIDTH}
    sizes |= {"shared_representation_size": 128, "nffn_hidden_size": inner, "chunk_size": CHUNK, "use_chunking": True}
    kind = {"attention_activation": "laplace", "normalization_type": "layernorm"}
    return MegaForCausalLM(
        MegaConfig(vocab_size=VOCABULARY, is_decoder=True, bidirectional=False, pad_token_id=0, **sizes, **kind)
    )


def megalodon(inner: int, longest: int) -> PreTrainedModel:
    """Return Megalodon as its code has it for 200 million parameters, in small."""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 1, "value_size": 2 * WIDTH}
    sizes |= {"shared_representation_size": 128, "intermediate_size": inner, "chunk_size": CHUNK}
    return MegalodonForCausalLM(MegalodonConfig(vocab_size=VOCABULARY, tie_word_embeddings=True, **sizes))


def luna(inner: int, longest: int) -> PreTrainedModel:
    """Return Luna with a P of 32 rows."""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    sizes |= {"intermediate_size": inner, "projection_length": ROWS, "max_position_embeddings": longest}
    return LunaForCausalLM(LunaConfig(vocab_size=VOCABULARY, is_decoder=True, pad_token_id=0, **sizes))


def llama(inner: int, longest: int) -> PreTrainedModel:
    """Return Llama as transformers has it."""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    sizes |= {"intermediate_size": inner, "max_position_embeddings": longest, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))


def gpt2(inner: int, longest: int) -> PreTrainedModel:
    """Return GPT-2 as transformers has it."""
    sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_inner": inner, "n_positions": longest}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes))


# The units that make them equal.
MODELS = {
    "mega": (mega, 1024),
    "megalodon": (megalodon, 1344),
    "luna": (luna, 2048),
    "llama": (llama, 1472),
    "gpt2": (gpt2, 2176),
}


def parameters(model: PreTrainedModel) -> int:
    """Return the number of parameters, without a table of positions."""
    positions = sum(x.numel() for name, x in model.named_parameters() if "wpe" in name or "position_embed" in name)
    return sum(x.numel() for x in model.parameters()) - positions


def matrices(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return the weights that a step multiplies by, `[rows, columns]` each."""
    return [x.weight for x in model.modules() if isinstance(x, nn.Linear) or type(x).__name__ == "Conv1D"]


def fill(model: PreTrainedModel, batch: int, context: int):
    """Return a cache of `context` positions, as the docstring of the module says."""
    config = model.config
    if config.model_type in ("llama", "gpt2"):
        past = DynamicCache(config=config)
        for layer in range(LAYERS):
            past.update(*torch.randn(2, batch, HEADS, context, WIDTH // HEADS), layer)
        return past
    length = min(context, LONGEST_PROMPT)
    if config.model_type in ("mega", "megalodon"):
        length += (CHUNK // 2 - length) % CHUNK if context >= CHUNK else 0
    return model(torch.randint(1, VOCABULARY, (batch, length)), use_cache=True, logits_to_keep=1).cache


def state_bytes(past) -> int:
    """Return the bytes of a cache that a step must read."""
    if isinstance(past, DynamicCache):
        return sum(x.nbytes for layer in past.layers for x in (layer.keys, layer.values))
    return past.nbytes


def clock(run: Callable[[], object]) -> float:
    """Return the seconds of a call: processor time with one CPU thread, else wall time, on a GPU until it is idle."""
    on_gpu = torch.cuda.is_initialized()
    now = time.process_time if torch.get_num_threads() == 1 and not on_gpu else time.perf_counter
    start = now()
    run()
    if on_gpu:
        torch.cuda.synchronize()
    return now() - start


def measure(
    models: dict[str, PreTrainedModel], batch: int, beams: bool, context: int, rounds: int, compiled: bool
) -> list[dict]:
    """Return a row for each model: milliseconds a step and of the floor, bytes of the cache."""
    runs, caches, bytes_read = {}, {}, {}
    token, order = torch.randint(1, VOCABULARY, (batch, 1)), torch.tensor(ORDER)
    vectors = {x.shape[1]: torch.randn(x.shape[1]) for model in models.values() for x in matrices(model)}
    for name, model in models.items():
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
    for name in models:
        weights, state = bytes_read[name]
        floor = min(seconds[name, "floor"]) * (weights + state) / weights
        row = {"model": name, "context": context, "batch": "4 beams" if beams else str(batch)}
        row |= {"step_ms": 1e3 * statistics.median(seconds[name]), "floor_ms": 1e3 * floor, "cache_bytes": state}
        rows.append(row)
    return rows


def prefill(model: PreTrainedModel, rounds: int = 3) -> float:
    """Return tokens a second of a prompt."""
    ids = torch.randint(1, VOCABULARY, (1, PREFILL))
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
    models = {name: build(inner, longest).eval() for name, (build, inner) in MODELS.items() if name in options.models}
    sizes = {name: parameters(model) for name, model in models.items()}
    if max(sizes.values()) > 1.05 * min(sizes.values()):
        raise ValueError(f"the models differ by more than 5 % in their parameters: {sizes}")
    for name, model in models.items():
        print(f"{name}: {sizes[name] / 1e6:.1f} M parameters, prefill of {PREFILL}: {prefill(model):.0f} tokens/s")
    print("\n| batch | context | model | step, ms | floor, ms | times the floor | cache, MiB |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for batch in options.batches:
        for context in options.contexts:
            beams = batch == "beams"
            size = len(ORDER) if beams else int(batch)
            rows += measure(models, size, beams, context, options.rounds, options.compile)
            for row in rows[-len(models) :]:
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
