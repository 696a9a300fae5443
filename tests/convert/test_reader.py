"""Damaged files, checksums and serializations."""

import collections
import hashlib
import io
import random
import tarfile
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from luna_mega.convert import ConversionError, convert_checkpoint
from luna_mega.convert.safe_load.reader import read_checkpoint
from tests.convert.files import flip, write


@pytest.fixture
def convert(convert):
    convert.writes = True
    return convert


def keep(share):
    return lambda content: content[: int(len(content) * share)]


def without_storages(content):
    """Return a legacy file in which the list of storage keys is empty."""
    return content[: content.rindex(b"\x80\x02]")] + b"\x80\x02]."


def without_a_crc(content):
    """Set one CRC-32 to 0 (the CRC of empty data), which is still checked if other entries have a CRC."""
    place = content.rindex(b"/data/3PK") - len("model") - 30
    return content[:place] + bytes(4) + content[place + 4 :]


def packed(mode):
    """Return a function that puts a checkpoint into an archive."""

    def change(content):
        archive = io.BytesIO()
        if mode == "zip":
            with zipfile.ZipFile(archive, "w") as files:
                files.writestr("run/checkpoint_best.pt", content)
        else:
            with tarfile.open(fileobj=archive, mode=mode) as files:
                member = tarfile.TarInfo("run/checkpoint_best.pt")
                member.size = len(content)
                files.addfile(member, io.BytesIO(content))
        return archive.getvalue()

    return change


