"""The code blocks of the pages, and whether the programs, options and files of their commands exist.

A block that cannot be tested has a comment before it, `<!-- not run: the reason -->`.
"""

import argparse
import configparser
import importlib
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import luna_mega_cli

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", "examples/README.md", *DOCS]
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+?) -->\n+)?(?P<fence> *```)(?P<language>\w*)\n(?P<code>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
# The programs that blocks call. In a block, each is a function that prints its name and its arguments.
PROGRAMS = ["accelerate", "curl", "hf", "luna-mega", "make", "pip", "python", "torchrun"]
FUNCTIONS = "".join(f"{name}() {{ printf '%s\\0' {name} \"$@\"; echo; }}\n" for name in PROGRAMS)


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the line number of its code, and the reason why it is not run (else None)."""

    page: str
    line: int
    language: str
    code: str
    reason: str | None

    def run(self, session: dict) -> None:
        """Execute a Python block; tracebacks have the line numbers of the page."""
        exec(compile("\n" * (self.line - 1) + self.code, ROOT / self.page, "exec"), session)

    def commands(self) -> list[list[str]]:
        """Run a shell block; return the programs that it calls with their arguments."""
        command = ["bash", "-e", "-c", FUNCTIONS + self.code]
        done = subprocess.run(command, env={"PATH": ""}, executable="/bin/bash", capture_output=True, encoding="utf-8")
        assert done.returncode == 0 and done.stdout, f"{self.page}:{self.line}: {done.stderr or 'calls no program'}"
        return [line.split("\0")[:-1] for line in done.stdout.splitlines()]


def read(page: str) -> list[Block]:
    """Return the blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start("code")) + 1, found["language"], found["code"], found["reason"])
        for found in BLOCK.finditer(text)
    ]


class Understood(Exception):
    """Raised when a program has parsed its arguments."""


def check_options(main: Callable[[list[str]], object], words: list[str]) -> None:
    """Check that a program parses its command line; it does not run."""
    parse = argparse.ArgumentParser.parse_known_args

    def parse_and_leave(self, *arguments, **options):
        found, unknown = parse(self, *arguments, **options)
        if not self.add_help:  # this parser reads one option before the others are parsed
            return found, unknown
        assert not unknown, f"unknown: {unknown}"
        raise Understood

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Understood):
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse_and_leave)
        main(words)


def check_script(script: str, words: list[str]) -> None:
    """Import a script as the interpreter does when it runs it; skip the test without a package that it requires."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend((ROOT / script).parent)
        try:
            main = importlib.import_module(Path(script).stem).main
        except (SystemExit, ModuleNotFoundError) as error:
            assert "is not installed" in str(error) or "No module named" in str(error) and "luna" not in str(error)
            pytest.skip(str(error))
    check_options(main, words)


def check_command(program: str, *words: str) -> None:
    """Check that the options and the files of a command exist."""
    if program in ("torchrun", "accelerate"):
        at = next(index for index, word in enumerate(words) if word.endswith(".py"))
        assert all((ROOT / word).is_file() for word in words[:at] if word.endswith(".yaml")), words
        program, words = "python", words[at:]
    if program == "luna-mega":
        check_options(luna_mega_cli.main, list(words))
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert {word for word in words if "=" not in word} <= set(targets), words
    elif program == "pip":
        setup = configparser.ConfigParser()
        setup.read(ROOT / "setup.cfg")
        extras = set(",".join(re.findall(r"\[(.*?)\]", " ".join(words))).split(",")) - {""}
        assert words[0] == "install" and extras <= set(setup["options.extras_require"]), words
    elif program == "python" and words[0].startswith(("examples/", "benchmarks/")):
        check_script(words[0], list(words[1:]))
    elif program == "python":
        assert words[0] == "train.py" or (ROOT / words[0]).is_file(), words
    else:
        assert program in PROGRAMS and words, program
