"""Files of every serialization: no code in them is executed, and damage gives one line or changes nothing.

Every example of this module runs under `watched`, which fails if a program is started.
"""

import argparse
import collections
import functools
import hashlib
import io
import os
import pickle
import shlex
import struct
import sys
import tarfile
import zipfile

import numpy
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save

from luna_mega.convert import ConversionError, convert_checkpoint
from luna_mega.convert.formats.registry import open_checkpoint
from luna_mega.convert.safe_load.reader import read_checkpoint
from tests.convert import megalodon
from tests.convert.contract import KINDS, built, changed, check_message, saved_report
from tests.convert.files import write
from tests.convert.folders import identical

BERT, FORMS = "luna_bert", ("zip", "no crc", "legacy")


@pytest.fixture(autouse=True, scope="module")
def watched():
    """Fail if a test of this module executes a program; `test_attacks_are_effective` shows that this is noticed."""
    calls, active = [], [True]
    running = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn"}
    # An audit hook cannot be removed; it does nothing after the module.
    sys.addaudithook(lambda event, _: calls.append(event) if active and event in running else None)
    yield calls
    active.clear()
    assert not calls


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return the path of a file that the examples of Hypothesis write."""
    return tmp_path_factory.mktemp("reader") / "model.pt"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.pt"


def error(file):
    """Return the error of a conversion, which leaves no files."""
    before = sorted(os.listdir(os.fsencode(file.parent)))
    with pytest.raises(ConversionError) as raised:
        convert_checkpoint(file, file.parent / "output")
    message = str(raised.value)
    check_message(message.replace(str(file.parent), ""))
    assert str(file).replace("\n", " ") in message and sorted(os.listdir(os.fsencode(file.parent))) == before
    return message


class Attack:
    """An object that runs a command when an ordinary unpickler loads it."""

    def __init__(self, file):
        self.command = shlex.join(["touch", str(file)])

    def __reduce__(self):
        return os.system, (self.command,)


def test_attacks_are_effective(tmp_path, watched):
    pickle.loads(pickle.dumps(Attack(tmp_path / "touched")))
    assert (tmp_path / "touched").exists() and watched == ["os.system"]
    watched.clear()


@pytest.mark.parametrize(
    ("form", "where"), [("zip", "extra_state"), ("legacy", "model"), ("pickle", "args"), ("shard", "model")]
)
def test_code_in_a_checkpoint_is_not_executed(file, tmp_path, monkeypatch, form, where):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    attack = {where: Attack(tmp_path / "touched")}
    if form == "shard":
        file = megalodon.folder(tmp_path / "source", ranks=2)
        torch.save(attack, file / SHARD)
    else:
        write(attack if form == "pickle" else built(BERT) | attack, file, form)
    message = error(file)
    assert f"{os.system.__module__}.system" in message and "nothing was executed" in message
    assert not (tmp_path / "touched").exists()


# Names in a pickle, with which it could execute code or create another object than a tensor or a plain value.
NAMES = """posix.system builtins.eval builtins.getattr torch.load numpy.load operator.attrgetter argparse.Namespace
argparse.ArgumentParser collections.OrderedDict collections.Counter torch._utils._rebuild_tensor_v2 torch.Tensor
torch._utils._rebuild_parameter torch._utils._rebuild_qtensor torch._utils._rebuild_sparse_tensor torch.FloatStorage
torch._utils._rebuild_nested_tensor torch._utils._rebuild_wrapper_subclass torch._tensor._rebuild_from_type_v2
torch.Size torch.device numpy.dtype numpy.core.multiarray.scalar _codecs.encode omegaconf.dictconfig.DictConfig
builtins.set builtins.bytearray builtins.complex x\x1b.y""".split()
GLOBALS = [b"c%b\n%b\n" % tuple(part.encode() for part in name.rsplit(".", 1)) for name in NAMES]
STRINGS = [b"model", b"args", b"touch hacked", b"cfg", b"storage", b"0", b"\xed\xa0\x80", b"a\nb\x1b[2J"]
STRINGS = [b"X" + struct.pack("<I", len(text)) + text for text in STRINGS]
# Numbers, and instructions that take exponential time or contain themselves.
OTHERS = [b"K\x01", b"J\xff\xff\xff\xff", b"G" + struct.pack(">d", 1e300), b"q\x01", b"h\x01"]
OTHERS += [b"q\x05" + b"h\x05h\x05\x86q\x05" * 45, b"]q\x04h\x04a"]
# An instruction of a pickle, which may be invalid.
INSTRUCTION = st.one_of(
    st.sampled_from(GLOBALS),
    st.builds(lambda name, text: name + b"(" + text + b"tR", st.sampled_from(GLOBALS), st.sampled_from(STRINGS)),
    st.sampled_from(STRINGS + OTHERS),
    st.sampled_from(b"}])(N\x88\x89\x8fR\x81bQ\x85\x86\x87tsuae").map(lambda code: bytes([code])),
    st.binary(min_size=1, max_size=1),
)
BODY = st.lists(INSTRUCTION, min_size=1, max_size=11).map(b"".join)
PREFIX = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}."  # of the legacy format


def fields(model, args):
    """Return the pickle of a dict with a model and args."""
    namespace = b"cargparse\nNamespace\n)\x81}" + b"X\x04\x00\x00\x00arch" + args + b"sb"
    return b"\x80\x02}X\x05\x00\x00\x00model" + model + b"sX\x04\x00\x00\x00args" + namespace + b"s."


def zipped(content, name="model/data.pkl"):
    """Return the bytes of a zip file, by default with a pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, content)
        archive.writestr("model/version", "3")
    return file.getvalue()


