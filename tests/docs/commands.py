"""Check that the program and the options of a command in the documentation exist."""

import argparse
import configparser
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import luna_mega_cli
from tests.docs.blocks import ROOT


class Understood(Exception):
    """Raised when a program has parsed its arguments."""


@contextmanager
def only_parse() -> Iterator[None]:
    """Make every program exit with `Understood` after parsing its command line, or with the parser's error."""
    parse = argparse.ArgumentParser.parse_known_args

    def parse_and_leave(self, *arguments, **options):
        found, unknown = parse(self, *arguments, **options)
        if not self.add_help:  # this parser reads one option before the others are parsed
            return found, unknown
        assert not unknown, f"unknown: {unknown}"
        raise Understood

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Understood):
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse_and_leave)
        yield


def entry(script: str) -> Callable[[list[str]], object]:
    """Return the function `main` of a script, imported as the interpreter does when it runs the script."""
    path = ROOT / script
    assert path.is_file(), script
    sys.path.insert(0, str(path.parent))
    try:
        return importlib.import_module(path.stem).main
    except SystemExit as error:
        assert "is not installed" in str(error), error
        pytest.skip(str(error))
    except ModuleNotFoundError as error:
        assert not error.name.startswith("luna_mega")
        pytest.skip(str(error))
    finally:
        sys.path.remove(str(path.parent))


def check_python(words: list[str]) -> None:
    if words[0] == "-m":
        if words[1] == "luna_mega_cli":
            check_luna_mega(words[2:])
    elif words[0].startswith(("examples/", "benchmarks/")):
        main = entry(words[0])
        with only_parse():
            main(words[1:])
    else:
        assert words[0] == "train.py" or (ROOT / words[0]).is_file(), words


def check_launcher(words: list[str]) -> None:
    """Check the files in the options of `torchrun` or `accelerate launch`, and the command of the script."""
    at = next(index for index, word in enumerate(words) if word.endswith(".py"))
    files = [word for word in words[:at] if word.endswith(".yaml")]
    assert all((ROOT / file).is_file() for file in files), files
    check_python(words[at:])


def check_luna_mega(words: list[str]) -> None:
    with only_parse():
        luna_mega_cli.main(words)


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = [word for word in words if "=" not in word]
    assert named and set(named) <= set(targets), words


def check_pip(words: list[str]) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = set(",".join(re.findall(r"\[(.*?)\]", " ".join(words))).split(",")) - {""}
    assert words[0] == "install" and extras <= set(setup["options.extras_require"]), words


def check_foreign(words: list[str]) -> None:
    """Check that a program of another package is called with arguments."""
    assert words


CHECKS = {
    "accelerate": check_launcher,
    "curl": check_foreign,
    "git": check_foreign,
    "hf": check_foreign,
    "luna-mega": check_luna_mega,
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
    "torchrun": check_launcher,
}
