"""The command line `luna-mega`: commands, exit statuses, and how soon it answers."""

import re
import subprocess
import sys

import pytest

import luna_mega
from luna_mega import cli
from luna_mega.convert import ConversionError, convert_checkpoint
from luna_mega.convert.exporter import export_checkpoint

COMMANDS = ("convert", "export", "verify", "info", "bundle", "onnx", "eval", "demo")


def run(argv, capsys):
    try:
        status = cli.main(argv)
    except SystemExit as stop:
        status = stop.code
    return status, capsys.readouterr()


def test_help_lists_commands_that_exist(capsys):
    status, output = run(["--help"], capsys)
    assert status == 0
    assert re.findall(r"^  (\w+)  ", output.out, flags=re.MULTILINE) == list(COMMANDS) == list(cli._COMMANDS)
    for name in COMMANDS:
        status, output = run([name, "--help"], capsys)
        assert status == 0 and output.out.startswith(f"usage: luna-mega {name} [-h]")


@pytest.mark.parametrize("argv", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_help_waits_for_no_package(argv, repo_root):
    """The processor time counts what other work on the machine does not change."""
    code = f"""
import contextlib, sys, time
from luna_mega_cli import main
with contextlib.suppress(SystemExit):
    main({[*argv, "--help"]!r})
assert not {{"luna_mega", "torch", "transformers"}} & sys.modules.keys()
assert time.process_time() < 0.5, time.process_time()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=repo_root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage: luna-mega" in done.stdout


def test_version_option(capsys):
    status, output = run(["--version"], capsys)
    assert (status, output.out) == (0, f"luna-mega {luna_mega.__version__}\n")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "COMMAND"),
        (["transmogrify", "x"], "transmogrify"),
        (["-q"], "COMMAND"),
        (["info"], "luna-mega info: error: the following arguments are required: PATH"),
        (["info", "x", "--length", "0"], "argument --length: 0: give a whole number of at least 1"),
        (["info", "x", "--length", "-3"], "argument --length: -3: give a whole number of at least 1"),
        (["verify", "a", "b", "--batch", "two"], "argument --batch: two: give a whole number of at least 1"),
        (["verify", "a", "b", "--seed", "1", "--text", "x"], "luna-mega verify: error: --seed is of the random inputs"),
        (["convert", "x", "--output", "y", "--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_wrong_usage_exits_with_2(argv, named, capsys):
    status, output = run(argv, capsys)
    assert status == 2
    assert named in output.err


def test_a_command_gets_its_options_and_its_status_is_returned(monkeypatch):
    received = []
    monkeypatch.setitem(cli._COMMANDS, "convert", lambda options: received.append(vars(options)) or 1)
    assert cli.main(["convert", "--head", "mnli", "model.pt", "--output", "x", "--dict", "a", "b", "--dict", "c"]) == 1
    expected = {"checkpoint": "model.pt", "head": "mnli", "output": "x", "dict": ["a", "b", "c"], "dtype": "float32"}
    assert expected.items() <= received[0].items()


@pytest.mark.parametrize(
    "error", [ConversionError("x.pt: not so\n  but so"), FileNotFoundError(2, "No such file", "x")]
)
@pytest.mark.parametrize("name", COMMANDS)
def test_an_input_at_fault_is_one_line(name, error, monkeypatch, capsys):
    def fail(options):
        raise error

    monkeypatch.setitem(cli._COMMANDS, name, fail)
    writes = dict.fromkeys(("convert", "export", "onnx"), ["a", "--output", "b"])
    argv = (writes | {"verify": ["a", "b"]}).get(name, ["a"])
    status, output = run([name, *argv], capsys)
    assert status == 1 and output.out == ""
    assert output.err.startswith(f"luna-mega {name}: error: ") and output.err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "function", "option"),
    [
        ("convert", convert_checkpoint, "layer_norm"),
        ("convert", convert_checkpoint, "ema_convention"),
        ("convert", convert_checkpoint, "dtype"),
        ("export", export_checkpoint, "layer_norm"),
        ("export", export_checkpoint, "dtype"),
    ],
)
def test_choices_are_those_of_the_function(command, function, option, tmp_path, capsys):
    """They are written twice, because the help does not import the package."""
    with pytest.raises(ValueError, match=f"{option} must be one of") as raised:
        function(tmp_path / "a", tmp_path / "b", **{option: "nonsense"})
    _, output = run([command, "--help"], capsys)
    shown = re.search(rf"--{option.replace('_', '-')} {{(.*?)}}", output.out)[1].split(",")
    assert ", ".join(shown) + ", got" in str(raised.value)
