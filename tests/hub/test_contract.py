"""Folders of every way to save a model, of every class and of earlier releases keep the contract."""

import errno
import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForMaskedLM, BertConfig, RobertaTokenizer

import luna_mega
from luna_mega import LunaTokenizer, cards, compat, saved_code
from luna_mega._register import CONFIGS, auto_classes, model_classes
from luna_mega.modeling_common.configuration import CODE_FOLDER
from tests.errors import command_error
from tests.hub import client as on_client
from tests.hub.client import Client, lists
from tests.hub.contract import (
    CLASSES,
    FIELDS,
    MASKED_LM,
    REMOTE,
    SEQUENCES,
    WAYS,
    Place,
    bundle,
    check_card,
    check_code,
    check_loads,
    contents,
    make,
)
from tests.marks import slow_but
from tests.modeling.samples import make_inputs

pytestmark = pytest.mark.usefixtures("with_code")


@pytest.fixture
def saved(tmp_path, tokenizer):
    """Return a folder with a masked LM, its tokenizer and a card."""
    make("luna").save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "README.md").write_text("# Small\n", encoding="utf-8")
    return tmp_path / "saved"


@pytest.mark.parametrize("way", WAYS)
def test_every_way(way, hub, client, stranger, tmp_path, tokenizer):
    """A folder or a repository loads with and without the package, as its card describes; its code is complete."""
    model_type, auto_class, make_folder, words = WAYS[way]
    model, saved = make(model_type, auto_class), tmp_path / "saved"
    model.save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    (saved / "README.md").write_text("---\nlicense: mit\n---\n\n# Small\n\n## Use\n\nAs others.\n", encoding="utf-8")
    source = folder = make_folder(Place(saved, auto_class, client, stranger))
    if source in hub.repositories:
        folder = tmp_path / "files"
        for name, content in hub.repositories[source].items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    if auto_class == SEQUENCES:  # the model was trained
        model = type(model).from_pretrained(folder).eval()
    check_loads(client, stranger, source, auto_class, model)
    check_code(folder, model_type)
    assert stranger(on_client.encode, source, ["abc"], **REMOTE) == [[0, 4, 5, 6, 2]]
    if words:
        card = (folder / "README.md").read_text(encoding="utf-8")
        assert words in card
        check_card(client, stranger, card, Path(source).name if folder == source else source, source)
        assert ("tokenizer = AutoTokenizer.from_pretrained(" if folder == source else "\n- luna-mega\n") in card
    if words == "Weights: mit.":  # the card that the folder had
        assert card.index("# Small") < card.index("## Load this model")
        assert card.endswith("\n## Use\n\nAs others.\n") and card.startswith("---\nlicense: mit\n")


@pytest.mark.parametrize(("model_type", "auto_class"), slow_but([("luna", "AutoModelForCausalLM")], CLASSES))
def test_every_class(model_type, auto_class, client, stranger, tmp_path):
    (model := make(model_type, auto_class)).save_pretrained(tmp_path)
    check_loads(client, stranger, tmp_path, auto_class, model)
    check_code(tmp_path, model_type)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_classes_without_an_auto_class(model_type, stranger, tmp_path):
    """The line on the card loads a model without an Auto class; code is complete for every type."""
    config = CONFIGS[model_type]
    classes = [cls for cls in model_classes(config).values() if cls not in auto_classes(config).values()]
    for model_class in classes:
        model_class(config(**FIELDS[model_type])).save_pretrained(tmp_path)
        code = "\n".join(cards.loading_without_package(model_class, str(tmp_path)))
        assert stranger(on_client.run_code, code).startswith("transformers_modules.")
    assert len(classes) == (model_type in ("luna", "mega"))
    config(**FIELDS[model_type]).save_pretrained(tmp_path)
    check_code(tmp_path, model_type)


