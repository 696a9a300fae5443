"""`luna-mega verify` compares two models on the same inputs."""

import json

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import luna_mega
from luna_mega import (
    LunaConfig,
    LunaForMaskedLM,
    LunaForMultipleChoice,
    LunaForSequenceClassification,
    LunaModel,
    MegaForMaskedLM,
    MegaForSequenceClassification,
    MegaModel,
)
from luna_mega.convert import ConversionError
from luna_mega.inspection.verify import compare
from luna_mega_cli import main
from tests.convert.mega import mega
from tests.convert.mega_lm import KINDS, mega_lm
from tests.errors import command_error

SIZES = {"vocab_size": 17, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
LUNA = SIZES | {"num_attention_heads": 4, "projection_length": 6, "max_position_embeddings": 20}
MEGA = SIZES | {"nffn_hidden_size": 8, "shared_representation_size": 8, "ema_projection_size": 2}
DECODER = {"is_decoder": True, "bidirectional": False, "add_lm_hidden_dense_layer": False}
PICTURES = {"input_type": "patches", "image_size": 32, "patch_size": 4, "output_projection": True, "final_norm": True}
OF_CLASS = {
    "LunaForCausalLM": {"is_decoder": True},
    "MegaForCausalLM": DECODER,
    "MegaForImageClassification": PICTURES,
}
# test_decoders.py compares encoder-decoders and Megalodon.
CLASSES = [
    name
    for name in luna_mega.__all__
    if name.startswith(("LunaFor", "MegaFor", "LunaModel", "MegaModel")) and "Conditional" not in name
]


def save(folder, model_class=LunaForMaskedLM, **fields):
    sizes = LUNA if model_class.config_class is LunaConfig else MEGA
    fields = OF_CLASS.get(model_class.__name__, {}) | fields
    model_class(model_class.config_class(**sizes | fields)).save_pretrained(folder)
    return folder


def change(folder, new, name, edit):
    """Write a copy of the model with one edited tensor and return its folder."""
    new.mkdir()
    (new / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    edit(tensors[name])
    save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    return new


@pytest.mark.parametrize("name", CLASSES)
def test_a_model_equals_itself(tmp_path, name):
    folder = save(tmp_path / "a", getattr(luna_mega, name))
    comparison = compare(folder, folder, tolerance=0.0, length=9)
    assert comparison.within and comparison.largest == 0 and comparison.model_class == name
    assert [row["layer"] for row in comparison.layers] == [0, 1, 2]
    results = {"Model": ["last_hidden_state"], "ForQuestionAnswering": ["start_logits", "end_logits"]}
    assert list(comparison.results) == results.get(name[4:], ["logits"])


def test_models_of_two_families(tmp_path):
    luna, mega = save(tmp_path / "luna", LunaModel), save(tmp_path / "mega", MegaModel)
    with pytest.raises(ConversionError, match="class: 'MegaModel' and 'LunaModel'"):
        compare(mega, luna)


def change_last_row(table):
    table[-1] += torch.linspace(20, 40, table[-1].numel()).view_as(table[-1])


EMBEDDINGS = "luna.embeddings.{}_embeddings"
SIMPLE = {"relative_positional_bias": "simple", "max_positions": 70}
# Class, fields, and the tensor whose last row is edited: token type, position, row of P or relative position.
UNUSUAL = {
    "types": (LunaForSequenceClassification, {"type_vocab_size": 3}, EMBEDDINGS.format("token_type") + ".weight"),
    "types of options": (LunaForMultipleChoice, {"type_vocab_size": 2}, EMBEDDINGS.format("token_type") + ".weight"),
    "positions": (LunaForMaskedLM, {"max_position_embeddings": 99}, EMBEDDINGS.format("position") + ".weight"),
    "P": (LunaForMaskedLM, {"projection_length": 30, "max_position_embeddings": 99}, EMBEDDINGS.format("packed")),
    "types of Mega": (
        *(MegaForMaskedLM, {"add_token_type_embeddings": True}),
        "mega.embedding_layer.token_type_embeddings.weight",
    ),
    "bias": (MegaForMaskedLM, SIMPLE, "mega.layers.0.mega_layer.rel_pos_bias.rel_pos_bias"),
    "bias in chunks": (
        *(MegaForMaskedLM, {"use_chunking": True, "chunk_size": 40, **SIMPLE}),
        "mega.layers.0.mega_layer.rel_pos_bias.rel_pos_bias",
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_differences_of_every_input_are_seen(tmp_path, name):
    model_class, fields, tensor = UNUSUAL[name]
    folder = save(tmp_path / "a", model_class, **fields)
    assert not compare(folder, change(folder, tmp_path / "b", tensor, change_last_row)).within


@pytest.mark.parametrize(
    "fields",
    [
        {"position_embedding_type": "sinusoidal", "input_type": "values", "pooling": "mean"},
        {"dynamic_projection_length": False, "pooling": "packed_mean", "drop_first_token": True},
    ],
)
def test_other_inputs(tmp_path, fields):
    folder, other = (save(tmp_path / name, LunaForSequenceClassification, **fields) for name in "ab")
    assert compare(folder, folder, tolerance=0.0).within and not compare(folder, other, length=9).within


@pytest.mark.parametrize(
    "fields",
    [{"input_type": "values", "relative_positional_bias": "simple"}, {"use_chunking": True, "chunk_size": 8}],
)
def test_other_inputs_of_mega(tmp_path, fields):
    folder = save(tmp_path / "a", MegaForSequenceClassification, pooling="mean", **fields)
    printed = str(compare(folder, folder, length=90, tolerance=0.0))
    assert "packed" not in printed and "embeddings" in printed and "equal in every number" in printed


def test_differences_start_at_their_layer(tmp_path, capsys):
    folder = save(tmp_path / "a")
    name = "luna.encoder.layers.0.fc2.bias"
    other = change(folder, tmp_path / "b", name, lambda bias: bias.add_(torch.linspace(-0.01, 0.01, 16)))
    assert main(["verify", str(folder), str(other)]) == 1
    table = capsys.readouterr().out
    assert "MORE THAN 1e-05" in table and "A        " in table
    comparison = compare(folder, other)
    hidden, packed = ([row[kind] for row in comparison.layers] for kind in ("hidden", "packed"))
    assert [value > 0 for value in hidden] == [False, True, True]
    assert [value > 0 for value in packed] == [False, False, True]
    assert comparison.largest == max(*hidden, *packed, comparison.results["logits"])
    assert 0.005 < hidden[1] < 0.1
    assert main(["verify", str(folder), str(other), "--tolerance", str(comparison.largest)]) == 0
    other = change(folder, tmp_path / "c", "lm_head.decoder.bias", lambda bias: bias[3].add_(1.0))
    comparison = compare(folder, other)
    assert comparison.results["logits"] == pytest.approx(1.0)
    assert not any(row["hidden"] or row["packed"] for row in comparison.layers)


def test_padding_is_not_compared(tmp_path):
    folder = save(tmp_path / "a", LunaModel)
    other = change(folder, tmp_path / "b", "embeddings.word_embeddings.weight", lambda table: table[1, 0].add_(1.0))
    assert compare(folder, other, tolerance=0.0).within
    other = change(folder, tmp_path / "c", "embeddings.packed_embeddings", lambda table: table[5, 0].add_(1.0))
    assert compare(folder, other, batch=1, length=5, tolerance=0.0).within
    assert not compare(folder, other, batch=1, length=6).within


def test_one_number_that_is_not_finite(tmp_path, capsys):
    folder = save(tmp_path / "a")
    other = change(folder, tmp_path / "b", "lm_head.decoder.bias", lambda bias: bias[0].fill_(float("nan")))
    assert main(["verify", str(folder), str(other)]) == 1
    assert "NaN/Inf" in capsys.readouterr().out
    assert main(["verify", str(folder), str(other), "--json", "--tolerance", "inf"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["results"] == {"logits": None} and found["largest"] is None and found["within"] is False
    assert compare(other, other, tolerance=0.0).within


def test_json(tmp_path, capsys):
    folder = save(tmp_path / "a", LunaForMultipleChoice)
    assert main(["verify", str(folder), str(folder), "--json", "--batch", "3", "--length", "7", "--seed", "5"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["inputs"]["random"] == {"input_ids": [3, 2, 7], "attention_mask": [3, 2, 7]}
    assert found["within"] is True and found["largest"] == 0 and len(found["layers"]) == 3


def test_checkpoints_are_converted(convert, make, tmp_path, capsys):
    state = make.bert(heads=[("a", 2), ("b", 3)])
    folder = convert(state, "--head", "b")
    file = convert.file
    assert main(["verify", str(folder), str(file), "--head", "b", "--tolerance", "0"]) == 0
    assert main(["verify", str(file), str(file)]) == 0
    assert "LunaForMaskedLM" in capsys.readouterr().out
    assert main(["verify", str(folder), str(file)]) == 1
    message = capsys.readouterr().err
    assert "'LunaForSequenceClassification' and 'LunaForMaskedLM'" in message and "--head" in message
    state["model"]["encoder.lm_head.layer_norm.weight"] += 0.5
    torch.save(state, tmp_path / "other.pt")
    assert main(["verify", str(file), str(tmp_path / "other.pt")]) == 1
    assert main(["verify", str(folder), str(tmp_path / "other.pt"), "--head", "b", "--layer-norm", "standard"]) == 0


def test_input_file(tmp_path, capsys):
    folder, file = save(tmp_path / "a"), tmp_path / "inputs.safetensors"
    save_file({"input_ids": torch.tensor([[0, 5, 2, 1]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])}, file)
    assert main(["verify", str(folder), str(folder), "--inputs", str(file)]) == 0
    assert "input_ids [1, 4]" in capsys.readouterr().out
    other = change(
        folder, tmp_path / "b", "luna.embeddings.word_embeddings.weight", lambda table: table[6, 0].add_(1.0)
    )
    assert compare(folder, other, inputs=file).layers[0]["hidden"] == 0


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"tokens": torch.zeros(1, 4).long()}, "tokens: LunaForMaskedLM has no such inputs"),
        ({"pair_input_ids": torch.zeros(1, 4).long()}, "it supports input_ids, attention_mask"),
        ({}, "contains no tensors"),
        ({"input_ids": torch.tensor([[0, 17]])}, "outside of the vocabulary, 0 to 16"),
        ({"input_ids": torch.zeros(1, 21).long()}, "21 exceeds the 20 learned positions"),
        ({"input_ids": torch.zeros(1, 4)}, "input_ids has dtype torch.float32; ids must be integers"),
        ({"input_ids": torch.zeros(1, 4).long(), "attention_mask": torch.ones(1, 3)}, "[1, 4]"),
        ({"attention_mask": torch.ones(1, 3)}, "exactly one of input_ids"),
    ],
)
def test_wrong_inputs(tmp_path, capsys, tensors, expected):
    folder, file = save(tmp_path / "a"), tmp_path / "inputs.safetensors"
    save_file(tensors, file)
    assert expected in command_error(capsys, "verify", folder, folder, "--inputs", file)


@pytest.mark.parametrize("model_class", [LunaForMaskedLM, LunaForMultipleChoice])
def test_text(tmp_path, capsys, model_class):
    first, second = save(tmp_path / "a", model_class), save(tmp_path / "b", model_class)
    assert "neither model has a tokenizer" in command_error(capsys, "verify", first, second, "--text", "w1")
    words = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3} | {f"w{index}": 4 + index for index in range(13)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>").save_pretrained(second)
    comparison = compare(first, second, texts=["w1 w2 w3", "w4"])
    choices = [1] if model_class is LunaForMultipleChoice else []
    assert comparison.inputs["texts"]["input_ids"] == [*choices, 2, 3] and not comparison.within
    assert compare(second, second, texts=["w1 " * 30], tolerance=0.0).inputs["texts"]["input_ids"] == [*choices, 1, 20]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"vocab_size": 18}, "vocab_size: 17 and 18"),
        ({"num_hidden_layers": 1}, "num_hidden_layers: 2 and 1"),
        ({"hidden_size": 8}, "hidden_size: 16 and 8"),
        ({"projection_length": 5}, "projection_length: 6 and 5"),
    ],
)
def test_other_kinds(tmp_path, capsys, fields, expected):
    assert expected in command_error(capsys, "verify", save(tmp_path / "a"), save(tmp_path / "b", **fields))


