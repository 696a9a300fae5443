"""Checks of error messages: each is one line that names the argument, the file or the fix."""

from collections.abc import Callable
from typing import Any

import pytest

import luna_mega_cli

Case = tuple[Callable[[], Any], type[Exception], str]


def check_error(call: Callable[[], Any], exception: type[Exception], named: str) -> None:
    with pytest.raises(exception) as error:
        call()
    message = str(error.value)
    assert named in message, message
    assert "\n" not in message and "\x1b" not in message and len(message) < 1200


def command_error(capsys: pytest.CaptureFixture, *argv: object) -> str:
    """Run a command that fails; return its error and check that it is one line."""
    capsys.readouterr()
    assert luna_mega_cli.main([str(argument) for argument in argv]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith(f"luna-mega {argv[0]}: error: ") and printed.find("\n") == len(printed) - 1, printed
    assert "\x1b" not in printed
    return printed
