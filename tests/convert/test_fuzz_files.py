"""Damaged files and hostile pickles: reproducible random examples of each."""

import argparse
import collections
import os
import random
import shutil
import struct
import sys

import pytest
import torch
from safetensors.torch import load_file

from luna_mega.convert import ConversionError, convert_checkpoint
from luna_mega.convert.importer import _identify
from luna_mega.convert.safe_load.reader import read_checkpoint
from luna_mega.convert.tensors import convert_tensors
from tests.convert import luna, mega, megalodon
from tests.convert.files import check_message, write, write_pickle

pytestmark = pytest.mark.slow
UNCHECKED = ("its zip entries have no CRC-32", "it has torch's legacy format")


@pytest.fixture
def watched():
    """Return the list of calls that would execute a program; it must stay empty."""
    calls, active = [], [True]
    running = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn"}
    # An audit hook cannot be removed; it does nothing after the test.
    sys.addaudithook(lambda event, _: calls.append(event) if active and event in running else None)
    yield calls
    active.clear()


def understood(file):
    """Return the tensors that a conversion would write, its configuration, and its warnings; write no files."""
    source = _identify(read_checkpoint(file), None, "auto", "auto")
    tensors = convert_tensors(source.mapping, source.checkpoint.tensors, source.minus_one, torch.float32)
    return tensors, source.spec.config.to_dict(), [*source.checkpoint.warnings, *source.warnings]


def outcome(file, folder, original):
    """Return "error" (one line, no files), "equal" (to the original) or "warned"."""
    try:
        tensors, config, warnings = understood(file)
    except ConversionError as error:
        check_message(str(error))
        assert sorted(folder.iterdir()) == [file]
        return "error"
    if any(warning.startswith(UNCHECKED) for warning in warnings):
        return "warned"
    assert config == original[1] and tensors.keys() == original[0].keys()
    assert all(torch.equal(tensors[key], tensor) for key, tensor in original[0].items())
    return "equal"


def flip(content, choose, head):
    """Flip one to three bits; two thirds of them are in the first bytes, which contain the structure."""
    content = bytearray(content)
    for _ in range(choose.choice((1, 1, 1, 3))):
        place = choose.randrange(min(head, len(content)) if choose.random() < 2 / 3 else len(content))
        content[place] ^= 1 << choose.randrange(8)
    return bytes(content)


