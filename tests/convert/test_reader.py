"""Files of every serialization: no code in them is executed, and damage gives one line or changes nothing.

Every example of this module runs under `watched`, which fails if a program is started.
"""

import argparse
import collections
import functools
import hashlib
import io
import itertools
import os
import pickle
import shlex
import shutil
import struct
import sys
import zipfile

import numpy
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file

from luna_mega.convert import ConversionError, convert_checkpoint
from luna_mega.convert.formats.registry import open_checkpoint
from luna_mega.convert.safe_load.reader import read_checkpoint
from tests.convert import luna, megalodon
from tests.convert.contract import KINDS, built, changed, check_message, saved_report
from tests.convert.files import HOSTILE, flip, write, write_pickle
from tests.convert.folders import identical
from tests.marks import diagonal

BERT, FORMS, UNCHECKED = "luna_bert", ("zip", "no crc", "legacy"), ("legacy", "no crc")
WEIGHT = "encoder.lm_head.dense.weight"
OTHER = "encoder.sentence_encoder.layers.0.self_attn.out_proj.weight"


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


def error(file, damaged=None):
    """Return the error of a conversion, which leaves no files."""
    before = sorted(os.listdir(os.fsencode(file.parent)))
    with pytest.raises(ConversionError) as raised:
        convert_checkpoint(file, file.parent / "output")
    message = str(raised.value)
    check_message(message.replace(str(file.parent), ""))
    assert str(damaged or file).replace("\n", " ") in message and sorted(os.listdir(os.fsencode(file.parent))) == before
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
    write_pickle(tmp_path / "model.pt", HOSTILE["a call of a value"][0])
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        torch.load(tmp_path / "model.pt", weights_only=True)


@pytest.mark.parametrize(("form", "where"), [("zip", "extra_state"), ("legacy", "model"), ("pickle", "args")])
def test_code_in_a_checkpoint_is_not_executed(file, tmp_path, monkeypatch, form, where):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    write(({} if form == "pickle" else built(BERT)) | {where: Attack(tmp_path / "touched")}, file, form)
    message = error(file)
    assert f"{os.system.__module__}.system" in message and "nothing was executed" in message
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(("kind", "where"), diagonal(HOSTILE, itertools.product((False, True), repeat=2)))
def test_no_pickle_is_executed(file, tmp_path, kind, where):
    """No pickle is executed, including those that contain Megalodon's weights without fairseq args."""
    is_folder, legacy = where
    source = damaged = file
    if is_folder:
        source = megalodon.folder(tmp_path / "source", ranks=2)
        damaged = source / "consolidated.01.pth"
    content, named = HOSTILE[kind]
    write_pickle(damaged, content, legacy)
    assert named in error(source, damaged)


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
TEXT = st.sampled_from([b"model", b"args", b"touch hacked", b"cfg", b"storage", b"0", b"\xed\xa0\x80", b"a\nb\x1b[2J"])
STRING = TEXT.map(lambda text: b"X" + struct.pack("<I", len(text)) + text)
GLOBAL = st.sampled_from(GLOBALS).map(lambda name: b"c" + name + b"\n")
# An instruction of a pickle, which may be invalid; the last ones take exponential time or contain themselves.
INSTRUCTION = st.one_of(
    GLOBAL,
    st.tuples(GLOBAL, STRING).map(lambda pair: pair[0] + b"(" + pair[1] + b"tR"),
    STRING,
    st.binary(min_size=1, max_size=1),
    st.sampled_from([b"K\x01", b"J\xff\xff\xff\xff", b"G" + struct.pack(">d", 1e300), b"q\x01", b"h\x01"]),
    st.sampled_from([b"}", b"]", b")", b"(", b"N", b"\x88", b"\x89", b"\x8f"]),
    st.sampled_from([b"R", b"\x81", b"b", b"Q", b"\x85", b"\x86", b"\x87", b"t", b"s", b"u", b"a", b"e"]),
    st.sampled_from([b"q\x05" + b"h\x05h\x05\x86q\x05" * 45, b"]q\x04h\x04a"]),
)
BODY = st.lists(INSTRUCTION, min_size=1, max_size=11).map(b"".join)
PREFIX = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}."  # of the legacy format


def fields(model, args):
    """Return the pickle of a dict with a model and args."""
    namespace = b"cargparse\nNamespace\n)\x81}" + b"X\x04\x00\x00\x00arch" + args + b"sb"
    return b"\x80\x02}X\x05\x00\x00\x00model" + model + b"sX\x04\x00\x00\x00args" + namespace + b"s."


@pytest.mark.parametrize("legacy", [False, True])
@given(
    content=st.one_of(
        BODY.map(lambda body: b"\x80\x02" + body + b"."),
        BODY.map(lambda body: fields(b"}", body)),
        BODY.map(lambda body: fields(b"}X\x01\x00\x00\x00w" + body + b"s", b"N")),
    )
)
def test_hostile_pickles(place, watched, legacy, content):
    """A random pickle is one line, never a model; `watched` checks that nothing is executed."""
    write_pickle(place, PREFIX + content + b"\x80\x02]." if legacy else content, legacy)
    error(place)
    assert not watched and os.listdir(place.parent) == ["model.pt"]


