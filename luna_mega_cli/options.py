"""Options and functions that several commands share."""

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from types import ModuleType
from typing import Any

_PATHS = {"checkpoint", "folder", "recorded", "dict", "bpe", "output"}
# Paths that are read. Folders of models are checked where they are opened.
_FILES, _FILES_OR_FOLDERS = ("dict",), ("recorded", "bpe", "checkpoint")
_WORDS = {"head", "license"}


class _Help(argparse.HelpFormatter):
    """Help formatter that preserves the lines of the examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def define_command(parser: argparse.ArgumentParser, command: ModuleType) -> None:
    """Set the help and the options of a command, given its module.

    Its function `run` returns the exit status, or None for 0.
    """
    lines = "\n".join(f"  {parser.prog} {line}" for line in command.EXAMPLES)
    parser.description, parser.epilog, parser.formatter_class = command.DESCRIPTION, f"examples:\n{lines}", _Help
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=command.run, parser=parser)
    command.add(parser)


FOLDER = {"metavar": "FOLDER", "help": "model folder, written by luna-mega convert or save_pretrained"}


def chosen(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the options with these names."""
    return {name: getattr(options, name) for name in names}


def show(options: argparse.Namespace, report: Any, content: dict[str, Any] | None = None) -> None:
    """Print a report, or with `--json` its content, by default the fields of the report."""
    from luna_mega.escaping import terminal

    content = asdict(report) if content is None and options.json else content
    print(json.dumps(content, indent=2, default=str) if options.json else terminal(str(report)))


def _texts(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every argument; an option can have several texts."""
    for name, value in vars(options).items():
        texts = value if isinstance(value, list) else [value]
        yield from ((name, text) for text in texts if isinstance(text, str))


def check_arguments(options: argparse.Namespace) -> None:
    """Raise `ConversionError` for invalid text, words with control characters, and missing or wrong paths."""
    from luna_mega.errors import ConversionError, shown
    from luna_mega.escaping import is_utf8, locale_hint

    for name, text in _texts(options):
        if not text and name in _PATHS:
            raise ConversionError(f"{name} '': is empty; pass a path")
        try:
            valid = "\0" not in text and os.fsencode(text) is not None
            # The name of a file may contain bytes that are not UTF-8.
            valid = valid and (name in _PATHS or text.encode() is not None)
        except UnicodeEncodeError:
            valid = False
        if not valid or name in _WORDS and not text.isprintable():
            advice = "use text without control characters and invalid bytes"
            if not is_utf8(text):
                advice = locale_hint() or advice
            raise ConversionError(f"{name} {shown(text)}: {advice}")
        label = f"--{name} " * (f"--{name}" in options.parser._option_string_actions)
        kind = "file" if name in _FILES else "file or folder"
        if name in (*_FILES, *_FILES_OR_FOLDERS) and not os.path.exists(text):
            raise ConversionError(f"{label}{text}: no such {kind}")
        if name in _FILES and os.path.isdir(text):
            raise ConversionError(f"{label}{text}: is a folder; pass a file")
