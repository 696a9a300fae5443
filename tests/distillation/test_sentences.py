"""`luna-mega distill`: folders of encoders and of sentence-transformers."""

import json

import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, BertTokenizer

import luna_mega_cli
from luna_mega.distillation.convert import convert_teacher
from luna_mega.distillation.record import license_of
from luna_mega.distillation.sentences import read_modules
from tests.distillation.models import make_model

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij", *[f"w{i}" for i in range(25)]]
POOLING = {"word_embedding_dimension": 16, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
TYPES = ("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")


@pytest.fixture
def teacher(tmp_path):
    folder = tmp_path / "teacher"
    make_model("bert", "Model", pad_token_id=0).save_pretrained(folder)
    BertTokenizer(vocab={word: index for index, word in enumerate(WORDS)}).save_pretrained(folder)
    return folder


@pytest.fixture
def sentence_teacher(teacher):
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(TYPES)
    ]
    (teacher / "1_Pooling").mkdir()
    write(teacher / "modules.json", entries)
    write(teacher / "1_Pooling" / "config.json", POOLING)
    write(teacher / "sentence_bert_config.json", {"max_seq_length": 16, "do_lower_case": True})
    write(teacher / "config_sentence_transformers.json", {"prompts": {"query": "w1 "}, "default_prompt_name": None})
    return teacher


def write(path, content):
    path.write_text(json.dumps(content))


def test_command(sentence_teacher, tmp_path, capsys):
    texts, output = tmp_path / "texts.txt", tmp_path / "out"
    texts.write_text("a b c d\n\ne f g\nh i j a b\n")
    argv = ["distill", str(sentence_teacher), "--output", str(output), "--projection-length", "9", "--max-length", "64"]
    assert luna_mega_cli.main([*argv, "--texts", str(texts)]) == 0
    out = capsys.readouterr().out
    assert "equals the teacher for texts of up to 9 tokens, reads 64" in out and "salience: fitted on 18 tokens" in out
    assert "```python\nimport luna_mega" in (output / "README.md").read_text()
    model, tokenizer = AutoModel.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    assert tokenizer.model_max_length == 64 and model.config.projection_length == 9
    batch = tokenizer(["a b c d", "e f"], return_tensors="pt", padding=True)
    with torch.no_grad():
        reference = AutoModel.from_pretrained(sentence_teacher)(**batch).last_hidden_state
        got = model(**batch).last_hidden_state
    kept = batch["attention_mask"].bool()
    torch.testing.assert_close(got[kept], reference[kept], rtol=0, atol=1e-5)
    assert json.loads((output / "sentence_bert_config.json").read_text()) == {
        "max_seq_length": 64,
        "do_lower_case": True,
    }
    for name in ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"):
        assert (output / name).read_bytes() == (sentence_teacher / name).read_bytes()
    modules = read_modules(str(output))
    assert modules.pooling == ("mean",) and modules.normalizes and modules.prompts == {"query": "w1 "}
    vectors = modules.embed(got, kept)
    assert torch.allclose(vectors.norm(dim=-1), torch.ones(2))
    assert luna_mega_cli.main([*argv, "--json"]) == 1
    assert "the output folder is not empty" in capsys.readouterr().err


def test_classifier(sentence_teacher, tmp_path):
    output = tmp_path / "out"
    assert luna_mega_cli.main(["distill", str(sentence_teacher), "--output", str(output), "--num-labels", "3"]) == 0
    model = AutoModelForSequenceClassification.from_pretrained(output)
    pooler = AutoModel.from_pretrained(sentence_teacher).pooler.dense
    assert model.config.num_labels == 3 and torch.equal(model.classifier.dense[0].weight, pooler.weight)
    assert not (output / "modules.json").exists()


def test_sentence_transformers_loads_the_folder(sentence_teacher, tmp_path):
    sentence_transformers = pytest.importorskip(
        "sentence_transformers", reason="sentence-transformers is not installed"
    )
    convert_teacher(str(sentence_teacher), tmp_path / "out", projection_length=16, max_length=32)
    texts = ["a b c", "d e f g h"]
    ours, theirs = (
        sentence_transformers.SentenceTransformer(str(folder), device="cpu")
        for folder in (tmp_path / "out", sentence_teacher)
    )
    assert ours.max_seq_length == 32
    assert abs(ours.encode(texts) - theirs.encode(texts)).max() < 1e-5


def test_cross_encoder(teacher, tmp_path):
    """A folder without pooling, and the activation of its scores."""
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
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["sentence_transformers"] == model.config.sentence_transformers
    with pytest.raises(ValueError, match="sentence vectors by a cross-encoder are not supported"):
        read_modules(str(tmp_path / "out")).embed(torch.zeros(1, 2, 16), torch.ones(1, 2, dtype=torch.bool))
    encoders = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    pairs = [("a b c", "d e"), ("w1", "w2 f")]
    ours, theirs = (
        encoders.CrossEncoder(str(folder), device="cpu").predict(pairs) for folder in (tmp_path / "out", teacher)
    )
    assert abs(ours - theirs).max() < 1e-5


