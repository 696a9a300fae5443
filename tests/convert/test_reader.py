import argparse
import collections
import hashlib
import json
import os
import pickle
import random
import zipfile

import numpy
import pytest
import torch
from safetensors.torch import save_file

from luna_mega.convert import ConversionError, convert_checkpoint
from luna_mega.convert.safe_load.reader import read_checkpoint
from luna_mega.inspection.info import describe


class Attack:
    """An object that creates a file when it is unpickled by an ordinary unpickler."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_the_attack_of_the_next_test_works_on_an_ordinary_unpickler(tmp_path):
    pickle.loads(pickle.dumps(Attack(f"touch {tmp_path}/touched")))
    assert (tmp_path / "touched").exists()


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
@pytest.mark.parametrize("place", ["args", "model", "extra_state"])
def test_code_in_a_checkpoint_is_not_executed(convert, make, tmp_path, monkeypatch, form, place):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    attack = {place: Attack(f"touch {tmp_path}/touched")}
    if form == "pickle":
        convert.file.write_bytes(pickle.dumps({"args": argparse.Namespace()} | attack, protocol=2))
    else:
        convert.save(make.bert() | attack, legacy=form == "legacy")
    message = convert.error()
    assert "posix.system" in message or "nt.system" in message
    assert "nothing was executed" in message
    assert not (tmp_path / "touched").exists()


def test_hydra_checkpoints_raise(convert, make):
    state = make.bert() | {"cfg": {"model": {"arch": "luna"}}}
    assert "'cfg'" in convert.error(state) and "hydra" in convert.error(state)


def test_omegaconf_objects_raise_with_their_name(tmp_path):
    # Protocol 2: GLOBAL omegaconf.dictconfig.DictConfig, empty tuple, REDUCE, STOP.
    content = b"\x80\x02comegaconf.dictconfig\nDictConfig\n)R."
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("model/data.pkl", content)
        archive.writestr("model/version", "3")
    with pytest.raises(ConversionError, match="omegaconf.*hydra"):
        read_checkpoint(tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "empty"),
        (bytes(range(100, 200)), "not a checkpoint"),
        (b"\x80\x02" + bytes(range(200, 256)), "not a checkpoint"),
        (b"PK\x03\x04" + bytes(100), "truncated"),
    ],
)
def test_files_that_are_not_checkpoints(convert, content, expected):
    convert.file.write_bytes(content)
    message = convert.error()
    assert str(convert.file) in message and expected in message


def test_missing_file_and_folder(convert):
    assert "no such file" in convert.error()
    convert.file.mkdir()
    (convert.file / "checkpoint_best.pt").touch()
    message = convert.error()
    assert "is a folder" in message and "checkpoint_best.pt" in message


def test_safetensors(convert):
    save_file({"weight": torch.zeros(2)}, convert.file)
    assert "safetensors" in convert.error()


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.99])
def test_truncated(convert, make, legacy, fraction):
    content = convert.save(make.bert(), legacy).read_bytes()
    convert.file.write_bytes(content[: int(len(content) * fraction)])
    message = convert.error()
    assert "truncated" in message and "copy" in message


@pytest.mark.parametrize("field", ["args", "model"])
def test_dict_without_args_or_model(convert, make, field):
    state = make.bert()
    del state[field]
    assert f"'{field}'" in convert.error(state)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ([1, 2], "list"),
        ({"args": {"arch": "luna"}, "model": {}}, "'args' is a dict"),
        ({"args": argparse.Namespace(), "model": [1]}, "'model' is a list"),
        ({"args": argparse.Namespace(), "model": {"weight": [1]}}, "'weight'"),
    ],
)
def test_other_content(convert, state, expected):
    assert expected in convert.error(state)


@pytest.mark.parametrize("legacy", [False, True])
def test_both_serialisations_and_ordered_dict(tmp_path, make, legacy):
    state = make.bert()
    state["model"] = collections.OrderedDict(state["model"])
    torch.save(state, tmp_path / "model.pt", _use_new_zipfile_serialization=not legacy)
    read = read_checkpoint(tmp_path / "model.pt")
    assert read.serialization == ("legacy" if legacy else "zip")
    assert read.num_updates == 1000
    assert read.args == vars(state["args"])
    assert list(read.tensors) == list(state["model"])
    assert all(torch.equal(read.tensors[key], tensor) for key, tensor in state["model"].items())


def flipped(content, place, choose):
    """The bytes with one changed bit."""
    return content[:place] + bytes([content[place] ^ 1 << choose.randrange(8)]) + content[place + 1 :]


def save(state, file, with_crc):
    with_crc_before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(with_crc)
    try:
        torch.save(state, file)
    finally:
        torch.serialization.set_crc32_options(with_crc_before)


@pytest.mark.parametrize("part", ["everywhere", "directory"])
def test_a_flipped_bit_is_an_error_or_changes_nothing(tmp_path, make, part):
    file, state, choose = tmp_path / "model.pt", make.bert(heads=[("a_head", 3)]), random.Random(part)
    torch.save(state, file)
    content, errors = file.read_bytes(), 0
    with zipfile.ZipFile(file) as archive:
        first = 0 if part == "everywhere" else archive.start_dir
    for place in choose.sample(range(first, len(content)), 100):
        file.write_bytes(flipped(content, place, choose))
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
    choose = random.Random(0)
    with zipfile.ZipFile(convert.file) as archive:
        entries = [(info.filename, archive.read(info)) for info in archive.infolist() if info.file_size > 30]
    content = convert.file.read_bytes()
    assert len(entries) > 50
    for name, data in [entries[0], *choose.sample(entries, 5)]:
        convert.file.write_bytes(flipped(content, content.index(data) + len(data) // 2, choose))
        message = convert.error()
        assert f"entry {name!r} has CRC-32" in message and "copy the file again" in message


def test_an_archive_without_crcs_is_read_with_a_warning(convert, make):
    save(make.bert(), convert.file, with_crc=False)
    with zipfile.ZipFile(convert.file) as archive:
        assert not any(info.CRC for info in archive.infolist())
    read = read_checkpoint(convert.file)
    assert len(read.warnings) == 1 and "no CRC-32" in read.warnings[0]
    assert read.unchecked and f"warning      {read.warnings[0]}" in str(describe(convert.file))
    printed = str(convert_checkpoint(convert.file, convert.output))
    report = json.loads((convert.output / "conversion_report.json").read_text())
    assert report["warnings"] == list(read.warnings) and read.warnings[0] in printed
    save(make.bert(), convert.file, with_crc=True)
    assert read_checkpoint(convert.file).warnings == ()


def test_one_entry_without_a_crc_is_damage(convert, make):
    """0 is the CRC-32 of empty data, so it is not exempt if other entries have a CRC."""
    convert.save(make.bert())
    with zipfile.ZipFile(convert.file) as archive:
        info = next(info for info in archive.infolist() if info.filename.endswith("/data/3"))
        content, directory = convert.file.read_bytes(), archive.start_dir
    place = content.index(info.filename.encode(), directory) - 30
    assert content[place : place + 4] == info.CRC.to_bytes(4, "little")
    convert.file.write_bytes(content[:place] + bytes(4) + content[place + 4 :])
    assert f"entry {info.filename!r} has CRC-32" in convert.error()


def test_compressed_and_moved_entries(convert, make):
    state, again = make.bert(), convert.file.with_name("again.pt")
    convert.save(state)
    with zipfile.ZipFile(convert.file) as archive:
        for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            with zipfile.ZipFile(again, "w", compression) as other:
                for info in archive.infolist():
                    other.writestr(info.filename, archive.read(info))
            if compression == zipfile.ZIP_STORED:
                assert read_checkpoint(again).args == vars(state["args"])
    with pytest.raises(ConversionError, match="entry 'model/data.pkl' is compressed"):
        read_checkpoint(again)
    content = convert.file.read_bytes()
    # Only in the directory the name of an entry is followed by the signature of the next.
    convert.file.write_bytes(content.replace(b"model/data/1PK", b"model/data/2PK"))
    assert "is not at the offset in the zip directory" in convert.error()


def test_trailing_bytes(tmp_path, make):
    """The directory is found up to 64 KiB before the end, as in every zip file."""
    state, file = make.bert(), tmp_path / "model.pt"
    torch.save(state, file)
    content, sha256 = file.read_bytes(), read_checkpoint(file).sha256
    file.write_bytes(content + bytes(100))
    read = read_checkpoint(file)
    assert read.args == vars(state["args"]) and read.sha256 != sha256
    file.write_bytes(content + bytes(1 << 17))
    with pytest.raises(ConversionError, match="the zip directory at its end is missing"):
        read_checkpoint(file)


@pytest.mark.parametrize("legacy", [False, True])
def test_sha256(tmp_path, make, legacy):
    torch.save(make.bert(), tmp_path / "model.pt", _use_new_zipfile_serialization=not legacy)
    read = read_checkpoint(tmp_path / "model.pt")
    assert read.sha256 == hashlib.sha256((tmp_path / "model.pt").read_bytes()).hexdigest()
    assert len(read.warnings) == legacy


@pytest.mark.parametrize("value", ["a\nb", "a\r\n\u2028\x0bb", " \n a\n\n  b \n"])
def test_a_message_has_one_line(value):
    assert str(ConversionError(value)).splitlines() == ["a b"]
    assert str(ConversionError("two  spaces.pt: no such file")) == "two  spaces.pt: no such file"


def test_names_and_values_with_newlines(convert, make, tmp_path):
    state = make.bert()
    state["model"]["a\nname"] = torch.zeros(1)
    assert "unexpected: a name" in convert.error(state)
    assert r"encoder_layers = '2\n3' is not an integer" in convert.error(make.bert(encoder_layers="2\n3"))
    convert.file = convert.source / "a\nfile.pt"
    assert "a file.pt: no such file" in convert.error()
    for content in ({1: 2}, {"args": argparse.Namespace(), "model": {"a\nname": 1}}, {"args": "a\nb", "model": {}}):
        torch.save(content, tmp_path / "a\nfile")
        with pytest.raises(ConversionError) as raised:
            read_checkpoint(tmp_path / "a\nfile")
        assert len(str(raised.value).splitlines()) == 1


def test_args_become_plain_values(convert, make):
    odd = {
        "nested": argparse.Namespace(ids=torch.arange(3), rate=numpy.float32(1), more=[[1, (2,)], {"a": None}]),
        "number": torch.tensor(2.0),
        "counts": collections.OrderedDict({(1, 2): 3}),
        "size": torch.Size([1, 2]),
        "rest": {"set": {1}, "bytes": b"x", "complex": 1j, "dtype": torch.float16},
        "meta": torch.zeros(2, device="meta"),
    }
    state = make.bert(**odd) | {"optimizer_history": [{"num_updates": numpy.int64(7)}]}
    report = json.loads((convert(state) / "conversion_report.json").read_text())
    assert {name: report["args"][name] for name in odd} == {
        "nested": {"ids": [0, 1, 2], "rate": 1.0, "more": [[1, [2]], {"a": None}]},
        "number": 2.0,
        "counts": {"(1, 2)": 3},
        "size": [1, 2],
        "rest": {"set": "{1}", "bytes": "b'x'", "complex": "1j", "dtype": "torch.float16"},
        "meta": "tensor(..., device='meta', size=(2,))",
    }
    assert report["source"]["num_updates"] == 7


def test_recursive_args(convert, make):
    loop = []
    loop.append(loop)
    assert "'args' contains itself" in convert.error(make.bert(loop=loop))


@pytest.mark.parametrize("change", [torch.Tensor.to_sparse, lambda tensor: tensor.to("meta"), "nothing"])
def test_non_dense_tensors(convert, make, change):
    state = make.bert()
    bias = state["model"]["encoder.lm_head.bias"]
    state["model"]["encoder.lm_head.bias"] = change(bias) if callable(change) else change
    assert "entry 'encoder.lm_head.bias' is not a dense tensor" in convert.error(state)


def test_numpy_numbers_are_values(tmp_path, make):
    state = make.bert(lr=numpy.float64(0.5), best=numpy.float32(2), update=numpy.int64(7), fp16=numpy.bool_(True))
    torch.save(state, tmp_path / "model.pt")
    args = read_checkpoint(tmp_path / "model.pt").args
    found = [args[name] for name in ("lr", "best", "update", "fp16")]
    assert found == [0.5, 2.0, 7, True]
    assert [type(value) for value in found] == [float, float, int, bool]


def test_numpy_numbers_of_numpy_1(tmp_path, make):
    """NumPy before 2.0 pickles the same function under another module name."""
    state = make.bert(lr=numpy.float64(0.5))
    torch.save(state, tmp_path / "model.pt", _use_new_zipfile_serialization=False)
    content = (tmp_path / "model.pt").read_bytes()
    assert b"cnumpy._core.multiarray\n" in content
    (tmp_path / "model.pt").write_bytes(content.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"))
    assert read_checkpoint(tmp_path / "model.pt").args["lr"] == 0.5


def test_numpy_arrays_raise_with_their_name(convert, make):
    message = convert.error(make.bert(weights=numpy.zeros(3)))
    assert "numpy" in message and "_reconstruct" in message
