"""Files of a model folder: which files are copied, and what links and indices may refer to."""

import json
import os
import pickle

import pytest
import torch
from transformers import AutoModelForMaskedLM, PreTrainedTokenizerFast

import luna_mega_cli
from luna_mega.errors import ConversionError
from luna_mega.hub.files import copy_model
from luna_mega.hub.folder import load_tokenizer, read_folder, read_json
from tests.convert.folders import edit
from tests.damage import NOT_OBJECTS
from tests.errors import command_error
from tests.marks import diagonal
from tests.modeling.luna import make

KEPT = [
    "config.json", "model.safetensors", "tokenizer.json", "README.md", "LICENSE", "modules.json", "dict.txt",
    "dict.label.txt", "target/tokenizer.json", "1_Pooling/config.json",
    "2_Dense/model.safetensors",
]  # fmt: skip
LEFT = [
    "evil.py", "notes.txt", ".env", "training_args.bin", "optimizer.pt", "pytorch_model.bin", "1_Pooling/evil.py",
    "checkpoint-5/model.safetensors", "data/config.json", "target/.secret", "trainer_state.json", "config.json.bak",
    "model-00001-of-00002.safetensors", "model.safetensors.index.json",
]  # fmt: skip


def fill(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name, encoding="utf-8")


def listed(folder):
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


def test_only_files_of_the_list_are_copied(tmp_path):
    fill(tmp_path / "model", KEPT + LEFT)
    (tmp_path / "out").mkdir()
    copy_model(tmp_path / "model", tmp_path / "out")
    assert listed(tmp_path / "out") == sorted(KEPT)


@pytest.mark.parametrize("name", ["README.md", "target", "1_Pooling"])
def test_a_link_out_of_the_folder_is_an_error(tmp_path, name):
    fill(tmp_path / "model", ["config.json", "model.safetensors", "real.txt"])
    (tmp_path / "out").mkdir()
    fill(tmp_path / "elsewhere", ["config.json"])
    there = tmp_path / "elsewhere"
    (tmp_path / "model" / name).symlink_to(there / "config.json" if name == "README.md" else there)
    with pytest.raises(
        ConversionError, match=f"{name}.*: the symbolic link points outside of the folder; copy the file"
    ):
        copy_model(tmp_path / "model", tmp_path / "out")


def test_links_within_the_folder_and_the_cache_of_the_hub(tmp_path):
    """Links may point into the folder or the Hub cache, which links snapshots/REVISION to blobs."""
    repository = tmp_path / "models--user--name"
    fill(repository, ["blobs/abc", "blobs/def", "snapshots/123/real.json", "snapshots/123/model.safetensors"])
    snapshot = repository / "snapshots" / "123"
    (snapshot / "target").mkdir()
    for name, link in (
        ("config.json", "../../blobs/abc"),
        ("target/vocab.json", "../../../blobs/def"),
        ("vocab.json", "real.json"),
    ):
        (snapshot / name).symlink_to(link)
    (tmp_path / "out").mkdir()
    copy_model(snapshot, tmp_path / "out")
    assert listed(tmp_path / "out") == ["config.json", "model.safetensors", "target/vocab.json", "vocab.json"]
    assert (tmp_path / "out" / "config.json").read_text(encoding="utf-8") == "blobs/abc"
    assert not (tmp_path / "out" / "config.json").is_symlink()
    fill(tmp_path / "models--user--other", ["blobs/xyz"])
    (snapshot / "README.md").symlink_to("../../../models--user--other/blobs/xyz")
    with pytest.raises(ConversionError, match="README.md: the symbolic link points outside of the folder"):
        copy_model(snapshot, tmp_path / "out")


@pytest.fixture
def folder(tmp_path):
    make("ForMaskedLM").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