def test_failed_push_of_a_training_script(hub, client, saved, tmp_path):
    """Without access to the Hub, a script does not train; after a failed push, a command uploads the folder."""
    arguments = saved, output = saved, tmp_path / "run"
    make("luna", SEQUENCES).save_pretrained(saved)
    hub.failing = "/api/whoami-v2"
    assert client.error(on_client.train, *arguments, "tester/run").startswith("SystemExit: error: --push_to_hub: ")
    assert not output.exists() and not hub.repositories
    hub.failing = ".*/commit/main"
    error = client.error(on_client.train, *arguments, "tester/run")
    assert error.startswith("SystemExit: error: the push failed") and "\n" not in error and "500 Internal" in error
    assert f"`hf upload tester/run {output} . " in error and not hub.repositories["tester/run"]
    hub.failing = ""
    client(on_client.upload, output, "tester/run")
    inputs = {"input_ids": [[0, 5, 2]]}
    found, expected = (
        client(on_client.outputs, place, SEQUENCES, inputs)["logits"] for place in ("tester/run", output)
    )
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))


# Folders that earlier releases wrote. Each has a tiny model with random weights, and `outputs.json` with its class,
# inputs and logits. If the name ends in `_bundle`, it is also the result of `luna-mega bundle`. Folders of the commit
# 20c2b5c3 are named after the removed field that they use.
ARCHIVE = Path(__file__).with_name("earlier_releases.tar.xz")
with tarfile.open(ARCHIVE) as archive:
    RELEASES = sorted({tuple(name.split("/")[:2]) for name in archive.getnames() if name.count("/") > 1})
REMOVED = [name for release, name in RELEASES if release == "20c2b5c3"]
LOADED = [(release, name) for release, name in RELEASES if release != "20c2b5c3"]
AUTO_CLASSES = {"ForCausalLM": "AutoModelForCausalLM", "ForMaskedLM": MASKED_LM}
AUTO_CLASSES["ForConditionalGeneration"] = "AutoModelForSeq2SeqLM"


