"""`luna-mega bundle`: add the code of a model to its folder."""

import argparse

from luna_mega_cli.options import FOLDER, show

DESCRIPTION = (
    "Adds the code to a model folder that has none: AutoModel...from_pretrained(FOLDER, trust_remote_code=True) "
    "loads it without luna-mega. If luna_mega is imported, its classes are used instead."
)
EXAMPLES = ("my-model", "my-model --output my-bundle")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", **FOLDER)
    parser.add_argument("--output", metavar="DIR", help="output folder, absent or empty (default: FOLDER itself)")


def run(options: argparse.Namespace) -> None:
    from luna_mega.hub.bundle import bundle

    code, output = bundle(options.folder, options.output), options.output or options.folder
    line = f"{code[-1]}; after `import luna_mega`, trust_remote_code is not required"
    show(options, f"written to {output}; load it with {line}", {"output": output, "code": code})
