"""`luna-mega bundle`: bundles load without luna_mega and have bitwise equal results."""

import errno
import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import BertConfig, BertModel, RobertaTokenizer

import luna_mega
import luna_mega_cli
from luna_mega import LunaTokenizer, MegaConfig
from luna_mega._register import CONFIGS
from luna_mega.hub import bundle as hub_bundle
from luna_mega.hub.samples import make_inputs
from tests.hub import client as on_client
from tests.marks import slow_but
from tests.modeling import luna_decoders, megalodon_decoders
from tests.modeling.decoders import padded, source, target
from tests.modeling.luna import VALUES, head_inputs, make

AUTO_CLASSES = {
    "AutoModel": "Model",
    "AutoModelForPreTraining": "ForMaskedLM",
    "AutoModelForMaskedLM": "ForMaskedLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForMultipleChoice": "ForMultipleChoice",
    "AutoModelForTokenClassification": "ForTokenClassification",
    "AutoModelForQuestionAnswering": "ForQuestionAnswering",
}
DECODERS = {"AutoModelForCausalLM": {}, "AutoModelForSeq2SeqLM": {"is_encoder_decoder": True}}
MASKED_LM = "AutoModelForMaskedLM"
REMOTE = {"trust_remote_code": True}


def bundle(*arguments):
    return luna_mega_cli.main(["bundle", *map(str, arguments)])


def expected(model, inputs):
    with torch.no_grad():
        return {name: value.tolist() for name, value in model(**inputs).items() if isinstance(value, torch.Tensor)}


def lists(inputs):
    return {name: value.tolist() for name, value in inputs.items()}


def on_remote_code(result):
    """Remove class and module from a client's result, and checks that the code came from the bundle."""
    assert result.pop("module").startswith("transformers_modules.")
    return result.pop("class"), result


@pytest.fixture
def saved(tmp_path, tokenizer):
    """A folder with a masked-LM model, tokenizer and card; the model and inputs."""
    model, inputs = make("ForMaskedLM"), head_inputs("ForMaskedLM", [7, 3])
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "README.md").write_text("# Small\n")
    return tmp_path / "saved", model, inputs


@pytest.mark.parametrize("auto_class", slow_but(["AutoModelForQuestionAnswering"], AUTO_CLASSES))
def test_every_auto_class(stranger, tmp_path, auto_class):
    head = AUTO_CLASSES[auto_class]
    model = make(head, type_vocab_size=2)
    inputs = make_inputs(model, [9, 3], side="left", gaps=True)
    model.save_pretrained(tmp_path / "saved")
    assert bundle(tmp_path / "saved", "--output", tmp_path / "bundle") == 0
    name, result = on_remote_code(stranger(on_client.outputs, tmp_path / "bundle", auto_class, lists(inputs), **REMOTE))
    assert name == type(model).__name__
    assert result == expected(model, inputs)


