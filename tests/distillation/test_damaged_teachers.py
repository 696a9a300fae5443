"""Damaged teachers, and tokenizers with larger ids, end in one line before a model of their size is built."""

import json
import time

import pytest
import tokenizers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from luna_mega.distillation import calibrate, check_tokenizer, load_teacher
from tests.distillation.models import make_batch, make_model, make_student, make_teacher

WEIGHTS = "model.safetensors"
FIELDS = {
    "layers": ("num_hidden_layers", 10**6, "specifies 1000000 layers, but the weights have 3"),
    "fewer layers": ("num_hidden_layers", 1, "specifies 1 layers, but the weights have 3"),
    "width": ("hidden_size", 10**6, "specifies .* parameters, but the weights have"),
    "overflow": ("hidden_size", 10**15, "bert: "),
    "words": ("vocab_size", 10**9, "specifies .* parameters, but the weights have"),
    "positions": ("max_position_embeddings", 10**9, "specifies .* parameters, but the weights have"),
    "another width": ("intermediate_size", 25, r"has shape \[24.*\], but config.json specifies \[25"),
    "heads": ("num_attention_heads", 0, "bert: ZeroDivisionError"),
    "odd heads": ("num_attention_heads", 5, "bert: ValueError: .*hidden size"),
    "type": ("hidden_size", "many", "bert: .*hidden_size"),
    "none": ("vocab_size", None, "bert: .*vocab_size"),
    "activation": ("hidden_act", "magic", "bert: KeyError: .*magic"),
    "dropout": ("hidden_dropout_prob", float("nan"), "bert: RuntimeError: dropout probability"),
    "architectures": ("architectures", 5, "bert: TypeError"),
    "epsilon": ("layer_norm_eps", float("nan"), "logits are not finite"),
}


@pytest.fixture
def folder(tmp_path):
    make_model("bert").save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def assert_one_line(folder, message):
    start = time.perf_counter()
    with pytest.raises(ValueError, match=message) as error:
        load_teacher(str(folder))
    assert "\n" not in str(error.value) and len(str(error.value)) < 800
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize(("field", "value", "message"), FIELDS.values(), ids=FIELDS)
def test_values_of_the_configuration(folder, field, value, message):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    assert_one_line(folder, message)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "[" * 100_000, "\0\xff"])
def test_a_damaged_configuration(folder, text):
    (folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises((ValueError, OSError)) as error:
        load_teacher(str(folder))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_truncated_weights(folder, part):
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: int(part * len(content))])
    assert_one_line(folder, f"{WEIGHTS}: damaged or truncated")


@pytest.mark.parametrize("text", ["", "[", "5", '{"weight_map": {"a": "../x.safetensors"}}', "[" * 100_000])
def test_a_damaged_index(folder, text):
    (folder / WEIGHTS).unlink()
    (folder / f"{WEIGHTS}.index.json").write_text(text)
    assert_one_line(folder, "index.json: (not JSON|not a JSON object|weight_map)")


def test_weights_too_large_to_calibrate(folder):
    tensors = load_file(folder / WEIGHTS)
    name = "bert.encoder.layer.1.output.LayerNorm.weight"
    save_file(tensors | {name: tensors[name] * 1e30}, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(ValueError, match="not finite|calibration failed") as error:
        teacher = load_teacher(str(folder))
        calibrate(teacher, make_student(teacher, "luna"), [make_batch(teacher)])
    assert "\n" not in str(error.value)


def test_constant_states():
    """Regression test: all weights are finite, but the embeddings make all states constant."""
    teacher = make_teacher("bert")
    teacher.model.bert.embeddings.word_embeddings.weight.data.fill_(1e30)
    with pytest.raises(ValueError, match="calibration failed"):
        calibrate(teacher, make_student(teacher, "luna"), [make_batch(teacher)])


@pytest.mark.parametrize("largest", [40, 10**6])
def test_the_largest_id_of_a_tokenizer_counts(largest):
    """The largest id is compared with the vocabulary, not the number of tokens, which is small here."""
    words = {"<mask>": 0, "<pad>": 1, "a": 2, "b": largest}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, mask_token="<mask>", pad_token="<pad>")
    with pytest.raises(ValueError, match=f"has token id {largest}, .* vocab_size is 40"):
        check_tokenizer(make_teacher("bert"), tokenizer)