# Places of a random body in a pickle: the entire file, the architecture, a tensor.
PICKLES = [b"\x80\x02%b.", fields(b"}", b"%b"), fields(b"}X\x01\x00\x00\x00w%bs", b"N")]


@pytest.mark.parametrize("legacy", [False, True])
@given(body=BODY, form=st.sampled_from(PICKLES))
def test_hostile_pickles(place, watched, legacy, body, form):
    """A random pickle is one line, never a model; `watched` checks that nothing is executed."""
    content = form.replace(b"%b", body)
    place.write_bytes(PREFIX + content + b"\x80\x02]." if legacy else zipped(content))
    error(place)
    assert not watched and os.listdir(place.parent) == ["model.pt"]


SHARD = "consolidated.01.pth"
FOLDER = (SHARD, "config.json", "consolidate_config.json", "tokenizer.model")


def flip(content, place, bit=0):
    """Return the bytes with one flipped bit."""
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


@functools.cache
def valid(name, make):
    """Return a checkpoint of this serialization or a Megalodon folder, the file that is damaged, and the tensors."""
    place = make("valid")
    if name in FOLDER:
        source = megalodon.folder(place / "source", ranks=2)
        return source, source / name, {key: x.clone() for key, x in open_checkpoint(source).tensors.items()}
    write(built(BERT), place / "model.pt", name)
    return place / "model.pt", place / "model.pt", built(BERT)["model"]


@pytest.mark.parametrize("name", [*FORMS, *FOLDER])
@given(share=st.floats(0, 1), head=st.booleans(), bits=st.lists(st.integers(0, 7), min_size=1, max_size=3))
def test_flipped_bits(tmp_path_factory, name, share, head, bits):
    """Flipped bits are one line or change nothing; a file without checksums has a warning, and settings may change."""
    source, file, tensors = valid(name, tmp_path_factory.mktemp)
    content = damaged = file.read_bytes()
    size = len(content) - len(bits)
    for number, bit in enumerate(bits):
        damaged = flip(damaged, int(share * (min(9000, size) if head else size)) + number, bit)
    file.write_bytes(damaged)
    try:
        report = convert_checkpoint(source, None)
        read = open_checkpoint(source)
    except ConversionError as raised:
        check_message(str(raised).replace(str(source), ""))
        assert name in FOLDER or str(source) in str(raised)
        return
    finally:
        file.write_bytes(content)
    if name in ("zip", SHARD):
        identical(read.tensors, tensors)
        assert name == SHARD or read.args == vars(built(BERT)["args"])
    elif name not in FOLDER:
        assert "damage to it goes unnoticed" in report.warnings[0]


