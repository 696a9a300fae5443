"""Every kind of checkpoint converts: the report, the command line, and the output folder."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import transformers
from huggingface_hub import ModelCard

import luna_mega
import luna_mega_cli
from luna_mega.convert import ConversionError, convert_checkpoint, importer
from luna_mega.hub.output import temporary_folder
from tests.convert import luna, mega
from tests.convert.contract import KINDS, built, check_arrived, save, saved_report, weights
from tests.convert.folders import load, words
from tests.errors import command_error


def run_json(capsys, *argv):
    """Return the report that the command prints as JSON."""
    assert luna_mega_cli.main(["convert", *map(str, argv), "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


@pytest.mark.parametrize("kind", KINDS)
def test_conversion(kind, tmp_path, monkeypatch, capsys):
    """A dry run prints the report of the function and writes nothing; the folder has all tensors and loads."""
    expected, state = KINDS[kind], built(kind)
    file, output = save(state, tmp_path), tmp_path / "new" / "model"
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    dry = run_json(capsys, file, "--dry-run")
    assert luna_mega_cli.main(["convert", str(file), "--dry-run"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before

    report = convert_checkpoint(file, output)
    written = json.loads(json.dumps(asdict(report)))
    assert [dry.pop(name) for name in ("output", "files", "load")] == [None, [], ""]
    assert (
        written.pop("output") == str(output) and written.pop("files") == sorted(report.files[:-1]) + report.files[-1:]
    )
    assert set(report.files) == {file.name for file in output.iterdir()}
    call, _, condition = written.pop("load").partition(" after ")
    assert dry == written and dry["model_class"] == rows["class"] == expected.model
    assert rows["read"].startswith(f"{file.name}: {kind.partition(',')[0]} of the ") and rows["written"] == "nothing"
    assert expected.sizes in f"{rows['sizes']}, " and ("labels" in rows) == ("Classification" in expected.model)
    assert rows["tensors"] == f"{len(report.mapped)} mapped, {len(report.dropped)} dropped, 0 missing, 0 unexpected"
    assert report.source == saved_report(output)["source"]

    card = ModelCard.load(output / "README.md")
    assert report.source["sha256"] in card.text and (card.data.pipeline_tag is None) is ("pixels" in kind)
    assert condition == "`import luna_mega`; without luna-mega, add trust_remote_code=True"
    auto_class = call.split(".")[0]
    model = eval(call, {auto_class: getattr(transformers, auto_class)})
    assert type(model).__name__ == expected.model and load(output).config.to_dict() == model.config.to_dict()
    check_arrived(state["model"], weights(output), written)
    if kind == "luna_bert":  # the folder of a head is also a language model
        load(output, luna_mega.LunaForMaskedLM)
    assert all(x.isfinite().all() for x in [model(**expected.inputs).logits, *model.state_dict().values()])


# Options of the command -> those of the function, and a checkpoint that converts with them.
OPTIONS = [
    (["--head", "a"], {"head": "a"}, lambda: luna.bert(heads=[("a", 3), ("b", 2)])),
    (["--layer-norm", "standard"], {"layer_norm": "standard"}, luna.lra21),
    (["--layer-norm", "plus-one"], {"layer_norm": "plus-one"}, luna.lra23),
    (["--ema-convention", "flash"], {"ema_convention": "flash"}, mega.mega),
    (["--ema-convention", "main"], {"ema_convention": "main"}, mega.mega),
    (["--dtype", "float16"], {"dtype": "float16"}, luna.bert),
    (["--license", "mit"], {"license": "mit"}, luna.bert),
    (["--dict", "dict.txt"], {"dictionaries": ["dict.txt"]}, luna.bert),
]


@pytest.mark.parametrize(("argv", "options", "build"), OPTIONS)
def test_command_and_function_agree(argv, options, build, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("dict.txt").write_text(words(12), encoding="utf-8")
    file = save(build(), tmp_path)
    printed = run_json(capsys, file, "--output", "a", *argv)
    written = json.loads(json.dumps(asdict(convert_checkpoint(file, "b", **options))))
    for name in ("output", "load"):
        assert printed.pop(name) != written.pop(name)
    assert printed == written
    for name in ("config.json", "model.safetensors", "conversion_report.json"):
        assert Path("a", name).read_bytes() == Path("b", name).read_bytes(), name
    assert ModelCard.load("a/README.md").data.license == options.get("license")
    save(luna.checkpoint({}), tmp_path)
    with pytest.raises(ConversionError) as error:
        convert_checkpoint(file, "c", **options)
    for place in (["--output", "c"], ["--dry-run"]):
        found = command_error(capsys, "convert", file, *place, *argv)
        assert found == f"luna-mega convert: error: {error.value}\n" and not Path("c").exists()


@pytest.fixture
def file(tmp_path):
    """Return a checkpoint in an otherwise empty folder."""
    return save(built("luna_lra, 2021"), tmp_path)


@pytest.mark.parametrize(
    ("signal_name", "status", "there"),
    [("SIGINT", 130, False), ("SIGTERM", 143, False), (None, None, False)]
    + [("SIGINT", 130, True), ("SIGTERM", 143, True), (None, None, True), ("move", None, True)],
)
def test_failed_write_leaves_no_files(file, tmp_path, monkeypatch, signal_name, status, there):
    """A conversion that fails or ends by a signal after the weights are on the disk, or by moving them, leaves none."""
    output = tmp_path / "model" if there else tmp_path / "x" / "y"
    if there:
        output.mkdir()
    before, handler = sorted(tmp_path.rglob("*")), signal.signal(signal.SIGINT, signal.default_int_handler)

    def fail(report, folder):
        assert (folder / "model.safetensors").is_file()
        if signal_name is None:
            raise LookupError
        signal.raise_signal(getattr(signal, signal_name))

    def rename(source, target, run=os.rename):
        if Path(target) == output / "model.safetensors":
            raise LookupError
        run(source, target)

    monkeypatch.setattr(*(os, "rename", rename) if signal_name == "move" else (importer.Report, "save", fail))
    try:
        with pytest.raises((LookupError, SystemExit)) as raised:
            sys.exit(luna_mega_cli.main(["convert", str(file), "--output", str(output)]))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert getattr(raised.value, "code", None) == status and sorted(tmp_path.rglob("*")) == before


def test_files_of_a_killed_conversion_are_removed_by_the_next(file, tmp_path, monkeypatch, with_code):
    """Those of a running process stay. An empty output folder stays, and has the code of the model."""
    with monkeypatch.context() as patch:
        patch.setattr(importer.Report, "save", lambda *_: signal.raise_signal(signal.SIGKILL))
        process = multiprocessing.get_context("fork").Process(
            target=convert_checkpoint, args=[file, tmp_path / "model"]
        )
        process.start()
        process.join()
    assert process.exitcode == -signal.SIGKILL and len(list(tmp_path.glob(".*"))) == 1
    (tmp_path / "model").mkdir(0o705)
    monkeypatch.chdir(tmp_path / "model")
    with temporary_folder(tmp_path, "model") as running:
        convert_checkpoint(file, ".")
        assert Path.cwd().samefile(tmp_path / "model") and Path.cwd().stat().st_mode & 0o777 == 0o705
        assert list(tmp_path.glob(".*")) == [running] and (tmp_path / "model" / "luna_mega_code").is_dir()


def test_full_disk(file, tmp_path, capsys):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        status = luna_mega_cli.main(["convert", str(file), "--output", str(tmp_path / "model")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 1 and "cannot write model.safetensors" in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == [file]


PATHS = {
    "/home/me/data-bin": "data-bin",
    "/home/me/a:/home/me/b": "a:b",
    "train --data /home/me/data/x --save checkpoints/last.pt": "train --data x --save checkpoints/last.pt",
    "python /home/me/train.py": "python train.py",
    "~me/secret/x": "x",
    "see ~me/secret/x": "see x",
    "C:\\Users\\me\\x": "x",
    "--data=C:/Users/me/x": "--data=x",
    "\\\\server\\me\\x": "x",
    "//server/me/x": "x",
    "file:///home/me/x": "file:x",
    "/home/me/O'Neill, John (old)/x": "x",
    "(x / 255 - 0.5) / 0.5": "(x / 255 - 0.5) / 0.5",
} | dict.fromkeys([same := "env:// tcp://host:1 https://a.b/c </s> w/o 1/2 ../x a/b -"], same)


def test_no_text_of_the_report_keeps_a_path(tmp_path):
    args = {
        "texts": list(PATHS),
        "numbers": [0.5, float("inf"), float("nan")],
        "tuple": ({"/home/me/k": {"train /home/me/k": 1}}, {"/home/me/a", "~me/b/c"}, b"~me/x"),
    }
    output = tmp_path / "model"
    report = convert_checkpoint(save(luna.bert(**args, arch="/home/me/arch", task="/home/me/task"), tmp_path), output)
    saved = saved_report(output)
    assert saved["args"]["texts"] == list(PATHS.values()) and saved["args"]["numbers"] == [0.5, "inf", "nan"]
    assert saved["args"]["tuple"] == [{"k": {"train k": 1}}, "{'a', 'c'}", "b'x'"]
    assert saved["source"]["arch"] == "arch" and saved["source"]["task"] == "task"
    for file in filter(Path.is_file, output.rglob("*")):
        assert b"home/me" not in file.read_bytes() and b"~me" not in file.read_bytes(), file.name
    assert "home/me" not in str(report).replace(str(output), "")


@pytest.mark.slow
def test_locale_of_a_process(file, tmp_path, repo_root):
    """Input paths that the locale cannot encode are read through a link; such output paths raise an error."""
    environment = os.environ | {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    source = file.rename(tmp_path / "modèle.pt")
    code = "import sys; from luna_mega_cli import main; file, *names = sys.argv[1:]\n"
    code += "print(*(main(['convert', file, '--output', name]) for name in names))"
    outputs = [str(tmp_path / name).encode() for name in ("a", "bé")]
    command = [sys.executable, "-c", code, str(source).encode(), *outputs]
    done = subprocess.run(command, cwd=repo_root, env=environment, capture_output=True)
    assert done.stdout.endswith(b"0 1\n"), done.stderr
    assert b"the locale's encoding is ascii, set PYTHONUTF8=1" in done.stderr
