"""`luna-mega verify`: compare two models."""

import argparse
from dataclasses import asdict

from luna_mega_cli.options import COUNT, add_conventions, chosen, seed, show

DESCRIPTION = (
    "Runs two models on the same inputs in float32 and prints the largest difference of every layer. "
    "Exit status 0: all differences are within the tolerance; 1: a difference is larger, or the input is invalid."
)
EXAMPLES = (
    "checkpoint_best.pt my-model",
    "my-model my-other-model --tolerance 1e-4",
    "my-model my-other-model --text 'A sentence.' 'Another one.' --json",
)
_RANDOM = ("batch", "length", "seed")


def add(parser: argparse.ArgumentParser) -> None:
    for name in "ab":
        parser.add_argument(name, metavar=name.upper(), help="model folder, or checkpoint to convert first")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--inputs", metavar="FILE", help="safetensors file with the inputs of the models: input_ids [B, T], ..."
    )
    source.add_argument("--text", metavar="TEXT", nargs="+", default=[], help="texts for the tokenizer of A or B")
    parser.add_argument("--batch", **COUNT, help="number of random sequences of one length")
    parser.add_argument(
        "--length", **COUNT, help="length of random sequences; default: shorter and longer than P and a chunk"
    )
    parser.add_argument("--seed", metavar="S", type=seed, help="seed of the random inputs (default: 0)")
    parser.add_argument(
        "--tolerance", metavar="T", type=float, default=1e-5, help="largest difference of equal models (default: 1e-5)"
    )
    add_conventions(
        parser,
        head="classification head of a checkpoint (see luna-mega convert)",
        layer_norm="storage of the norm weights in a checkpoint (see luna-mega convert)",
        ema_convention="branch that wrote a checkpoint (see luna-mega convert)",
    )


def check(options: argparse.Namespace) -> str | None:
    for name in _RANDOM:
        if getattr(options, name) is not None and (options.inputs or options.text):
            return f"--{name} applies to random inputs only; omit it with --inputs and --text"
    return None


def run(options: argparse.Namespace) -> int:
    from luna_mega.inspection.verify import compare

    arguments = chosen(options, "inputs", "tolerance", "head", "layer_norm", "ema_convention")
    arguments |= {name: value for name, value in chosen(options, *_RANDOM).items() if value is not None}
    comparison = compare(options.a, options.b, texts=options.text, progress=not options.json, **arguments)
    summary = {"largest": comparison.largest, "within": comparison.within}
    show(options, comparison, asdict(comparison) | summary)
    return 0 if comparison.within else 1