def exhaustive(number):
    return pytest.param(number, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize("tries", [80, exhaustive(500)])
@pytest.mark.parametrize("form", ["zip", "no crc", "legacy"])
def test_flipped_bits(tmp_path, watched, form, tries):
    file, choose, outcomes = tmp_path / "model.pt", random.Random(form), collections.Counter()
    for state in (luna.bert(heads=[("a_head", 3)]), mega.mega()):
        write(state, file, form)
        content, original = file.read_bytes(), understood(file)
        head = 9000 if form != "legacy" else content.index(b"ctorch._utils") + 9000
        for _ in range(tries // 2):
            file.write_bytes(flip(content, choose, head))
            outcomes[outcome(file, tmp_path, original)] += 1
    assert outcomes["error"] > tries / 10 and outcomes.total() == tries and not watched
    assert not outcomes["warned"] if form == "zip" else not outcomes["equal"] and outcomes["warned"] > tries / 10


FOLDER = ("consolidated.01.pth", "config.json", "consolidate_config.json", "tokenizer.model")


@pytest.mark.parametrize("tries", [12, exhaustive(33)])
@pytest.mark.parametrize("damaged", ["zip", "legacy", *FOLDER])
def test_flipped_bits_of_conversions(tmp_path, watched, damaged, tries):
    """A file with flipped bits converts with equal weights or raises an error; it never executes a program.

    Settings have no checksum: a flipped digit may result in another model. There are fewer examples than for reading,
    because each writes a folder.
    """
    source, output, choose = tmp_path / "source", tmp_path / "output", random.Random(damaged)
    if damaged in FOLDER:
        file = megalodon.folder(source, ranks=2) / damaged
    else:
        write(luna.bert(), file := source, damaged)
    convert_checkpoint(source, output)
    expected, outcomes = load_file(output / "model.safetensors"), collections.Counter()
    shutil.rmtree(output)
    content = file.read_bytes()
    for _ in range(tries):
        file.write_bytes(flip(content, choose, 9000))
        try:
            report = convert_checkpoint(source, output)
        except ConversionError as error:
            check_message(str(error))
            assert list(tmp_path.iterdir()) == [source]
            outcomes["error"] += 1
            continue
        if damaged == "legacy":
            assert report.warnings[0].startswith(UNCHECKED)
        else:
            tensors = load_file(output / "model.safetensors")
            assert tensors.keys() == expected.keys()
            assert all(torch.equal(tensors[key], tensor) for key, tensor in expected.items())
        shutil.rmtree(output)
    assert outcomes["error"] > 1 and not watched


GLOBALS = [
    b"posix\nsystem", b"os\nsystem", b"builtins\neval", b"builtins\nexec", b"builtins\ngetattr", b"subprocess\nPopen",
    b"torch\nload", b"torch.hub\nload", b"torch.serialization\nload", b"importlib\nimport_module", b"numpy\nload",
    b"runpy\nrun_path", b"webbrowser\nopen", b"pickle\nloads", b"functools\npartial", b"operator\nattrgetter",
    b"argparse\nNamespace", b"argparse\nArgumentParser", b"collections\nOrderedDict", b"collections\nCounter",
    b"torch._utils\n_rebuild_tensor_v2", b"torch._utils\n_rebuild_parameter", b"torch._utils\n_rebuild_qtensor",
    b"torch._utils\n_rebuild_sparse_tensor", b"torch._utils\n_rebuild_nested_tensor", b"torch\nFloatStorage",
    b"torch._utils\n_rebuild_wrapper_subclass", b"torch._tensor\n_rebuild_from_type_v2", b"torch\nSize",
    b"torch\nTensor", b"torch\ndevice", b"numpy\ndtype", b"numpy.core.multiarray\nscalar", b"_codecs\nencode",
    b"omegaconf.dictconfig\nDictConfig", b"builtins\nset", b"builtins\nbytearray", b"builtins\ncomplex", b"x\x1b\ny",
]  # fmt: skip


def instruction(choose):
    """Return a random instruction of a pickle, which may be invalid."""
    text = choose.choice(
        [b"model", b"args", b"touch hacked", b"cfg", b"storage", b"0", b"\xed\xa0\x80", b"a\nb\x1b[2J"]
    )
    return choose.choice(
        [
            lambda: b"c" + choose.choice(GLOBALS) + b"\n",
            lambda: b"c" + choose.choice(GLOBALS) + b"\n(X" + struct.pack("<I", len(text)) + text + b"tR",
            lambda: b"X" + struct.pack("<I", len(text)) + text,
            lambda: b"K" + bytes([choose.randrange(256)]),
            lambda: b"J" + struct.pack("<i", choose.choice([-1, 1 << 30, 7])),
            lambda: b"G" + struct.pack(">d", choose.choice([0.5, float("nan"), 1e300])),
            lambda: choose.choice([b"q", b"h"]) + bytes([choose.randrange(6)]),
            lambda: choose.choice([b"}", b"]", b")", b"(", b"N", b"\x88", b"\x89", b"\x8f"]),
            lambda: choose.choice([b"R", b"\x81", b"b", b"Q", b"\x85", b"\x86", b"\x87", b"t", b"s", b"u", b"a", b"e"]),
            lambda: bytes([choose.randrange(256)]),
            lambda: b"q\x05" + b"h\x05h\x05\x86q\x05" * 45,
            lambda: b"]q\x04h\x04a",
        ]
    )()


def hostile_pickle(choose):
    """Return a pickle of a dict with a random model and random args, or a completely random pickle."""
    body = b"".join(instruction(choose) for _ in range(choose.randrange(1, 12)))
    if choose.random() < 0.3:
        return b"\x80" + bytes([choose.choice([2, 2, 2, 3, 4])]) + body + b"."
    namespace = b"cargparse\nNamespace\n)\x81}" + b"X\x04\x00\x00\x00arch" + body + b"sb"
    model = choose.choice([b"}", body, b"}X\x01\x00\x00\x00w" + body + b"s"])
    return b"\x80\x02}X\x05\x00\x00\x00model" + model + b"sX\x04\x00\x00\x00args" + namespace + b"s."


@pytest.mark.parametrize("legacy", [False, True])
def test_hostile_pickles(tmp_path, watched, legacy, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file, choose, reasons = tmp_path / "model.pt", random.Random(legacy), collections.Counter()
    prefix = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}."
    for _ in range(500):
        content = hostile_pickle(choose)
        write_pickle(file, prefix + content + b"\x80\x02]." if legacy else content, legacy)
        with pytest.raises(ConversionError) as raised:
            read = read_checkpoint(file)
            convert_checkpoint(file, tmp_path / "output")
            raise AssertionError(read)
        message = str(raised.value)
        check_message(message)
        assert os.listdir(tmp_path) == ["model.pt"]
        reasons["not loaded" if "not loaded" in message else "damaged" if "damaged" in message else "other"] += 1
    assert min(reasons["not loaded"], reasons["damaged"], reasons["other"]) > 10, reasons
    assert not watched


def planned(checkpoint):
    """Return the configuration converted from a fixture, or the text of the error if it is only part of a model."""
    try:
        return _identify(checkpoint, None, "auto", "auto").spec.config.to_dict()
    except ConversionError as error:
        return str(error).removeprefix(str(checkpoint.path))


@pytest.mark.parametrize("step", [6, exhaustive(1)])
def test_every_fixture_without_checksums_is_as_with_them(parity_folder, tmp_path, step):
    families = ("luna", "mega", "megalodon")
    files = [folder / "checkpoint.pt" for family in families for folder in parity_folder.all(family)]
    fixtures = [file for file in files if file.is_file()]
    assert len(fixtures) > 15
    for fixture in fixtures[::step]:
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = torch.load(fixture, weights_only=True)
        expected = read_checkpoint(fixture)
        for form in ("legacy", "no crc"):
            write(state, tmp_path / "model.pt", form)
            found = read_checkpoint(tmp_path / "model.pt")
            assert found.unchecked and found.args == expected.args, fixture
            assert all(torch.equal(found.tensors[key], tensor) for key, tensor in expected.tensors.items()), fixture
            assert planned(found) == planned(expected), fixture
