"""A damaged folder, or an invalid argument, is one sentence: nothing is executed, and nothing is written."""

import json
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, PreTrainedTokenizerFast
from transformers.utils import SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

import luna_mega
import luna_mega_cli
from luna_mega.errors import ConversionError
from luna_mega.hub.bundle import copy_model
from luna_mega.hub.find import find_dataset, find_model
from luna_mega.hub.folder import load_tokenizer
from luna_mega.saved_code import model_code
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


def text(name, content):
    return lambda folder: (folder / name).write_text(content, encoding="utf-8")


def index(places):
    return lambda folder: damage(folder, "index", places)


def weights_are(name, other=None):
    """Rename the weights, and create another file."""

    def change(folder):
        (folder / SAFE_WEIGHTS_NAME).rename(folder / name)
        if other:
            (folder / other).touch()

    return change


def without_bias(folder):
    weights = load_file(folder / SAFE_WEIGHTS_NAME)
    del weights["lm_head.decoder.bias"]
    save_file(weights, folder / SAFE_WEIGHTS_NAME, {"format": "pt"})
    write_record(folder.with_name("record"), load_file(folder.with_name("record")), folder)


# A damage, and words of the sentence of every command; then of those that load the model.
ROWS = [
    (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    (text("config.json", "{"), "not JSON"),
    (text("config.json", "\ufeff[]"), "not a JSON object"),
    (lambda folder: edit(folder, model_type="bert"), "model_type 'bert' is not supported; expected 'luna'"),
    (lambda folder: edit(folder, auto_map="x"), "is not an object; remove it"),
    (lambda folder: edit(folder, hidden_size="x"), "hidden_size"),
    (weights_are("model.pt"), "no model.safetensors; use a folder of save_pretrained"),
    (index({"x": "a.safetensors"}), "no a.safetensors; use a folder of save_pretrained"),
    (index({"x": "../outside.safetensors"}), "weight_map must name files of this folder"),
    *((weights_are("x", name), f"weights only in {name}; convert them") for name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)),
]
OF_MODELS = [
    (lambda folder: edit(folder, architectures=["X"]), "architectures 'X' is not one of LunaFor"),
    (lambda folder: edit(folder, vocab_size=41), "ignore_mismatched_sizes"),
    (text("generation_config.json", "[]"), "not a JSON object"),
    (without_bias, "the weights lack lm_head.decoder.bias"),
]
CASES = [(*ROWS[row], command) for row, command in diagonal(range(len(ROWS)), COMMANDS)]


@pytest.mark.parametrize(("change", "words", "command"), CASES + [(*row, "verify") for row in OF_MODELS])
def test_the_damage_is_named(change, words, command, folder, original, capsys):
    shutil.copy(original.with_name("record"), folder.parent)
    change(folder)
    before = contents(folder.parent)
    message = command_error(capsys, *words_of(command, folder))
    assert words in message and str(folder) in message and contents(folder.parent) == before


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
    """Links may point into the folder, or to the blobs of the same repository in the Hub's cache, and nowhere else."""
    repository, output = tmp_path / "models--user--name", tmp_path / "out"
    snapshot = repository / "snapshots" / "123"
    fill(snapshot, KEPT + LEFT)
    fill(repository, ["blobs/abc"])
    fill(tmp_path / "models--user--other", ["blobs/xyz"])
    links = {"vocab.json": "../../blobs/abc", "target/vocab.json": "../../../blobs/abc", "merges.txt": "dict.txt"}
    for name, link in links.items():
        (snapshot / name).symlink_to(link)
    output.mkdir()
    copy_model(snapshot, output)
    assert contents(output).keys() == {*KEPT, *links} and contents(output)["target/vocab.json"] == b"blobs/abc"
    assert not any(file.is_symlink() for file in output.rglob("*"))
    (snapshot / "NOTICE").symlink_to("../../../models--user--other/blobs/xyz")
    with pytest.raises(ConversionError, match="NOTICE: the symbolic link points outside of the folder; copy the file"):
        copy_model(snapshot, output)


def test_the_package_does_not_run_code_of_a_folder(folder):
    edit(folder, auto_map={MASKED_LM: "evil.X", "AutoConfig": "evil.C"})
    for options in ({}, {"trust_remote_code": True}):
        model = AutoModelForMaskedLM.from_pretrained(folder, **options)
        assert type(model).__module__ == "luna_mega.modeling_luna.modeling_luna"
    assert not list(folder.rglob("executed"))


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


# Names of models and datasets on the Hub


@pytest.fixture
def online(hub, monkeypatch, tmp_path):
    """Return the Hub, and let its cache contain `tester/model`."""
    hub.repositories["tester/model"] = {}
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    repository, commit = tmp_path / "cache" / "models--tester--model", hub.revision("tester/model")
    fill(repository, [f"snapshots/{commit}/config.json"])
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit, encoding="utf-8")
    return hub


@pytest.mark.parametrize(
    ("name", "words"),
    [(name, "no such folder; pass a folder or a name on the Hub") for name in ("no/", "./no", "a/b/c", "a  b")]
    + [("file", "is a file; pass a folder"), ("tester/modl", "no such folder, and no such model on the Hub")],
)
def test_names_of_no_model(name, words, online, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(ConversionError, match=f"^{re.escape(name)}: {words}"):
        find_model(name)
    assert len(online.requests) == ("modl" in name)


@pytest.mark.parametrize("fault", [None, 500, 429, "stopped", "offline"])
def test_one_request_for_a_name_even_if_the_hub_cannot_be_reached(fault, online, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", fault == "offline")
    if fault == "stopped":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    elif isinstance(fault, int):
        online.failing, online.status = ".*", fault
    assert find_model(str(tmp_path)) == str(tmp_path) and not find_dataset(str(tmp_path), tmp_path / "a___data")
    found = find_model("tester/model")
    assert found.endswith(online.revision("tester/model")) if fault else found == "tester/model"
    missing = r"the Hub cannot be reached \([^\[]+\);" if fault else "no such (model|dataset) on the Hub"
    for find in (lambda: find_model("tester/x"), lambda: find_dataset("a/data", tmp_path / "a___data")):
        with pytest.raises(ConversionError, match=f": no such folder, and {missing}"):
            find()
    (tmp_path / "a___data").mkdir()
    if fault:
        assert find_dataset("a/data", tmp_path / "a___data")
    assert len(online.requests) == {None: 3, "stopped": 0, "offline": 0}.get(fault, 4)
