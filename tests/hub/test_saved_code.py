"""Saved and pushed folders contain the code of the model, and load in a process without the package."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModel, AutoModelForMaskedLM, BertConfig
from transformers.dynamic_module_utils import get_imports, get_relative_import_files

import luna_mega
from luna_mega._code import model_code
from luna_mega._register import CONFIGS, auto_classes, model_classes
from luna_mega.modeling_common.configuration import CODE_FOLDER
from tests.hub import client as on_client
from tests.hub.client import check_outputs, lists
from tests.marks import slow_but
from tests.modeling.samples import make_inputs

pytestmark = pytest.mark.usefixtures("with_code")
REMOTE = {"trust_remote_code": True}
SMALL = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
LUNA = SMALL | {"num_attention_heads": 2, "projection_length": 4, "max_position_embeddings": 32}
MEGA = SMALL | {"shared_representation_size": 8, "ema_projection_size": 2, "nffn_hidden_size": 16}
MEGALODON = SMALL | {"shared_representation_size": 8, "value_size": 16, "ema_projection_size": 2, "chunk_size": 8}
MEGALODON |= {"num_attention_heads": 2, "norm_num_groups": 4}
FIELDS = {"luna": LUNA, "luna_seq2seq": LUNA, "mega": MEGA, "mega_seq2seq": MEGA, "megalodon": MEGALODON}
IMAGES = {"vocab_size": None, "input_type": "patches", "image_size": 8, "patch_size": 4}
VALUES = {"vocab_size": None, "input_type": "values", "pooling": "mean"}
MEGA_LM = {"is_decoder": True, "bidirectional": False, "use_chunking": True, "chunk_size": 4}
MEGA_LM |= {"adaptive_input_cutoffs": [8], "adaptive_softmax_cutoffs": [8]}
OTHER_FIELDS = {
    ("luna", "AutoModel"): {"type_vocab_size": 2},
    ("luna", "AutoModelForCausalLM"): {"is_decoder": True},
    ("luna", "AutoModelForSequenceClassification"): {"tie_key_value": False, "pooling": "packed_attention"},
    ("luna", "AutoModelForAudioClassification"): VALUES,
    ("mega", "AutoModelForCausalLM"): MEGA_LM,
    ("mega", "AutoModelForSequenceClassification"): VALUES
    | {"normalization_type": "batchnorm", "use_chunking": True, "chunk_size": 3},
    ("mega", "AutoModelForImageClassification"): IMAGES,
}
CASES = [(model_type, name) for model_type, config in CONFIGS.items() for name in auto_classes(config)]
FAST = [("mega", "AutoModelForCausalLM")]


def make(model_type, auto_class="AutoModelForMaskedLM"):
    fields = FIELDS[model_type] | OTHER_FIELDS.get((model_type, auto_class), {})
    config = CONFIGS[model_type](**{name: value for name, value in fields.items() if value is not None})
    return auto_classes(CONFIGS[model_type])[auto_class](config).eval()


def code_blocks(card):
    return re.findall(r"^```python\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("model_type", "auto_class"), slow_but(FAST, CASES))
def test_saved_models_run_without_the_package(stranger, tmp_path, model_type, auto_class):
    model, generates = make(model_type, auto_class), auto_class == "AutoModelForCausalLM"
    inputs = make_inputs(model, [9, 3], side="left", gaps=not generates)
    model.save_pretrained(tmp_path)
    check_outputs(stranger(on_client.outputs, tmp_path, auto_class, lists(inputs), **REMOTE), model, inputs)
    if generates:
        options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "use_cache": True}
        written = model.generate(**inputs, **options).tolist()
        assert stranger(on_client.generate, tmp_path, lists(inputs), options, **REMOTE) == written


def test_pushed_models_load_without_the_package(hub, client, stranger, tmp_path):
    model_type, auto_class = "mega_seq2seq", "AutoModelForSeq2SeqLM"
    model = make(model_type, auto_class)
    inputs = make_inputs(model, [9, 3], side="left", gaps=False)
    model.save_pretrained(tmp_path / "saved")
    client(on_client.push_in_both_ways, tmp_path / "saved", auto_class, tmp_path / "run", "tester/run", "tester/model")
    for name in ("tester/run", "tester/model"):
        check_outputs(stranger(on_client.outputs, name, auto_class, lists(inputs), **REMOTE), model, inputs)
        files = hub.repositories[name].files
        assert sum(len(content) for file, content in files.items() if file.startswith(CODE_FOLDER)) < 1_000_000
        card = files["README.md"].decode()
        assert "luna-mega" in ModelCard(card).data.tags
        assert "Weights: not stated; set `license` in the metadata of this card." in card
        with_package, without_package = code_blocks(card)
        assert client(on_client.run_code, with_package) == f"luna_mega.{type(model).__module__.split('.', 1)[1]}"
        assert stranger(on_client.run_code, without_package).startswith("transformers_modules.tester.")
        error = stranger.error(on_client.outputs, name, auto_class, lists(inputs))
        assert "pass the argument `trust_remote_code=True`" in error


def test_checkpoint_pushed_during_training(hub, client, stranger, tmp_path, tokenizer):
    """Trainer pushes only the configuration and the weights of a checkpoint, and the files of the output folder.

    Without `hub_always_push`, Trainer skips a checkpoint while the push of an earlier one is in progress.
    """
    model = make("luna", "AutoModelForSequenceClassification")
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    options = {"publishes": False, "hub_model_id": "tester/run", "hub_always_push": True}
    client(on_client.train, tmp_path / "saved", tmp_path / "run", **options)
    inputs = {"input_ids": torch.tensor([[0, 5, 6, 7, 2]])}
    place = "AutoModelForSequenceClassification", lists(inputs)
    checkpoint = luna_mega.LunaForSequenceClassification.from_pretrained(tmp_path / "run" / "checkpoint-4").eval()
    for source in ("tester/run", tmp_path / "run" / "checkpoint-4"):
        check_outputs(stranger(on_client.outputs, source, *place, **REMOTE), checkpoint, inputs)
    assert stranger(on_client.encode, "tester/run", ["abc"]) == [[0, 4, 5, 6, 2]]


@pytest.mark.parametrize("model_type", CONFIGS)
def test_models_without_an_auto_class(stranger, tmp_path, model_type):
    """The line on the card loads a model without an Auto class."""
    config = CONFIGS[model_type]
    classes = [cls for cls in model_classes(config).values() if cls not in auto_classes(config).values()]
    for model_class in classes:
        model_class(config(**FIELDS[model_type])).save_pretrained(tmp_path)
        code = "\n".join(luna_mega._cards.loading_without_package(model_class, str(tmp_path)))
        assert stranger(on_client.run_code, code).startswith("transformers_modules.")
    assert len(classes) == (model_type in ("luna", "mega"))


def test_saved_again_without_the_package(stranger, tmp_path):
    """The code is saved with a model that was loaded with it, and with a new one of the same class."""
    model = make("luna")
    inputs = make_inputs(model, [9, 3], side="left", gaps=True)
    model.save_pretrained(tmp_path / "first")
    stranger(on_client.save_again, tmp_path / "first", "AutoModelForMaskedLM", tmp_path / "second", tmp_path / "new")
    check_outputs(
        stranger(on_client.outputs, tmp_path / "second", "AutoModelForMaskedLM", lists(inputs), **REMOTE), model, inputs
    )
    files = [sorted((tmp_path / name / CODE_FOLDER).iterdir()) for name in ("first", "second", "new")]
    assert len({tuple((file.name, file.read_bytes()) for file in part) for part in files}) == 1
    assert not list(tmp_path.glob("*/*.py"))
    first, *others = (
        json.loads((tmp_path / name / "config.json").read_text(encoding="utf-8")) for name in ("first", "second", "new")
    )
    assert all(other["auto_map"] == first["auto_map"] for other in others)


def test_package_uses_its_own_classes(client, tmp_path):
    """With the package, a folder with code needs no argument, and its code does not run even with the argument."""
    model = make("mega")
    model.save_pretrained(tmp_path)
    for file in (tmp_path / CODE_FOLDER).iterdir():
        file.write_text("raise SystemExit", encoding="utf-8")
    inputs = lists(make_inputs(model, [9, 3], side="left", gaps=True))
    for options in ({}, REMOTE, {"trust_remote_code": False}):
        result = client(on_client.outputs, tmp_path, "AutoModelForMaskedLM", inputs, **options)
        assert result["module"] == "luna_mega.modeling_mega.modeling_mega"


def test_save_code_false(tmp_path):
    """One line disables the code; the configuration then does not name code that the folder does not contain."""
    model = make("luna")
    model.save_pretrained(tmp_path / "first")
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "first")
    luna_mega.save_code(False)
    try:
        loaded.save_pretrained(tmp_path / "second")
    finally:
        luna_mega.save_code(True)
    assert "auto_map" not in json.loads((tmp_path / "second" / "config.json").read_text(encoding="utf-8"))
    assert not (tmp_path / "second" / CODE_FOLDER).exists()
    loaded.save_pretrained(tmp_path / "second")
    assert (tmp_path / "second" / CODE_FOLDER / "auto_luna.py").is_file()


def test_files_of_an_earlier_version_are_removed(tmp_path):
    (tmp_path / CODE_FOLDER).mkdir()
    for name in ("gone.py", "own.py"):
        (tmp_path / CODE_FOLDER / name).write_text(
            "# Generated by luna-mega 0.0.1\n" * (name == "gone.py"), encoding="utf-8"
        )
    make("luna").save_pretrained(tmp_path)
    names = {file.name for file in (tmp_path / CODE_FOLDER).iterdir()}
    assert "gone.py" not in names and {"own.py", "modeling_luna.py"} <= names


def test_code_of_others(tmp_path):
    """Entries of `auto_map` for other code stay if the code is in the folder, and `auto_map` is not shared."""
    config = make("luna").config
    config.auto_map = {
        "AutoTokenizer": ["other.Tokenizer", None],
        "AutoModel": "gone.Model",
        "AutoProcessor": "a/b--c.D",
    }
    (tmp_path / "other.py").touch()
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["auto_map"]
    assert saved["AutoTokenizer"] == ["other.Tokenizer", None] and saved["AutoProcessor"] == "a/b--c.D"
    assert saved["AutoModel"] == f"{CODE_FOLDER}/auto_luna.LunaModel"
    assert config.auto_map["AutoModel"] == "gone.Model"  # as transformers, saving does not change the configuration
    assert not CONFIGS["luna"]().auto_map
    with pytest.raises(TypeError):
        CONFIGS["luna"]().auto_map["AutoModel"] = "would change all configurations"


class MyConfig(luna_mega.LunaConfig):
    model_type = "my-luna"


class MyModel(luna_mega.LunaForMaskedLM):
    config_class = luna_mega.LunaConfig


def test_classes_of_a_user(tmp_path, monkeypatch):
    """Transformers saves the code of a user's registered class; the package saves its own for its model types only."""
    MyConfig(**LUNA).save_pretrained(tmp_path / "config")
    assert "auto_map" not in json.loads((tmp_path / "config" / "config.json").read_text(encoding="utf-8"))
    monkeypatch.setattr(MyModel, "_auto_class", None)
    MyModel.register_for_auto_class("AutoModelForMaskedLM")
    assert MyModel._auto_class == "AutoModelForMaskedLM"
    MyModel(luna_mega.LunaConfig(**LUNA)).save_pretrained(tmp_path / "model")
    saved = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))["auto_map"]
    assert saved["AutoModelForMaskedLM"] == "test_saved_code.MyModel"
    assert saved["AutoModel"] == f"{CODE_FOLDER}/auto_luna.LunaModel"
    assert (tmp_path / "model" / "test_saved_code.py").is_file()


