import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

import luna_mega_cli
from luna_mega import _code
from luna_mega.convert import ConversionError, convert_checkpoint, importer
from luna_mega.hub.output import temporary_folder


def test_empty_output_folder_and_new_parents(convert, make, with_code):
    convert.output.mkdir()
    convert(make.bert())
    convert.output = convert.output / "new" / "deeper"
    assert sorted(path.name for path in convert(make.bert()).iterdir()) == [
        "README.md",
        "config.json",
        "conversion_report.json",
        "luna_mega_code",
        "model.safetensors",
    ]


def test_occupied_output(convert, make):
    convert.output.mkdir()
    (convert.output / "mine").write_text("precious", encoding="utf-8")
    assert "not empty" in convert.error(make.bert())
    assert [path.name for path in convert.output.iterdir()] == ["mine"]
    (convert.output / "mine").rename(convert.output.with_name("file"))
    convert.output = convert.output.with_name("file")
    assert "is a file" in convert.error()


@pytest.mark.parametrize(
    ("error", "there"), [(OSError("no space left"), False), (KeyboardInterrupt(), True), (Exception("bug"), False)]
)
def test_failed_write_leaves_no_files(convert, make, monkeypatch, error, there):
    """A write that fails after the weights are on the disk leaves no files."""
    if there:
        convert.output.mkdir()
    before = sorted(convert.output.parent.rglob("*"))

    def fail(report, folder):
        assert (folder / "model.safetensors").is_file()
        raise error

    monkeypatch.setattr(importer.Report, "save", fail)
    convert.save(make.bert())
    with pytest.raises(type(error)) as raised:
        convert_checkpoint(convert.file, convert.output / "x" / "y" if not there else convert.output)
    assert raised.value is error
    assert sorted(convert.output.parent.rglob("*")) == [*before, convert.file]


SIGNALS = [("SIGINT", 130, "luna-mega convert: interrupted\n"), ("SIGTERM", 143, "")]