INDEXES = [
    {"x": "../outside.safetensors"}, {"x": "/etc/passwd"}, {"x": "a/../../b.safetensors"}, {"x": ".."}, {"x": ""},
    {"x": 5}, {"x": ["a"]}, {"x": "a\0b"}, [], {}, "model.safetensors", None, 5, {"x": "..\\outside.safetensors"},
]  # fmt: skip
COMMANDS = [
    ["verify", "MODEL", "MODEL"], ["bundle", "MODEL"], ["bundle", "MODEL", "--output", "NEW"],
]  # fmt: skip


@pytest.mark.parametrize("places", INDEXES, ids=repr)
def test_an_index_names_files_of_its_folder(folder, places):
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    with pytest.raises(ConversionError, match="weight_map must name files of this folder"):
        read_folder(folder)


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_no_command_reads_weights_elsewhere_or_pickled_ones(folder, argv, capsys):
    index, names = folder / "model.safetensors.index.json", {"MODEL": folder, "NEW": folder.parent / "new"}
    argv = [names.get(word, word) for word in argv]
    index.write_text(json.dumps({"weight_map": {"x": "../outside.safetensors"}}), encoding="utf-8")
    (folder / "model.safetensors").rename(folder / "model.pt")
    assert "weight_map must name files" in command_error(capsys, *argv)
    index.unlink()
    assert "no model.safetensors" in command_error(capsys, *argv)
    for name in ("pytorch_model.bin.index.json", "pytorch_model.bin"):
        (folder / name).touch()
        message = command_error(capsys, *argv)
        assert f"has its weights only in {name};" in message and "save_pretrained(NEW)" in message


class Executed:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("harmful", [False, True])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00001.bin"])
def test_folders_of_pickles_are_read_as_the_security_page_says(folder, name, harmful, repo_root):
    page = (repo_root / "SECURITY.md").read_text(encoding="utf-8")
    assert all(f"`{text}`" in page for text in ("pytorch_model.bin", "torch.load(weights_only=True)", "model.pt"))
    load = AutoModelForMaskedLM.from_pretrained
    weights = load(folder).state_dict() | ({"x": Executed(folder / "executed")} if harmful else {})
    torch.save(weights, folder / name)
    if "of" in name:
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights, name)}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="no file named model.safetensors"):
        load(folder, use_safetensors=True)
    if harmful:
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            load(folder)
    else:
        assert all(tensor.equal(weights[key]) for key, tensor in load(folder).state_dict().items())
    assert not (folder / "executed").exists()
    (folder / name).rename(folder / "model.pt")
    with pytest.raises(OSError):
        load(folder)


CONFIGS = [
    ("model_type", []), ("model_type", {}), ("model_type", None), ("architectures", {}), ("architectures", {"a": 1}),
    ("architectures", "LunaModel2"), ("architectures", [[]]), ("architectures", [5]), ("hidden_size", 10**18),
    ("hidden_size", "x"), ("hidden_size", []), ("vocab_size", 10**18), ("num_hidden_layers", -1), ("id2label", []),
    ("id2label", 5), ("dtype", "nonsense"), ("auto_map", "x"), ("auto_map", [1]), ("max_position_embeddings", 10**19),
    ("embedding_norm", "long " * 9999), ("pooling", "long" * 9999), ("dropout", ["long"] * 9999),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), CONFIGS, ids=lambda value: str(value)[:20])
def test_invalid_configuration_raises(folder, field, value, capsys):
    edit(folder, **{field: value})
    message = command_error(capsys, "verify", folder, folder)
    assert "\x1b" not in message and len(message) < 800 + len(str(folder))


AUTO_MAPS = [["a"], "x", {"AutoModel": ["a", None], "AutoModelForMaskedLM": 5, "x": "evil.X"}]


