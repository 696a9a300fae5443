"""`luna-mega info`: describe a model."""

import argparse

from luna_mega_cli.options import COUNT, show

DESCRIPTION = (
    "Describes a model: architecture, attention, parameters, bytes of weights and cache, heads, and "
    "the code that wrote it. `luna-mega convert --help` lists the sizes of the papers' models."
)
EXAMPLES = ("my-model", "my-model --length 16384", "checkpoint_best.pt --json")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="model folder or checkpoint")
    parser.add_argument("--length", **COUNT, help="positions in the cache (default: all of the model)")


def run(options: argparse.Namespace) -> None:
    from luna_mega.inspection.info import describe

    show(options, describe(options.path, options.length, progress=not options.json))
