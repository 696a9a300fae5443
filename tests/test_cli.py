"""The command line `luna-mega`: one table of commands, exit statuses and words of their messages; help and startup."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch

import luna_mega
import luna_mega_cli
from luna_mega.convert import convert_checkpoint
from tests.docs.blocks import check_command

COMMANDS = tuple(luna_mega_cli.COMMANDS)


def run(argv, capsys):
    try:
        status = luna_mega_cli.main(argv)
    except SystemExit as stop:
        status = stop.code
    return status, capsys.readouterr()


# A command line, its exit status, and words of its message. MODEL is a model folder, TEXT a file, INSIDE a path below
# that file, NEW and ABSENT are absent, EMPTY is an empty folder, and LOOP is a link to itself.
TABLE = [
    ("convert ABSENT --output NEW", 1, "error: ABSENT: no such file or folder"),
    ("convert TEXT --output NEW --dict ABSENT", 1, "error: --dict ABSENT: no such file"),
    ("convert TEXT --output NEW --dict TEXT MODEL", 1, "error: --dict MODEL: is a folder; pass a file"),
    ("convert TEXT --output ''", 1, "error: output '': is empty; pass a path"),
    ("convert TEXT --output TEXT", 1, "TEXT: the output is a file; use a folder"),
    ("convert '' --dry-run", 1, "error: checkpoint '': is empty; pass a path"),
    ("convert INSIDE --dry-run", 1, "error: INSIDE: no such file or folder"),
    ("convert EMPTY --dry-run", 1, "none of its files ends in .pt"),
    ("convert MODEL --output NEW", 1, "is a folder; pass the checkpoint file itself (checkpoint_best.pt)"),
    ("bundle ABSENT", 1, "error: ABSENT: no such folder"),
    ("bundle TEXT", 1, "is a file; use a model folder"),
    ("bundle MODEL --output INSIDE", 1, "INSIDE: TEXT is not a folder; use another name"),
    ("bundle MODEL --output MODEL", 1, "the output folder is not empty"),
    ("bundle MODEL --output LOOP", 1, "LOOP: the symbolic link is circular; use another name"),
    ("", 2, "COMMAND"),
    ("conver", 2, "invalid choice: 'conver'; did you mean 'convert'? (choose from 'convert', "),
    ("bundlex x", 2, "invalid choice: 'bundlex'; did you mean 'bundle'?"),
    ("bundle", 2, "luna-mega bundle: error: the following arguments are required: FOLDER"),
    ("bundle x y", 2, "luna-mega bundle: error: unrecognized arguments: y\n"),
    ("bundle x --len\x1b[31m", 2, r"--len\x1b[31m"),
    ("convert x", 2, "luna-mega convert: error: one of the arguments --output --dry-run is required"),
    ("convert x --output y --dry-run", 2, "--dry-run: not allowed with argument --output"),
    ("convert x --output y --dtype bfloat", 2, "--dtype: invalid choice: 'bfloat'; did you mean 'bfloat16'?"),
    ("convert x --output y --dtpye=x", 2, "unrecognized arguments: --dtpye=x; did you mean '--dtype'?"),
    ("verify x y --tolerance nan", 2, "--tolerance: must be at least 0 and less than 1, got nan"),
    ("verify x y --tolerance much", 2, "argument --tolerance: invalid tolerance value: 'much'"),
    ("--version", 0, f"luna-mega {luna_mega.__version__}\n"),
    ("--help", 0, "Luna, Mega and Megalodon"),
    *((f"{name} --help", 0, f"usage: luna-mega {name} [-h]") for name in COMMANDS),
    ("bundle MODEL --output NEW", 0, "written to NEW; load it with model = AutoModelForMaskedLM.from_pretrained("),
]


@pytest.fixture
def names(tmp_path):
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 24}
    config = luna_mega.LunaConfig(**sizes, num_attention_heads=2, projection_length=4)
    luna_mega.LunaForMaskedLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "notes.txt").write_text("no checkpoint", encoding="utf-8")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "empty").mkdir()
    (tmp_path / "model" / "checkpoint_best.pt").touch()
    places = {"MODEL": "model", "TEXT": "notes.txt", "NEW": "new", "ABSENT": "absent", "INSIDE": "notes.txt/inside"}
    places |= {"EMPTY": "empty", "LOOP": "loop"}
    return {name: str(tmp_path / path) for name, path in places.items()}


@pytest.mark.parametrize(("line", "expected", "words"), TABLE, ids=[ascii(row[0]) for row in TABLE])
def test_every_command(line, expected, words, names, capsys):
    status, output = run([names.get(word, word) for word in shlex.split(line)], capsys)
    for name, path in names.items():
        words = words.replace(name, path)
    assert status == expected and words in (output.err if status else output.out)
    assert bool(output.err) == bool(status) and "Errno" not in output.err
    assert status != 1 or output.err.count("\n") == 1 and output.out == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command(name, capsys):
    """It is listed, its examples are commands, and a misspelled option is named although others are missing."""
    assert re.search(rf"^    {name}  ", run(["--help"], capsys)[1].out, flags=re.MULTILINE)
    _, output = run([name, "--help"], capsys)
    examples, usage = output.out.partition("\nexamples:\n")[2].splitlines(), output.out.partition("\n\n")[0]
    assert len(examples) >= 2 and max(map(len, examples)) <= 120
    for line in examples:
        check_command(*shlex.split(line))
    for option in set(re.findall(r"^  (--[a-z-]+)", output.out, flags=re.MULTILINE)):
        wrong = f"{option[:3]}x{option[3:]}"
        status, output = run([name, wrong], capsys)
        assert status == 2 and f"unrecognized arguments: {wrong}; did you mean '{option}'?" in output.err
        assert output.err.startswith(usage)


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


def test_report_as_json(names, capsys):
    """`--json` prints a JSON report. Reports of other commands are tested with their formats."""
    status, output = run(["bundle", names["MODEL"], "--output", names["NEW"], "--json"], capsys)
    assert status == 0 and output.err == ""
    found = json.loads(output.out)
    assert found["output"] == names["NEW"] and "trust_remote_code=True" in found["code"][-1]


def test_help_imports_no_package(repo_root):
    """`--help` imports no packages, and only the module of its command."""
    code = f"""
