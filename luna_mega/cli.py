# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""The command line ``luna-mega``: one sub-command per task, each with its own parser and ``--help``."""

import argparse
import importlib
import sys
from collections.abc import Sequence

import luna_mega

# Sub-command -> (module whose main(argv) returns the exit status, line of help). Modules are imported when chosen.
_COMMANDS = {
    "convert": ("luna_mega.convert.cli", "convert a fairseq checkpoint into a folder that AutoModel loads"),
    "export": ("luna_mega.convert.exporter", "write a folder back as a fairseq checkpoint"),
    "verify": ("luna_mega.convert.verify", "compare two models layer by layer on the same inputs"),
    "info": ("luna_mega.convert.info", "describe a model: parameters, memory, FLOPs, heads, origin"),
    "bundle": ("luna_mega.convert.hub_bundle", "add the code to a model folder, for trust_remote_code"),
}


def _parser() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {name:10}{text}" for name, (_, text) in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="luna-mega",
        usage="luna-mega [-h] [--version] COMMAND ...",
        description=f"Luna and Mega for transformers.\n\ncommands:\n{lines}",
        epilog="`luna-mega COMMAND --help` shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"luna-mega {luna_mega.__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=_COMMANDS, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command.

    Args:
        argv: arguments without the program name; those of the process when None.

    Returns:
        Exit status: 0 done, 1 the input is at fault.

    Raises:
        SystemExit: 2 on wrong usage, 0 after ``--help`` and ``--version``.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    module, _ = _COMMANDS[_parser().parse_args(arguments[:1]).command]
    return importlib.import_module(module).main(arguments[1:])
