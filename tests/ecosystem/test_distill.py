"""`luna-mega distill` with models of sentence-transformers, PEFT and bitsandbytes: equal vectors, or an error."""

import importlib.util

import pytest
import torch
from safetensors.torch import load_file, save_file

import luna_mega_cli
from luna_mega.distillation import equality, from_teacher
from luna_mega.distillation.convert import convert_teacher
from luna_mega.errors import ConversionError
from tests.distillation.models import bert_tokenizer, make_model, run_card, save_teacher, xlm_tokenizer

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

import sentence_transformers  # noqa: E402
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder  # noqa: E402
from sentence_transformers.sentence_transformer import modules  # noqa: E402
from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling  # noqa: E402

TEXTS = ["a b c", "d", "e f g h i j a b", ""]
PAIRS = [(first, second) for first in TEXTS for second in TEXTS[:2]]


def save(folder, name="bert", **options):
    return str(save_teacher(folder, name, **options))


def mean(folder):
    return [modules.Transformer(save(folder)), modules.Pooling(16, "mean"), modules.Normalize()]


def dense(folder):
    torch.manual_seed(0)
    parts = [modules.Dense(16, 6), modules.LayerNorm(6), modules.Dropout(0.5), modules.Dense(6, 5)]
    return [modules.Transformer(save(folder, "distilbert")), modules.Pooling(16, "cls"), *parts]


def pools(folder):
    return [modules.Transformer(save(folder, "electra")), modules.Pooling(16, ("max", "weightedmean", "lasttoken"))]


def layers(folder):
    model = modules.Transformer(save(folder), config_kwargs={"output_hidden_states": True})
    weighted = modules.WeightedLayerPooling(16, num_hidden_layers=2, layer_start=1)
    with torch.no_grad():
        weighted.layer_weights.copy_(torch.tensor([0.5, 2.0]))
    return [model, weighted, modules.Pooling(16, "mean")]


def e5(folder):
    return [modules.Transformer(save(folder, tokenizer=xlm_tokenizer())), modules.Pooling(16, "mean")]


def splade(folder):
    return [MLMTransformer(save(folder, head="ForMaskedLM")), SpladePooling("max")]


def splade_task(folder):
    folder = save(folder, "distilbert", head="ForMaskedLM")
    return [modules.Transformer(folder, transformer_task="fill-mask"), SpladePooling("sum")]


MODELS = {
    "mean": (SentenceTransformer, mean),
    "dense": (SentenceTransformer, dense),
    "poolings": (SentenceTransformer, pools),
    "all layers": (SentenceTransformer, layers),
    "e5": (SentenceTransformer, e5),
    "splade": (SparseEncoder, splade),
    "splade with a task": (SparseEncoder, splade_task),
}


def vectors(model, texts=TEXTS):
    found = model.encode(texts, show_progress_bar=False, convert_to_tensor=True)
    return found.to_dense() if found.is_sparse else found


@pytest.fixture
def teacher(tmp_path, request):
    """Return the folder of a model in `MODELS`."""
    kind, make = MODELS[request.param]
    kind(modules=make(tmp_path / "plain"), device="cpu").save_pretrained(str(tmp_path / "teacher"))
    return tmp_path / "teacher"


@pytest.mark.parametrize("teacher", MODELS, indirect=True)
def test_vectors(teacher, request, tmp_path, capsys, monkeypatch):
    kind = MODELS[request.node.callspec.params["teacher"]][0]
    argv = ["distill", str(teacher), "--output", str(tmp_path / "out"), "--projection-length", "16"]
    assert luna_mega_cli.main(argv) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("largest difference"))
    what = "sentence vectors " if kind is SentenceTransformer else "sparse vectors "
    assert float(line.partition(what)[2]) < 1e-5
    ours, theirs = (kind(str(folder), device="cpu") for folder in (tmp_path / "out", teacher))
    expected = vectors(theirs)
    torch.testing.assert_close(vectors(ours), expected, rtol=0, atol=1e-5)
    assert (expected[0] - expected[1]).abs().max() > 1e-3
    monkeypatch.chdir(tmp_path)
    model, card = run_card(tmp_path / "out")
    assert type(model) is kind and card.data.library_name == "sentence-transformers"


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("stored", [True, False])
def test_scores_of_cross_encoders(labels, stored, tmp_path, capsys, monkeypatch):
    """Scores equal the teacher's for a folder of CrossEncoder, and for one of transformers.

    The latter has its activation in the configuration.
    """
    folder = save(tmp_path / "teacher", head="ForSequenceClassification", num_labels=labels)
    if stored:
        CrossEncoder(folder, device="cpu").save_pretrained(folder)
    argv = ["distill", folder, "--output", str(tmp_path / "out"), "--projection-length", "16"]
    assert luna_mega_cli.main(argv) == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("largest difference"))
    assert line.count("scores ") == stored
    ours, theirs = (CrossEncoder(str(path), device="cpu").predict(PAIRS) for path in (tmp_path / "out", folder))
    assert abs(ours - theirs).max() < 1e-5
    monkeypatch.chdir(tmp_path)
    assert (type(run_card(tmp_path / "out")[0]) is CrossEncoder) == stored
    assert luna_mega_cli.main([*argv[:2], "--output", str(tmp_path / "new"), "--num-labels", "2"]) == 0
    assert "scores" not in next(line for line in capsys.readouterr().out.splitlines() if line.startswith("largest"))