@pytest.mark.parametrize(
    "fields",
    [
        {"tie_key_value": False, "pooling": "packed_attention"},
        {"pooling": "mean", **VALUES},
        pytest.param({"pack_method": "importance", "type_vocab_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["packed_attention", "values", "importance"],
)
def test_other_configurations(stranger, tmp_path, fields):
    model = make("ForSequenceClassification", **fields)
    inputs = make_inputs(model, [7, 3])
    model.save_pretrained(tmp_path)
    assert bundle(tmp_path) == 0
    result = stranger(on_client.outputs, tmp_path, "AutoModelForSequenceClassification", lists(inputs), **REMOTE)
    assert on_remote_code(result)[1] == expected(model, inputs)


@pytest.mark.parametrize("auto_class", slow_but(["AutoModelForSeq2SeqLM"], DECODERS))
def test_luna_decoders(stranger, tmp_path, auto_class):
    model = luna_decoders.make(torch.float32, **DECODERS[auto_class])
    ids, mask = padded([7, 3], 7, "right")
    inputs = source(model, 2) | target(model, ids, mask)
    model.save_pretrained(tmp_path)
    assert bundle(tmp_path) == 0
    name, result = on_remote_code(stranger(on_client.outputs, tmp_path, auto_class, lists(inputs), **REMOTE))
    assert name == type(model).__name__ and result == expected(model, inputs)


@pytest.mark.parametrize(
    ("auto_class", "fields"),
    [
        ("AutoModelForMaskedLM", {}),
        pytest.param(
            "AutoModelForSequenceClassification",
            {"input_type": "values", "normalization_type": "batchnorm", "use_chunking": True, "chunk_size": 3},
            marks=pytest.mark.slow,
        ),
        ("AutoModelForImageClassification", {"input_type": "patches", "image_size": 16, "patch_size": 4}),
    ],
)
def test_mega(stranger, tmp_path, auto_class, fields):
    config = MegaConfig(vocab_size=20, hidden_size=16, num_hidden_layers=2, ema_projection_size=4, **fields)
    model = getattr(luna_mega, auto_class.replace("AutoModel", "Mega"))(config).eval()
    inputs = {
        "tokens": {"input_ids": torch.randint(4, 20, (2, 7))},
        "values": {"input_values": torch.rand(2, 7)},
        "patches": {"pixel_values": torch.rand(2, 3, 16, 16)},
    }[config.input_type]
    model.save_pretrained(tmp_path)
    assert bundle(tmp_path) == 0
    name, result = on_remote_code(stranger(on_client.outputs, tmp_path, auto_class, lists(inputs), **REMOTE))
    assert name == type(model).__name__ and result == expected(model, inputs)


@pytest.mark.parametrize("adaptive", [pytest.param(False, marks=pytest.mark.slow), True])
def test_mega_language_model(stranger, tmp_path, adaptive):
    fields = {"adaptive_input_cutoffs": [8], "adaptive_softmax_cutoffs": [8]} if adaptive else {}
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "ema_projection_size": 4}
    decoder = {"is_decoder": True, "bidirectional": False, "use_chunking": True, "chunk_size": 4, "use_cache": False}
    model = luna_mega.MegaForCausalLM(MegaConfig(**sizes, **decoder, **fields)).eval()
    inputs = {"input_ids": torch.randint(4, 20, (2, 7))}
    model.save_pretrained(tmp_path)
    assert bundle(tmp_path) == 0
    files = {file.name for file in tmp_path.glob("*.py")}
    assert {"adaptive.py", "cache_mega.py", "presets_mega.py", "layout.py"} <= files
    auto_class = "AutoModelForCausalLM"
    name, result = on_remote_code(stranger(on_client.outputs, tmp_path, auto_class, lists(inputs), **REMOTE))
    assert name == "MegaForCausalLM" and result == expected(model, inputs)
    written = model.generate(**inputs, max_new_tokens=9, do_sample=False, use_cache=True).tolist()
    options = {"max_new_tokens": 9, "do_sample": False, "use_cache": True}
    assert stranger(on_client.generate, tmp_path, lists(inputs), options, **REMOTE) == written


@pytest.mark.parametrize(
    "auto_class",
    slow_but(["AutoModel"], ["AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification"]),
)
def test_megalodon(stranger, tmp_path, auto_class):
    head = auto_class.removeprefix("AutoModel") or "Model"
    model = megalodon_decoders.make(head, dtype=torch.float32, use_cache=False)
    ids, mask = padded([7, 3], 7, "left")
    inputs = {"input_ids": ids, "attention_mask": mask}
    model.save_pretrained(tmp_path)
    assert bundle(tmp_path) == 0
    name, result = on_remote_code(stranger(on_client.outputs, tmp_path, auto_class, lists(inputs), **REMOTE))
    assert name == type(model).__name__ and result == expected(model, inputs)
    if auto_class == "AutoModelForCausalLM":
        options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "use_cache": True}
        written = model.generate(**inputs, **options).tolist()
        assert stranger(on_client.generate, tmp_path, lists(inputs), options, **REMOTE) == written


def test_tokenizer_with_custom_code(stranger, saved, tmp_path):
    folder, *_ = saved
    vocabulary = {symbol: index for index, symbol in enumerate(["<s>", "<pad>", "</s>", "<unk>", "a", "<mask>", "b"])}
    backend = RobertaTokenizer(vocab=vocabulary, merges=[]).backend_tokenizer
    special = {"cls_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>", "unk_token": "<unk>"}
    LunaTokenizer(tokenizer_object=backend, dictionary_size=6, **special).save_pretrained(folder)
    assert bundle(folder, "--output", tmp_path / "bundle") == 0
    assert stranger(on_client.encode, tmp_path / "bundle", ["ab"], **REMOTE) == [[0, 4, 3, 2]]


@pytest.mark.slow
def test_imported_package_takes_precedence_over_a_bundle(client, saved):
    folder, model, inputs = saved
    assert bundle(folder) == 0
    result = client(on_client.outputs, folder, MASKED_LM, lists(inputs), **REMOTE)
    assert result.pop("module") == "luna_mega.modeling_luna.heads_luna"
    assert result.pop("class") == "LunaForMaskedLM" and result == expected(model, inputs)


def test_through_the_hub(hub, stranger, saved):
    """Model, tokenizer and code in one push; without trust_remote_code an error says what to do."""
    folder, model, inputs = saved
    assert bundle(folder) == 0
    stranger(on_client.push_folder, folder, "tester/bundle")
    result = stranger(on_client.outputs, "tester/bundle", MASKED_LM, lists(inputs), **REMOTE)
    assert on_remote_code(result)[1] == expected(model, inputs)
    assert stranger(on_client.encode, "tester/bundle", ["abc"], **REMOTE) == [[0, 4, 5, 6, 2]]
    error = stranger.error(on_client.outputs, "tester/bundle", MASKED_LM, lists(inputs), trust_remote_code=False)
    assert "trust_remote_code=True" in error


@pytest.mark.slow
def test_several_bundles_and_the_package_in_one_process(client, tmp_path, saved):
    """Each runs separate operators, forward, backward and compiled, also next to a version with other results."""
    folder, _, inputs = saved
    assert bundle(folder) == 0
    assert bundle(folder, "--output", tmp_path / "other") == 0
    code = tmp_path / "other" / "kernels_luna_attention_torch_backend.py"
    changed = code.read_text().replace("return output.transpose(1, 2)", "return 2 * output.transpose(1, 2)")
    assert changed != code.read_text()
    code.write_text(changed)
    modules, equal = zip(
        *client(on_client.gradients_with_other_bundles, [folder, tmp_path / "other"], lists(inputs)), strict=True
    )
    assert len(set(modules)) == 3 and modules[2].startswith("luna_mega.")
    assert equal == (True, False, True, True)


@pytest.mark.slow
def test_bundle_saved_again_is_a_bundle(stranger, tmp_path):
    """The imports of the saved model's class, which transformers copies, must be the code of all heads."""
    model, inputs = make("ForSequenceClassification"), head_inputs("ForSequenceClassification", [7, 3])
    model.save_pretrained(tmp_path / "first")
    assert bundle(tmp_path / "first") == 0
    stranger(on_client.save_again, tmp_path / "first", "AutoModelForSequenceClassification", tmp_path / "second")
    for auto_class in ("AutoModelForSequenceClassification", MASKED_LM, "AutoModel"):
        result = stranger(on_client.outputs, tmp_path / "second", auto_class, lists(inputs), **REMOTE)
        name, values = on_remote_code(result)
        if name == type(model).__name__:
            assert values == expected(model, inputs)
    assert bundle(tmp_path / "second") == 0


def test_output_contains_only_model_files(saved, tmp_path):
    folder, *_ = saved
    for name in ("training_args.bin", "optimizer.pt", ".hidden"):
        (folder / name).write_text("")
    (folder / "checkpoint-1").mkdir()
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    assert bundle(folder, "--output", tmp_path / "out") == 0
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} == before
    kept = {name for name in before if not name.endswith((".bin", ".pt")) and not name.startswith(".")}
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {name for name in names if not name.endswith(".py")} == kept
    auto_map = json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"]
    assert auto_map.keys() == {"AutoConfig", *AUTO_CLASSES, "AutoModelForCausalLM"}
    old, new = (json.loads((place / "config.json").read_text()) for place in (folder, tmp_path / "out"))
    assert new.pop("auto_map") and new == old