@pytest.fixture(scope="module")
def releases(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("releases")
    with tarfile.open(ARCHIVE) as archive:
        for member in filter(tarfile.TarInfo.isreg, archive):  # Debian's `extractall` has no `filter`
            (file := folder / member.name).parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(archive.extractfile(member).read())
    return folder


@pytest.mark.parametrize(("release", "name"), LOADED)
def test_folder_of_an_earlier_release(releases, release, name, stranger, tmp_path):
    """The package loads an old folder. Its saved code may require earlier versions; renewed code does not."""
    folder = shutil.copytree(releases / release / name, tmp_path / f"{release[:3]}_{name}".replace(".", ""))
    content = json.loads((folder / "outputs.json").read_text(encoding="utf-8"))
    call = folder, AUTO_CLASSES["For" + content["class"].partition("For")[2]], content["inputs"]
    found = [on_client.outputs(*call)]
    assert found[0]["module"].startswith("luna_mega.")
    if name.endswith("_bundle"):
        assert bundle(folder) == 0
        found.append(stranger(on_client.outputs, *call, **REMOTE))
        check_code(folder, "luna")
    for output in found:
        logits = torch.tensor(content["logits"])
        torch.testing.assert_close(torch.tensor(output["logits"]), logits, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", REMOVED)
def test_folder_that_needs_a_removed_field_raises(releases, name, capsys):
    folder, field = releases / "20c2b5c3" / name, name.removeprefix("luna_")
    value = json.loads((folder / "config.json").read_text(encoding="utf-8"))[field]
    for load in (transformers.AutoConfig, AutoModelForMaskedLM, luna_mega.LunaModel):
        with pytest.raises(ValueError, match=re.escape(f"{field}={value!r} is not supported")):
            load.from_pretrained(folder)
    assert "the last commit of luna-mega that supports it is 20c2b5c3" in command_error(capsys, "bundle", folder)


def test_bundle_contains_the_code_of_a_tokenizer(saved, stranger, tmp_path, capsys):
    """The code of `LunaTokenizer` is a file of the model, and a folder without a card receives one."""
    vocabulary = {symbol: index for index, symbol in enumerate(["<s>", "<pad>", "</s>", "<unk>", "a", "<mask>", "b"])}
    backend = RobertaTokenizer(vocab=vocabulary, merges=[]).backend_tokenizer
    special = {"cls_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>", "unk_token": "<unk>"}
    LunaTokenizer(tokenizer_object=backend, dictionary_size=6, **special).save_pretrained(saved)
    (saved / "README.md").unlink()
    before, output = contents(saved), tmp_path / "out"
    assert bundle(saved, "--output", output) == 0 and contents(saved) == before
    code = f"model = {MASKED_LM}.from_pretrained({json.dumps(str(output))}, trust_remote_code=True)"
    assert code in capsys.readouterr().out
    card = (output / "README.md").read_text(encoding="utf-8")
    assert "# out\n" in card and "Weights: not stated" in card
    assert contents(output).keys() == before.keys() | {"README.md"}
    old, new = (json.loads((place / "config.json").read_text(encoding="utf-8")) for place in (saved, output))
    assert new == old
    assert stranger(on_client.encode, output, ["ab"], **REMOTE) == [[0, 4, 3, 2]]
    assert "trust_remote_code=True" in stranger.error(on_client.encode, output, ["ab"], trust_remote_code=False)


@pytest.mark.slow
def test_several_bundles_and_the_package_in_one_process(client, saved, tmp_path):
    """Bundles of different versions and the package run their own operators in the same process."""
    other = shutil.copytree(saved, tmp_path / "other")
    code = other / CODE_FOLDER / "kernels_luna_attention_torch_backend.py"
    old = code.read_text(encoding="utf-8")
    new = old.replace("return output.transpose(1, 2)", "return 2 * output.transpose(1, 2)")
    assert new != old
    code.write_text(new, encoding="utf-8")
    inputs, name = lists(make_inputs(make("luna"), [7, 3])), f"{CODE_FOLDER}/auto_luna.LunaForMaskedLM"
    calls = [(saved, name, True), (other, name, False), (saved, MASKED_LM, False), (saved, name, True)]
    found = [client(on_client.outputs, folder, kind, inputs, compiled) for folder, kind, compiled in calls]
    assert len({output["module"] for output in found}) == 3 and found[2]["module"].startswith("luna_mega.")
    first, changed, package, again = (torch.tensor(output["logits"]) for output in found)
    torch.testing.assert_close(package, first)
    torch.testing.assert_close(again, first)
    assert (changed - first).abs().max() > 0.01


def test_disk_full(saved, tmp_path, monkeypatch, capsys):
    """The configuration is written after the code, so that a failed bundle leaves a folder that loads as before."""
    config, write = (saved / "config.json").read_bytes(), Path.write_text

    def until_full(file, *args, **options):
        if file.name == "modeling_luna.py":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, *args, **options)

    monkeypatch.setattr(Path, "write_text", until_full)
    assert bundle(saved) == bundle(saved, "--output", tmp_path / "out") == 1
    assert capsys.readouterr().err.count("No space left on device") == 2
    assert (saved / "config.json").read_bytes() == config and not (tmp_path / "out").exists()


def test_save_code_false(saved, tmp_path):
    """One line disables the code; the configuration then does not name code that the folder does not contain."""
    loaded, second = AutoModelForMaskedLM.from_pretrained(saved), tmp_path / "second"
    luna_mega.save_code(False)
    try:
        loaded.save_pretrained(second)
    finally:
        luna_mega.save_code(True)
    assert "auto_map" not in json.loads((second / "config.json").read_text(encoding="utf-8"))
    assert not (second / CODE_FOLDER).exists()
    (second / CODE_FOLDER).mkdir()
    for name, text in (("gone.py", f"{saved_code.GENERATED}0.0.1\n"), ("own.py", "")):
        (second / CODE_FOLDER / name).write_text(text, encoding="utf-8")
    loaded.save_pretrained(second)
    names = {file.name for file in (second / CODE_FOLDER).iterdir()}
    assert "gone.py" not in names and {"own.py", "modeling_luna.py"} <= names


def test_code_of_others(tmp_path):
    """Entries of `auto_map` for other code stay if the code is in the folder, and `auto_map` is not shared."""
    config = make("luna").config
    config.auto_map = {"AutoTokenizer": ["other.T", None], "AutoModel": "gone.Model", "AutoProcessor": "a/b--c.D"}
    (tmp_path / "other.py").touch()
    config.save_pretrained(tmp_path)
    found = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["auto_map"]
    assert found["AutoTokenizer"] == ["other.T", None] and found["AutoProcessor"] == "a/b--c.D"
    assert found["AutoModel"] == f"{CODE_FOLDER}/auto_luna.LunaModel"
    assert config.auto_map["AutoModel"] == "gone.Model"  # as transformers, saving does not change the configuration
    assert not CONFIGS["luna"]().auto_map
    with pytest.raises(TypeError):
        CONFIGS["luna"]().auto_map["AutoModel"] = "would change all configurations"


class MyConfig(luna_mega.LunaConfig):
    model_type = "my-luna"


class MyModel(luna_mega.LunaForMaskedLM):
    config_class = luna_mega.LunaConfig


class MyHead(luna_mega.LunaPreTrainedModel):
    config_class = luna_mega.LunaConfig


def test_classes_of_others(tmp_path, monkeypatch):
    """Transformers saves the code of a user's registered class; the package saves its own for its classes only."""
    MyConfig(**FIELDS["luna"]).save_pretrained(tmp_path / "config")
    bert = BertConfig(num_hidden_layers=1, hidden_size=12, intermediate_size=4, vocab_size=9)
    AutoModel.from_config(bert).save_pretrained(tmp_path / "bert")
    for name in ("config", "bert"):
        assert "auto_map" not in json.loads((tmp_path / name / "config.json").read_text(encoding="utf-8"))
        assert not (tmp_path / name / CODE_FOLDER).exists()
    luna_mega.LunaForMaskedLM.register_for_auto_class(MASKED_LM)
    make("luna").save_pretrained(tmp_path / "luna")
    assert not list((tmp_path / "luna").glob("*.py"))
    monkeypatch.setattr(MyModel, "_auto_class", None)
    MyModel.register_for_auto_class(MASKED_LM)
    MyModel(luna_mega.LunaConfig(**FIELDS["luna"])).save_pretrained(tmp_path / "model")
    found = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))["auto_map"]
    assert found[MASKED_LM] == "test_contract.MyModel"
    assert found["AutoModel"] == f"{CODE_FOLDER}/auto_luna.LunaModel"
    assert (tmp_path / "model" / "test_contract.py").is_file()
    for model_class in (MyModel, MyHead):  # the card of another model does not describe how to load it
        (tmp_path / "README.md").write_text("# Mine\n", encoding="utf-8")
        cards.complete_card(model_class(luna_mega.LunaConfig(**FIELDS["luna"])), tmp_path, "a/b")
        text = (tmp_path / "README.md").read_text(encoding="utf-8")
        assert text.startswith("# Mine\n")
        assert ('AutoModelForMaskedLM.from_pretrained("a/b")' in text) is (model_class is MyModel)


