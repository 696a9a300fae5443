"""`luna-mega verify`: compare a model with recorded outputs of the original code."""

import argparse
from dataclasses import asdict

from luna_mega_cli.options import FOLDER, chosen, show

DESCRIPTION = (
    "Runs a model on recorded inputs and compares its outputs with those that the original code recorded. "
    "Exit status 0: all differences are within the tolerance; 1: a difference is larger, or the input is invalid."
)
EXAMPLES = ("my-model recorded.safetensors", "my-model recorded.safetensors --tolerance 1e-4 --json")


def tolerance(text: str) -> float:
    if not 0 <= float(text) < 1:  # false for NaN
        raise argparse.ArgumentTypeError(f"must be at least 0 and less than 1, got {text}")
    return float(text)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", **FOLDER)
    parser.add_argument(
        "recorded", metavar="RECORDED", help="safetensors file with inputs and outputs that the original code wrote"
    )
    parser.add_argument(
        "--tolerance",
        metavar="T",
        type=tolerance,
        default=1e-5,
        help="largest difference, as a fraction of the largest absolute value of an output (default: 1e-5)",
    )


def run(options: argparse.Namespace) -> int:
    from luna_mega.inspection.verify import verify

    found = verify(**chosen(options, "folder", "recorded", "tolerance"))
    show(options, found, asdict(found) | {"within": found.within})
    return 0 if found.within else 1
