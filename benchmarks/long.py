"""One layer on sequences of up to a million positions: time and memory of forward and backward, and their slope.

    python benchmarks/long.py --threads 1

The slope is taken between the logarithms of one length and the next: 1 = linear in the length.
"""

import argparse
import math
import multiprocessing
import time
from collections.abc import Callable

import torch
from measure import peak, reset_peak

from luna_mega import LunaConfig, MegaConfig, MegalodonConfig
from luna_mega.modeling_common.layout import DENSE
from luna_mega.modeling_luna.modeling_luna import LunaLayer, LunaPreTrainedModel
from luna_mega.modeling_mega.modeling_mega import MegaBlock, MegaPreTrainedModel
from luna_mega.modeling_megalodon.modeling_megalodon import (
    MegalodonBlock,
    MegalodonPreTrainedModel,
    MegalodonRotary,
)

LENGTHS = (65_536, 262_144, 1_048_576)
LAYERS = {"luna, l = 32": "luna", "mega, chunk 128": "mega", "megalodon, chunk 128": "megalodon"}


def make(family: str, width: int) -> tuple[torch.nn.Module, Callable[[torch.Tensor], tuple]]:
    """Return a layer without dropout, and the function that returns the arguments that follow its input."""
    torch.manual_seed(0)
    if family == "luna":
        sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": width // 64}
        config = LunaConfig(projection_length=32, dropout=0.0, attention_dropout=0.0, **sizes)
        layer, packed = LunaLayer(config), torch.randn(1, 32, width, requires_grad=True)
        return layer.apply(LunaPreTrainedModel(config)._init_weights), lambda x: (packed,)
    if family == "megalodon":
        sizes = {"hidden_size": width, "intermediate_size": 2 * width, "value_size": 2 * width, "norm_num_groups": 8}
        heads = {"num_attention_heads": 1, "shared_representation_size": 64, "chunk_size": 128}
        config = MegalodonConfig(**sizes, **heads)
        layer, rope = MegalodonBlock(config, 0), MegalodonRotary(config)
        layer.apply(MegalodonPreTrainedModel(config)._init_weights)
        return layer, lambda x: (DENSE, rope(x, DENSE, None))
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "nffn_hidden_size": 2 * width}
    dropouts = dict.fromkeys(("dropout_prob", "hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = MegaConfig(
        shared_representation_size=64,
        use_chunking=True,
        chunk_size=128,
        normalization_type="layernorm",
        **sizes,
        **dropouts,
    )
    return MegaBlock(config).apply(MegaPreTrainedModel(config)._init_weights), lambda x: (DENSE,)


def measure(family: str, width: int, length: int, threads: int) -> dict[str, float]:
    """Return seconds of forward and backward, and peak gigabytes above weights and input, of one pass.

    Raises `FloatingPointError` where a result or a gradient is not finite.
    """
    if threads:
        torch.set_num_threads(threads)
    layer, rest = make(family, width)
    result = {}
    for size in (1024, length):  # the first loads what PyTorch loads when it is needed
        x = torch.randn(1, size, width, generator=torch.Generator().manual_seed(0)).requires_grad_()
        base, start = reset_peak("cpu"), time.perf_counter()
        output = layer(x, *rest(x))
        output = output[0] if isinstance(output, tuple) else output
        result["forward"] = time.perf_counter() - start
        output.backward(x.detach())
        result["backward"] = time.perf_counter() - start - result["forward"]
        result["peak"] = (peak("cpu") - base) / 2**30
        for tensor in (output, x.grad, *(parameter.grad for parameter in layer.parameters())):
            if tensor is not None and not math.isfinite(tensor.sum().item()):
                raise FloatingPointError(f"{family} with {size} positions has results that are not finite")
        del output, tensor
    return result


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--width", type=int, default=128, help="d; the feed-forward network has 2 d")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 = as PyTorch chooses")
    arguments = parser.parse_args(argv)
    print(f"d = {arguments.width}, float32, one sequence, forward and backward of one layer once")
    print("| layer | n | forward, backward (s) | peak (GB) | slope of time, memory |\n|---|---|---|---|---|")
    for name, family in LAYERS.items():
        before = None
        for length in sorted(arguments.lengths):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                row = pool.apply(measure, (family, arguments.width, length, arguments.threads))
            seconds, slopes = row["forward"] + row["backward"], ""
            if before is not None:
                steps = math.log(length / before[0])
                rises = (math.log(seconds / before[1]) / steps, math.log(row["peak"] / before[2]) / steps)
                slopes = ", ".join(f"{rise:.2f}" for rise in rises)
            before = (length, seconds, row["peak"])
            figures = f"{row['forward']:.2f}, {row['backward']:.2f} | {row['peak']:.2f}"
            print(f"| {name} | {length} | {figures} | {slopes} |", flush=True)


if __name__ == "__main__":
    main()
