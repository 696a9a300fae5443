"""Measure the bytes that context-parallel ranks exchange, and the time, on gloo and CPUs.

    python benchmarks/context_parallel.py
    python benchmarks/context_parallel.py --ranks 4 --lengths 1024 4096 --models luna

Prints the bytes that a rank passes to collectives for each layer, forward and backward, at several lengths, and the
time of forward and backward at the longest one on that many processes and on one, each with one thread.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import luna_mega

WIDTH = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000}
LUNA = WIDTH | {"num_attention_heads": 4, "projection_length": 64, "position_embedding_type": "sinusoidal"}
MEGA = WIDTH | {"ema_projection_size": 16, "shared_representation_size": 64, "use_chunking": True, "chunk_size": 128}
MODELS = {
    "luna": (luna_mega.LunaForMaskedLM, luna_mega.LunaConfig, LUNA),
    "luna decoder": (luna_mega.LunaForCausalLM, luna_mega.LunaConfig, LUNA | {"is_decoder": True}),
    "mega": (luna_mega.MegaForMaskedLM, luna_mega.MegaConfig, MEGA),
    "mega decoder": (luna_mega.MegaForCausalLM, luna_mega.MegaConfig, MEGA | {"is_decoder": True}),
}


class Counter:
    """Counts the bytes that this rank passes to collectives."""

    def __init__(self):
        self.bytes = 0
        for name in ("all_gather", "all_reduce", "broadcast", "reduce_scatter"):
            setattr(dist, name, self.counted(name, getattr(dist, name)))

    def counted(self, name, collective):
        # A rank passes the second argument of these and gets the first one.
        given = 1 if name in ("all_gather", "reduce_scatter") else 0

        def call(*args, **kwargs):
            tensors = args[given] if isinstance(args[given], list) else [args[given]]
            self.bytes += sum(tensor.nbytes for tensor in tensors)
            return collective(*args, **kwargs)

        return call


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 16384])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args(argv)
    one, shared = run(1, arguments), run(arguments.ranks, arguments)
    print(f"\nBytes per layer that each of {arguments.ranks} ranks passes to collectives in forward and backward")
    print("".join(f"{cell:>14}" for cell in ("model", *(f"n = {length}" for length in arguments.lengths))))
    for name in arguments.models:
        print("".join(f"{cell:>14}" for cell in (name, *(f"{bytes_:,.0f}" for bytes_ in shared[name]["bytes"]))))
    print(f"\nSeconds of forward and backward at n = {max(arguments.lengths)}, {arguments.layers} layers")
    print("".join(f"{cell:>14}" for cell in ("model", "1 process", f"{arguments.ranks} processes", "ratio")))
    for name in arguments.models:
        before, after = one[name]["seconds"], shared[name]["seconds"]
        print("".join(f"{cell:>14}" for cell in (name, f"{before:.2f}", f"{after:.2f}", f"{before / after:.2f}")))


def run(ranks: int, arguments: argparse.Namespace) -> dict[str, dict]:
    """Return the measurement of the first of `ranks` processes."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (ranks, folder, arguments), ranks)
        return torch.load(Path(folder) / "result")


def work(rank: int, ranks: int, folder: str, arguments: argparse.Namespace):
    """Measure on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    counter = Counter()
    group = dist.group.WORLD if ranks > 1 else None
    result = {}
    for name in arguments.models:
        counts = (
            [count(name, length, arguments.layers, counter, group) for length in arguments.lengths] if group else []
        )
        seconds = measure(name, max(arguments.lengths), arguments, group)
        result[name] = {"bytes": counts, "seconds": seconds}
    if rank == 0:
        torch.save(result, f"{folder}/result")
    dist.destroy_process_group()


def make(name: str, layers: int) -> torch.nn.Module:
    """Return a model in evaluation, with the same weights on all ranks."""
    model_class, config_class, options = MODELS[name]
    torch.manual_seed(0)
    return model_class(config_class(**options, num_hidden_layers=layers)).eval()


def train(model: torch.nn.Module, length: int, group: dist.ProcessGroup | None):
    """Run forward and backward over one sequence, or over the shard of this rank."""
    ids = torch.randint(4, 1000, (1, length), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    if group is not None:
        batch = luna_mega.shard_sequence(batch, group, multiple=MEGA["chunk_size"]) | {"cp_group": group}
    model(**batch, use_cache=False).loss.backward()


def count(name: str, length: int, layers: int, counter: Counter, group: dist.ProcessGroup) -> float:
    """Return the bytes that an additional layer passes to collectives."""
    totals = []
    for depth in (layers, 2 * layers):
        model = make(name, depth)
        counter.bytes = 0
        train(model, length, group)
        totals.append(counter.bytes)
    return (totals[1] - totals[0]) / layers


def measure(name: str, length: int, arguments: argparse.Namespace, group: dist.ProcessGroup | None) -> float:
    """Return the median of the seconds of forward and backward."""
    model, seconds = make(name, arguments.layers), []
    for _ in range(1 + arguments.repeats):
        dist.barrier()
        begin = time.perf_counter()
        train(model, length, group)
        dist.barrier()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
