"""`luna-mega bundle`: bundles load without luna_mega and give bitwise equal results."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel, RobertaTokenizer
from transformers.dynamic_module_utils import get_imports, get_relative_import_files

import luna_mega
import luna_mega_cli
from luna_mega import LunaTokenizer, MegaConfig
from luna_mega._register import CONFIGS
from luna_mega.hub import bundle as hub_bundle
from luna_mega.hub.samples import make_inputs
from tests.convert.exports import edit
from tests.errors import command_error
from tests.hub import client as on_client
from tests.marks import slow_but
from tests.modeling import luna_decoders, megalodon_decoders
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
MASKED_LM = "AutoModelForMaskedLM"
REMOTE = {"trust_remote_code": True}
MEGA = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "ema_projection_size": 4}
MEGA_LM = {"is_decoder": True, "bidirectional": False, "use_chunking": True, "chunk_size": 4, "use_cache": False}
MEGA_LM |= {"adaptive_input_cutoffs": [8], "adaptive_softmax_cutoffs": [8]}
IMAGES = {"input_type": "patches", "image_size": 16, "patch_size": 4}
VALUES_IN_CHUNKS = {"input_type": "values", "normalization_type": "batchnorm", "use_chunking": True, "chunk_size": 3}
OTHER_FIELDS = {
    "ForSequenceClassification": {"tie_key_value": False, "pooling": "packed_attention"},
    "ForTokenClassification": {"pack_method": "importance", "type_vocab_size": 2},
}


def luna(auto_class):
    head = AUTO_CLASSES[auto_class]
    return make(head, **OTHER_FIELDS.get(head, {"type_vocab_size": 2}))


def mega(head, **fields):
    return getattr(luna_mega, f"Mega{head}")(MegaConfig(**MEGA | fields))


# Auto class, function that creates the model, and whether it generates.
CASES = {
    **{f"luna {name}": (name, lambda name=name: luna(name), False) for name in AUTO_CLASSES},
    "luna values": (
        "AutoModelForSequenceClassification",
        lambda: make("ForSequenceClassification", pooling="mean", **VALUES),
        False,
    ),
    "luna lm": ("AutoModelForCausalLM", lambda: luna_decoders.make(torch.float32), False),
    "luna seq2seq": (
        "AutoModelForSeq2SeqLM",
        lambda: luna_decoders.make(torch.float32, is_encoder_decoder=True),
        False,
    ),
    "mega mlm": (MASKED_LM, lambda: mega("ForMaskedLM"), False),
    "mega values": (
        "AutoModelForSequenceClassification",
        lambda: mega("ForSequenceClassification", **VALUES_IN_CHUNKS),
        False,
    ),
    "mega images": ("AutoModelForImageClassification", lambda: mega("ForImageClassification", **IMAGES), False),
    "mega lm": ("AutoModelForCausalLM", lambda: mega("ForCausalLM", **MEGA_LM), True),
    "megalodon": ("AutoModel", lambda: megalodon_decoders.make("Model", torch.float32, use_cache=False), False),
    "megalodon lm": (
        "AutoModelForCausalLM",
        lambda: megalodon_decoders.make("ForCausalLM", torch.float32, use_cache=False),
        True,
    ),
}
FAST = ["luna AutoModelForQuestionAnswering", "luna seq2seq", "mega images", "mega lm", "megalodon"]


def bundle(*arguments):
    return luna_mega_cli.main(["bundle", *map(str, arguments)])


def expected(model, inputs):
    with torch.no_grad():
        return {name: value.tolist() for name, value in model(**inputs).items() if isinstance(value, torch.Tensor)}


def lists(inputs):
    return {name: value.tolist() for name, value in inputs.items()}


def on_remote_code(result):
    """Check that the code of a client's result is from the bundle; return the class and the remaining result."""
    assert result.pop("module").startswith("transformers_modules.")
    return result.pop("class"), result


@pytest.fixture
def saved(tmp_path, tokenizer):
    """Save a masked-LM model with tokenizer and card; return the folder, the model and inputs."""
    model, inputs = make("ForMaskedLM"), head_inputs("ForMaskedLM", [7, 3])
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "README.md").write_text("# Small\n")
    return tmp_path / "saved", model, inputs


@pytest.mark.parametrize("case", slow_but(FAST, CASES))
def test_results_are_equal_without_the_package(stranger, tmp_path, case):
    auto_class, build, generates = CASES[case]
    model = build().eval()
    inputs = make_inputs(model, [9, 3], side="left", gaps=not generates)
    model.save_pretrained(tmp_path)
    assert bundle(tmp_path) == 0
    name, result = on_remote_code(stranger(on_client.outputs, tmp_path, auto_class, lists(inputs), **REMOTE))
    assert name == type(model).__name__ and result == expected(model, inputs)
    if generates:
        options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "use_cache": True}
        written = model.generate(**inputs, **options).tolist()
        assert stranger(on_client.generate, tmp_path, lists(inputs), options, **REMOTE) == written


