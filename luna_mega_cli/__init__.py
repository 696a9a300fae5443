# PYTHON_ARGCOMPLETE_OK
"""The command line `luna-mega`, one module per command.

The package is separate from `luna_mega`, whose import takes seconds because of torch and transformers. The module of a
command is imported when the command is used. At its top, it imports only the standard library; functions import the
rest.
"""

import argparse
import difflib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from luna_mega_cli.options import check_arguments, define_command

# Module of a command -> its line in the list of commands.
COMMANDS = {
    "convert": "convert a checkpoint of the original code into a folder that AutoModel loads",
    "verify": "compare a model with outputs that the original code recorded",
    "bundle": "add the code to a model folder, for trust_remote_code",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name.

    Args:
        argv: Arguments without the program name; None = `sys.argv`.

    Returns:
        Exit status: 0 if the command succeeded, 1 if its input is invalid (one line on stderr), 130 after Ctrl-C.

    Raises:
        SystemExit: 2 on wrong usage, 0 after `--help` and `--version`, 143 after SIGTERM.
    """
    completes = "_ARGCOMPLETE" in os.environ  # set by a shell that completes a command line
    words = sys.argv[1:] if argv is None else argv
    used = next((word for word in words if not word.startswith("-")), None)
    parser = _parser(COMMANDS if completes else {used})
    if completes:
        with suppress(ImportError):
            import argcomplete

            argcomplete.autocomplete(parser)  # exits
    options = parser.parse_args(words)
    try:
        with _exit_on_sigterm():
            return _run(options)
    except KeyboardInterrupt:
        print(f"luna-mega {options.command}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _run(options: argparse.Namespace) -> int:
    """Run a command; print errors caused by its input as one line on stderr."""
    import torch
    from transformers.utils import logging

    from luna_mega.errors import ConversionError
    from luna_mega.escaping import terminal

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a locale may lack characters of a report
    bars = logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # the progress bars of this package check for a terminal themselves
    try:
        check_arguments(options)
        return int(options.run(options) or 0)
    except torch.OutOfMemoryError as error:
        reason = str(error).strip().partition(". ")[0]
        message = f"out of memory ({reason}); use shorter inputs, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
    except (ConversionError, OSError, UnicodeError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename is not None and error.strerror:
            text = f"{error.filename}: {error.strerror}"  # without "[Errno 13]"
        message = " ".join(text.split())
    finally:
        if bars:
            logging.enable_progress_bar()
    print(f"luna-mega {options.command}: {_red('error:')} {terminal(message)}", file=sys.stderr)
    return 1


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Raise `SystemExit` on SIGTERM during the block, so that temporary files are removed."""

    def leave(*_: object) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():  # only the main thread can set a handler
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _red(text: str) -> str:
    """Return the text in red if stderr is a terminal with colors (https://no-color.org)."""
    colors = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\033[31m{text}\033[0m" if colors else text


class _Parser(argparse.ArgumentParser):
    """Argument parser whose errors suggest a similar word, and contain no terminal control characters."""

    def error(self, message: str) -> NoReturn:
        super().error("".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in message))

    def _check_value(self, action: argparse.Action, value: Any) -> None:  # of commands and of options with choices
        if action.choices is not None and value not in action.choices:
            choices = ", ".join(map(repr, action.choices))
            similar = _similar(value, action.choices)
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{similar} (choose from {choices})")


class _Command(_Parser):
    """Parser of a command. It reports an unknown option before a missing one, whose misspelling it may be."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        unknown: Sequence[str] = ()
        if not {"-h", "--help"}.intersection(args):
            groups: Sequence[Any] = self._mutually_exclusive_groups
            required = [one for one in (*self._actions, *groups) if one.required]
            self._set_required(required, False)
            with suppress(argparse.ArgumentError):  # raised again below
                _, unknown = super().parse_known_args(args)
            self._set_required(required, True)
        if unknown:
            similar = _similar(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{similar}")
        return super().parse_known_args(args, namespace)

    def _set_required(self, options: Iterable[Any], value: bool) -> None:
        self.exit_on_error = value
        for option in options:
            option.required = value


def _similar(word: str, words: Iterable[str]) -> str:
    """Return a question with the most similar of the words; an empty string if none is similar."""
    found = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


class _Version(argparse.Action):
    """Print the version of `luna_mega` and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"luna-mega {importlib.import_module('luna_mega').__version__}")
        parser.exit()


def _parser(used: Collection[str | None]) -> argparse.ArgumentParser:
    """Return the parser, with the options of the commands in `used`."""
    parser = _Parser(
        prog="luna-mega",
        usage="luna-mega [-h] [--version] COMMAND ...",
        description="Luna, Mega and Megalodon for transformers.",
        epilog="`luna-mega COMMAND --help` shows the options of a command, with examples.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show program's version number and exit")
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True, prog="luna-mega", parser_class=_Command
    )
    for name, line in COMMANDS.items():
        command = commands.add_parser(name, help=line)
        if name in used:
            define_command(command, importlib.import_module(f"luna_mega_cli.{name}"))
    return parser