def test_other_classes(tmp_path, capsys):
    first = save(tmp_path / "a", LunaForSequenceClassification, num_labels=2)
    second = save(tmp_path / "b", LunaForSequenceClassification, num_labels=3)
    assert "shapes [1, 2] and [1, 3]" in command_error(capsys, "verify", first, second)


def test_incomplete_weights(tmp_path, capsys):
    folder = save(tmp_path / "a")
    tensors = load_file(folder / "model.safetensors")
    del tensors["luna.encoder.layers.1.fc1.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "luna.encoder.layers.1.fc1.weight" in command_error(capsys, "verify", folder, folder)
    assert "no such file or folder" in command_error(capsys, "verify", folder, tmp_path / "absent")


@pytest.mark.parametrize(
    "options",
    [["--batch", "0"], ["--length", "x"], ["--text", "a", "--inputs", "b"], ["--text", "a", "--seed", "1"]],
)
def test_usage(tmp_path, options):
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(tmp_path), str(tmp_path), *options])
    assert stop.value.code == 2


@pytest.mark.parametrize("options", [["--head", "a"], ["--layer-norm", "standard"], ["--ema-convention", "main"]])
def test_options_for_checkpoints_require_one(tmp_path, capsys, options):
    folder = save(tmp_path / "a")
    assert f"{options[0]} applies to checkpoints" in command_error(capsys, "verify", folder, folder, *options)