@pytest.mark.parametrize(("name", "status", "screen"), SIGNALS)
def test_interrupted_conversion_leaves_no_files(convert, make, monkeypatch, name, status, screen):
    convert.save(make.bert())
    monkeypatch.setattr(importer.Report, "save", lambda *_: signal.raise_signal(getattr(signal, name)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        found = luna_mega_cli.main(["convert", str(convert.file), "--output", str(convert.output)])
    except SystemExit as stop:
        found = stop.code
    finally:
        signal.signal(signal.SIGINT, before)
    assert (found, convert.capsys.readouterr().err) == (status, screen)
    assert list(convert.output.parent.iterdir()) == [convert.source]


def test_files_of_a_killed_conversion_are_removed_by_the_next(convert, make, monkeypatch):
    """Those of a running process stay."""
    convert.save(make.bert())
    with monkeypatch.context() as patch:
        patch.setattr(importer.Report, "save", lambda *_: signal.raise_signal(signal.SIGKILL))
        process = multiprocessing.get_context("fork").Process(
            target=convert_checkpoint, args=[convert.file, convert.output]
        )
        process.start()
        process.join()
    assert process.exitcode == -signal.SIGKILL and len(list(convert.output.parent.glob(".*"))) == 1
    with temporary_folder(convert.output.parent, convert.output.name) as running:
        convert(None)
        assert list(convert.output.parent.glob(".*")) == [running]


def test_full_disk(convert, make, monkeypatch):
    monkeypatch.setattr(_code, "_enabled", False)  # its files are written before the weights
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    convert.save(make.bert())
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        status = luna_mega_cli.main(["convert", str(convert.file), "--output", str(convert.output)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 1
    assert "cannot write model.safetensors" in convert.capsys.readouterr().err.splitlines()[-1]
    assert list(convert.output.parent.iterdir()) == [convert.source]


def test_report(convert, make):
    """The report has the source, the args and the mapping; `test_golden.py` has complete reports."""
    report = convert.report(make.bert(heads=[("a_head", 3)], lr=[0.1], fp16=False))
    assert len(report["source"]["sha256"]) == 64 and report["source"]["file"] == "model.pt"
    assert report["args"]["lr"] == [0.1] and report["args"]["task"] == "masked_lm"
    assert report["missing"] == report["unexpected"] == []
    assert all("--head a_head" in row["reason"] for row in report["dropped"])
    source, target = "encoder.lm_head.weight", "lm_head.decoder.weight"
    assert {"source": source, "target": target, "shape": [make.VOCABULARY, make.WIDTH]} in report["mapped"]


def test_model_card(convert, make):
    dictionary = make.dictionary(convert.source / "dict.txt")
    report = convert.report(make.bert(), "--license", "mit", "--dict", dictionary)
    card = ModelCard.load(convert.output / "README.md")
    assert (card.data.license, card.data.pipeline_tag) == ("mit", "fill-mask")
    assert "README.md" in report["files"] and report["source"]["sha256"] in card.text


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


def test_no_text_of_the_report_keeps_a_path(convert, make):
    args = {
        "texts": list(PATHS),
        "keys": {"/home/me/k": {"train /home/me/k": 1}},
        "set": {"/home/me/a", "~me/b/c"},
        "bytes": b"--data /home/me/x",
        "tuple": ({"a": ["x", "cat '/home/me/d' 'e/f'"]},),
    }
    convert(make.bert(**args, arch="/home/me/arch", task="/home/me/task"))
    report = json.loads((convert.output / "conversion_report.json").read_text(encoding="utf-8"))
    assert report["args"]["texts"] == list(PATHS.values())
    assert report["args"]["keys"] == {"k": {"train k": 1}} and report["args"]["set"] == "{'a', 'c'}"
    assert report["args"]["bytes"] == "b'--data x'" and report["args"]["tuple"] == [{"a": ["x", "cat 'd' 'e/f'"]}]
    assert report["source"]["arch"] == "arch" and report["source"]["task"] == "task"
    for file in filter(Path.is_file, convert.output.rglob("*")):
        assert b"home/me" not in file.read_bytes() and b"~me" not in file.read_bytes(), file.name
    assert "home/me" not in convert.screen.replace(str(convert.output), "")


def test_multi_line_name_raises(convert, make):
    assert r"args.task = 'masked\n_lm' is not a name" in convert.error(make.bert(task="masked\n_lm"))


def test_public_function_checks_its_options(tmp_path):
    with pytest.raises(ValueError, match="dtype must be one of"):
        convert_checkpoint(tmp_path, tmp_path, dtype="int8")
    with pytest.raises(ValueError, match="layer_norm must be one of"):
        convert_checkpoint(tmp_path, tmp_path, layer_norm="minus-one")
    with pytest.raises(ConversionError, match="no such file"):
        convert_checkpoint(tmp_path / "nowhere.pt", tmp_path / "output")


def test_locale_without_utf8_is_named(convert, make, monkeypatch):
    """A locale without UTF-8 raises an error that names it; `test_locale_of_a_process` uses a real locale."""
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    monkeypatch.setattr(os, "fsencode", lambda text: os.fspath(text).encode("ascii", "surrogateescape"))
    convert.output = convert.output.with_name("bé")
    assert "the locale's encoding is ascii, set PYTHONUTF8=1" in convert.error(make.bert())


@pytest.mark.slow
def test_locale_of_a_process(convert, make, repo_root):
    """Input paths that the locale cannot encode are read through a link; such output paths raise an error."""
    convert.save(make.bert())
    environment = os.environ | {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    file = convert.file.rename(convert.source / "modèle.pt")
    code = "import sys; from luna_mega_cli import main; file, *names = sys.argv[1:]\n"
    code += "print(*(main(['convert', file, '--output', name]) for name in names))"
    outputs = [str(convert.output.with_name(name)).encode() for name in ("a", "bé")]
    command = [sys.executable, "-c", code, str(file).encode(), *outputs]
    done = subprocess.run(command, cwd=repo_root, env=environment, capture_output=True)
    assert done.stdout.endswith(b"0 1\n"), done.stderr
    assert b"the locale's encoding is ascii, set PYTHONUTF8=1" in done.stderr
