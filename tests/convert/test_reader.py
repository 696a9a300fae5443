import argparse
import collections
import os
import pickle
import zipfile

import numpy
import pytest
import torch
from safetensors.torch import save_file

from luna_mega.convert import ConversionError
from luna_mega.convert.reader import read_checkpoint


class Attack:
    """Unpickling this the ordinary way creates a file."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_the_attack_of_the_next_test_works_on_an_ordinary_unpickler(tmp_path):
    pickle.loads(pickle.dumps(Attack(f"touch {tmp_path}/touched")))
    assert (tmp_path / "touched").exists()


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
@pytest.mark.parametrize("place", ["args", "model", "extra_state"])
def test_code_in_a_checkpoint_does_not_run(convert, make, tmp_path, monkeypatch, form, place):
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


def test_hydra_checkpoints_are_refused(convert, make):
    state = make.bert() | {"cfg": {"model": {"arch": "luna"}}}
    assert "'cfg'" in convert.error(state) and "hydra" in convert.error(state)


def test_omegaconf_objects_are_refused_by_name(tmp_path):
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
def test_files_that_are_no_checkpoints(convert, content, expected):
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


def test_numpy_numbers_are_values(tmp_path, make):
    state = make.bert(lr=numpy.float64(0.5), best=numpy.float32(2), update=numpy.int64(7), fp16=numpy.bool_(True))
    torch.save(state, tmp_path / "model.pt")
    args = read_checkpoint(tmp_path / "model.pt").args
    found = [args[name] for name in ("lr", "best", "update", "fp16")]
    assert found == [0.5, 2.0, 7, True]
    assert [type(value) for value in found] == [float, float, int, bool]


def test_numpy_numbers_of_numpy_1(tmp_path, make):
    """numpy before 2.0 pickles the same function under another module name."""
    state = make.bert(lr=numpy.float64(0.5))
    torch.save(state, tmp_path / "model.pt", _use_new_zipfile_serialization=False)
    content = (tmp_path / "model.pt").read_bytes()
    assert b"cnumpy._core.multiarray\n" in content
    (tmp_path / "model.pt").write_bytes(content.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"))
    assert read_checkpoint(tmp_path / "model.pt").args["lr"] == 0.5


def test_numpy_arrays_are_refused_by_name(convert, make):
    message = convert.error(make.bert(weights=numpy.zeros(3)))
    assert "numpy" in message and "_reconstruct" in message
