"""Untrusted files: missing checksums, hostile pickles, invalid args, tensors and names."""

import argparse
import functools
import json
import os
import pickle
import zipfile

import pytest
import torch

from luna_mega.convert import ConversionError, convert_checkpoint
from luna_mega.convert.safe_load.reader import read_checkpoint
from tests.convert import megalodon

BIAS, WEIGHT = "encoder.lm_head.bias", "encoder.lm_head.dense.weight"
FORMS = ("legacy", "no crc")


def save(state, file, form):
    torch.serialization.set_crc32_options(form != "no crc")
    try:
        torch.save(state, file, _use_new_zipfile_serialization=form != "legacy")
    finally:
        torch.serialization.set_crc32_options(True)


def pickled(*instructions):
    """A zip checkpoint whose pickle has these instructions."""
    return b"\x80\x02" + b"".join(instructions) + b"."


def save_pickle(file, content):
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("model/data.pkl", content)
        archive.writestr("model/version", "3")


@pytest.mark.parametrize(("form", "words"), [("legacy", "legacy format, which has no checksums"), ("no crc", "CRC-32")])
def test_a_file_without_checksums_is_converted_with_a_warning(convert, make, form, words):
    save(make.bert(), convert.file, form)
    report = convert_checkpoint(convert.file, convert.output)
    (warning,) = report.warnings
    assert words in warning and "damage to it goes unnoticed" in warning
    assert any(line.startswith("warning  ") and line.endswith(warning) for line in str(report).splitlines())
    assert json.loads((convert.output / "conversion_report.json").read_text())["warnings"] == [warning]


def test_the_numbers_of_a_file_without_checksums_may_change_with_the_warning_only(convert, make):
    save(make.bert(), convert.file, "legacy")
    content = convert.file.read_bytes()
    convert.file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "no checksums" in "".join(convert_checkpoint(convert.file, convert.output).warnings)


LAYOUTS = {
    "expanded": lambda weight: weight[:1].expand(weight.shape),
    "transposed": lambda weight: weight.t(),
    "part of a larger storage": lambda weight: torch.cat([weight, weight])[: len(weight)],
    "after another": lambda weight: torch.cat([weight, weight])[len(weight) :],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("change", LAYOUTS)
def test_sizes_strides_and_storages_that_contradict_each_other(convert, make, form, change):
    state = make.bert()
    state["model"][WEIGHT] = LAYOUTS[change](state["model"][WEIGHT])
    save(state, convert.file, form)
    message = convert.error()
    assert f"tensor '{WEIGHT}' of shape [16, 16]" in message and "does not fit its storage" in message
    save(state, convert.file, "zip")  # with checksums, it is as its writer wanted it
    assert convert_checkpoint(convert.file, convert.output).warnings == []


@pytest.mark.parametrize("form", ["zip", *FORMS])
@pytest.mark.parametrize("rows", [1 << 28, (1 << 31) - 1, 1 << 40])
def test_expanded_tensors_are_rejected(convert, make, rows, form):
    """A file of a few kB that requests more memory than a machine has."""
    state = make.bert()
    for key, tensor in state["model"].items():
        if key.endswith(("embed_tokens.weight", "lm_head.weight")):
            state["model"][key] = tensor[:1].expand(rows, 16)
    save(state, convert.file, form)
    message = convert.error()
    assert "bytes of memory and repeat" in message or form != "zip" and "does not fit its storage" in message


def test_endlessly_shared_layers_are_rejected(convert, make):
    state, large = make.bert(), torch.zeros(1 << 20)
    state["model"] |= {f"encoder.layers.{layer}.weight": large for layer in range(2000)}
    save(state, convert.file, "zip")
    assert "its tensors need 8,388,6" in convert.error()


@pytest.mark.parametrize("form", FORMS)
def test_tensors_that_share_a_storage_without_being_tied(convert, make, form):
    state, other = make.bert(), "encoder.sentence_encoder.layers.0.self_attn.out_proj.weight"
    state["model"][other] = state["model"][WEIGHT]
    save(state, convert.file, form)
    message = convert.error()
    assert WEIGHT in message and other in message and "share a storage" in message
    state = make.bert()
    save(state | {"last_optimizer_state": {"state": [{"step": state["model"][WEIGHT]}]}}, convert.file, form)
    assert f"tensor '{WEIGHT}' shares its storage with a value outside the model" in convert.error()


def test_trailing_bytes_and_empty_storages(convert, make):
    save(make.bert(), convert.file, "legacy")
    content = convert.file.read_bytes()
    convert.file.write_bytes(content + b"more")
    assert "4 bytes follow the last storage" in convert.error()
    state = {"model": {"weight": torch.ones(2)}, "args": argparse.Namespace()}
    save(state, convert.file, "legacy")
    content = convert.file.read_bytes()
    keys = content.rindex(b"\x80\x02]")
    convert.file.write_bytes(content[:keys] + b"\x80\x02].")
    assert "no data for 1 of its storages" in convert.error()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("build", ["bert", "lra21", "lra23"])
def test_sound_files_without_checksums_are_converted(convert, make, form, build):
    state = getattr(make, build)()
    if build == "bert":  # as in a fairseq file
        state["last_optimizer_state"] = {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1}]}
    save(state, convert.file, form)
    tensors = read_checkpoint(convert.file).tensors
    assert all(torch.equal(tensors[key], tensor) for key, tensor in state["model"].items())
    convert_checkpoint(convert.file, convert.output)


