"""A check of error messages of the command line."""

import pytest

import luna_mega_cli


def command_error(capsys: pytest.CaptureFixture, *argv: object) -> str:
    """Run a command that fails; return its error and check that it is one line."""
    capsys.readouterr()
    assert luna_mega_cli.main([str(argument) for argument in argv]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith(f"luna-mega {argv[0]}: error: ") and printed.find("\n") == len(printed) - 1, printed
    assert "\x1b" not in printed
    return printed