def test_bundling_again_replaces_the_code(saved):
    folder, *_ = saved
    assert bundle(folder) == 0
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    (folder / "heads_luna.py").write_text("# Generated by luna-mega 0.0.1\n")
    (folder / "gone_luna.py").write_text("# Generated by luna-mega 0.0.1\n")
    assert bundle(folder) == 0
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def break_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "not a JSON object"),
        (lambda folder: break_config(folder, model_type="bert"), "model_type 'bert' is not supported; expected 'luna'"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors"),
        (
            lambda folder: (folder / "modeling_luna.py").write_text("mine"),
            "modeling_luna.py was not written by an earlier bundle",
        ),
    ],
)
def test_invalid_folder(saved, capsys, harm, message):
    folder, *_ = saved
    harm(folder)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert bundle(folder) == 1
    error = capsys.readouterr().err
    assert error.startswith("luna-mega bundle: error: ") and error.count("\n") == 1 and message in error
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_disk_full(saved, tmp_path, monkeypatch, capsys):
    """The configuration is written last: until then the folder loads as before."""
    folder, *_ = saved
    config = (folder / "config.json").read_bytes()
    replace = hub_bundle.os.replace

    def until_full(source, target):
        if target.name == "modeling_luna.py":
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(hub_bundle.os, "replace", until_full)
    assert bundle(folder) == bundle(folder, "--output", tmp_path / "out") == 1
    assert capsys.readouterr().err.count("No space left on device") == 2
    assert (folder / "config.json").read_bytes() == config
    assert not [file for file in folder.iterdir() if file.is_dir()] and not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert bundle(folder) == 0


