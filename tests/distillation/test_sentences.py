"""`luna-mega distill`: folders of encoders and of sentence-transformers."""

import json
import shutil

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

import luna_mega_cli
from luna_mega import _code
from luna_mega.distillation import from_teacher
from luna_mega.distillation.convert import convert_teacher
from luna_mega.distillation.sentences import read_modules
from luna_mega.hub.card import license_of
from tests.damage import NOT_OBJECTS
from tests.distillation.models import ENCODERS, HEADS, change, make_model, run_card, save_teacher, write, xlm_tokenizer
from tests.errors import check_error, command_error


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_teacher(tmp_path_factory.mktemp("saved") / "teacher", modules=("Pooling", "Normalize"))


@pytest.fixture
def teacher(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "teacher", ignore=shutil.ignore_patterns("modules.json", "1_Pooling"))


@pytest.fixture
def sentence_teacher(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "teacher")
    write(folder / "sentence_bert_config.json", {"max_seq_length": 16, "do_lower_case": True})
    write(folder / "config_sentence_transformers.json", {"prompts": {"query": "w1 "}, "default_prompt_name": None})
    return folder


def test_command(sentence_teacher, tmp_path, capsys):
    texts, output = tmp_path / "texts.txt", tmp_path / "out"
    texts.write_text("a b\u2028c d\n\ne f g\nh i j a b\n", encoding="utf-8")  # only line feeds end a text
    argv = ["distill", str(sentence_teacher), "--output", str(output), "--projection-length", "9", "--max-length", "64"]
    assert luna_mega_cli.main([*argv, "--texts", str(texts)]) == 0
    out = capsys.readouterr().out
    assert "equals the teacher for texts of up to 9 tokens, reads 64" in out and "salience: fitted on 18 tokens" in out
    assert "```python\nimport luna_mega" in (output / "README.md").read_text(encoding="utf-8")
    model, tokenizer = AutoModel.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    assert tokenizer.model_max_length == 64 and model.config.projection_length == 9
    batch = tokenizer(["a b c d", "e f"], return_tensors="pt", padding=True)
    with torch.no_grad():
        reference = AutoModel.from_pretrained(sentence_teacher)(**batch).last_hidden_state
        got = model(**batch).last_hidden_state
    kept = batch["attention_mask"].bool()
    torch.testing.assert_close(got[kept], reference[kept], rtol=0, atol=1e-5)
    assert json.loads((output / "sentence_bert_config.json").read_text(encoding="utf-8")) == {
        "max_seq_length": 64,
        "do_lower_case": True,
    }
    for name in ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"):
        assert (output / name).read_bytes() == (sentence_teacher / name).read_bytes()
    modules = read_modules(str(output))
    assert modules.pooling == ("mean",) and modules.normalizes
    vectors = modules.embed(got, kept)
    assert torch.allclose(vectors.norm(dim=-1), torch.ones(2))
    assert "not empty" in command_error(capsys, *argv, "--json")


def test_classifier(sentence_teacher, tmp_path):
    output = tmp_path / "out"
    assert luna_mega_cli.main(["distill", str(sentence_teacher), "--output", str(output), "--num-labels", "3"]) == 0
    model = AutoModelForSequenceClassification.from_pretrained(output)
    pooler = AutoModel.from_pretrained(sentence_teacher).pooler.dense
    assert model.config.num_labels == 3 and torch.equal(model.classifier.dense[0].weight, pooler.weight)
    assert not (output / "modules.json").exists()


def test_cross_encoder(teacher, tmp_path):
    """A cross-encoder folder has no pooling module; the activation of its scores is copied."""
    model = make_model("bert", "ForSequenceClassification", pad_token_id=0, num_labels=1)
    model.config.sentence_transformers = {"activation_fn": "torch.nn.modules.linear.Identity"}
    model.save_pretrained(teacher)
    kind = "sentence_transformers.base.modules.transformer.Transformer"
    write(teacher / "modules.json", [{"idx": 0, "name": "0", "path": "", "type": kind}])
    task = {"text": {"method": "forward", "method_output_name": "logits"}}
    settings = {"transformer_task": "sequence-classification", "modality_config": task, "module_output_name": "scores"}
    write(teacher / "sentence_bert_config.json", settings)
    write(teacher / "config_sentence_transformers.json", {"model_type": "CrossEncoder"})
    report = convert_teacher(str(teacher), tmp_path / "out", projection_length=16, max_length=32)
    assert report.model_class == "LunaForSequenceClassification" and report.sentence_transformers
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["sentence_transformers"] == model.config.sentence_transformers
    assert not read_modules(str(tmp_path / "out")).embeds