def without_a_crc(content):
    """Set one CRC-32 to 0 (the CRC of empty data), which is still checked if other entries have a CRC."""
    at = content.rindex(b"/data/3PK") - len("model") - 30
    return content[:at] + bytes(4) + content[at + 4 :]


def rewritten(content, compression=zipfile.ZIP_DEFLATED):
    """Return the same entries, written by zipfile."""
    found = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(found, "w", compression) as other:
        for info in archive.infolist():
            other.writestr(info.filename, archive.read(info))
    return found.getvalue()


def tarred(content):
    file, info = io.BytesIO(), tarfile.TarInfo("checkpoint_best.pt")
    with tarfile.open(fileobj=file, mode="w") as archive:
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def executes(instructions):
    return lambda content: zipped(b"\x80\x02" + instructions + b".")


STARTS = {"gzip": b"\x1f\x8b", "bzip2": b"BZh", "xz": b"\xfd7zXZ\x00", "zstd": b"\x28\xb5\x2f\xfd"}
# Instructions whose hash takes exponential time.
TWICE = b"".join(b"q" + bytes([index]) + b"h" + bytes([index]) + b"\x86" for index in range(60))
# Name -> change of the bytes of a zip file, and a part of the error.
DAMAGES = {
    "an instruction": (executes(b"\x8c\x01a"), "nothing was executed"),
    "a name of 10,000 letters": (executes(b"cos\n" + b"x\x1b" * 5000 + b"\n)R"), "nothing was executed"),
    "omegaconf": (executes(b"comegaconf.dictconfig\nDictConfig\n)R"), "omegaconf.dictconfig"),
    "an expensive hash": (executes(b"}K\x01" + TWICE + b"Ns"), "a tuple is nested more than 50 deep"),
    "a deep tuple": (executes(b")" + b"\x85" * 60), "a tuple is nested more than 50 deep"),
    "empty": (lambda content: b"", "the file is empty; copy"),
    "other bytes": (lambda content: bytes(range(100, 200)), "not a checkpoint"),
    "another pickle": (lambda content: b"\x80\x02" + bytes(range(200, 256)), "not a checkpoint"),
    "a start": (lambda content: b"PK\x03\x04" + bytes(100), "truncated"),
    "half of it": (lambda content: content[: len(content) // 2], "truncated"),
    "far from the end": (lambda content: content + bytes(1 << 17), "the zip directory at its end is missing"),
    "no CRC of an entry": (without_a_crc, "entry 'model/data/3' has CRC-32"),
    "an entry": (lambda x: flip(x, len(x) // 2), "has CRC-32"),
    "the pickle": (lambda x: flip(x, 500), "entry 'model/data.pkl' has CRC-32"),
    # only in the directory is an entry's name followed by the signature of the next entry
    "moved": (lambda x: x.replace(b"model/data/1PK", b"model/data/2PK"), "at the offset in the zip directory"),
    "a version": (lambda x: flip(x, x.index(b"PK\x01\x02") + 6, 7), "directory cannot be read: zip file version"),
    "compressed": (rewritten, "entry 'model/data.pkl' is compressed"),
    **{x: (lambda content, x=x: STARTS[x] + content, f"a {x} archive; extract it (") for x in STARTS},
    "tar": (tarred, "a tar archive; extract it ("),
    "zip": (lambda content: zipped(content, "checkpoint_best.pt"), "a zip archive; extract it ("),
    "safetensors": (lambda content: save({"weight": torch.zeros(2)}), "a safetensors file"),
}
LEGACY = {
    "half of it": (lambda content: content[: len(content) // 2], "truncated"),
    "trailing bytes": (lambda content: content + b"more", "4 bytes follow the last storage"),
    "no storages": (lambda content: content[: content.rindex(b"\x80\x02]")] + b"\x80\x02].", "no data for"),
}


@pytest.mark.parametrize(("form", "damage"), [*(("zip", x) for x in DAMAGES), *(("legacy", x) for x in LEGACY)])
def test_damaged_files(file, form, damage):
    write(built(BERT), file, form)
    change, named = (DAMAGES if form == "zip" else LEGACY)[damage]
    file.write_bytes(change(file.read_bytes()))
    message = error(file)
    assert named in message and ("truncated" not in named or "copy" in message), message


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_serializations(file, kind, form):
    """A file without checksums is read with a warning, and its numbers may be damaged."""
    state = built(kind)
    write(changed(state, collections.OrderedDict(state["model"])), file, form)
    read, content = read_checkpoint(file), file.read_bytes()
    assert read.serialization == ("legacy" if form == "legacy" else "zip")
    assert read.sha256 == hashlib.sha256(content).hexdigest() and read.args == vars(state["args"])
    identical(read.tensors, state["model"])
    if kind != "megalodon":  # its folders have no such file
        report = convert_checkpoint(file, None)
        assert {*read.warnings} <= {*report.warnings} and bool(read.unchecked) is bool(read.warnings)
        assert all(warning in str(report) for warning in read.warnings)
    if form == "zip":
        assert read.warnings == ()
        # the directory is searched in the last 64 KiB, and other programs write archives with other offsets
        for other in (content + bytes(100), rewritten(content, zipfile.ZIP_STORED)):
            file.write_bytes(other)
            again = read_checkpoint(file)
            assert again.args == read.args and again.sha256 != read.sha256
    else:
        (warning,) = read.warnings
        assert {"legacy": "legacy format, which has no checksums", "no crc": "no CRC-32"}[form] in warning


@pytest.mark.parametrize(("where", "prefix"), [("ema", "module."), ("extra_state.swa.model", "")])
def test_averaged_weights_are_mentioned(file, where, prefix):
    """A copy of the weights at any place of the file is mentioned; the weights of the field `model` are converted."""
    state = built(BERT)
    holder = {f"{prefix}{name}": tensor + 1 for name, tensor in list(state["model"].items())[3:]} | {"decay": 0.999}
    for name in reversed(where.split(".")):
        holder = {name: holder}
    write(state | holder, file)
    read, count = read_checkpoint(file), len(state["model"])
    (warning,) = read.warnings
    assert f"field '{where}' has other values of {count - 3} of the {count} tensors" in warning
    assert "save a file with them as the field 'model'" in warning
    identical(read.tensors, state["model"])


MODEL = built(BERT)["model"]
WEIGHT, OTHER = "encoder.lm_head.dense.weight", "encoder.sentence_encoder.layers.0.self_attn.out_proj.weight"
X, ROW = MODEL[WEIGHT], MODEL["encoder.lm_head.weight"][:1]


def with_tensors(tensors):
    return built(BERT) | {"model": MODEL | tensors}


# Content of a file, and a part of the error; `test_damage.py` has odd tensors.
CONTENT = {
    "a list": ([1, 2], "contains a list"),
    "other keys": ({1: 2, "a\nb": 3}, "no field 'args' (found: 1, a"),
    "args as a dict": ({"args": {"arch": "luna"}, "model": {}}, "'args' is a dict"),
    "a model as a list": (built(BERT) | {"model": [1]}, "'model' is a list"),
    "no args": (built(BERT) | {"args": None}, "field 'args' is None"),
    "no model": (built(BERT) | {"model": None}, "field 'model' is None"),
    "hydra": (built(BERT) | {"cfg": {"model": {"arch": "luna"}}}, "field 'cfg': written by a later fairseq (hydra"),
    "endlessly shared": (with_tensors(dict.fromkeys(map(str, range(2000)), torch.zeros(1 << 20))), "need 8,388,6"),
    **{
        f"{rows} rows": (with_tensors({"encoder.lm_head.weight": ROW.expand(rows, 16)}), "of memory and repeat")
        for rows in (1 << 28, (1 << 31) - 1, 1 << 40)
    },
}
# A damaged file without checksums may have these contents; valid checksums mean that they are intended.
CONTRADICTIONS = {
    "strides": (with_tensors({WEIGHT: X.t()}), "does not fit its storage"),
    "one row": (with_tensors({WEIGHT: X[:1].expand(X.shape)}), "does not fit its storage"),
    "more numbers": (with_tensors({WEIGHT: torch.cat([X, X])[:16]}), "does not fit its storage"),
    "an offset": (with_tensors({WEIGHT: torch.cat([X, X])[16:]}), "does not fit its storage"),
    "two tensors": (with_tensors({OTHER: X}), f"'{OTHER}' and"),
    "an optimizer": (built(BERT) | {"optimizer": [{"step": X}]}, "shares its storage with a value outside the model"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CONTENT | CONTRADICTIONS)
def test_invalid_content_is_one_line(file, case, form):
    state, named = (CONTENT | CONTRADICTIONS)[case]
    write(state, file, form)
    if case in CONTRADICTIONS and form == "zip":
        assert convert_checkpoint(file, None).warnings == []
        return
    message = error(file)
    assert named in message and (case in CONTENT or f"'{WEIGHT}'" in message), message


def test_names_of_files(file, tmp_path):
    """A name that is no Unicode is shown with escapes, and a newline in a name as a space."""
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.pt")
    write(built(BERT), file)
    os.rename(file, odd)
    assert convert_checkpoint(odd, tmp_path / "b").source["file"] == "caf\\xe9.pt"
    identical(open_checkpoint(odd).tensors, MODEL)
    os.truncate(odd, 100)
    with pytest.raises(ConversionError, match="zip directory at its end is missing"):
        convert_checkpoint(odd, tmp_path / "c")
    for name in ("\ud800.pt", "a\0b.pt", "x" * 5000):
        with pytest.raises((ConversionError, OSError)):
            convert_checkpoint(tmp_path / name, tmp_path / "c")
    assert "a file.pt: no such file" in error(tmp_path / "a\nfile.pt")


# Argument -> its value, and the value in the report.
ODD = {
    "nested": (argparse.Namespace(ids=torch.arange(3), rate=numpy.float32(1)), {"ids": [0, 1, 2], "rate": 1.0}),
    "list": ([[1, (2,)], {"a": None}], [[1, [2]], {"a": None}]),
    "number": (torch.tensor(2.0), 2.0),
    "counts": (collections.OrderedDict({(1, 2): 3}), {"(1, 2)": 3}),
    "rest": ([{1}, b"x", 1j, torch.float16], ["{1}", "b'x'", "1j", "torch.float16"]),
    "meta": (torch.zeros(2, device="meta"), "tensor(..., device='meta', size=(2,))"),
    "numpy": ([numpy.float64(0.5), numpy.int64(7), numpy.bool_(True)], [0.5, 7, True]),
}


@pytest.mark.parametrize("form", FORMS)
def test_args_become_plain_values(file, form):
    """Numbers of NumPy can be read, also those of NumPy before 2.0, which used another module name."""
    state = changed(built(BERT), **{name: value for name, (value, _) in ODD.items()})
    write(state | {"optimizer_history": [{"num_updates": numpy.int64(7)}]}, file, form)
    if form == "legacy":
        content = file.read_bytes().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
        assert content != file.read_bytes()
        file.write_bytes(content)
    convert_checkpoint(file, file.with_name("model"))
    report = saved_report(file.with_name("model"))
    assert {name: report["args"][name] for name in ODD} == {name: expected for name, (_, expected) in ODD.items()}
    assert report["source"]["num_updates"] == 7
