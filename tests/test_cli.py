"""The command line `luna-mega`: commands, exit statuses, and startup time."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from transformers.utils import logging

import luna_mega
import luna_mega_cli
from luna_mega.convert import ConversionError, convert_checkpoint

COMMANDS = ("convert", "verify", "bundle")


def replace(monkeypatch, name, function):
    """Make the command run another function, also with names of files that do not exist."""
    monkeypatch.setattr("luna_mega_cli.check_arguments", lambda options: None)
    monkeypatch.setattr(importlib.import_module(f"luna_mega_cli.{name}"), "run", function)


def run(argv, capsys):
    try:
        status = luna_mega_cli.main(argv)
    except SystemExit as stop:
        status = stop.code
    return status, capsys.readouterr()


def test_help_lists_commands_that_exist(capsys):
    status, output = run(["--help"], capsys)
    assert status == 0
    assert "Luna, Mega and Megalodon" in output.out
    assert re.findall(r"^    (\w+)  ", output.out, flags=re.MULTILINE) == list(COMMANDS) == list(luna_mega_cli.COMMANDS)
    for name in COMMANDS:
        status, output = run([name, "--help"], capsys)
        assert status == 0 and output.out.startswith(f"usage: luna-mega {name} [-h]")


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_in_the_help_are_commands(name, monkeypatch, capsys):
    ran = []
    replace(monkeypatch, name, lambda options: ran.append(options) or 0)
    _, output = run([name, "--help"], capsys)
    examples = output.out.partition("\nexamples:\n")[2].splitlines()
    for line in examples:
        program, *argv = shlex.split(line)
        assert program == "luna-mega" and run(argv, capsys)[0] == 0
    assert len(ran) == len(examples) >= 2 and max(map(len, examples)) <= 120


def test_completion(repo_root, tmp_path):
    """Completion follows the protocol of argcomplete's shell functions."""
    pytest.importorskip("argcomplete", reason="argcomplete is not installed")
    line = "luna-mega convert --ema-convention "
    place = tmp_path / "answer"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    asked |= {"_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(place)}
    code = "import luna_mega_cli, sys; luna_mega_cli.main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=repo_root, env=os.environ | asked, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert place.read_text(encoding="utf-8").split() == ["auto", "main", "flash"]


@pytest.mark.parametrize(
    ("environment", "colored"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colors_are_only_for_terminals(environment, colored, monkeypatch, capsys, tmp_path):
    for name, value in ({"NO_COLOR": "", "TERM": "xterm"} | environment).items():
        monkeypatch.setenv(name, value)
    _, output = run(["bundle", str(tmp_path)], capsys)
    assert "\033" not in output.err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    _, output = run(["bundle", str(tmp_path)], capsys)
    assert ("\033[31merror:\033[0m" in output.err) == colored


def test_out_of_memory_is_one_line_with_a_hint(monkeypatch, capsys):
    def fail(options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has ...\nmore")

    replace(monkeypatch, "verify", fail)
    status, output = run(["verify", "a", "b"], capsys)
    assert status == 1 and output.err.count("\n") == 1 and "CUDA_VISIBLE_DEVICES" in output.err


def test_progress_bars_require_a_terminal(monkeypatch, tmp_path, capsys):
    seen = []
    replace(monkeypatch, "bundle", lambda options: seen.append(logging.is_progress_bar_enabled()) or 0)
    assert logging.is_progress_bar_enabled()
    run(["bundle", "x"], capsys)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    run(["bundle", "x"], capsys)
    assert seen == [False, True] and logging.is_progress_bar_enabled()


@pytest.fixture
def encoder(tmp_path):
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 24}
    config = luna_mega.LunaConfig(**sizes, num_attention_heads=2, projection_length=4)
    luna_mega.LunaForMaskedLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_report_as_json(encoder, tmp_path, capsys):
    """`--json` prints a JSON report. Reports of other commands are tested with their formats."""
    status, output = run(["bundle", str(encoder), "--output", str(tmp_path / "bundle"), "--json"], capsys)
    assert status == 0 and output.err == ""
    found = json.loads(output.out)
    assert found["output"] == str(tmp_path / "bundle") and "trust_remote_code=True" in found["code"][-1]


@pytest.mark.parametrize(
    ("argv", "answer"),
    [
        (["convert", "ABSENT", "--output", "NEW"], "error: ABSENT: no such file or folder"),
        (["convert", "TEXT", "--output", "NEW", "--dict", "ABSENT"], "error: --dict ABSENT: no such file"),
        (["convert", "TEXT", "--output", "NEW", "--dict", "TEXT", "FOLDER"], "error: --dict FOLDER: is a folder; pass"),
        (["convert", "TEXT", "--output", "NEW", "--bpe", "ABSENT"], "error: --bpe ABSENT: no such file or folder"),
        (["convert", "TEXT", "--output", ""], "error: output '': is empty; pass a path"),
        (["convert", "TEXT", "--output", "TEXT"], "TEXT: the output is a file; use a folder"),
        (["convert", "", "--dry-run"], "error: checkpoint '': is empty; pass a path"),
        (["convert", "INSIDE", "--dry-run"], "error: INSIDE: no such file or folder"),
        (["verify", "FOLDER", "FOLDER"], "error: FOLDER: not a file of recorded outputs; write one with the original"),
        (["bundle", "ABSENT"], "error: ABSENT: no such folder"),
        (["bundle", "FOLDER", "--output", "INSIDE"], "INSIDE: TEXT is not a folder; use another name"),
        (["convert", "FOLDER", "--output", "NEW"], "is a folder; pass the checkpoint file itself"),
        (["verify", "FOLDER", "NEW"], "no such file or folder"),
        (["verify", "ROBERTA", "FOLDER"], "model_type 'roberta' is not supported; expected 'luna', "),
        (["bundle", "TEXT"], "is a file; use a model folder"),
        (["bundle", "ROBERTA"], "model_type 'roberta' is not supported; expected 'luna', "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_common_beginner_mistakes(argv, answer, encoder, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("no checkpoint", encoding="utf-8")
    (tmp_path / "roberta").mkdir()
    (tmp_path / "roberta" / "config.json").write_text('{"model_type": "roberta"}', encoding="utf-8")
    names = {
        "FOLDER": encoder,
        "TEXT": tmp_path / "notes.txt",
        "NEW": tmp_path / "new",
        "ABSENT": tmp_path / "absent",
        "INSIDE": tmp_path / "notes.txt" / "inside",
        "ROBERTA": tmp_path / "roberta",
    }
    status, output = run([str(names.get(word, word)) for word in argv], capsys)
    for name, path in names.items():
        answer = answer.replace(name, str(path))
    assert status == 1 and output.err.count("\n") == 1 and answer in output.err and "Errno" not in output.err


def test_help_imports_no_package(repo_root):
    """`--help` imports no packages and takes little CPU time (which other processes do not affect)."""
    code = f"""
import contextlib, sys, time
from luna_mega_cli import main
for argv in {[[], *([name] for name in COMMANDS)]!r}:
    with contextlib.suppress(SystemExit):
        main([*argv, "--help"])
    commands = sys.modules.keys() & {{f"luna_mega_cli.{{name}}" for name in {COMMANDS!r}}}
    assert not argv or argv[0] != "convert" or commands == {{"luna_mega_cli.convert"}}, "imports only its own module"
assert not {{"luna_mega", "torch", "transformers"}} & sys.modules.keys()
assert time.process_time() < 0.3, time.process_time()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=repo_root, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: luna-mega") == 1 + len(COMMANDS)


def test_version_option(capsys):
    status, output = run(["--version"], capsys)
    assert (status, output.out) == (0, f"luna-mega {luna_mega.__version__}\n")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "COMMAND"),
        (["transmogrify", "x"], "transmogrify"),
        (["-q"], "COMMAND"),
        (["bundle"], "luna-mega bundle: error: the following arguments are required: FOLDER"),
        (["convert", "x"], "luna-mega convert: error: one of the arguments --output --dry-run is required"),
        (["convert", "x", "--output", "y", "--dry-run"], "--dry-run: not allowed with argument --output"),
        (
            ["verify", "x", "y", "--tolerance", "nan"],
            "--tolerance: must be at least 0 and less than 1, got nan",
        ),
        (["verify", "x", "y", "--tolerance", "much"], "argument --tolerance: invalid tolerance value: 'much'"),
        (["verify", "x", "y", "--text", "x"], "luna-mega verify: error: unrecognized arguments: --text x"),
        (["bundle", "x", "--len\x1b[31m"], r"--len\x1b[31m"),
        (["convert", "x", "--output", "y", "--dtype", "int8"], "invalid choice: 'int8' (choose from 'float32', "),
        (["conver"], "invalid choice: 'conver'; did you mean 'convert'? (choose from 'convert', "),
        (["bundlex", "x"], "invalid choice: 'bundlex'; did you mean 'bundle'?"),
        (["convert", "x", "--output", "y", "--dtype", "bfloat"], "--dtype: invalid choice: 'bfloat'; did you mean 'bf"),
        (
            ["convert", "x", "--dry-run", "--layer-norm", "plusone"],
            "--layer-norm: invalid choice: 'plusone'; did you mean 'pl",
        ),
        (["convert", "x", "--output", "y", "--dtpye=x"], "unrecognized arguments: --dtpye=x; did you"),
        (["bundle", "x", "y"], "luna-mega bundle: error: unrecognized arguments: y\n"),
    ],
)
def test_wrong_usage_exits_with_2(argv, named, capsys):
    status, output = run(argv, capsys)
    assert status == 2
    assert named in output.err


@pytest.mark.parametrize("name", COMMANDS)
def test_a_misspelled_option_is_named_although_others_are_missing(name, capsys):
    _, output = run([name, "--help"], capsys)
    usage = output.out.partition("\n\n")[0]
    assert ("(--output DIR | --dry-run)" in usage) == (name == "convert")
    for option in set(re.findall(r"^  (--[a-z-]+)", output.out, flags=re.MULTILINE)):
        wrong = f"{option[:3]}x{option[3:]}"
        status, output = run([name, wrong], capsys)
        assert status == 2
        assert f"unrecognized arguments: {wrong}; did you mean '{option}'?" in output.err
        assert output.err.startswith(usage)


def test_command_receives_its_options_and_returns_its_status(monkeypatch):
    received = []
    replace(monkeypatch, "convert", lambda options: received.append(vars(options)) or 1)
    assert (
        luna_mega_cli.main(
            ["convert", "--head", "mnli", "model.pt", "--output", "x", "--dict", "a", "b", "--dict", "c"]
        )
        == 1
    )
    expected = {"checkpoint": "model.pt", "head": "mnli", "output": "x", "dict": ["a", "b", "c"], "dtype": None}
    assert expected.items() <= received[0].items()


@pytest.mark.parametrize(
    "error", [ConversionError("x.pt: not so\n  but so"), FileNotFoundError(2, "No such file", "x")]
)
@pytest.mark.parametrize("name", COMMANDS)
def test_invalid_input_is_one_line(name, error, monkeypatch, capsys):
    def fail(options):
        raise error

    replace(monkeypatch, name, fail)
    argv = {"convert": ["a", "--dry-run"], "verify": ["a", "b"]}.get(name, ["a"])
    status, output = run([name, *argv], capsys)
    assert status == 1 and output.out == ""
    assert output.err.startswith(f"luna-mega {name}: error: ") and output.err.count("\n") == 1


@pytest.mark.parametrize("option", ["layer_norm", "ema_convention", "dtype"])
def test_choices_equal_the_function_choices(option, tmp_path, capsys):
    """The choices in the help equal the function's; they are duplicated, because the help imports no package."""
    with pytest.raises(ValueError, match=f"{option} must be one of") as raised:
        convert_checkpoint(tmp_path / "a", tmp_path / "b", **{option: "nonsense"})
    _, output = run(["convert", "--help"], capsys)
    shown = re.search(rf"--{option.replace('_', '-')} {{(.*?)}}", output.out)[1].split(",")
    assert ", ".join(shown) + ", got" in str(raised.value)