def test_json_without_texts(teacher, tmp_path, capsys):
    assert luna_mega_cli.main(["distill", str(teacher), "--output", str(tmp_path / "out"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model_class"] == "LunaModel" and report["conversion"]["fit"] is None
    assert not report["sentence_transformers"] and not (tmp_path / "out" / "modules.json").exists()


MODULES = {
    "no modules": [1],
    "no transformer": [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}],
    "no pooling": [{"path": "", "type": "sentence_transformers.models.Transformer"}],
}
OUTSIDE = ("../elsewhere", "/elsewhere")
SETTINGS = {
    "no pooling": ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "none"),
    "mode": ("1_Pooling/config.json", {"pooling_mode": "attention"}, "attention"),
    "number": ("1_Pooling/config.json", {"pooling_mode": 5}, "5"),
    "null": ("1_Pooling/config.json", {"pooling_mode": None}, "None"),
    "field": ("1_Pooling/config.json", {"pooling_mode_new": False}, "pooling_mode_new"),
    "width": ("1_Pooling/config.json", {"word_embedding_dimension": 8}, "vectors of 8 numbers"),
    "length": ("sentence_bert_config.json", {"max_seq_length": "8"}, "max_seq_length"),
    "negative length": ("sentence_bert_config.json", {"max_seq_length": -1}, "max_seq_length"),
    "prompts": ("config_sentence_transformers.json", {"prompts": "a"}, "prompts"),
    "prompt": ("config_sentence_transformers.json", {"prompts": {"a": 1}}, "prompts"),
    "class": ("config_sentence_transformers.json", {"model_type": "Other"}, "Other"),
}


@pytest.mark.parametrize(("file", "fields", "named"), SETTINGS.values(), ids=SETTINGS)
def test_settings(file, fields, named, sentence_teacher, tmp_path, capsys):
    change(sentence_teacher / file, **fields)
    assert named in command_error(capsys, "distill", sentence_teacher, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_modules(sentence_teacher):
    file = sentence_teacher / "modules.json"
    entries = json.loads(file.read_text(encoding="utf-8"))
    changes = [json.dumps(content).encode() for content in MODULES.values()]
    changes += [json.dumps([*entries, {"path": path, "type": "Dense"}]).encode() for path in OUTSIDE]
    for content in changes + [content for content in NOT_OBJECTS.values() if content != b"[1]"]:
        file.write_bytes(content)
        check_error(lambda: read_modules(str(sentence_teacher)), ValueError, "modules.json")


@pytest.mark.parametrize("license", ["[" * 1000, "[mit, other]", "{a: 1}", "5"])
def test_the_license_of_a_damaged_card_is_unknown(license, tmp_path):
    (tmp_path / "README.md").write_text(f"---\nlicense: {license}\n---\n", encoding="utf-8")
    assert license_of(str(tmp_path)) is None


def test_texts(teacher, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("\n", encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    cases = {"none.txt": "no such file", "teacher": "a folder", "empty.txt": "no text", "latin.txt": "UTF-8"}
    for texts, named in cases.items():
        argv = ["--output", tmp_path / "out", "--texts", tmp_path / texts]
        error = command_error(capsys, "distill", teacher, *argv)
        assert named in error and f"--texts {tmp_path / texts}" in error


INPUTS = {
    "rows": (["--projection-length", 100_000], "projection_length=100000 exceeds the longest text of 20 tokens"),
    "labels of long texts": (["--max-length", 64], "max_length=64 exceeds the 20 positions"),
    "texts": (["--texts", "none.txt"], "--texts none.txt: no such file"),
}


@pytest.mark.parametrize(("argv", "named"), INPUTS.values(), ids=INPUTS)
def test_inputs_are_checked_before_weights_are_read(argv, named, tmp_path, capsys):
    folder = save_teacher(tmp_path / "teacher", head="ForTokenClassification")
    (folder / "model.safetensors").unlink()
    assert named in command_error(capsys, "distill", folder, "--output", tmp_path / "out", *argv)


def test_misspelled_names(tmp_path, capsys, monkeypatch):
    """One request instead of six attempts for each file."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("luna_mega.distillation.convert.read_modules", None)
    for name, named in {"teachr": "the Hub cannot be reached", "./teachr": "pass a folder or a name"}.items():
        error = command_error(capsys, "distill", name, "--output", tmp_path / "out")
        assert f"{name}: no such folder" in error and named in error
        check_error(lambda: from_teacher(name), ValueError, named)  # noqa: B023


def test_progress(teacher, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("luna_mega.distillation.windows._SECONDS", -1)
    (tmp_path / "texts.txt").write_text("a b c d e f g h i j\n" * 1000, encoding="utf-8")
    argv = ["distill", str(teacher), "--texts", str(tmp_path / "texts.txt"), "--projection-length", "8", "--output"]
    assert luna_mega_cli.main([*argv, str(tmp_path / "out")]) == 0
    lines = iter(capsys.readouterr().err.splitlines())
    for named in ("reading the teacher", "fitting the salience on 500 texts", "341 of 500 texts", "up to 8 tokens"):
        assert any(named in line for line in lines), named
    last = ["writing the folder", "comparing the folder with the teacher", "comparing a text of 20 tokens in float64"]
    assert [*lines][-3:] == last
    assert luna_mega_cli.main([*argv, str(tmp_path / "json"), "--json"]) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize("head", HEADS)
def test_code_of_the_card(head, tmp_path, monkeypatch):
    save_teacher(tmp_path / "teacher", head=head)
    report = convert_teacher(str(tmp_path / "teacher"), tmp_path / 'out "1"', projection_length=20)
    monkeypatch.chdir(tmp_path)
    model, card = run_card(report.output)
    assert type(getattr(model, "model", model)).__name__ == report.model_class
    assert card.data.pipeline_tag and "equals that model for texts of up to 20 tokens" in card.text


def test_folders(teacher, tmp_path, capsys):
    """Folders without a tokenizer, missing folders and folders with custom code raise an error.

    For a folder without a tokenizer, transformers returns an empty tokenizer.
    """
    for file in teacher.glob("tokenizer*"):
        file.unlink()
    write(tmp_path / "code" / "config.json", {"model_type": "new", "auto_map": {"AutoConfig": "new.NewConfig"}})
    for folder, named in {"teacher": "tokenizer", "none": "no such folder", "code": "own code"}.items():
        error = command_error(capsys, "distill", tmp_path / folder, "--output", tmp_path / "out")
        assert named in error and str(tmp_path / folder) in error and not (tmp_path / "out").exists()


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_full_disk(file, tmp_path, capsys, monkeypatch):
    """A full disk is reported in one line, and no files are left.

    Words of 4,000 characters make the tokenizer larger than the weights.
    """
    monkeypatch.setattr(_code, "_enabled", False)  # its files are written before the weights
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    tokenizer = xlm_tokenizer(fill="a" * 4_000)
    teacher = save_teacher(tmp_path / "teacher", head="ForSequenceClassification", tokenizer=tokenizer)
    sizes = {name: (teacher / name).stat().st_size for name in ("model.safetensors", "tokenizer.json")}
    limit = sizes[file] - 1000
    assert file == "model.safetensors" or limit > sizes["model.safetensors"] + 1000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        assert file in command_error(capsys, "distill", teacher, "--output", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]


@pytest.mark.parametrize(("name", "own"), [*((name, 0) for name in ENCODERS), ("bert", 3), ("bert", None)])
@torch.no_grad()
def test_padding_of_another_tokenizer(name, own, tmp_path):
    """The student pads with the tokenizer's token, unless positions depend on the padding token, as in RoBERTa.

    multilingual-e5-small is a BERT whose tokenizer pads with 1, but its config.json specifies 0.
    """
    folder, output = (
        save_teacher(tmp_path / "teacher", name, tokenizer=xlm_tokenizer(), pad_token_id=own),
        tmp_path / "out",
    )
    if name not in ("bert", "distilbert", "electra"):
        check_error(lambda: convert_teacher(str(folder), output), ValueError, "pads with 1")
        return
    convert_teacher(str(folder), output, projection_length=12)
    student, tokenizer = AutoModel.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    assert student.config.pad_token_id == tokenizer.pad_token_id == 1
    batch = tokenizer(["w0 w1 w2 w3", "w4"], padding=True, return_tensors="pt")
    mask = batch["attention_mask"].bool()
    expected = AutoModel.from_pretrained(folder)(**batch).last_hidden_state[mask]
    for inputs in (batch, {"input_ids": batch["input_ids"]}):  # the second call infers the mask
        torch.testing.assert_close(student(**inputs).last_hidden_state[mask], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("head", ["Model", "ForTokenClassification"])
def test_only_a_masked_language_model_needs_a_mask_token(head, teacher, tmp_path):
    make_model("bert", head, pad_token_id=0).save_pretrained(teacher)
    change(teacher / "tokenizer_config.json", mask_token=None)
    assert AutoTokenizer.from_pretrained(teacher).mask_token is None
    convert_teacher(str(teacher), tmp_path / "out")


def test_a_single_token_type(teacher, tmp_path):
    """A student of a teacher with one token type accepts the `token_type_ids` that the tokenizer returns."""
    make_model("bert", "Model", pad_token_id=0, type_vocab_size=1).save_pretrained(teacher)
    convert_teacher(str(teacher), tmp_path / "out", projection_length=16)
    batch = AutoTokenizer.from_pretrained(tmp_path / "out")("a b c", return_tensors="pt")
    got, want = (AutoModel.from_pretrained(folder)(**batch).last_hidden_state for folder in (tmp_path / "out", teacher))
    assert "token_type_ids" in batch
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
