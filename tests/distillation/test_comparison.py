"""The comparison of a conversion finds faults that are put into the copy or into its folder, and nothing is left."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer, BertTokenizer

import luna_mega_cli
from luna_mega.distillation import convert, exact, from_teacher
from luna_mega.distillation.convert import convert_teacher
from luna_mega.errors import ConversionError
from tests.distillation.models import PLAIN
from tests.distillation.test_exact import HEADS, make
from tests.distillation.test_originals import xlm_tokenizer
from tests.distillation.test_sentences import POOLING, TYPES, WORDS, write

VALUE = "encoder.layers.1.attention.value.bias"
TYPES_NAME = "embeddings.token_type_embeddings.weight"


def save_teacher(folder, name="bert", head="Model", modules=False, **fields):
    model = make(name, head, **{"pad_token_id": 0} | fields)
    model.save_pretrained(folder)
    BertTokenizer(vocab={word: index for index, word in enumerate(WORDS)}).save_pretrained(folder)
    if modules:
        entries = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(TYPES)
        ]
        (folder / "1_Pooling").mkdir()
        write(folder / "modules.json", entries)
        write(folder / "1_Pooling" / "config.json", POOLING)
    return model


def tensors(change):
    def edit(folder):
        loaded = load_file(folder / "model.safetensors")
        change(loaded)
        save_file(loaded, folder / "model.safetensors", {"format": "pt"})

    return edit


def content(name, **fields):
    def edit(folder):
        write(folder / name, json.loads((folder / name).read_text()) | fields)

    return edit


def swap(loaded):
    first, second = (f"encoder.layers.{index}.fc1.weight" for index in (0, 2))
    loaded[first], loaded[second] = loaded[second], loaded[first]


def drop_module(folder):
    modules = json.loads((folder / "modules.json").read_text())
    write(folder / "modules.json", modules[:-1])


def another_padding(folder):
    content("tokenizer_config.json", pad_token="[MASK]")(folder)
    content("config.json", pad_token_id=4, first_position=1)(folder)


CASES = [*((name, "Model") for name in PLAIN), *(("bert", head) for head in HEADS[1:]), ("distilbert", HEADS[-1])]
FAULTS = {
    "swapped weight": (tensors(swap), "another tensor encoder.layers.0.fc1.weight|another tensor encoder.layers.2"),
    "missing bias": (tensors(lambda x: x.pop(VALUE)), f"the weights lack {VALUE}"),
    "zero bias": (tensors(lambda x: x[VALUE].zero_()), f"another tensor {VALUE}"),
    "token types": (
        tensors(lambda x: x["embeddings.token_type_embeddings.weight"][1].mul_(1.001)),
        "another tensor emb",
    ),
    "epsilon": (content("config.json", layer_norm_eps=1e-5), "outputs for .* in float64 of the copy differ"),
    "activation": (content("config.json", hidden_act="gelu_new"), "outputs for length 1 of the copy differ"),
    "dropped module": (drop_module, "modules.json. in the folder is not the teacher.s"),
    "pooling": (
        content("1_Pooling/config.json", pooling_mode_cls_token=True),
        "1_Pooling/config.json' in the folder is",
    ),
    "padding": (
        content("tokenizer_config.json", pad_token="[MASK]"),
        "the tokenizer pads with 4, but the model with 0",
    ),
    "both paddings": (another_padding, "the tokenizer in the folder returns other input_ids"),
    "tokens": (lambda folder: xlm_tokenizer().save_pretrained(folder), "pads with 1, but the model with 0"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faults_in_the_folder(case, tmp_path, monkeypatch, capsys):
    fault, message = FAULTS[case]
    save_teacher(tmp_path / "teacher", modules=True)
    compare = convert.compare_folder

    def damage(teacher, name, student, folder, *options):
        fault(folder)
        return compare(teacher, name, student, folder, *options)

    monkeypatch.setattr(convert, "compare_folder", damage)
    capsys.readouterr()
    argv = ["distill", str(tmp_path / "teacher"), "--output", str(tmp_path / "out"), "--projection-length", "12"]
    assert luna_mega_cli.main(argv) == 1
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]


def layer(model, index):
    return model.luna.encoder.layers[index]


def embeddings(model):
    return model.luna.embeddings


def swap_modules(model):
    first, second = layer(model, 0), layer(model, 2)
    first.fc1, second.fc1 = second.fc1, first.fc1


COPIES = {
    "swapped weights": swap_modules,
    "missing bias": lambda model: layer(model, 1).attention.value.bias.zero_(),
    "norm": lambda model: layer(model, 2).final_layer_norm.bias.zero_(),
    "position": lambda model: embeddings(model).position_embeddings.weight[-3].mul_(1.5),
    "token types": lambda model: embeddings(model).token_type_embeddings.weight[1].mul_(1.5),
    "a word": lambda model: embeddings(model).word_embeddings.weight[7].mul_(1.5),
    "head": lambda model: model.classifier.out_proj.bias.zero_(),
    "epsilon": lambda model: setattr(embeddings(model).layer_norm, "eps", 1e-3),
}


@pytest.mark.parametrize("case", COPIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_faults_in_the_copy(case, dtype, monkeypatch):
    copy = exact.copy_encoder

    def damage(teacher, student):
        report = copy(teacher, student)
        with torch.no_grad():
            COPIES[case](student)
        return report

    teacher = make("bert", "ForSequenceClassification").to(dtype)
    assert from_teacher(teacher, projection_length=20, max_length=20).report.differences["outputs"] < 1e-5
    monkeypatch.setattr(exact, "copy_encoder", damage)
    with pytest.raises(ConversionError, match="word embeddings of the copy|outputs for .* of the copy differ"):
        from_teacher(teacher, projection_length=20, max_length=20)


def test_a_position_beyond_the_rows_of_p(tmp_path, monkeypatch):
    """Texts of up to the teacher's table are compared with as many rows."""
    copy = exact.copy_encoder

    def damage(teacher, student):
        report = copy(teacher, student)
        with torch.no_grad():
            student.embeddings.position_embeddings.weight[-1].mul_(1.001)
        return report

    monkeypatch.setattr(exact, "copy_encoder", damage)
    save_teacher(tmp_path / "teacher")
    with pytest.raises(ConversionError, match="outputs for 20 tokens in float64"):
        convert_teacher(str(tmp_path / "teacher"), tmp_path / "out", projection_length=6, max_length=20)


