"""Untrusted content is never executed, and errors are one line of limited length."""

import argparse
import collections
import itertools
import os
import pickle
import shlex

import numpy
import pytest
import torch

from luna_mega.convert import ConversionError, convert_checkpoint
from luna_mega.convert.safe_load.reader import read_checkpoint
from tests.convert import luna, megalodon
from tests.convert.files import HOSTILE, check_message, pickled, write, write_pickle
from tests.marks import diagonal

BIAS, WEIGHT, NORM = (f"encoder.lm_head.{part}" for part in ("bias", "dense.weight", "layer_norm.weight"))
OTHER = "encoder.sentence_encoder.layers.0.self_attn.out_proj.weight"
FORMS = ("legacy", "no crc")


@pytest.fixture
def convert(convert):
    convert.writes = True
    return convert


class Attack:
    """An object that runs a command when an ordinary unpickler loads it."""

    def __init__(self, file):
        self.command = shlex.join(["touch", str(file)])

    def __reduce__(self):
        return os.system, (self.command,)


def test_attacks_are_effective(tmp_path):
    pickle.loads(pickle.dumps(Attack(tmp_path / "touched")))
    assert (tmp_path / "touched").exists()
    write_pickle(tmp_path / "model.pt", HOSTILE["a call of a value"])
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        torch.load(tmp_path / "model.pt", weights_only=True)


@pytest.mark.parametrize(("form", "place"), [("zip", "extra_state"), ("legacy", "model"), ("pickle", "args")])
def test_code_in_a_checkpoint_is_not_executed(convert, make, tmp_path, monkeypatch, form, place):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    write(({} if form == "pickle" else make.bert()) | {place: Attack(tmp_path / "touched")}, convert.file, form)
    message = convert.error()
    assert f"{os.system.__module__}.system" in message and "nothing was executed" in message
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(("kind", "place"), diagonal(HOSTILE, itertools.product((False, True), repeat=2)))
def test_no_pickle_is_executed(tmp_path, kind, place):
    """No pickle is executed, including those that contain Megalodon's weights without fairseq args."""
    is_folder, legacy = place
    source = damaged = tmp_path / "model.pt"
    if is_folder:
        source = megalodon.folder(tmp_path / "source", ranks=2)
        damaged = source / "consolidated.01.pth"
    write_pickle(damaged, HOSTILE[kind], legacy)
    with pytest.raises(ConversionError, match=f"{damaged.name}.*nothing was executed") as raised:
        convert_checkpoint(source, tmp_path / "model")
    check_message(str(raised.value), 700 + len(str(damaged)))
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("legacy", [False, True])
def test_key_with_expensive_hash(convert, legacy):
    twice = b"".join(b"q" + bytes([index]) + b"h" + bytes([index]) + b"\x86" for index in range(60))
    write_pickle(convert.file, pickled(b"}", b"K\x01", twice, b"N", b"s"), legacy)
    assert "a tuple is nested more than 50 deep" in convert.error()


def test_omegaconf_objects_raise_with_their_name(convert):
    write_pickle(convert.file, pickled(b"comegaconf.dictconfig\nDictConfig\n", b")R"))
    message = convert.error()
    assert "omegaconf" in message and "hydra" in message


def changed(change):
    """Return a function that builds a checkpoint with changed tensors."""

    def build():
        state = luna.bert()
        change(state["model"])
        return state

    return build


def replaced(key, change):
    return changed(lambda model: model.update({key: change(model[key])}))


def expanded(rows):
    tables = ("embed_tokens.weight", "lm_head.weight")
    return changed(
        lambda model: model.update({k: x[:1].expand(rows, 16) for k, x in model.items() if k.endswith(tables)})
    )