import contextlib, sys
from luna_mega_cli import main
for argv in {[[], *([name] for name in COMMANDS)]!r}:
    with contextlib.suppress(SystemExit):
        main([*argv, "--help"])
    commands = sys.modules.keys() & {{f"luna_mega_cli.{{name}}" for name in {COMMANDS!r}}}
    assert not argv or argv[0] != "convert" or commands == {{"luna_mega_cli.convert"}}
assert not {{"luna_mega", "torch", "transformers"}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=repo_root, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: luna-mega") == 1 + len(COMMANDS)


def test_out_of_memory_is_one_line(names, monkeypatch, capsys):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has ...\nmore")
    monkeypatch.setattr(shutil, "copyfile", Mock(side_effect=error))
    status, output = run(["bundle", names["MODEL"], "--output", names["NEW"]], capsys)
    words = "error: out of memory (CUDA out of memory); use shorter inputs, or set CUDA_VISIBLE_DEVICES= to run on"
    assert status == 1 and output.err.startswith(f"luna-mega bundle: {words}") and output.err.count("\n") == 1


@pytest.mark.parametrize("option", ["layer_norm", "ema_convention", "dtype"])
def test_choices_equal_the_function_choices(option, tmp_path, capsys):
    """The choices in the help equal the function's; they are duplicated, because the help imports no package."""
    with pytest.raises(ValueError, match=f"{option} must be one of") as raised:
        convert_checkpoint(tmp_path / "a", tmp_path / "b", **{option: "nonsense"})
    _, output = run(["convert", "--help"], capsys)
    shown = re.search(rf"--{option.replace('_', '-')} {{(.*?)}}", output.out)[1].split(",")
    assert ", ".join(shown) + ", got" in str(raised.value)