HOSTILE = {
    "a function": pickled(b"cposix\nsystem\n", b"X\x02\x00\x00\x00ls", b"\x85R"),
    "a class": pickled(b"csubprocess\nPopen\n", b")R"),
    "an instruction": pickled(b"\x8c\x01a"),
    "a call of a value": pickled(b"N)R"),
    "an object of a value": pickled(b"N)\x81"),
    "a list that is none": pickled(b"}Na"),
    "a state of a value": pickled(b"N}b"),
    "a dict that is none": pickled(b"]NNs"),
    "a jagged tensor": pickled(b"ctorch.nested._internal.nested_tensor\nOther\n)R"),
    "a name of 10,000 letters": pickled(b"cos\n" + b"x\x1b" * 5000 + b"\n)R"),
}


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("kind", HOSTILE)
def test_no_message_quotes_the_advice_to_execute_a_pickle(convert, kind, legacy):
    if legacy:
        convert.file.write_bytes(HOSTILE[kind])
    else:
        save_pickle(convert.file, HOSTILE[kind])
    message = convert.error()
    assert "nothing was executed" in message
    assert not any(word in message for word in ("weights_only", "add_safe_globals", "issue", "github", "\x1b"))
    assert len(message) < 600 + len(str(convert.file))


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("kind", HOSTILE)
def test_no_shard_of_a_folder_is_executed(tmp_path, kind, legacy):
    """The weights of Megalodon are a pickle as well, without the args of fairseq."""
    source = megalodon.folder(tmp_path / "source", ranks=2)
    if legacy:
        (source / "consolidated.01.pth").write_bytes(HOSTILE[kind])
    else:
        save_pickle(source / "consolidated.01.pth", HOSTILE[kind])
    with pytest.raises(ConversionError, match="consolidated.01.pth.*nothing was executed") as raised:
        convert_checkpoint(source, tmp_path / "model")
    message = str(raised.value)
    assert (
        not any(word in message for word in ("weights_only", "add_safe_globals", "\n", "\x1b")) and len(message) < 700
    )
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def nested(times, kind=list):
    value = kind()
    for _ in range(times):
        value = kind((value, value))
    return value


ARGS = {
    "lists that are shared": nested(40),
    "tuples that are shared": nested(40, tuple),
    "a dict of shared lists": {"a": {"b": nested(40)}},
    "many values": list(range(200_000)),
    "a deep list": functools.reduce(lambda inner, _: [inner], range(60), []),
    "a large tensor": torch.zeros(1).expand(1 << 40),
    "a long text often": ["x" * 100_000] * 1000,
    "a large set": set(range(200_000)),
    "many keys": dict.fromkeys(range(200_000)),
}


