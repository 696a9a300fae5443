"""`reproduce.py` from the download to the row of the table, with small archives of the real formats."""

import dataclasses
import io
import json
import shlex
import shutil
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from luna_mega import LunaConfig, MegaForCausalLM
from tests.convert import files, mega_lm
from tests.examples.runs import assert_error, wav

BYTES = [10, 32, *range(97, 123)]  # newline, space and letters


class Handler(BaseHTTPRequestHandler):
    """Serve `files` with ranges; the next reply to GET ends after `cut` bytes."""

    files: dict[str, bytes] = {}
    cut: int | None = None
    ranges: list[str | None] = []

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET(with_content=False)

    def do_GET(self, with_content=True):
        content = self.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        start = 0
        if with_content:
            self.ranges.append(self.headers["Range"])
            start = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if with_content:
            end, type(self).cut = type(self).cut, None
            self.wfile.write(content[start:end])


@pytest.fixture
def served():
    """Return the handler of a server on the loopback address, with its address in `address`."""
    handler = type("Served", (Handler,), {"files": {}, "ranges": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    handler.address = f"http://127.0.0.1:{server.server_port}"
    yield handler
    server.shutdown()
    server.server_close()


@pytest.fixture
def reproduce(script, served, monkeypatch, tmp_path):
    """Return a function that runs the script; published addresses are those of `served`."""
    module = script("reproduce")
    for name, experiment in module.EXPERIMENTS.items():
        changes = {
            field: f"{served.address}/{name}/{field}.{'tar.gz' if (name, field) == ('speech', 'data') else 'zip'}"
            for field in ("archive", "data")
            if getattr(experiment, field)
        }
        monkeypatch.setitem(module.EXPERIMENTS, name, dataclasses.replace(experiment, **changes))
    monkeypatch.setattr(module, "ENWIK8", 4000)
    return lambda *arguments: module.main([*map(str, arguments), "--output_dir", str(tmp_path / "out")])


def zipped(contents):
    """Return a zip file."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return target.getvalue()


def test_enwik8(reproduce, served, tmp_path, capsys):
    """An interrupted download continues, a second run downloads and converts nothing, and the score is exact."""
    torch.manual_seed(0)
    files.write(mega_lm.mega_lm(), tmp_path / "bytes.pt")
    text = bytes(np.random.default_rng(0).choice(BYTES, 4000).astype(np.uint8))
    dictionary = "".join(f"{byte} 1\n" for byte in BYTES)
    checkpoint = {"a/best.pt": (tmp_path / "bytes.pt").read_bytes()}
    archive = zipped(checkpoint | {"a/b/dict.txt": dictionary, "a/readme.txt": "no"})
    data = zipped({"enwik8": text})
    assert_error(reproduce, "HTTP Error 404", "enwik8")
    assert_error(reproduce, "absent.zip: no such file", "enwik8", "--data", "absent.zip")
    served.files |= {"/enwik8/archive.zip": archive, "/enwik8/data.zip": data}
    served.cut = 100
    assert_error(reproduce, f"interrupted after 100 of {len(data)} bytes; run the command again", "enwik8")
    here = reproduce("enwik8")
    assert served.ranges == [None, "bytes=100-", None]
    assert reproduce("enwik8") == here and len(served.ranges) == 3
    out = capsys.readouterr().out
    assert out.count("$ luna-mega convert") == 1 and "$ python examples/eval_lm.py" in out
    assert f"enwik8, bits_per_token: paper 1.02 (Mega, Table 5), here {here:.4g}, difference {here - 1.02:+.3g}" in out
    header, _, *rows = (tmp_path / "out" / "results.md").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 2 and len({row.count("|") for row in (header, *rows)}) == 1 and "| 1.02 |" in rows[0]
    assert here == pytest.approx(expected_bits(tmp_path / "out", text[3800:]), rel=1e-5)


@torch.no_grad()
def expected_bits(out, text):
    """Return the bits per byte of a text in one block; the chunk of the evaluation is longer than the text."""
    model = MegaForCausalLM.from_pretrained(out / "model", chunk_size=4096).eval()
    text = text.removesuffix(b"\n") + b"\n"
    symbols = {byte: index + 4 for index, byte in enumerate(BYTES)}
    ids = torch.tensor([[symbols[byte] for byte in text]])
    logits = model(ids, use_cache=False).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item() / np.log(2)


def test_wikitext103(reproduce, served, parity_folder, tmp_path):
    """A missing dictionary is an error with the content of the archive; --dict and --data are used."""
    folder = parity_folder("mega", "08_lm_adaptive_tied_factor2_base")
    served.files["/wikitext103/archive.zip"] = zipped({"wt103/last/1.pt": (folder / "checkpoint.pt").read_bytes()})
    words = [line.split()[0] for line in (folder / "dict.txt").read_text(encoding="utf-8").splitlines()[:20]]
    (tmp_path / "data.zip").write_bytes(zipped({"a/b/wiki.test.tokens": f" \n {' '.join(words)} \n = {words[0]} = \n"}))
    data = ["--data", tmp_path / "data.zip"]
    message = "has no fitting dictionaries; it contains: wt103/last/1.pt; pass --dict"
    assert_error(reproduce, message, "wikitext103", *data)
    here = reproduce("wikitext103", *data, "--dict", folder / "dict.txt")
    assert 1 < here < 1e6
    report = json.loads((tmp_path / "out" / "scores" / "scores.json").read_text(encoding="utf-8"))
    assert [(x["context"], x["chunk"], x["perplexity"]) for x in report] == [(24557, 2048, here)]


def tarred(*members, mode="w"):
    """Return a tar archive of (name, type, content or target of a link)."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode=mode) as archive:
        for name, kind, value in members:
            item = tarfile.TarInfo(name)
            item.type, item.mode = kind, 0o7777
            if kind == tarfile.REGTYPE:
                item.size = len(value)
            else:
                item.linkname = value
            archive.addfile(item, io.BytesIO(value) if kind == tarfile.REGTYPE else None)
    return target.getvalue()


def speech_commands(words):
    """Return an archive of Speech Commands with one clip of each word in each split."""
    contents = {}
    for index, word in enumerate(words):
        for name in ("train", "validation", "testing"):
            contents[f"./{word}/{name}.wav"] = wav(3000 * np.sin(np.arange(64) * (index + 1) / 9))
    for name in ("validation", "testing"):
        contents[f"./{name}_list.txt"] = "".join(f"{word}/{name}.wav\n" for word in words).encode()
    return tarred(*((name, tarfile.REGTYPE, content) for name, content in contents.items()), mode="w:gz")


def test_speech(reproduce, script, served, parity_folder, tmp_path, capsys):
    """Several checkpoints are an error that lists them; --file chooses one."""
    content = (parity_folder("mega", "14_sc_raw_base") / "checkpoint.pt").read_bytes()
    other = torch.load(io.BytesIO(content), weights_only=False) | {"last_optimizer_state": torch.zeros(1)}
    files.write(other, tmp_path / "other.pt")
    archive = zipped({"base/1.pt": content, "big/1.pt": (tmp_path / "other.pt").read_bytes(), "notes/x.pt": b"none"})
    served.files["/speech/archive.zip"] = archive
    served.files["/speech/data.tar.gz"] = speech_commands(script("lra.released").SC10)
    message = "2 checkpoints for MegaForSequenceClassification: base/1.pt, big/1.pt; pass --file"
    assert_error(reproduce, message, "speech")
    here = reproduce("speech", "--file", "base")
    assert 0 <= here <= 100 and here % 10 == pytest.approx(0, abs=1e-6)
    assert "speech 32, test_accuracy: paper nan (Mega, Table 4), here " in capsys.readouterr().out
    predictions = (tmp_path / "out" / "scores" / "predictions.tsv").read_text(encoding="utf-8").splitlines()
    assert len(predictions) == 11


def test_imagenet(reproduce, parity_folder, tmp_path):
    for number in range(7):
        folder = tmp_path / "data" / "validation" / f"n{number}"
        folder.mkdir(parents=True)
        Image.new("RGB", (30, 40), (30 * number, 90, 100)).save(folder / "1.png")
    checkpoint = parity_folder("mega", "16_image_batchnorm_linear_nopos_rep") / "checkpoint.pt"
    here = reproduce("imagenet", "--checkpoint", checkpoint, "--data", tmp_path / "data")
    assert here * 7 / 100 == pytest.approx(round(here * 7 / 100), abs=1e-6)


def test_options_are_those_of_the_scripts(script, tmp_path):
    """Every evaluation has options of its script, and every model of a paper has a score."""
    module = script("reproduce")
    LunaConfig().save_pretrained(tmp_path)
    paths = [f"--{name}={tmp_path}" for name in ("model_name_or_path", "dataset_path", "output_dir")]
    for name, experiment in module.EXPERIMENTS.items():
        found = set()
        for task in experiment.tasks or (None,):
            options = shlex.split(experiment.options.format(task=task))
            parsed = script(experiment.script).parse([*options, *paths])
            assert task is None or parsed[0].task_name == task
            for flag in (False, True):
                config = {"use_chunking": flag, "tie_key_value": flag, "hidden_size": 60 + 12 * flag}
                found.add(module.variant(SimpleNamespace(name=name, task_name=task), config))
        assert found == experiment.paper.keys()


def test_enwik8_is_split_at_its_bytes(reproduce, script, tmp_path):
    """--prepare writes the splits in the output folder; a character at a border is omitted."""
    content = ("é" * 2000).encode()
    content = b"a" + content[:-1]  # borders are inside of characters
    (tmp_path / "enwik8").write_bytes(content)
    reproduce("enwik8", "--data", tmp_path / "enwik8", "--prepare")
    found = {file.stem: pd.read_parquet(file)["text"].tolist() for file in (tmp_path / "out").glob("*.parquet")}
    assert found == {"train": ["a" + "é" * 1799], "validation": ["é" * 99], "test": ["é" * 99]}


FILE, LINK, HARD = ("x", tarfile.REGTYPE, b"new"), tarfile.SYMTYPE, tarfile.LNKTYPE


@pytest.fixture(params=["data_filter"] * hasattr(tarfile, "data_filter") + ["check_member"])
def checked(request, monkeypatch):
    """Extract with `tarfile.data_filter`, if Python has it, and with the check of the script."""
    if request.param == "check_member":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    return request.param


@pytest.mark.parametrize(
    "members",
    [
        [("../../x", tarfile.REGTYPE, b"new")],
        [("a/../../../x", tarfile.REGTYPE, b"new")],
        [("ABSOLUTE", tarfile.REGTYPE, b"new")],
        [("a", LINK, "../.."), ("a/x", tarfile.REGTYPE, b"new")],
        [("a", LINK, "FOLDER")],
        [("a/b", LINK, "../../x")],
        [("a", HARD, "../../x")],
        [("a", HARD, "ABSOLUTE")],
        [("a", LINK, "b/c/../../.."), ("b/c", LINK, "."), ("a/x", tarfile.REGTYPE, b"new")],
        [("a", tarfile.FIFOTYPE, "")],
        [("a", tarfile.CHRTYPE, "")],
        [FILE, ("a", tarfile.BLKTYPE, ""), ("b", HARD, "a")],
    ],
)
def test_hostile_archives(reproduce, tmp_path, checked, members):
    """Nothing outside of the folder changes; Python's filter removes the / of an absolute name."""
    (tmp_path / "x").write_bytes(b"old")
    known = {"ABSOLUTE": str(tmp_path / "x"), "FOLDER": str(tmp_path)}
    members = [(known.get(name, name), kind, known.get(value, value)) for name, kind, value in members]
    (tmp_path / "data.tar").write_bytes(tarred(*members))
    removed = checked == "data_filter" and members[0][0] == known["ABSOLUTE"]
    message = "no files of 4000 bytes" if removed else "^error: '.+' "
    assert_error(reproduce, message, "enwik8", "--data", tmp_path / "data.tar")
    assert (tmp_path / "x").read_bytes() == b"old" and not (tmp_path / "x").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"x", "data.tar", "out"}
    left = [path.resolve() for path in (tmp_path / "out").rglob("*")]
    assert all(path.is_relative_to(tmp_path / "out") for path in left) and removed == bool(left)


def test_modes_and_links_of_archives(script, tmp_path, checked):
    """Files keep no setuid bit and belong to the user; links inside of the folder work."""
    links = [("a/up", LINK, "../x"), ("a/up2", LINK, "up"), ("b", LINK, "a"), ("b/hard", HARD, "x"), ("b/x", HARD, "x")]
    (tmp_path / "data.tar").write_bytes(tarred(("a", tarfile.DIRTYPE, ""), FILE, *links))
    content = script("reproduce").unpack(tmp_path / "data.tar", tmp_path)
    assert all((content / name).read_bytes() == b"new" for name in ("x", "a/up", "a/up2", "a/hard", "b/x"))
    assert {oct(path.stat().st_mode & 0o7022) for path in content.rglob("*")} == {"0o0"}
    assert {path.stat().st_uid for path in content.rglob("*")} == {tmp_path.stat().st_uid}


def test_a_full_disk(reproduce, served, monkeypatch):
    served.files["/enwik8/data.zip"] = b"x" * 1000
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 2999))
    assert_error(reproduce, "are needed; pass another --output_dir", "enwik8")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 3000))
    assert_error(reproduce, "files of 4000 bytes; it contains: data.zip; pass --data FILE", "enwik8")