ARCHIVES = {"gzip": "w:gz", "bzip2": "w:bz2", "xz": "w:xz", "tar": "w", "zip": "zip"}
ARCHIVES = {kind: packed(mode) for kind, mode in ARCHIVES.items()}
# Name -> serialization, damage to the bytes, and a part of the error.
DAMAGES = {
    "empty": ("zip", lambda content: b"", "empty"),
    "other bytes": ("zip", lambda content: bytes(range(100, 200)), "not a checkpoint"),
    "another pickle": ("zip", lambda content: b"\x80\x02" + bytes(range(200, 256)), "not a checkpoint"),
    "a start": ("zip", lambda content: b"PK\x03\x04" + bytes(100), "truncated"),
    **{f"{form} {x}": (form, keep(x), "truncated") for form in ("zip", "legacy") for x in (0.1, 0.5, 0.99)},
    "far from the end": ("zip", lambda content: content + bytes(1 << 17), "the zip directory at its end is missing"),
    "trailing bytes": ("legacy", lambda content: content + b"more", "4 bytes follow the last storage"),
    "no storages": ("legacy", without_storages, "no data for"),
    "no CRC of an entry": ("zip", without_a_crc, "entry 'model/data/3' has CRC-32"),
    **{kind: ("zip", change, f"a {kind} archive; extract it (") for kind, change in ARCHIVES.items()},
    # only in the directory is an entry's name followed by the signature of the next entry
    "moved": ("zip", lambda x: x.replace(b"model/data/1PK", b"model/data/2PK"), "at the offset in the zip directory"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files(convert, make, damage):
    form, change, named = DAMAGES[damage]
    write(make.bert(), convert.file, form)
    content = convert.file.read_bytes()
    convert.file.write_bytes(change(content))
    assert content != convert.file.read_bytes()
    message = convert.error()
    assert str(convert.file) in message and named in message
    assert "truncated" not in named or "copy" in message


def test_other_paths(convert):
    assert "no such file" in convert.error()
    save_file({"weight": torch.zeros(2)}, convert.file)
    assert "safetensors" in convert.error()
    convert.file.unlink()
    convert.file.mkdir()
    (convert.file / "checkpoint_best.pt").touch()
    message = convert.error()
    assert "is a folder" in message and "checkpoint_best.pt" in message


@pytest.mark.parametrize("form", ["zip", "legacy", "no crc"])
def test_serializations(convert, make, form):
    """A file without checksums is read with a warning, and its numbers may be damaged."""
    state = make.bert()
    state["model"] = collections.OrderedDict(state["model"])
    write(state, convert.file, form)
    read, content = read_checkpoint(convert.file), convert.file.read_bytes()
    assert read.serialization == ("legacy" if form == "legacy" else "zip")
    assert read.sha256 == hashlib.sha256(content).hexdigest()
    assert read.num_updates == 1000 and read.args == vars(state["args"])
    assert list(read.tensors) == list(state["model"])
    assert all(torch.equal(read.tensors[key], tensor) for key, tensor in state["model"].items())
    report = convert.report(None)
    assert report["warnings"] == list(read.warnings) and bool(read.unchecked) is bool(read.warnings)
    if form == "zip":
        assert read.warnings == ()
        convert.file.write_bytes(content + bytes(100))  # the directory is searched in the last 64 KiB
        again = read_checkpoint(convert.file)
        assert again.args == read.args and again.sha256 != read.sha256
        return
    (warning,) = read.warnings
    assert {"legacy": "legacy format, which has no checksums", "no crc": "no CRC-32"}[form] in warning
    assert "damage to it goes unnoticed" in warning
    assert any(line.startswith("warning  ") and line.endswith(warning) for line in convert.screen.splitlines())
    if form == "legacy":
        convert.file.write_bytes(flip(content, len(content) - 1))
        damaged = convert_checkpoint(convert.file, convert.output.with_name("damaged"))
        assert "no checksums" in "".join(damaged.warnings)


@pytest.mark.parametrize("seed", range(4))
def test_averaged_weights_are_mentioned(convert, make, seed):
    """A copy of the weights at any place of the file is mentioned; the weights of the field `model` are converted."""
    draw, state = random.Random(seed), make.bert()
    place = draw.choice([["ema"], ["model_ema"], ["extra_state", "ema"], ["extra_state", "swa", "model"]])
    prefix = draw.choice(["", "module."])
    copy = {f"{prefix}{name}": tensor + 1 for name, tensor in state["model"].items() if draw.random() < 0.9}
    holder = state
    for name in place[:-1]:
        holder = holder.setdefault(name, {})
    holder[place[-1]] = copy | {"decay": 0.999}
    write(state, convert.file)
    report = convert.report(None)
    (warning,) = report["warnings"]
    assert f"field '{'.'.join(place)}' has other values of {len(copy)} of the {len(state['model'])} tensors" in warning
    assert "save a file with them as the field 'model'" in warning and warning in convert.screen
    read = read_checkpoint(convert.file)
    assert all(torch.equal(read.tensors[key], tensor) for key, tensor in state["model"].items())


@pytest.mark.parametrize("part", ["everywhere", "directory"])
def test_a_flipped_bit_is_an_error_or_changes_nothing(tmp_path, make, part):
    file, state, choose = tmp_path / "model.pt", make.bert(heads=[("a_head", 3)]), random.Random(part)
    write(state, file)
    content, errors = file.read_bytes(), 0
    with zipfile.ZipFile(file) as archive:
        first = 0 if part == "everywhere" else archive.start_dir
    for place in choose.sample(range(first, len(content)), 100):
        file.write_bytes(flip(content, place, choose.randrange(8)))
        try:
            read = read_checkpoint(file)
        except ConversionError as error:
            assert str(file) in str(error), place
            errors += 1
        else:
            assert read.args == vars(state["args"]) and list(read.tensors) == list(state["model"]), place
            assert all(torch.equal(read.tensors[key], tensor) for key, tensor in state["model"].items()), place
    assert 30 < errors < 100


def test_a_damaged_entry_is_named(convert, make):
    convert.save(make.bert())
    with zipfile.ZipFile(convert.file) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist() if info.file_size > 30]
    content = convert.file.read_bytes()
    assert len(entries) > 50
    for name, data in [entries[0], *random.Random(0).sample(entries, 5)]:
        convert.file.write_bytes(flip(content, content.index(data) + len(data) // 2))
        message = convert.error()
        assert f"entry {name!r} has CRC-32" in message and "copy the file again" in message


def test_archives_of_other_programs(convert, make):
    state, again = make.bert(), convert.file.with_name("again.pt")
    convert.save(state)
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(convert.file) as archive, zipfile.ZipFile(again, "w", compression) as other:
            for info in archive.infolist():
                other.writestr(info.filename, archive.read(info))
        if compression == zipfile.ZIP_STORED:
            assert read_checkpoint(again).args == vars(state["args"])
    with pytest.raises(ConversionError, match="entry 'model/data.pkl' is compressed"):
        read_checkpoint(again)