def test_json_without_texts(teacher, tmp_path, capsys):
    assert luna_mega_cli.main(["distill", str(teacher), "--output", str(tmp_path / "out"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model_class"] == "LunaModel" and report["conversion"]["fit"] is None
    assert not report["sentence_transformers"] and not (tmp_path / "out" / "modules.json").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pooling_mode_mean_tokens": False}, "has the pooling none; supported are cls, max, mean"),
        ({"pooling_mode": "attention"}, "has the pooling attention; supported are cls, max, mean"),
        ({"pooling_mode_new": False}, "has the pooling pooling_mode_new; supported"),
        ({"word_embedding_dimension": 8}, "is for vectors of 8 numbers, but config.json specifies 16"),
    ],
    ids=["none", "mode", "field", "width"],
)
def test_unsupported_pooling(change, message, sentence_teacher, tmp_path, capsys):
    write(sentence_teacher / "1_Pooling" / "config.json", POOLING | change)
    assert luna_mega_cli.main(["distill", str(sentence_teacher), "--output", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_damaged_modules(sentence_teacher):
    modules = sentence_teacher / "modules.json"
    entries = json.loads(modules.read_text())
    for content, message in (
        ("[", "modules.json: not JSON"),
        ("[" * 100_000, "modules.json: not JSON"),
        ("{}", "modules.json: not a JSON array"),
        ("[1]", "is not a list of modules with type and path"),
        (json.dumps(entries[1:]), "the first module in modules.json must be a Transformer in the same folder"),
        (json.dumps(entries[:1]), "contains no Pooling"),
        (json.dumps([*entries, {"path": "../elsewhere", "type": "Dense"}]), "names '../elsewhere', which is not in"),
        (json.dumps([*entries, {"path": str(sentence_teacher), "type": "Dense"}]), "which is not in the folder"),
    ):
        modules.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_modules(str(sentence_teacher))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("sentence_bert_config.json", {"max_seq_length": "8"}, "max_seq_length must be a positive integer, got '8'"),
        ("sentence_bert_config.json", {"max_seq_length": -1}, "max_seq_length must be a positive integer, got -1"),
        ("config_sentence_transformers.json", {"prompts": "a"}, "prompts must be texts by name, got 'a'"),
        ("config_sentence_transformers.json", {"prompts": {"a": 1}}, "prompts must be texts by name"),
        ("1_Pooling/config.json", {"pooling_mode": 5}, "has the pooling 5; supported are"),
        ("1_Pooling/config.json", {"pooling_mode": None}, "has the pooling None; supported are"),
    ],
)
def test_damaged_settings(name, content, message, sentence_teacher):
    write(sentence_teacher / name, content)
    with pytest.raises(ValueError, match=message):
        read_modules(str(sentence_teacher))


@pytest.mark.parametrize("license", ["[" * 2000, "[mit, other]", "{a: 1}", "5"])
def test_the_license_of_a_damaged_card_is_unknown(license, teacher):
    (teacher / "README.md").write_text(f"---\nlicense: {license}\n---\n")
    assert license_of(str(teacher)) is None


def test_files_that_do_not_exist(teacher, tmp_path, capsys):
    argv = ["distill", str(teacher), "--output", str(tmp_path / "out")]
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    cases = {
        "none.txt": "No such file",
        "empty.txt": "has no text; it must have one text per line",
        "latin.txt": "latin.txt is not UTF-8 text (unexpected end of data at byte 3); convert it",
    }
    for texts, message in cases.items():
        assert luna_mega_cli.main([*argv, "--texts", str(tmp_path / texts)]) == 1
        assert message in capsys.readouterr().err


def test_teachers_that_cannot_be_loaded(teacher, tmp_path, capsys):
    """For a folder without a tokenizer, transformers returns an empty one."""
    for file in teacher.glob("tokenizer*"):
        file.unlink()
    gguf, own_code = tmp_path / "model.gguf", tmp_path / "code"
    gguf.touch()
    own_code.mkdir()
    write(own_code / "config.json", {"model_type": "new", "auto_map": {"AutoConfig": "new.NewConfig"}})
    cases = {
        teacher: "there is no tokenizer, or its vocabulary is empty",
        tmp_path / "none": "no such folder or model",
        gguf: "is a GGUF checkpoint; save it once as a folder",
        own_code: "requires its own code, which is not run",
    }
    for folder, message in cases.items():
        assert luna_mega_cli.main(["distill", str(folder), "--output", str(tmp_path / "out")]) == 1
        error = capsys.readouterr().err
        assert message in error and str(folder) in error and error.count("\n") == 1
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("head", ["Model", "ForTokenClassification"])
def test_only_a_masked_language_model_needs_a_mask_token(head, teacher, tmp_path):
    make_model("bert", head, pad_token_id=0).save_pretrained(teacher)
    file = teacher / "tokenizer_config.json"
    write(file, json.loads(file.read_text()) | {"mask_token": None})
    assert AutoTokenizer.from_pretrained(teacher).mask_token is None
    convert_teacher(str(teacher), tmp_path / "out")


def test_a_single_token_type(teacher, tmp_path):
    """The tokenizer returns `token_type_ids`, which the student must accept."""
    make_model("bert", "Model", pad_token_id=0, type_vocab_size=1).save_pretrained(teacher)
    convert_teacher(str(teacher), tmp_path / "out", projection_length=16)
    batch = AutoTokenizer.from_pretrained(tmp_path / "out")("a b c", return_tensors="pt")
    got, want = (AutoModel.from_pretrained(folder)(**batch).last_hidden_state for folder in (tmp_path / "out", teacher))
    assert "token_type_ids" in batch
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
