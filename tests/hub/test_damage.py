"""A damaged folder, or an invalid argument, is one sentence: nothing is executed, and nothing is written."""

import json
import os
import pickle
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, PreTrainedTokenizerFast
from transformers.utils import SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

import luna_mega
import luna_mega_cli
from luna_mega._code import model_code
from luna_mega.errors import ConversionError
from luna_mega.hub.files import copy_model
from luna_mega.hub.folder import load_tokenizer, read_folder, read_json
from tests.convert.folders import edit
from tests.errors import command_error
from tests.hub.contract import DAMAGES, EVIL, MASKED_LM, contents, damage, make
from tests.inspection.records import write_record
from tests.marks import diagonal

COMMANDS = {
    "bundle": ["bundle", "MODEL"],
    "bundle to a folder": ["bundle", "MODEL", "--output", "NEW"],
    "verify": ["verify", "MODEL", "RECORD"],
}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Return a folder with a model without code, code of others, and a record of its outputs next to it."""
    folder = tmp_path_factory.mktemp("original") / "model"
    model, ids = make("luna"), torch.tensor([[0, 5, 6, 2], [0, 7, 2, 1]])
    luna_mega.save_code(False)
    try:
        model.save_pretrained(folder)
    finally:
        luna_mega.save_code(True)
    files = dict.fromkeys(("evil.py", "x.py"), EVIL) | dict.fromkeys(("tokenizer.json", "generation_config.json"), "{}")
    for name, content in (files | {"README.md": "# Small\n"}).items():
        (folder / name).write_text(content, encoding="utf-8")
    record = {"input_ids": ids, "logits": model(ids).logits.detach()}
    write_record(folder.with_name("record"), record, folder)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "model")


def words_of(command: str, folder: Path) -> list[str]:
    names = {"MODEL": folder, "NEW": folder.with_name("new"), "RECORD": folder.with_name("record")}
    return [str(names.get(word, word)) for word in COMMANDS[command]]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", DAMAGES)
def test_any_damage(kind, command, original, capsys):
    """A command succeeds, or fails with one sentence and changes no file; it does not run code of the folder."""

    @given(DAMAGES[kind])
    def check(value):
        with tempfile.TemporaryDirectory() as temporary:
            folder = shutil.copytree(original, Path(temporary, "model"))
            shutil.copytree(original, Path(temporary, "elsewhere"))
            shutil.copy(original.with_name("record"), temporary)
            damage(folder, kind, value)
            before = contents(Path(temporary))
            status = luna_mega_cli.main(words_of(command, folder))
            printed, after = capsys.readouterr().err, contents(Path(temporary))
            assert not list(Path(temporary).rglob("executed")) and not list(Path(temporary).rglob("*.partial"))
            changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
            if status:
                assert status == 1 and not changed
                assert not printed or printed.startswith(f"luna-mega {command.split()[0]}: error: ")
                assert printed.count("\n") <= 1 and printed.rstrip("\n").isprintable() and len(printed) < 1000
            else:
                assert kind != "index" and (kind, command) != ("link", "bundle to a folder")
                assert all(name.startswith("model/" if command == "bundle" else "new/") for name in changed)
                assert (command == "verify") == (not changed)
            if changed:
                check_auto_map(folder if command == "bundle" else Path(temporary, "new"))

    check()


def check_auto_map(folder):
    """Check that `auto_map` names the code of the package, and otherwise only files of the folder."""
    found = json.loads((folder / "config.json").read_text(encoding="utf-8"))["auto_map"]
    assert model_code("luna")[1].items() <= found.items()
    parts = [part for code in found.values() for part in (code if isinstance(code, list) else [code]) if part]
    assert all("--" in part or (folder / f"{part.partition('.')[0]}.py").is_file() for part in parts)
    return found


def test_code_of_others_stays_in_a_bundle(folder):
    others = {"AutoTokenizer": ["evil.X", None], "AutoProcessor": "a/b--c.D"}
    edit(folder, auto_map=others | {"AutoModel": "evil.X", "x": "gone.X", "AutoImageProcessor": "auto_luna.X"})
    assert luna_mega_cli.main(["bundle", str(folder)]) == 0
    assert check_auto_map(folder) == others | model_code("luna")[1]


@pytest.mark.parametrize("names", [5, True, 0.5, "LunaForMaskedLM"])
def test_a_bundle_of_any_architectures(names, folder):
    edit(folder, architectures=names)
    assert luna_mega_cli.main(["bundle", str(folder)]) == 0
    assert "AutoModel.from_pretrained(" in (folder / "README.md").read_text(encoding="utf-8")


def text(name, content):
    return lambda folder: (folder / name).write_text(content, encoding="utf-8")


def index(places):
    return lambda folder: damage(folder, "index", places)


def renamed(name, touched=None):
    """Rename the weights, and create another file."""

    def change(folder):
        (folder / SAFE_WEIGHTS_NAME).rename(folder / name)
        if touched:
            (folder / touched).touch()

    return change


PLACES = [
    {"x": "../outside.safetensors"}, {"x": "/etc/passwd"}, {"x": "a/../../b.safetensors"}, {"x": ".."}, {"x": "."},
    {"x": ""}, {"x": 5}, {"x": ["a"]}, {"x": "a\0b"}, [], {}, None, 5, {"x": "..\\outside.safetensors"},
]  # fmt: skip
# A damage, and words of the sentence of every command.
ROWS = [
    (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    *((text("config.json", content), "not JSON") for content in ("{", "", "\\")),
    (text("config.json", "[]"), "not a JSON object"),
    (lambda folder: edit(folder, model_type="bert"), "model_type 'bert' is not supported; expected 'luna'"),
    (lambda folder: edit(folder, model_type=[]), "model_type [] is not supported"),
    *(
        (lambda folder, value=value: edit(folder, auto_map=value), "is not an object; remove it")
        for value in ("x", [1])
    ),
    (lambda folder: edit(folder, hidden_size="x"), "hidden_size"),
    (renamed("model.pt"), "no model.safetensors; use a folder of save_pretrained"),
    (index({"x": "a.safetensors"}), "no a.safetensors; use a folder of save_pretrained"),
    *((index(places), "weight_map must name files of this folder") for places in PLACES),
    *((renamed("x", name), f"weights only in {name}; convert them") for name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)),
]


@pytest.mark.parametrize(("row", "command"), diagonal(range(len(ROWS)), COMMANDS))
def test_the_damage_is_named(row, command, folder, capsys):
    change, words = ROWS[row]
    change(folder)
    folder.with_name("record").touch()
    before = contents(folder.parent)
    message = command_error(capsys, *words_of(command, folder))
    assert words in message and str(folder) in message and contents(folder.parent) == before


def without_bias(folder):
    weights = load_file(folder / SAFE_WEIGHTS_NAME)
    del weights["lm_head.decoder.bias"]
    save_file(weights, folder / SAFE_WEIGHTS_NAME, {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: edit(folder, architectures=["X"]), "architectures 'X' is not one of LunaFor"),
        (lambda folder: edit(folder, architectures=5), "architectures"),
        (lambda folder: edit(folder, vocab_size=41), "ignore_mismatched_sizes"),
        (text("generation_config.json", "[]"), "not a JSON object"),
        (without_bias, "the weights lack lm_head.decoder.bias"),
    ],
)
def test_weights_and_class_that_do_not_fit(change, words, folder):
    change(folder)
    with pytest.raises(ConversionError) as error:
        read_folder(folder).load()
    assert words in str(error.value) and str(folder) in str(error.value) and "\n" not in str(error.value)


def test_json_with_a_byte_order_mark(tmp_path):
    (tmp_path / "list").write_text("\ufeff[1]", encoding="utf-8")
    assert read_json(tmp_path / "list", list) == [1]
    with pytest.raises(ConversionError, match="not a JSON object"):
        read_json(tmp_path / "list")


KEPT = [
    "config.json", "model.safetensors", "tokenizer.json", "README.md", "LICENSE", "modules.json", "dict.txt",
    "dict.label.txt", "target/tokenizer.json", "1_Pooling/config.json", "2_Dense/model.safetensors",
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


def test_only_files_of_the_list_are_copied(tmp_path):
    fill(tmp_path / "model", KEPT + LEFT)
    (tmp_path / "out").mkdir()
    copy_model(tmp_path / "model", tmp_path / "out")
    assert contents(tmp_path / "out").keys() == set(KEPT)


def test_links_within_the_folder_and_the_cache_of_the_hub(tmp_path):
    """Links may point into the folder or the Hub cache, which links snapshots/REVISION to blobs, and nowhere else."""
    repository = tmp_path / "models--user--name"
    fill(repository, ["blobs/abc", "blobs/def", "snapshots/123/real.json", "snapshots/123/model.safetensors"])
    snapshot = repository / "snapshots" / "123"
    (snapshot / "target").mkdir()
    links = {"config.json": "../../blobs/abc", "target/vocab.json": "../../../blobs/def", "vocab.json": "real.json"}
    for name, link in links.items():
        (snapshot / name).symlink_to(link)
    (tmp_path / "out").mkdir()
    copy_model(snapshot, tmp_path / "out")
    assert contents(tmp_path / "out").keys() == links.keys() | {"model.safetensors"}
    assert (tmp_path / "out" / "config.json").read_text(encoding="utf-8") == "blobs/abc"
    assert not (tmp_path / "out" / "config.json").is_symlink()
    fill(tmp_path / "models--user--other", ["blobs/xyz"])
    (snapshot / "README.md").symlink_to("../../../models--user--other/blobs/xyz")
    with pytest.raises(ConversionError, match="README.md: the symbolic link points outside of the folder; copy the fi"):
        copy_model(snapshot, tmp_path / "out")


class Executed:
    """An object whose pickle creates a folder when it is loaded."""

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
        content = {"metadata": {}, "weight_map": dict.fromkeys(weights, name)}
        (folder / WEIGHTS_INDEX_NAME).write_text(json.dumps(content), encoding="utf-8")
    (folder / SAFE_WEIGHTS_NAME).unlink()
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


@pytest.mark.parametrize("options", [{}, {"trust_remote_code": True}, {"trust_remote_code": False}])
def test_the_package_does_not_run_code_of_a_folder(folder, options):
    edit(folder, auto_map={MASKED_LM: "evil.X", "AutoConfig": "evil.C"})
    model = AutoModelForMaskedLM.from_pretrained(folder, **options)
    assert type(model).__module__ == "luna_mega.modeling_luna.modeling_luna" and not list(folder.rglob("executed"))


@pytest.mark.parametrize("damaged", ["[]", "{", '{"model": 5}', "\udcff", "code", "empty"])
def test_damaged_tokenizer_raises(folder, damaged):
    """A tokenizer with code is not run."""
    content = {"tokenizer_class": PreTrainedTokenizerFast.__name__}
    if damaged == "code":
        content = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    elif damaged != "empty":
        (folder / "tokenizer.json").write_bytes(damaged.encode(errors="surrogateescape"))
    (folder / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConversionError, match="no tokenizer that transformers|its vocabulary is empty"):
        load_tokenizer(folder)
    assert not list(folder.rglob("executed"))


def test_names_of_folders_on_the_screen(folder, capsys):
    odd = folder.rename(folder.parent / "a\x1b[31mb\u202ec")
    assert luna_mega_cli.main(["bundle", str(odd)]) == 0
    printed = capsys.readouterr().out
    assert r"a\x1b[31mb\u202ec" in printed and "\x1b" not in printed and "\u202e" not in printed
    assert r"a\x1b[31mb" in command_error(capsys, "bundle", f"{odd}/nothing")


ARGUMENTS = [
    ["convert", "WORD", "--dry-run"], ["verify", "MODEL", "WORD"], ["verify", "WORD", "MODEL"], ["bundle", "WORD"],
    ["convert", "MODEL", "--output", "NEW", "--head", "WORD"], ["bundle", "MODEL", "--output", "WORD"],
    ["convert", "MODEL", "--output", "WORD"], ["convert", "MODEL", "--output", "NEW", "--bpe", "WORD"],
    ["convert", "MODEL", "--output", "NEW", "--license", "WORD"],
    ["convert", "MODEL", "--output", "NEW", "--dict", "WORD"],
]  # fmt: skip
CONTROLS = st.sampled_from(["\n", "\r", "\x1b[0m", "\u202e", "\0", "\udcff", "\ud800"])


@pytest.mark.parametrize("argv", ARGUMENTS, ids=" ".join)
@given(word=st.builds("{}{}{}".format, st.text("ab/. ", max_size=3), CONTROLS, st.text("ab", max_size=2)))
def test_any_argument(argv, word, original, capsys):
    """Invalid text is one sentence, and so is text with control characters if it is not a path."""
    with tempfile.TemporaryDirectory() as temporary:
        names = {"MODEL": str(original), "NEW": f"{temporary}/new", "WORD": word}
        if argv[-2] == "--output":
            names["WORD"] = f"{original}/config.json/{word}"
        message = command_error(capsys, *(names.get(argument, argument) for argument in argv))
        assert not list(Path(temporary).iterdir())
    if argv[-2] in ("--head", "--license"):
        assert f"{argv[-2][2:]} " in message and "use text without control characters and invalid bytes" in message


@pytest.mark.parametrize("name", ["loop", "loop/x", "file/x", "caf\udce9"])
@pytest.mark.parametrize("command", ["convert", "bundle"])
def test_output_that_cannot_be_a_folder(folder, name, command, capsys, monkeypatch):
    monkeypatch.chdir(folder.parent)
    os.symlink("loop", "loop")
    Path("file").touch()
    before = sorted(Path().iterdir())
    command_error(capsys, command, folder if command == "bundle" else "file", "--output", name)
    assert sorted(Path().iterdir()) == before