@pytest.mark.parametrize(
    ("name", "head"),
    [*((name, "Model") for name in PLAIN), *(("bert", x) for x in HEADS[1:]), ("distilbert", HEADS[-1])],
)
def test_report(name, head, tmp_path, capsys):
    """Every family and head is compared from its folder, with token types and options if it has them."""
    padding = 0 if name in ("bert", "distilbert", "electra") else 1
    save_teacher(tmp_path / "teacher", name, head, pad_token_id=padding)
    if padding:
        xlm_tokenizer().save_pretrained(tmp_path / "teacher")
    argv = ["distill", str(tmp_path / "teacher"), "--output", str(tmp_path / "out"), "--projection-length", "12"]
    assert luna_mega_cli.main(argv) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("largest difference"))
    assert float(line.removeprefix("largest difference from the teacher: outputs ")) < 1e-5


def test_a_teacher_whose_forward_pass_is_changed():
    """A hook is not a weight, so that the copy lacks it."""
    teacher = make("bert")
    teacher.encoder.layer[0].register_forward_hook(lambda module, args, output: output * 1.01)
    with pytest.raises(ConversionError, match="outputs for length 12 of the copy differ"):
        from_teacher(teacher, projection_length=12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype):
    teacher = make("roberta", "ForTokenClassification").to(dtype)
    assert 0 < from_teacher(teacher, projection_length=12).report.differences["outputs"] < 0.1


@torch.no_grad()
def test_e5_with_the_tokenizer_of_xlm_r(tmp_path):
    """multilingual-e5-small is a BERT that pads with 1; its config.json says 0."""
    save_teacher(tmp_path / "teacher", modules=True)
    for file in (tmp_path / "teacher").glob("tokenizer*"):
        file.unlink()
    xlm_tokenizer().save_pretrained(tmp_path / "teacher")
    convert_teacher(str(tmp_path / "teacher"), tmp_path / "out", projection_length=12, max_length=40)
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path / "out"), AutoModel.from_pretrained(tmp_path / "out")
    assert model.config.pad_token_id == tokenizer.pad_token_id == 1
    batch = tokenizer(["w1 w2 w3", "w4"], padding=True, return_tensors="pt")
    expected = AutoModel.from_pretrained(tmp_path / "teacher")(**batch).last_hidden_state
    mask = batch["attention_mask"].bool()
    torch.testing.assert_close(model(**batch).last_hidden_state[mask], expected[mask], rtol=0, atol=1e-5)