@pytest.mark.parametrize("teacher", ["dense"], indirect=True)
def test_faults_of_modules(teacher, tmp_path, monkeypatch):
    """A module with different weights raises an error, even if the comparison of files does not detect it."""
    monkeypatch.setattr(equality, "_compare_modules", damage)
    with pytest.raises(ConversionError, match="sentence vectors of the copy differ from the teacher's"):
        convert_teacher(str(teacher), tmp_path / "out", projection_length=16)
    assert not (tmp_path / "out").exists()


def damage(modules, folder):
    file = folder / "2_Dense" / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor * 1.001 for name, tensor in tensors.items()}, file, {"format": "pt"})


@pytest.mark.parametrize("teacher", ["mean"], indirect=True)
def test_other_modules_are_errors(teacher, tmp_path):
    file = teacher / "modules.json"
    text = file.read_text(encoding="utf-8")
    for kind, name in (("sentence_transformers.models.WordWeights", "WordWeights"), ("my_code.Pool", "my_code.Pool")):
        file.write_text(text.replace("sentence_transformers.base.modules.normalize.Normalize", kind), encoding="utf-8")
        with pytest.raises(ConversionError, match=f"the module '{name}' in modules.json is not supported"):
            convert_teacher(str(teacher), tmp_path / "out")
    with pytest.raises(ValueError, match="must be a model of transformers, got a SentenceTransformer; pass its folder"):
        from_teacher(SentenceTransformer(modules=mean(tmp_path / "again"), device="cpu"))


@pytest.mark.parametrize("teacher", ["mean"], indirect=True)
def test_without_sentence_transformers(teacher, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sentence_transformers", None)
    report = convert_teacher(str(teacher), tmp_path / "out", projection_length=16)
    assert "sentence vectors not compared; install sentence-transformers" in str(report)
    assert report.conversion.differences["outputs"] < 1e-5 and sentence_transformers


def test_adapters(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = make_model("bert", "ForSequenceClassification").eval()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query", "value"], init_lora_weights=False))
    for teacher in (adapted, adapted.base_model.model):
        with pytest.raises(ValueError, match=r"has an adapter \(.*\); merge it first: `model.merge_and_unload\(\)`"):
            from_teacher(teacher)
    adapted.save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match="contains an adapter .adapter_config.json.; merge it first"):
        from_teacher(str(tmp_path))
    merged = adapted.merge_and_unload().eval()
    student = from_teacher(merged, projection_length=12).model
    ids = torch.randint(3, 40, (2, 12))
    torch.testing.assert_close(student(ids).logits, merged(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("bits", [8, 4])
def test_weights_of_few_bits(bits, tmp_path):
    from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128}
    folder = save(tmp_path / "full", head="ForSequenceClassification", **sizes)
    how = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    teacher = AutoModelForSequenceClassification.from_pretrained(folder, quantization_config=how, device_map="cpu")
    teacher.save_pretrained(tmp_path / "few")
    bert_tokenizer().save_pretrained(tmp_path / "few")
    for source in (teacher, str(tmp_path / "few")):
        with pytest.raises(ValueError, match=r"quantized \(bitsandbytes\); pass the original checkpoint, or save"):
            from_teacher(source)
    teacher = AutoModelForSequenceClassification.from_pretrained(tmp_path / "few", device_map="cpu")
    whole = teacher.dequantize()
    student = from_teacher(whole, projection_length=12).model
    assert student.dtype == whole.dtype and student.get_input_embeddings().weight.is_floating_point()
