"""`luna-mega bundle`: bundles load without luna_mega and give equal results up to rounding."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import RobertaTokenizer

import luna_mega
import luna_mega_cli
from luna_mega import LunaTokenizer, MegaConfig, _code
from luna_mega.hub.samples import make_inputs
from tests.convert.folders import edit
from tests.errors import command_error
from tests.hub import client as on_client
from tests.hub.loopback import metadata_errors
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
FAST = ["luna AutoModelForQuestionAnswering", "mega lm", "megalodon"]


def bundle(*arguments):
    return luna_mega_cli.main(["bundle", *map(str, arguments)])


def save_without_code(model, folder):
    luna_mega.save_code(False)
    try:
        model.save_pretrained(folder)
    finally:
        luna_mega.save_code(True)


def assert_results(result, model, inputs):
    """Compare the lists of a client with the tensors of the model up to rounding: addresses of weights may differ."""
    with torch.no_grad():
        expected = {name: value for name, value in model(**inputs).items() if isinstance(value, torch.Tensor)}
    found = {name: torch.tensor(value) for name, value in result.items()}
    torch.testing.assert_close(found, expected, check_dtype=False)


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
    save_without_code(model, tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "README.md").write_text("# Small\n", encoding="utf-8")
    return tmp_path / "saved", model, inputs


@pytest.mark.parametrize("case", slow_but(FAST, CASES))
def test_results_are_equal_without_the_package(stranger, tmp_path, case):
    auto_class, build, generates = CASES[case]
    model = build().eval()
    inputs = make_inputs(model, [9, 3], side="left", gaps=not generates)
    save_without_code(model, tmp_path)
    assert bundle(tmp_path) == 0
    name, result = on_remote_code(stranger(on_client.outputs, tmp_path, auto_class, lists(inputs), **REMOTE))
    assert name == type(model).__name__
    assert_results(result, model, inputs)
    if generates:
        options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "use_cache": True}
        written = model.generate(**inputs, **options).tolist()
        assert stranger(on_client.generate, tmp_path, lists(inputs), options, **REMOTE) == written


def contents(folder):
    files = filter(Path.is_file, folder.rglob("*"))
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def test_through_the_hub(hub, stranger, saved):
    """Model, tokenizer and code are pushed together; loading without trust_remote_code raises a helpful error."""
    folder, model, inputs = saved
    assert bundle(folder) == 0
    before = contents(folder)
    for name in ("modeling_luna.py", "luna_mega_code/modeling_luna.py", "luna_mega_code/gone_luna.py"):
        (folder / name).write_text("# Generated by luna-mega 0.0.1\n", encoding="utf-8")
    assert bundle(folder) == 0 and contents(folder) == before  # code of an earlier bundle is replaced
    stranger(on_client.push_folder, folder, "tester/bundle")
    result = stranger(on_client.outputs, "tester/bundle", MASKED_LM, lists(inputs), **REMOTE)
    assert_results(on_remote_code(result)[1], model, inputs)
    assert stranger(on_client.encode, "tester/bundle", ["abc"], **REMOTE) == [[0, 4, 5, 6, 2]]
    error = stranger.error(on_client.outputs, "tester/bundle", MASKED_LM, lists(inputs), trust_remote_code=False)
    assert "trust_remote_code=True" in error


@pytest.mark.slow
def test_several_bundles_and_the_package_in_one_process(client, tmp_path, saved):
    """Bundles of different versions and the package run their own operators in the same process."""
    folder, _, inputs = saved
    assert bundle(folder) == 0
    assert bundle(folder, "--output", tmp_path / "other") == 0
    code = tmp_path / "other" / "luna_mega_code" / "kernels_luna_attention_torch_backend.py"
    changed = code.read_text(encoding="utf-8").replace(
        "return output.transpose(1, 2)", "return 2 * output.transpose(1, 2)"
    )
    assert changed != code.read_text(encoding="utf-8")
    code.write_text(changed, encoding="utf-8")
    modules, equal = zip(
        *client(on_client.gradients_with_other_bundles, [folder, tmp_path / "other"], lists(inputs)), strict=True
    )
    assert len(set(modules)) == 3 and modules[2].startswith("luna_mega.")
    assert equal == (True, False, True, True)


def test_output_contains_only_model_files(stranger, saved, tmp_path):
    """The output contains only model files; the code of a custom tokenizer is one of them."""
    folder, *_ = saved
    vocabulary = {symbol: index for index, symbol in enumerate(["<s>", "<pad>", "</s>", "<unk>", "a", "<mask>", "b"])}
    backend = RobertaTokenizer(vocab=vocabulary, merges=[]).backend_tokenizer
    special = {"cls_token": "<s>", "pad_token": "<pad>", "sep_token": "</s>", "unk_token": "<unk>"}
    LunaTokenizer(tokenizer_object=backend, dictionary_size=6, **special).save_pretrained(folder)
    for name in ("training_args.bin", "optimizer.pt", ".hidden"):
        (folder / name).write_text("", encoding="utf-8")
    (folder / "checkpoint-1").mkdir()
    before = contents(folder)
    assert bundle(folder, "--output", tmp_path / "out") == 0 and contents(folder) == before
    kept = {name for name in before if not name.endswith((".bin", ".pt")) and not name.startswith(".")}
    assert {name for name in contents(tmp_path / "out") if not name.startswith("luna_mega_code/")} == kept
    auto_map = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["auto_map"]
    assert auto_map.keys() == {"AutoConfig", *AUTO_CLASSES, "AutoModelForAudioClassification", "AutoModelForCausalLM"}
    old, new = (json.loads((place / "config.json").read_text(encoding="utf-8")) for place in (folder, tmp_path / "out"))
    assert new.pop("auto_map") and new == old
    assert stranger(on_client.encode, tmp_path / "out", ["ab"], **REMOTE) == [[0, 4, 3, 2]]


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{", encoding="utf-8"), "not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]", encoding="utf-8"), "not a JSON object"),
        (lambda folder: edit(folder, model_type="bert"), "model_type 'bert' is not supported; expected 'luna'"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors"),
    ],
)
def test_invalid_folder(saved, capsys, harm, message):
    folder, *_ = saved
    harm(folder)
    before = contents(folder)
    assert message in command_error(capsys, "bundle", folder)
    assert contents(folder) == before


def test_message_and_card(saved, capsys):
    """The command prints one line of code; the card keeps its text and says how to load the folder."""
    folder, *_ = saved
    old = "---\nlicense: mit\n---\n\n# Small\n\n## Use\n\n```python\nimport luna_mega\n```\n"
    for card in (old, None):
        (folder / "README.md").unlink()
        if card:
            (folder / "README.md").write_text(card, encoding="utf-8")
        assert bundle(folder) == 0
        line = f'model = AutoModelForMaskedLM.from_pretrained("{folder}", trust_remote_code=True)'
        assert line in capsys.readouterr().out
        text = (folder / "README.md").read_text(encoding="utf-8")
        assert text.index("## Load this model") < text.find("## Use") % len(text)
        assert "trust_remote_code=True" in text and metadata_errors(text) == []
        assert ("Weights: mit." in text and old.partition("## Use")[2] in text) if card else "# saved" in text


def test_disk_full(saved, tmp_path, monkeypatch, capsys):
    """The configuration is written after the code, so that a failed bundle leaves a folder that loads as before."""
    folder, *_ = saved
    config = (folder / "config.json").read_bytes()
    write = Path.write_text

    def until_full(file, *args, **options):
        if file.name == "modeling_luna.py":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, *args, **options)

    monkeypatch.setattr(Path, "write_text", until_full)
    assert bundle(folder) == bundle(folder, "--output", tmp_path / "out") == 1
    assert capsys.readouterr().err.count("No space left on device") == 2
    assert (folder / "config.json").read_bytes() == config
    assert not (tmp_path / "out").exists()


def test_invalid_output(saved, tmp_path, capsys):
    folder, *_ = saved
    assert "the output folder is not empty" in command_error(capsys, "bundle", folder, "--output", folder)
    assert "no such folder" in command_error(capsys, "bundle", tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import luna_mega.kernels.api", "use `from x.y import name`"),
        ("from ..api import *", "use `from x.y import name`"),
        ("x = 1; from luna_mega.kernels.api import luna_pack", "use `from x.y import name`"),
        ("operator = torch.ops.luna_mega", "`luna_mega` cannot be used like this"),
        ("name = 'luna_mega::attend'", "`luna_mega` cannot be used like this"),
    ],
)
def test_unsupported_source(monkeypatch, line, message):
    """An unsupported statement in a source file raises an error."""
    read = _code._source

    def changed(module):
        return read(module) + (f"\n{line}\n" if module.endswith("torch_backend") else "")

    monkeypatch.setattr(_code, "_source", changed)
    with pytest.raises(RuntimeError, match=message):
        _code._flat_text.__wrapped__("luna_mega.kernels.luna_attention.torch_backend")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["luna", "mega", "megalodon"])
def test_bundle_contains_the_kernels(model_type, tmp_path, repo_root):
    """Bundles contain the kernels even if they are created on a machine without Triton."""
    code = f"""
import sys
sys.modules["triton"] = None
from pathlib import Path
from luna_mega._code import write_code
write_code({model_type!r}, Path({str(tmp_path / "without")!r}))
"""
    _code.write_code(model_type, tmp_path / "with")
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(repo_root)})
    files, without = contents(tmp_path / "with" / "luna_mega_code"), contents(tmp_path / "without" / "luna_mega_code")
    assert files == without
    op = {"luna": "luna_attention", "mega": "moving_average", "megalodon": "moving_average"}[model_type]
    assert b"try:\n    import triton\nexcept ImportError:\n    raise\n" in files["kernels_common_triton_launch.py"]
    assert f"kernels_{op}_triton_ops.py" in files