class MyHead(luna_mega.LunaPreTrainedModel):
    config_class = luna_mega.LunaConfig


@pytest.mark.parametrize(("model_class", "said"), [(MyModel, True), (MyHead, False)])
def test_cards_of_classes_of_a_user(tmp_path, model_class, said):
    """The card of a subclass of a model says how to load that model; a model of its own is not loaded like that."""
    (tmp_path / "README.md").write_text("# Mine\n", encoding="utf-8")
    luna_mega._cards.complete_card(model_class(luna_mega.LunaConfig(**LUNA)), tmp_path, "a/b")
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert text.startswith("# Mine\n") and ('AutoModelForMaskedLM.from_pretrained("a/b")' in text) == said


def test_registering_a_class_of_the_package_changes_nothing(tmp_path):
    """Transformers' method would save one of many files; the code is saved in any case."""
    luna_mega.LunaForMaskedLM.register_for_auto_class("AutoModelForMaskedLM")
    luna_mega.LunaConfig.register_for_auto_class()
    make("luna").save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.py"))


def test_configuration_pushed_with_its_code(hub, client, stranger, tmp_path):
    make("luna").save_pretrained(tmp_path / "saved")
    client(on_client.push_config, tmp_path / "saved", tmp_path / "config", "tester/config")
    assert stranger(on_client.model_type_of, "tester/config", **REMOTE) == "luna"