@pytest.mark.parametrize("auto_map", AUTO_MAPS)
def test_a_bundle_of_any_auto_map(folder, auto_map, tmp_path, capsys):
    edit(folder, auto_map=auto_map)
    if not isinstance(auto_map, dict):
        assert "auto_map" in command_error(capsys, "bundle", folder)
        return
    assert luna_mega_cli.main(["bundle", str(folder), "--output", str(tmp_path / "out")]) == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["auto_map"]
    assert set(written.values()) == {f"luna_mega_code/auto_luna.{code.partition('.')[2]}" for code in written.values()}


def test_byte_order_mark_of_json(tmp_path):
    (tmp_path / "config.json").write_text('\ufeff{"model": 1}', encoding="utf-8")
    assert read_json(tmp_path / "config.json") == {"model": 1}


@pytest.mark.parametrize("content", NOT_OBJECTS.values(), ids=NOT_OBJECTS)
def test_invalid_json_raises(folder, content, capsys):
    (folder / "config.json").write_bytes(content)
    command_error(capsys, "bundle", folder)


def test_a_tokenizer_with_code_is_not_run(folder):
    (folder / "evil.py").write_text("raise SystemExit('executed')", encoding="utf-8")
    content = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConversionError, match="no tokenizer that transformers"):
        load_tokenizer(folder)


@pytest.mark.parametrize("damage", ["[]", "{", '{"model": 5}', "\udcff"])
def test_damaged_tokenizer_raises(folder, damage):
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": PreTrainedTokenizerFast.__name__}), encoding="utf-8"
    )
    (folder / "tokenizer.json").write_bytes(damage.encode(errors="surrogateescape"))
    with pytest.raises(ConversionError, match="no tokenizer that transformers"):
        load_tokenizer(folder)


def test_names_of_folders_on_the_screen(folder, capsys):
    odd = folder.rename(folder.parent / "a\x1b[31mb\u202ec")
    assert luna_mega_cli.main(["bundle", str(odd)]) == 0
    printed = capsys.readouterr().out
    assert r"a\x1b[31mb\u202ec" in printed and "\x1b" not in printed and "\u202e" not in printed
    assert r"a\x1b[31mb" in command_error(capsys, "bundle", f"{odd}/nothing")


OUTPUTS = ["a\0b", "caf\udce9", "\ud800", "loop", "loop/x", "file/x"]


@pytest.mark.parametrize(("name", "command"), diagonal(OUTPUTS, ["convert", "bundle"]))
def test_output_without_a_file_name(folder, name, command, capsys, monkeypatch):
    monkeypatch.chdir(folder.parent)
    os.symlink("loop", "loop")
    (folder.parent / "file").write_text("", encoding="utf-8")
    command_error(capsys, command, folder if command != "convert" else "file", "--output", name)
    assert not list(folder.parent.glob(".*.partial"))


WORDS = ["a\0b", "\udcff", "\ud800"]


ARGUMENTS = [
    ["convert", "WORD", "--dry-run"], ["verify", "MODEL", "WORD"], ["verify", "WORD", "MODEL"], ["bundle", "WORD"],
    ["convert", "x", "--output", "NEW", "--head", "WORD"],
    ["convert", "WORD", "--output", "NEW"], ["convert", "x", "--output", "NEW", "--bpe", "WORD"],
]  # fmt: skip


@pytest.mark.parametrize(("argv", "word"), diagonal(ARGUMENTS, WORDS), ids=ascii)
def test_argument_that_is_not_a_string(folder, argv, word, capsys):
    names = {"MODEL": str(folder), "NEW": str(folder.parent / "new"), "WORD": word}
    command_error(capsys, *(names.get(argument, argument) for argument in argv))


@pytest.mark.parametrize(
    ("word", "option"), diagonal(["mit\n# x", "a\rb", "a\x1b[0m", "a\u202eb"], ["--license", "--head"]), ids=ascii
)
def test_plain_words_are_not_quoted(option, word, folder, capsys):
    message = command_error(capsys, "convert", folder, "--output", folder.parent / "new", option, word)
    assert f"{option[2:]} " in message and "use text without control characters" in message