def test_invalid_output(saved, tmp_path, capsys):
    folder, *_ = saved
    assert bundle(folder, "--output", folder) == 1
    assert "the output folder is not empty" in capsys.readouterr().err
    assert bundle(tmp_path / "nowhere") == 1
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import luna_mega.kernels.api", "use `from luna_mega.x.y import name`"),
        ("from luna_mega.kernels.api import *", "use `from luna_mega.x.y import name`"),
        ("from . import reference", "use `from luna_mega.x.y import name`"),
        ("x = 1; from luna_mega.kernels.api import luna_pack", "use `from luna_mega.x.y import name`"),
        ("operator = torch.ops.luna_mega", "`luna_mega` cannot be used like this"),
        ("name = 'luna_mega::attend'", "`luna_mega` cannot be used like this"),
        ("import scipy", "requires scipy"),
        ('"""\nfrom .elsewhere import x\n"""', "interprets a line of text as an import of"),
    ],
)
def test_unsupported_source(monkeypatch, tmp_path, line, message):
    """An unsupported statement in a source file raises an error."""
    read = hub_bundle._source

    def changed(module):
        return read(module) + (f"\n{line}\n" if module.endswith("torch_backend") else "")

    monkeypatch.setattr(hub_bundle, "_source", changed)
    with pytest.raises(RuntimeError, match=message):
        hub_bundle.write_code("luna", tmp_path)


def test_optional_package_in_a_try_is_allowed(monkeypatch, tmp_path):
    read = hub_bundle._source
    added = "\ntry:\n    import scipy\nexcept ImportError:\n    scipy = None\n"
    monkeypatch.setattr(hub_bundle, "_source", lambda module: read(module) + added)
    assert hub_bundle.write_code("luna", tmp_path)[0]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["luna", "mega", "megalodon"])
def test_bundle_contains_the_kernels(model_type, tmp_path, repo_root):
    """Bundles contain the kernels even if they are created on a machine without Triton."""
    code = f"""
import sys
sys.modules["triton"] = None
from pathlib import Path
from luna_mega.hub.bundle import write_code
write_code({model_type!r}, Path({str(tmp_path / "without")!r}))
"""
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
    hub_bundle.write_code(model_type, tmp_path / "with")
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(repo_root)})
    files = {file.name: file.read_text() for file in (tmp_path / "with").iterdir()}
    assert files == {file.name: file.read_text() for file in (tmp_path / "without").iterdir()}
    op = {"luna": "luna_attention", "mega": "moving_average", "megalodon": "moving_average"}[model_type]
    assert "try:\n    import triton\nexcept ImportError:\n    raise\n" in files["kernels_common_triton_launch.py"]
    assert f"kernels_{op}_triton_ops.py" in files


@pytest.fixture
def registered():
    """Return a function that registers a model; afterwards no class is registered."""
    yield hub_bundle.register_for_auto_class
    for config in CONFIGS.values():
        config.code_writer = None


@pytest.mark.parametrize("head", slow_but(["ForMaskedLM"], ["ForMaskedLM", "ForSequenceClassification"]))
def test_a_registered_model_is_saved_as_a_bundle(stranger, registered, tmp_path, head):
    model, inputs = make(head), head_inputs(head, [7, 3])
    registered(model)
    for name in ("first", "second"):  # a second time over the first, as checkpoints of a run that is repeated
        model.save_pretrained(tmp_path / name)
        model.save_pretrained(tmp_path / name)
    assert not model.config.auto_map
    result = stranger(on_client.outputs, tmp_path / "second", f"AutoModel{head}", lists(inputs), **REMOTE)
    assert on_remote_code(result)[1] == expected(model, inputs)


def test_bundle_saved_again_by_the_package_names_only_existing_code(stranger, tmp_path):
    """The package loads a bundle with its own classes, whose code no `save_pretrained` writes."""
    model, inputs = make("ForMaskedLM"), head_inputs("ForMaskedLM", [7, 3])
    model.save_pretrained(tmp_path / "first")
    assert bundle(tmp_path / "first") == 0
    loaded = type(model).from_pretrained(tmp_path / "first")
    loaded.save_pretrained(tmp_path / "second")
    assert "auto_map" not in json.loads((tmp_path / "second" / "config.json").read_text())
    loaded.save_pretrained(tmp_path / "first")
    result = stranger(on_client.outputs, tmp_path / "first", MASKED_LM, lists(inputs), **REMOTE)
    assert on_remote_code(result)[1] == expected(model, inputs)


def test_only_models_with_an_auto_class_are_registered(registered):
    with pytest.raises(ValueError, match="no Auto class loads a LunaForSequencePairClassification"):
        registered(make("ForSequencePairClassification"))
    with pytest.raises(ValueError, match="no Auto class loads a BertModel"):
        registered(BertModel(BertConfig(num_hidden_layers=1, hidden_size=12)))


def test_a_configuration_is_not_uploaded_without_its_code(registered, tmp_path):
    model = make("ForMaskedLM")
    registered(model)
    with pytest.raises(ValueError, match=r"use `config.push_to_hub\(...\)`"):
        model.config.save_pretrained(tmp_path, push_to_hub=True)