def test_generation_config_is_an_object(tmp_path, capsys):
    folder = save(tmp_path / "a")
    (folder / "generation_config.json").write_text("[]", encoding="utf-8")
    assert "generation_config.json: not a JSON object" in command_error(capsys, "verify", folder, folder)


def test_transformers_is_quiet_only_here(tmp_path):
    logging = pytest.importorskip("transformers.utils.logging")
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with pytest.raises(ConversionError):
        compare(tmp_path / "absent", tmp_path)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize("kind", ["untied", "adaptive"])
def test_language_models_of_mega(convert, tmp_path, kind):
    state = mega_lm(**KINDS[kind])
    folder = convert(state)
    comparison = compare(folder, convert.file, tolerance=0.0, length=9)
    assert comparison.within and list(comparison.results) == ["logits"]
    assert ModelCard.load(folder / "README.md").data.pipeline_tag == "text-generation"
    state["model"]["decoder.layers.1.mega_layer.h_proj.weight"] *= 1.5
    torch.save(state, tmp_path / "other.pt")
    assert [row["hidden"] > 0 for row in compare(folder, tmp_path / "other.pt", length=9).layers] == [
        False,
        False,
        True,
    ]


def test_checkpoints_of_the_two_branches(convert, tmp_path):
    """A file that is loaded with the convention of the other branch gives different results."""
    state = mega(rotary=True)
    folder = convert(state)
    assert compare(folder, convert.file, length=9).largest == 0
    other = compare(folder, convert.file, ema_convention="flash", length=9)
    assert other.layers[0]["hidden"] == 0 and other.layers[1]["hidden"] > 1e-3
    assert main(["verify", str(folder), str(folder), "--ema-convention", "flash"]) == 1


def test_v4_folders(parity_folder):
    """Folders of transformers v4 are supported without conversion."""
    folder = parity_folder("mega", "hf_mlm_softmax_rotary_scalenorm")
    assert compare(folder, folder, tolerance=0.0).within
