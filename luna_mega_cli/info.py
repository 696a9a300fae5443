# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""`luna-mega info`: describe a model."""

import argparse
from dataclasses import asdict

from luna_mega_cli.options import Commands, add_command, positive, show


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "info",
        run,
        help="describe a model: parameters, memory, FLOPs, heads, origin",
        description="Describes a model: architecture, parameters, memory and FLOPs at a length, heads, and the code "
        "that wrote it.",
        examples=("my-model", "my-model --length 16384 --explain", "checkpoint_best.pt --json"),
    )
    parser.add_argument("path", metavar="PATH", help="model folder or checkpoint")
    parser.add_argument(
        "--length", metavar="N", type=positive, help="number of positions (default: all positions of the model)"
    )
    parser.add_argument("--explain", action="store_true", help="also print the formulas of the numbers")


def run(options: argparse.Namespace) -> None:
    from luna_mega.inspection.info import describe

    description = describe(options.path, options.length, progress=not options.json)
    text = f"{description}\n\n{description.explanation}" if options.explain else description
    show(options, text, asdict(description))
