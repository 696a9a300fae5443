"""The comparison of a conversion detects errors in the copy or in its folder; then no files are left."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import luna_mega_cli
from luna_mega.distillation import convert, exact, from_teacher
from luna_mega.distillation.convert import convert_teacher
from luna_mega.errors import ConversionError
from tests.distillation.models import ENCODERS, HEADS, change, make_model, save_teacher, write, xlm_tokenizer
from tests.errors import check_error, command_error
from tests.marks import diagonal

VALUE = "encoder.layers.1.attention.value.bias"
TYPES = "embeddings.token_type_embeddings.weight"


def tensors(change):
    def edit(folder):
        loaded = load_file(folder / "model.safetensors")
        change(loaded)
        save_file(loaded, folder / "model.safetensors", {"format": "pt"})

    return edit


def content(name, **fields):
    return lambda folder: change(folder / name, **fields)


def swap(loaded):
    first, second = (f"encoder.layers.{index}.fc1.weight" for index in (0, 1))
    loaded[first], loaded[second] = loaded[second], loaded[first]


def drop_module(folder):
    modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    write(folder / "modules.json", modules[:-1])


def another_padding(folder):
    content("tokenizer_config.json", pad_token="[MASK]")(folder)
    content("config.json", pad_token_id=4, first_position=1)(folder)


CASES = [("bert", "ForQuestionAnswering"), ("distilbert", "ForMultipleChoice"), *diagonal(ENCODERS, HEADS)]
FAULTS = {
    "swapped weight": (tensors(swap), r"encoder.layers.[01].fc1.weight"),
    "missing bias": (tensors(lambda x: x.pop(VALUE)), VALUE),
    "zero bias": (tensors(lambda x: x[VALUE].zero_()), VALUE),
    "token types": (tensors(lambda x: x[TYPES][1].mul_(1.001)), TYPES),
    "epsilon": (content("config.json", layer_norm_eps=3e-6), "outputs for .* in float64"),
    "activation": (content("config.json", hidden_act="gelu_new"), "outputs for length 1"),
    "dropped module": (drop_module, "modules.json"),
    "pooling": (content("1_Pooling/config.json", pooling_mode_cls_token=True), "1_Pooling/config.json"),
    "padding": (content("tokenizer_config.json", pad_token="[MASK]"), "the tokenizer pads with 4"),
    "both paddings": (another_padding, "the tokenizer .* input_ids"),
    "tokens": (lambda folder: xlm_tokenizer().save_pretrained(folder), "pads with 1"),
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_teacher(tmp_path_factory.mktemp("sentences") / "teacher", modules=("Pooling", "Normalize"))


@pytest.mark.parametrize("case", FAULTS)
def test_faults_in_the_folder(case, teacher, tmp_path, monkeypatch, capsys):
    fault, message = FAULTS[case]
    compare = convert.compare_folder

    def damage(teacher, name, student, folder, *options):
        fault(folder)
        return compare(teacher, name, student, folder, *options)

    monkeypatch.setattr(convert, "compare_folder", damage)
    argv = ["distill", teacher, "--output", tmp_path / "out", "--projection-length", 12]
    assert re.search(message, command_error(capsys, *argv))
    assert not list(tmp_path.iterdir())


def layer(model, index):
    return model.luna.encoder.layers[index]


def embeddings(model):
    return model.luna.embeddings


def swap_modules(model):
    first, second = layer(model, 0), layer(model, 1)
    first.fc1, second.fc1 = second.fc1, first.fc1


COPIES = {
    "swapped weights": swap_modules,
    "missing bias": lambda model: layer(model, 1).attention.value.bias.zero_(),
    "norm": lambda model: layer(model, 1).final_layer_norm.bias.zero_(),
    "position": lambda model: embeddings(model).position_embeddings.weight[-3].mul_(1.5),
    "token types": lambda model: embeddings(model).token_type_embeddings.weight[1].mul_(1.5),
    "a word": lambda model: embeddings(model).word_embeddings.weight[7].mul_(1.5),
    "head": lambda model: model.classifier.out_proj.bias.zero_(),
    "epsilon": lambda model: setattr(embeddings(model).layer_norm, "eps", 1e-3),
}


@pytest.mark.parametrize(("case", "dtype"), diagonal(COPIES, [torch.float32, torch.float64]))
def test_faults_in_the_copy(case, dtype, monkeypatch):
    copy = exact.copy_encoder

    def damage(teacher, student):
        report = copy(teacher, student)
        with torch.no_grad():
            COPIES[case](student)
        return report

    teacher = make_model("bert", "ForSequenceClassification").to(dtype)
    monkeypatch.setattr(exact, "copy_encoder", damage)
    check_error(lambda: from_teacher(teacher, projection_length=20, max_length=20), ConversionError, "of the copy")


def test_a_position_beyond_the_rows_of_p(teacher, tmp_path, monkeypatch):
    """An error at a position beyond the rows of P is found: texts up to the teacher's length are compared too."""
    copy = exact.copy_encoder

    def damage(teacher, student):
        report = copy(teacher, student)
        with torch.no_grad():
            student.embeddings.position_embeddings.weight[-1].mul_(1.001)
        return report

    monkeypatch.setattr(exact, "copy_encoder", damage)
    sizes = {"projection_length": 6, "max_length": 20}
    check_error(lambda: convert_teacher(str(teacher), tmp_path / "out", **sizes), ConversionError, "20 tokens")


@pytest.mark.parametrize(("name", "head"), CASES)
def test_report(name, head, tmp_path, capsys):
    """Folders of every family and head are compared, with token types and options if they have them."""
    padding = 0 if name in ("bert", "distilbert", "electra") else 1
    save_teacher(tmp_path / "teacher", name, head, tokenizer=xlm_tokenizer() if padding else None, pad_token_id=padding)
    argv = ["distill", str(tmp_path / "teacher"), "--output", str(tmp_path / "out"), "--projection-length", "12"]
    assert luna_mega_cli.main(argv) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("largest difference"))
    assert float(line.removeprefix("largest difference from the teacher: outputs ")) < 1e-5


def test_a_teacher_whose_forward_pass_is_changed():
    """A hook of the teacher, which the copy lacks because it is not a weight, raises an error."""
    teacher = make_model("bert")
    teacher.encoder.layer[0].register_forward_hook(lambda module, args, output: output * 1.01)
    check_error(lambda: from_teacher(teacher, projection_length=12), ConversionError, "outputs for length 12")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype):
    teacher = make_model("roberta", "ForTokenClassification").to(dtype)
    assert 0 < from_teacher(teacher, projection_length=12).report.differences["outputs"] < 0.1