@pytest.mark.parametrize("model_type", CONFIGS)
def test_code_is_complete_and_small(model_type, tmp_path):
    """The file in `auto_map` imports all others, which require no other packages, and none of another family."""
    make_config = CONFIGS[model_type](**FIELDS[model_type])
    make_config.save_pretrained(tmp_path)
    files, (texts, auto_map) = set((tmp_path / CODE_FOLDER).iterdir()), model_code(model_type)
    assert {file.stem for file in files} == texts.keys()
    (entry,) = {name.partition(".")[0] for name in auto_map.values()}
    assert {Path(file) for file in get_relative_import_files(tmp_path / f"{entry}.py")} | {
        tmp_path / f"{entry}.py"
    } == files
    required = {name for file in files for name in get_imports(file)} - sys.stdlib_module_names
    assert required <= {"huggingface_hub", "packaging", "torch", "transformers"}
    unread = {"luna": "gated_attention|moving_average|mega", "mega": "luna|timestep_norm", "megalodon": "luna|adaptive"}
    others = re.compile(unread[model_type.removesuffix("_seq2seq")].replace("mega", "mega(?!lodon)"))
    assert not [file.name for file in files if others.search(file.name)]


def test_other_models_are_unchanged(tmp_path):
    """Models of transformers save no code."""
    config = BertConfig(num_hidden_layers=1, hidden_size=12, intermediate_size=4, vocab_size=9)
    AutoModel.from_config(config).save_pretrained(tmp_path)
    assert not (tmp_path / CODE_FOLDER).exists()