# Other versions


@pytest.mark.parametrize(
    ("versions", "error"),
    [
        ({"transformers": "5.21.1"}, "transformers 5.22 or later, but 5.21.1 is installed"),
        ({"torch": "2.6.0"}, "torch 2.7 or later, but 2.6.0 is installed"),  # with which a run failed
        ({"transformers": "5.22.0.dev0", "torch": "2.8.0+cpu"}, None),
        ({"transformers": "99.0", "torch": "99.0"}, None),
    ],
)
def test_entry_file_checks_the_versions_first(stranger, saved, versions, error):
    """No other file of the code is imported before the check: transformers then has none of the undocumented names."""
    removed = ["OutputRecorder", "capture_outputs", "selected_hidden_states"] if error else []
    folder = saved.rename(saved.parent / saved.parent.name)  # the process has no module of this name
    call = on_client.load_with_versions, folder, MASKED_LM, versions, removed
    if error is None:
        assert stranger(*call) == "LunaForMaskedLM"
        return
    found = stranger.error(*call)
    assert error in found and found.startswith("ImportError: ") and "\n" not in found


@pytest.mark.parametrize(("version", "count"), [(luna_mega.__version__, 0), ("0.5.0", 2), ("77.1.0", 1)])
def test_code_of_another_version_is_logged(saved, tmp_path, caplog, version, count):
    """Once for a folder with old code, which `luna-mega bundle` renews with its card, and once for all newer code."""
    folders = [shutil.copytree(saved, tmp_path / name) for name in ("first", "second")]
    old, new = (f"{saved_code.GENERATED}{name}" for name in (luna_mega.__version__, version))
    for file in (file for folder in folders for file in (folder / CODE_FOLDER).iterdir()):
        file.write_text(file.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")

    def load():
        caplog.clear()
        for folder in folders:
            AutoModelForMaskedLM.from_pretrained(folder)
            luna_mega.LunaForMaskedLM.from_pretrained(folder.parent, subfolder=folder.name)
        return [record.getMessage() for record in caplog.records if record.name == saved_code.__name__]

    messages = load()
    assert len(messages) == count and all(f"code of luna-mega {version}" in message for message in messages)
    advice = "run `luna-mega bundle {}`" if count == 2 else "install that version"
    assert all(advice.format(folder) in message for folder, message in zip(folders, messages, strict=False))
    card = f"# Old\n\nWithout luna-mega, transformers runs the code in `{CODE_FOLDER}`:\n"
    (folders[0] / "README.md").write_text(card, encoding="utf-8")
    assert bundle(folders[0]) == bundle(folders[1]) == 0 and load() == []
    assert cards.WITHOUT_PACKAGE in (folders[0] / "README.md").read_text(encoding="utf-8")


OF_VERSIONS = [(model_type, "AutoModelForCausalLM") for model_type in ("luna", "mega", "megalodon")]
OF_VERSIONS += [("luna", SEQUENCES), ("mega", MASKED_LM)]
OF_VERSIONS += [(model_type, "AutoModelForSeq2SeqLM") for model_type in ("luna_seq2seq", "mega_seq2seq")]


@pytest.mark.slow
def test_oldest_transformers_that_the_card_promises(server, stranger, tmp_path):
    """Outputs, losses and generated tokens equal those of the installed version."""
    site, version = tmp_path / "site", compat.REQUIRED["transformers"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site]
    if subprocess.run([*pip, f"transformers=={version}.*"], capture_output=True).returncode:
        pytest.skip("pip reaches no package index")
    old = Client(server, tmp_path / "home", package=False, before=site)
    found = old.error(on_client.run_code, "import transformers; raise ValueError(transformers.__version__)")
    assert found.startswith(f"ValueError: {version}.")
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "num_beams": 2}
    for model_type, auto_class in OF_VERSIONS:
        (model := make(model_type, auto_class)).save_pretrained(folder := tmp_path / model_type / auto_class)
        inputs = lists(make_inputs(model, [6, 6]))
        labels = [0, 1] if auto_class == SEQUENCES else inputs.get("decoder_input_ids", inputs["input_ids"])
        calls = [(on_client.outputs, folder, auto_class, inputs | {"labels": labels})]
        calls += [(on_client.generate, folder, auto_class, inputs, settings)] * model.can_generate()
        for call in calls:
            assert old(*call, **REMOTE) == stranger(*call, **REMOTE)
    old.pool.shutdown()