@pytest.mark.slow
def test_imported_package_takes_precedence_over_a_bundle(client, saved):
    folder, model, inputs = saved
    assert bundle(folder) == 0
    result = client(on_client.outputs, folder, MASKED_LM, lists(inputs), **REMOTE)
    assert result.pop("module") == "luna_mega.modeling_luna.modeling_luna"
    assert result.pop("class") == "LunaForMaskedLM" and result == expected(model, inputs)


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def test_through_the_hub(hub, stranger, saved):
    """Model, tokenizer and code are pushed together; loading without trust_remote_code raises a helpful error."""
    folder, model, inputs = saved
    assert bundle(folder) == 0
    before = contents(folder)
    for name in ("modeling_luna.py", "gone_luna.py"):
        (folder / name).write_text("# Generated by luna-mega 0.0.1\n")
    assert bundle(folder) == 0 and contents(folder) == before  # code of an earlier bundle is replaced
    stranger(on_client.push_folder, folder, "tester/bundle")
    result = stranger(on_client.outputs, "tester/bundle", MASKED_LM, lists(inputs), **REMOTE)
    assert on_remote_code(result)[1] == expected(model, inputs)
    assert stranger(on_client.encode, "tester/bundle", ["abc"], **REMOTE) == [[0, 4, 5, 6, 2]]
    error = stranger.error(on_client.outputs, "tester/bundle", MASKED_LM, lists(inputs), trust_remote_code=False)
    assert "trust_remote_code=True" in error


@pytest.mark.slow
def test_several_bundles_and_the_package_in_one_process(client, tmp_path, saved):
    """Bundles of different versions and the package run their own operators in the same process."""
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
    """Saving a bundle again gives a complete bundle, although transformers copies only imported files."""
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


def test_output_contains_only_model_files(stranger, saved, tmp_path):
    """The output contains only model files; the code of a custom tokenizer is one of them."""
    folder, *_ = saved
    vocabulary = {symbol: index for index, symbol in enumerate(["<s>", "<pad>", "</s>", "<unk>", "a", "<mask>", "b"])}
    backend = RobertaTokenizer(vocab=vocabulary, merges=[]).backend_tokenizer
    special = {"cls_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>", "unk_token": "<unk>"}
    LunaTokenizer(tokenizer_object=backend, dictionary_size=6, **special).save_pretrained(folder)
    for name in ("training_args.bin", "optimizer.pt", ".hidden"):
        (folder / name).write_text("")
    (folder / "checkpoint-1").mkdir()
    before = contents(folder)
    assert bundle(folder, "--output", tmp_path / "out") == 0 and contents(folder) == before
    kept = {name for name in before if not name.endswith((".bin", ".pt", ".py")) and not name.startswith(".")}
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {name for name in names if not name.endswith(".py")} == kept
    auto_map = json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"]
    assert auto_map.keys() == {"AutoConfig", *AUTO_CLASSES, "AutoModelForCausalLM"}
    old, new = (json.loads((place / "config.json").read_text()) for place in (folder, tmp_path / "out"))
    assert new.pop("auto_map") and new == old
    assert stranger(on_client.encode, tmp_path / "out", ["ab"], **REMOTE) == [[0, 4, 3, 2]]


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "not a JSON object"),
        (lambda folder: edit(folder, model_type="bert"), "model_type 'bert' is not supported; expected 'luna'"),
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
    before = contents(folder)
    assert message in command_error(capsys, "bundle", folder)
    assert contents(folder) == before


def test_disk_full(saved, tmp_path, monkeypatch, capsys):
    """The configuration is written last, so that a failed bundle leaves a folder that loads as before."""
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


def test_invalid_output(saved, tmp_path, capsys):
    folder, *_ = saved
    assert "the output folder is not empty" in command_error(capsys, "bundle", folder, "--output", folder)
    assert "no such folder" in command_error(capsys, "bundle", tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import luna_mega.kernels.api", "use `from luna_mega.x.y import name`"),
        ("from luna_mega.kernels.api import *", "use `from luna_mega.x.y import name`"),
        ("from . import reference", "use `from luna_mega.x.y import name`"),
        ("x = 1; from luna_mega.kernels.api import luna_pack", "use `from luna_mega.x.y import name`"),
        ("operator = torch.ops.luna_mega", "`luna_mega` cannot be used like this"),
        ("name = 'luna_mega::attend'", "`luna_mega` cannot be used like this"),
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


@pytest.mark.parametrize("model_type", CONFIGS)
def test_transformers_finds_all_files(model_type, tmp_path):
    """The file in `auto_map` imports all others, and they require no other packages."""
    files, auto_map = hub_bundle.write_code(model_type, tmp_path)
    (entry,) = {name.partition(".")[0] for name in auto_map.values()}
    assert {Path(file) for file in get_relative_import_files(tmp_path / f"{entry}.py")} == set(files)
    required = {name for file in files for name in get_imports(file)} - sys.stdlib_module_names
    assert required <= {"huggingface_hub", "packaging", "torch", "transformers"}


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
    """Return a function that registers a model; undo the registration after the test."""
    yield hub_bundle.register_for_auto_class
    for config in CONFIGS.values():
        config.code_writer = None


def test_saved_as_a_bundle_and_again_by_the_package(stranger, registered, tmp_path):
    """The package loads a bundle with its own classes, and saves code only if the model is registered."""
    model, inputs = make("ForMaskedLM"), head_inputs("ForMaskedLM", [7, 3])
    registered(model)
    model.save_pretrained(tmp_path / "first")
    model.save_pretrained(tmp_path / "first")  # overwrites the first save, as in a run that is repeated
    assert not model.config.auto_map
    type(model.config).code_writer = None
    loaded = type(model).from_pretrained(tmp_path / "first")
    loaded.save_pretrained(tmp_path / "second")
    assert "auto_map" not in json.loads((tmp_path / "second" / "config.json").read_text())
    result = stranger(on_client.outputs, tmp_path / "first", MASKED_LM, lists(inputs), **REMOTE)
    assert on_remote_code(result)[1] == expected(model, inputs)
    loaded.save_pretrained(tmp_path / "first")  # keeps the code in the folder
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