NEVER, NOT_DENSE = "which the original never saves", "not a dense tensor"
TENSORS = {
    "float8": (lambda x: x.to(torch.float8_e4m3fn), f"has dtype float8_e4m3fn, {NEVER}"),
    "complex": (lambda x: x.to(torch.complex64), f"has dtype complex64, {NEVER}"),
    "conjugate": (lambda x: x.to(torch.complex64).conj(), f"has dtype complex64, {NEVER}"),
    "unsigned": (lambda x: x.to(torch.uint16), f"has dtype uint16, {NEVER}"),
    "nested": (lambda x: torch.nested.nested_tensor([x, x[:3]]), "a tensor that is not dense"),
    "jagged": (lambda x: torch.nested.nested_tensor([x], layout=torch.jagged), "a tensor that is not dense"),
    "sparse": (torch.Tensor.to_sparse, NOT_DENSE),
    "meta": (lambda x: x.to("meta"), NOT_DENSE),
    "text": (lambda x: "nothing", NOT_DENSE),
}
# Name -> content of a checkpoint (or a function that returns it), and a part of the error.
CONTENT = {
    "a list": ([1, 2], "list"),
    "args as a dict": ({"args": {"arch": "luna"}, "model": {}}, "'args' is a dict"),
    "a model as a list": ({"args": argparse.Namespace(), "model": [1]}, "'model' is a list"),
    "a weight as a list": ({"args": argparse.Namespace(), "model": {"weight": [1]}}, "'weight'"),
    "no args": ({"model": {}}, "no field 'args'"),
    "no model": ({"args": argparse.Namespace()}, "no field 'model'"),
    "hydra": (
        lambda: luna.bert() | {"cfg": {"model": {"arch": "luna"}}},
        "field 'cfg': written by a later fairseq (hydra",
    ),
    "a name of two lines": (changed(lambda model: model.update({"a\nname": torch.zeros(1)})), "unexpected: a name"),
    "nested args": (lambda: luna.bert(odd=torch.nested.nested_tensor([torch.ones(3), torch.ones(1)])), "not dense"),
    "an array": (lambda: luna.bert(odd=numpy.zeros(3)), "numpy"),
    "endlessly shared": (
        changed(lambda model: model.update(dict.fromkeys((f"x.{i}" for i in range(2000)), torch.zeros(1 << 20)))),
        "its tensors need 8,388,6",
    ),
    **{f"{rows} rows": (expanded(rows), "bytes of memory and repeat") for rows in (1 << 28, (1 << 31) - 1, 1 << 40)},
    **{f"{name} {key}": (replaced(key, TENSORS[name][0]), TENSORS[name][1])
       for name, key in diagonal(TENSORS, (BIAS, WEIGHT, NORM))},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("case", CONTENT)
def test_invalid_content_is_one_line(convert, case):
    content, named = CONTENT[case]
    message = convert.error(content() if callable(content) else content)
    assert named in message and len(message) < 700, message


CHANGES = (torch.Tensor.t, lambda x: x[:1].expand(x.shape), lambda x: torch.cat([x, x])[:16],
           lambda x: torch.cat([x, x])[16:])  # fmt: skip


@pytest.mark.parametrize(("change", "form"), diagonal(CHANGES, FORMS))
def test_sizes_strides_and_storages_that_contradict_each_other(convert, form, change):
    state = replaced(WEIGHT, change)()
    write(state, convert.file, form)
    message = convert.error()
    assert f"tensor '{WEIGHT}' of shape [16, 16]" in message and "does not fit its storage" in message
    write(state, convert.file)  # valid checksums mean that the writer intended this content
    assert convert_checkpoint(convert.file, convert.output).warnings == []


@pytest.mark.parametrize(("rows", "form"), diagonal([1 << 28, (1 << 31) - 1, 1 << 40], FORMS))
def test_expanded_tensors_without_checksums(convert, rows, form):
    """A file of a few kB that requests more memory than a machine has raises an error."""
    write(expanded(rows)(), convert.file, form)
    message = convert.error()
    assert "bytes of memory and repeat" in message or "does not fit its storage" in message


@pytest.mark.parametrize("form", FORMS)
def test_tensors_that_share_a_storage_without_being_tied(convert, form):
    write(changed(lambda model: model.update({OTHER: model[WEIGHT]}))(), convert.file, form)
    message = convert.error()
    assert WEIGHT in message and OTHER in message and "share a storage" in message
    state = luna.bert()
    write(state | {"last_optimizer_state": {"state": [{"step": state["model"][WEIGHT]}]}}, convert.file, form)
    assert f"tensor '{WEIGHT}' shares its storage with a value outside the model" in convert.error()


def test_the_negative_bit_is_a_sign(convert, make):
    state, key = make.bert(), "encoder.lm_head.weight"
    weight = state["model"][key]
    state["model"][key] = torch._neg_view(-weight)
    convert(state)
    assert torch.equal(read_checkpoint(convert.file).tensors[key], weight)


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_odd_tensors_among_the_args(convert, make):
    values = torch.ones(3)
    odd = {"float8": values.to(torch.float8_e4m3fn), "complex": values.to(torch.complex64).conj()}
    convert(make.bert(**odd, quantized=torch.quantize_per_tensor(values, 1.0, 0, torch.qint8)))


@pytest.mark.skipif(os.name == "nt", reason="names are Unicode there")
def test_a_name_that_is_no_unicode(convert, make):
    odd = os.fsdecode(os.fsencode(convert.source) + b"/caf\xe9.pt")
    convert.save(make.bert())
    report = convert_checkpoint(convert.file, convert.output)
    os.rename(convert.file, odd)
    other = convert_checkpoint(odd, convert.output.with_name("other"))
    assert (report.source["file"], other.source["file"]) == ("model.pt", "caf\\xe9.pt")
    first, second = convert.output / "model.safetensors", convert.output.with_name("other") / "model.safetensors"
    assert first.read_bytes() == second.read_bytes()
    os.truncate(odd, 100)
    with pytest.raises(ConversionError, match="zip directory at its end is missing"):
        convert_checkpoint(odd, convert.output.with_name("third"))
    for name in ("\ud800.pt", "a\0b.pt", "x" * 5000):
        with pytest.raises((ConversionError, OSError)):
            convert_checkpoint(convert.source / name, convert.output.with_name("third"))


def test_values_in_messages_are_cut(convert, make):
    long = "long_" * 1000
    for content in (
        changed(lambda model: model.update({long: torch.zeros(1)}))(),
        {long: 1, "x": 2},
        {"args": argparse.Namespace(), "model": {long: 1}},
        make.checkpoint({"x": torch.zeros(1)}, arch=f"\x1b{long}"),
    ):
        message = convert.error(content)
        assert len(message) < 700 and "long_long_" in message and "\x1b" not in message


def test_newlines_in_names_and_messages(convert, tmp_path):
    convert.file = convert.source / "a\nfile.pt"
    assert "a file.pt: no such file" in convert.error()
    for content in ({1: 2}, {"args": argparse.Namespace(), "model": {"a\nname": 1}}, {"args": "a\nb", "model": {}}):
        torch.save(content, tmp_path / "a\nfile")
        with pytest.raises(ConversionError) as raised:
            read_checkpoint(tmp_path / "a\nfile")
        assert len(str(raised.value).splitlines()) == 1
    for value in ("a\nb", "a\r\n\u2028\x0bb", " \n a\n\n  b \n"):
        assert str(ConversionError(value)).splitlines() == ["a b"]
    assert str(ConversionError("two  spaces.pt: no such file")) == "two  spaces.pt: no such file"


def test_args_become_plain_values(convert, make):
    odd = {
        "nested": argparse.Namespace(ids=torch.arange(3), rate=numpy.float32(1), more=[[1, (2,)], {"a": None}]),
        "number": torch.tensor(2.0),
        "counts": collections.OrderedDict({(1, 2): 3}),
        "size": torch.Size([1, 2]),
        "rest": {"set": {1}, "bytes": b"x", "complex": 1j, "dtype": torch.float16},
        "meta": torch.zeros(2, device="meta"),
        "numpy": [numpy.float64(0.5), numpy.int64(7), numpy.bool_(True)],
    }
    state = make.bert(**odd) | {"optimizer_history": [{"num_updates": numpy.int64(7)}]}
    report = convert.report(state)
    assert {name: report["args"][name] for name in odd} == {
        "nested": {"ids": [0, 1, 2], "rate": 1.0, "more": [[1, [2]], {"a": None}]},
        "number": 2.0,
        "counts": {"(1, 2)": 3},
        "size": [1, 2],
        "rest": {"set": "{1}", "bytes": "b'x'", "complex": "1j", "dtype": "torch.float16"},
        "meta": "tensor(..., device='meta', size=(2,))",
        "numpy": [0.5, 7, True],
    }
    assert report["source"]["num_updates"] == 7


def test_numpy_numbers_of_numpy_1(tmp_path, make):
    """Numbers pickled by NumPy before 2.0, which used another module name, can be read."""
    file = tmp_path / "model.pt"
    write(make.bert(lr=numpy.float64(0.5)), file, "legacy")
    content = file.read_bytes()
    assert b"cnumpy._core.multiarray\n" in content
    file.write_bytes(content.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"))
    assert read_checkpoint(file).args["lr"] == 0.5