@pytest.mark.parametrize("kind", ARGS)
def test_args_without_bounds_are_one_line(convert, make, kind):
    message = convert.error(make.bert(nested=ARGS[kind]))
    assert ("more than 100,000 values" in message or "nested more than 50 deep" in message) and len(message) < 400


@pytest.mark.parametrize("legacy", [False, True])
def test_key_with_expensive_hash(convert, legacy):
    twice = b"".join(b"q" + bytes([index]) + b"h" + bytes([index]) + b"\x86" for index in range(60))
    content = pickled(b"}", b"K\x01", twice, b"N", b"s")
    if legacy:
        convert.file.write_bytes(content)
    else:
        save_pickle(convert.file, content)
    assert "a tuple is nested more than 50 deep" in convert.error()


def test_updates_are_a_number_or_unknown(convert, make):
    state = make.bert() | {"optimizer_history": [{"num_updates": nested(40)}]}
    convert.save(state)
    assert read_checkpoint(convert.file).num_updates is None


TENSORS = {
    "float8": (lambda bias: bias.to(torch.float8_e4m3fn), "has dtype float8_e4m3fn, which the original never saves"),
    "complex": (lambda bias: bias.to(torch.complex64), "has dtype complex64, which the original never saves"),
    "conjugate": (lambda bias: bias.to(torch.complex64).conj(), "has dtype complex64, which the original never saves"),
    "unsigned": (lambda bias: bias.to(torch.uint16), "has dtype uint16, which the original never saves"),
    "nested": (lambda bias: torch.nested.nested_tensor([bias, bias[:3]]), "a tensor that is not dense"),
    "jagged": (lambda bias: torch.nested.nested_tensor([bias], layout=torch.jagged), "a tensor that is not dense"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("key", [BIAS, "encoder.lm_head.weight", "encoder.lm_head.layer_norm.weight"])
@pytest.mark.parametrize("kind", TENSORS)
def test_weights_of_other_kinds_are_one_line(convert, make, kind, key):
    change, words = TENSORS[kind]
    state = make.bert()
    state["model"][key] = change(state["model"][key])
    assert words in convert.error(state)


def test_the_negative_bit_is_a_sign(convert, make):
    state = make.bert()
    weight = state["model"]["encoder.lm_head.weight"]
    state["model"]["encoder.lm_head.weight"] = torch._neg_view(-weight)
    convert(state)
    assert torch.equal(read_checkpoint(convert.file).tensors["encoder.lm_head.weight"], weight)


@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("kind", ["float8", "nested", "complex", "quantized"])
def test_odd_tensors_among_the_args(convert, make, kind):
    values = torch.ones(3)
    odd = {
        "float8": values.to(torch.float8_e4m3fn),
        "nested": torch.nested.nested_tensor([values, values[:1]]),
        "complex": values.to(torch.complex64).conj(),
        "quantized": torch.quantize_per_tensor(values, 1.0, 0, torch.qint8),
    }
    if kind == "nested":
        assert "not dense" in convert.error(make.bert(odd=odd[kind]))
    else:
        convert(make.bert(odd=odd[kind]))


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
    with open(odd, "r+b") as file:
        file.truncate(100)
    with pytest.raises(ConversionError, match="zip directory at its end is missing"):
        convert_checkpoint(odd, convert.output.with_name("third"))
    for name in ("\ud800.pt", "a\0b.pt", "x" * 5000):
        with pytest.raises((ConversionError, OSError)):
            convert_checkpoint(convert.source / name, convert.output.with_name("third"))


def test_values_in_messages_are_cut(convert, make):
    long = "long_" * 1000
    state = make.bert()
    state["model"][long] = torch.zeros(1)
    for message in (
        convert.error(state),
        convert.error({long: 1, "x": 2}),
        convert.error({"args": argparse.Namespace(), "model": {long: 1}}),
        convert.error(make.checkpoint({"x": torch.zeros(1)}, arch=f"\x1b{long}")),
    ):
        assert len(message) < 700 and "long_long_" in message and "\x1b" not in message


def test_attack_pickles_are_effective(tmp_path):
    save_pickle(tmp_path / "model.pt", HOSTILE["a call of a value"])
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        torch.load(tmp_path / "model.pt", weights_only=True)