FOLDER = ("consolidated.01.pth", "config.json", "consolidate_config.json", "tokenizer.model")


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
    if name in ("zip", FOLDER[0]):
        identical(read.tensors, tensors)
        assert name == FOLDER[0] or read.args == vars(built(BERT)["args"])
    elif name not in FOLDER:
        assert "damage to it goes unnoticed" in report.warnings[0]


def keep(share):
    return lambda content: content[: int(len(content) * share)]


def without_storages(content):
    """Return a legacy file in which the list of storage keys is empty."""
    return content[: content.rindex(b"\x80\x02]")] + b"\x80\x02]."


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


# Name -> serialization, damage to the bytes, and a part of the error.
DAMAGES = {
    "empty": ("zip", lambda content: b"", "the file is empty; copy"),
    "other bytes": ("zip", lambda content: bytes(range(100, 200)), "not a checkpoint"),
    "another pickle": ("zip", lambda content: b"\x80\x02" + bytes(range(200, 256)), "not a checkpoint"),
    "a start": ("zip", lambda content: b"PK\x03\x04" + bytes(100), "truncated"),
    **{f"{form} {x}": (form, keep(x), "truncated") for form in ("zip", "legacy") for x in (0.1, 0.5, 0.99)},
    "far from the end": ("zip", lambda content: content + bytes(1 << 17), "the zip directory at its end is missing"),
    "trailing bytes": ("legacy", lambda content: content + b"more", "4 bytes follow the last storage"),
    "no storages": ("legacy", without_storages, "no data for"),
    "no CRC of an entry": ("zip", without_a_crc, "entry 'model/data/3' has CRC-32"),
    "an entry": ("zip", lambda x: flip(x, len(x) // 2), "has CRC-32"),
    "the pickle": ("zip", lambda x: flip(x, 500), "entry 'model/data.pkl' has CRC-32"),
    # only in the directory is an entry's name followed by the signature of the next entry
    "moved": ("zip", lambda x: x.replace(b"model/data/1PK", b"model/data/2PK"), "at the offset in the zip directory"),
    "compressed": ("zip", rewritten, "entry 'model/data.pkl' is compressed"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files(file, damage):
    form, change, named = DAMAGES[damage]
    write(built(BERT), file, form)
    content = file.read_bytes()
    file.write_bytes(change(content))
    message = error(file)
    assert named in message and ("truncated" not in named or "copy" in message), message


ARCHIVES = {"gzip": "gztar", "bzip2": "bztar", "xz": "xztar", "tar": "tar", "zip": "zip"}


@pytest.mark.parametrize("kind", ARCHIVES)
def test_an_archive_of_the_file(file, tmp_path, kind):
    (tmp_path / "run").mkdir()
    write(built(BERT), tmp_path / "run" / "checkpoint_best.pt")
    os.replace(shutil.make_archive(tmp_path / "archive", ARCHIVES[kind], tmp_path / "run"), file)
    assert f"a {kind} archive; extract it (" in error(file)


def test_other_paths(file):
    assert "no such file" in error(file)
    save_file({"weight": torch.zeros(2)}, file)
    assert "a safetensors file" in error(file)
    file.unlink()
    file.mkdir()
    assert "none of its files ends in .pt" in error(file)
    (file / "checkpoint_best.pt").touch()
    assert "is a folder; pass the checkpoint file itself (checkpoint_best.pt)" in error(file)


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


def with_model(change):
    """Return a function that builds a checkpoint with changed tensors."""

    def build():
        state = luna.bert()
        change(state["model"])
        return state

    return build


def replaced(key, change):
    return with_model(lambda model: model.update({key: change(model[key])}))


def expanded(rows):
    tables = ("embed_tokens.weight", "lm_head.weight")
    return with_model(
        lambda model: model.update({k: x[:1].expand(rows, 16) for k, x in model.items() if k.endswith(tables)})
    )


def in_optimizer():
    state = luna.bert()
    return state | {"last_optimizer_state": {"state": [{"step": state["model"][WEIGHT]}]}}


# Content of a checkpoint, or a function that returns it, and a part of the error; `test_damage.py` has odd tensors.
CONTENT = {
    "a list": ([1, 2], "contains a list, not the dict"),
    "args as a dict": ({"args": {"arch": "luna"}, "model": {}}, "'args' is a dict"),
    "a model as a list": ({"args": argparse.Namespace(), "model": [1]}, "'model' is a list"),
    "no args": ({"model": {}}, "no field 'args'"),
    "no model": ({"args": argparse.Namespace()}, "no field 'model'"),
    "args None": (built(BERT) | {"args": None}, "field 'args' is None"),
    "a model None": (built(BERT) | {"model": None}, "field 'model' is None"),
    "hydra": (built(BERT) | {"cfg": {"model": {"arch": "luna"}}}, "field 'cfg': written by a later fairseq (hydra"),
    "two lines": ({1: 2, "a\nb": 3}, "no field 'args' (found: 1, a"),
    "endlessly shared": (
        with_model(lambda model: model.update(dict.fromkeys((f"x.{i}" for i in range(2000)), torch.zeros(1 << 20)))),
        "its tensors need 8,388,6",
    ),
    **{f"{rows} rows": (expanded(rows), "bytes of memory and repeat") for rows in (1 << 28, (1 << 31) - 1, 1 << 40)},
}


@pytest.mark.parametrize("case", CONTENT)
def test_invalid_content_is_one_line(file, case):
    content, named = CONTENT[case]
    write(content() if callable(content) else content, file)
    assert named in error(file)


# A damaged file without checksums may have these contents; valid checksums mean that they are intended.
CONTRADICTIONS = {
    "strides": (replaced(WEIGHT, torch.Tensor.t), "does not fit its storage"),
    "one row": (replaced(WEIGHT, lambda x: x[:1].expand(x.shape)), "does not fit its storage"),
    "more numbers": (replaced(WEIGHT, lambda x: torch.cat([x, x])[:16]), "does not fit its storage"),
    "an offset": (replaced(WEIGHT, lambda x: torch.cat([x, x])[16:]), "does not fit its storage"),
    "two tensors": (with_model(lambda model: model.update({OTHER: model[WEIGHT]})), f"'{OTHER}' and"),
    "an optimizer": (in_optimizer, "shares its storage with a value outside the model"),
}


@pytest.mark.parametrize("form", UNCHECKED)
@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_of_a_file_without_checksums(file, name, form):
    build, named = CONTRADICTIONS[name]
    write(build(), file, form)
    message = error(file)
    assert named in message and f"'{WEIGHT}'" in message, message
    write(build(), file)
    assert convert_checkpoint(file, None).warnings == []


@pytest.mark.parametrize("form", UNCHECKED)
def test_expanded_tensors_without_checksums(file, form):
    """A file of a few kB that requests more memory than a machine has raises an error."""
    write(expanded(1 << 40)(), file, form)
    message = error(file)
    assert "bytes of memory and repeat" in message or "does not fit its storage" in message


def test_names_of_files(file, tmp_path):
    """A name that is no Unicode is shown with escapes, and a newline in a name as a space."""
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.pt")
    write(built(BERT), file)
    report = convert_checkpoint(file, tmp_path / "a")
    os.rename(file, odd)
    other = convert_checkpoint(odd, tmp_path / "b")
    assert (report.source["file"], other.source["file"]) == ("model.pt", "caf\\xe9.pt")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    os.truncate(odd, 100)
    with pytest.raises(ConversionError, match="zip directory at its end is missing"):
        convert_checkpoint(odd, tmp_path / "c")
    for name in ("\ud800.pt", "a\0b.pt", "x" * 5000):
        with pytest.raises((ConversionError, OSError)):
            convert_checkpoint(tmp_path / name, tmp_path / "c")
    assert "a file.pt: no such file" in error(tmp_path / "a\nfile.pt")
    for value in ("a\nb", "a\r\n\u2028\x0bb", " \n a\n\n  b \n"):
        assert str(ConversionError(value)).splitlines() == ["a b"]


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_args_become_plain_values(file):
    # Value of an argument, and the value in the report.
    odd = {
        "nested": (argparse.Namespace(ids=torch.arange(3), rate=numpy.float32(1)), {"ids": [0, 1, 2], "rate": 1.0}),
        "list": ([[1, (2,)], {"a": None}], [[1, [2]], {"a": None}]),
        "number": (torch.tensor(2.0), 2.0),
        "counts": (collections.OrderedDict({(1, 2): 3}), {"(1, 2)": 3}),
        "size": (torch.Size([1, 2]), [1, 2]),
        "rest": ([{1}, b"x", 1j, torch.float16], ["{1}", "b'x'", "1j", "torch.float16"]),
        "meta": (torch.zeros(2, device="meta"), "tensor(..., device='meta', size=(2,))"),
        "numpy": ([numpy.float64(0.5), numpy.int64(7), numpy.bool_(True)], [0.5, 7, True]),
    }
    values = torch.ones(3)
    others = {"float8": values.to(torch.float8_e4m3fn), "complex": values.to(torch.complex64).conj()}
    others["quantized"] = torch.quantize_per_tensor(values, 1.0, 0, torch.qint8)
    state = luna.bert(**{name: value for name, (value, _) in odd.items()}, **others)
    write(state | {"optimizer_history": [{"num_updates": numpy.int64(7)}]}, file)
    convert_checkpoint(file, file.with_name("model"))
    report = saved_report(file.with_name("model"))
    assert {name: report["args"][name] for name in odd} == {name: expected for name, (_, expected) in odd.items()}
    assert report["source"]["num_updates"] == 7


def test_numpy_numbers_of_numpy_1(file):
    """Numbers pickled by NumPy before 2.0, which used another module name, can be read."""
    write(luna.bert(lr=numpy.float64(0.5)), file, "legacy")
    content = file.read_bytes()
    assert b"cnumpy._core.multiarray\n" in content
    file.write_bytes(content.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"))
    assert read_checkpoint(file).args["lr"] == 0.5
