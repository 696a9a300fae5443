import json

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
)

from tests.convert.exports import load

HEADS = {
    "sentence_classification_head": "cls",
    "pooling_classification_head": "packed_max",
    "attention_classification_head": "packed_attention",
}


def report(folder):
    return json.loads((folder / "conversion_report.json").read_text())


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tied_lm", [True, False])
def test_masked_lm(convert, make, tied, tied_lm, legacy):
    state = make.bert(tied=tied, tied_lm=tied_lm, untie_luna_kv=not tied, untie_weights_luna=not tied_lm)
    folder = convert(state, legacy=legacy)
    model = load(folder, AutoModelForMaskedLM)
    assert type(model).__name__ == "LunaForMaskedLM" == AutoConfig.from_pretrained(folder).architectures[0]
    config = model.config
    assert (config.tie_key_value, config.tie_word_embeddings) == (tied, tied_lm)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (17, 16, 24)
    assert (config.projection_length, config.max_position_embeddings, config.num_hidden_layers) == (6, 20, 2)
    assert convert.screen.count("\nwarning ") == legacy  # legacy files have no checksums
    ours = model.state_dict()
    for row in report(folder)["mapped"]:
        assert torch.equal(ours[row["target"]], state["model"][row["source"]]), row
    assert report(folder)["parameters"] == {"model": model.num_parameters(), "file": model.num_parameters()}
    assert model(torch.tensor([[0, 5, 6, 2]])).logits.isfinite().all()


@pytest.mark.parametrize("name", HEADS)
def test_every_kind_of_head_by_name(convert, make, name):
    state = make.bert(heads=[(other, 3) for other in HEADS], pooler_activation_fn="relu", pooler_dropout=0.3)
    folder = convert(state, "--head", name)
    model = load(folder, AutoModelForSequenceClassification)
    assert model.config.architectures == ["LunaForSequenceClassification"] and model.config.num_labels == 3
    assert model.config.pooling == HEADS[name]
    assert (model.config.classifier_activation, model.config.classifier_dropout) == ("relu", 0.3)
    source = f"classification_heads.{name}."
    mapped = {row["source"]: row["target"] for row in report(folder)["mapped"]}
    ours = model.state_dict()
    for key, tensor in state["model"].items():
        if key.startswith(source):
            assert torch.equal(ours[mapped[key]], tensor)
    dropped = {row["source"] for row in report(folder)["dropped"]}
    heads = {key for key in state["model"] if key.startswith("classification_heads.") and not key.startswith(source)}
    assert dropped == heads
    masked = load(folder, AutoModelForMaskedLM).state_dict()
    assert torch.equal(masked["lm_head.decoder.bias"], state["model"]["encoder.lm_head.bias"])
    _, info = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]


@pytest.mark.parametrize(
    ("task", "heads", "expected"),
    [
        ("masked_lm", [("a", 3)], "LunaForMaskedLM"),
        ("sentence_prediction", [("a", 3)], "LunaForSequenceClassification"),
        ("sentence_prediction", [("a", 3), ("b", 2)], "LunaForMaskedLM"),
        ("sentence_prediction", [], "LunaForMaskedLM"),
        ("sentence_ranking", [("a", 1)], "LunaForMultipleChoice"),
        ("commonsense_qa", [("a", 1)], "LunaForMultipleChoice"),
        ("sentence_ranking", [("a", 4)], "LunaForSequenceClassification"),
    ],
)
def test_class_by_task(convert, make, task, heads, expected):
    folder = convert(make.bert(heads=heads, task=task))
    assert AutoConfig.from_pretrained(folder).architectures == [expected]


def test_multiple_choice_loads(convert, make):
    folder = convert(make.bert(heads=[("sentence_classification_head", 1)], task="sentence_ranking"))
    model = load(folder, AutoModelForMultipleChoice)
    assert model(torch.tensor([[[0, 5, 2], [0, 6, 2]]])).logits.shape == (1, 2)


def test_regression(convert, make):
    folder = convert(make.bert(heads=[("a", 1)], task="sentence_prediction", regression_target=True))
    model = load(folder, AutoModelForSequenceClassification)
    assert model.config.problem_type == "regression" and model.config.num_labels == 1


def test_missing_head_error_lists_available_heads(convert, make):
    message = convert.error(make.bert(heads=[("a_head", 3), ("b_head", 2)]), "--head", "c_head")
    assert "c_head" in message and "a_head, b_head" in message
    assert "no classification head" in convert.error(make.bert(), "--head", "c_head")


def test_unknown_head_name(convert, make):
    assert "'{layer}'" in convert.error(make.bert(heads=[("{layer}", 2)]))


def test_old_args_get_the_defaults_of_their_arch(convert, make):
    missing = {"encoder_layers": None, "encoder_attention_heads": None, "max_positions": None}
    config = AutoConfig.from_pretrained(convert(make.bert(arch="luna_large_512", **missing)))
    assert (config.num_attention_heads, config.num_hidden_layers, config.max_position_embeddings) == (16, 2, 20)
    assert (config.dropout, config.attention_dropout, config.activation_dropout) == (0.1, 0.1, 0.0)
    assert (config.hidden_act, config.classifier_activation) == ("gelu", "tanh")
    assert config.dynamic_projection_length is True


def test_args_are_kept(convert, make):
    args = {"dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.4, "encoder_layerdrop": 0.05}
    config = AutoConfig.from_pretrained(convert(make.bert(fix_projection_length=True, activation_fn="relu", **args)))
    dropouts = (config.dropout, config.attention_dropout, config.activation_dropout, config.layerdrop)
    assert dropouts == tuple(args.values())
    assert config.hidden_act == "relu" and config.dynamic_projection_length is False


def test_shapes_win_over_args(convert, make):
    folder = convert(make.bert(encoder_ffn_embed_dim=99, max_positions=512, untie_luna_kv=True))
    config = AutoConfig.from_pretrained(folder)
    assert (config.intermediate_size, config.max_position_embeddings, config.tie_key_value) == (24, 20, True)
    assert "args.encoder_ffn_embed_dim = 99 but the tensors have 24" in convert.screen
    assert convert.screen.count("using the tensors") == 3


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"encoder_layers": 3}, "args.encoder_layers = 3 but the file has 2"),
        ({"encoder_attention_heads": 5}, "divisible by num_attention_heads"),
        ({"encoder_attention_heads": None, "arch": "mine"}, "args.encoder_attention_heads is missing"),
        ({"activation_fn": "swoosh"}, "args.activation_fn = 'swoosh'"),
        ({"dropout": 1.5}, "dropout"),
    ],
)
def test_inconsistent_args(convert, make, args, expected):
    message = convert.error(make.bert(**args))
    assert expected in message and str(convert.file) in message


LAYER = "encoder.sentence_encoder.layers.1"


@pytest.mark.parametrize(
    "key",
    [
        f"{LAYER}.self_attn.pc_proj.weight",
        f"{LAYER}.fc1.bias",
        "encoder.sentence_encoder.embed_tokens.weight",
        "encoder.sentence_encoder.proj_emb_layer_norm.weight",
        "encoder.lm_head.weight",
        "encoder.lm_head.dense.bias",
        "classification_heads.a.out_proj.bias",
        "classification_heads.a.out_proj.weight",
    ],
)
def test_missing_tensor(convert, make, key):
    state = make.bert(heads=[("a", 2)], task="sentence_prediction")
    del state["model"][key]
    message = convert.error(state)
    assert "missing" in message and key in message


def test_missing_layer(convert, make):
    state = make.bert(encoder_layers=None)
    state["model"] = {key.replace(".layers.1.", ".layers.2."): tensor for key, tensor in state["model"].items()}
    assert "layers [0, 2]" in convert.error(state)


@pytest.mark.parametrize("key", ["encoder.sentence_encoder.quant_noise.weight", f"{LAYER}.self_attn.k_proj.bias", "x"])
def test_unexpected_tensor(convert, make, key):
    state = make.bert()
    state["model"][key] = torch.zeros(2, 2)
    message = convert.error(state)
    assert "unexpected" in message and key in message


@pytest.mark.parametrize(
    ("key", "shape", "expected"),
    [
        (f"{LAYER}.fc2.weight", (16, 23), "[16, 23], the model needs [16, 24]"),
        ("encoder.sentence_encoder.projected_embeddings", (6, 15), "[6, 15], the model needs [6, 16]"),
        ("encoder.sentence_encoder.embed_tokens.weight", (17,), "[17], expected [vocabulary, width]"),
        ("encoder.lm_head.bias", (18,), "[18], the model needs [17]"),
    ],
)
def test_wrong_shape(convert, make, key, shape, expected):
    state = make.bert()
    state["model"][key] = torch.ones(shape)
    message = convert.error(state)
    assert f"'{key}'" in message and expected in message


@pytest.mark.parametrize("tied", [True, False])
def test_lm_weight_against_its_flag(convert, make, tied):
    """A weight different from the embedding stays untied for any flag; an equal one is tied unless the flag is off."""
    config = AutoConfig.from_pretrained(convert(make.bert(tied_lm=tied, untie_weights_luna=tied)))
    assert config.tie_word_embeddings is False
    assert ("args.untie_weights_luna" in convert.screen) is not tied


def test_nan_is_reported_and_converted(convert, make):
    state = make.bert()
    state["model"][f"{LAYER}.fc1.weight"][0, 0] = float("nan")
    state["model"]["encoder.sentence_encoder.embed_tokens.weight"][3, 2] = float("inf")
    state["model"]["encoder.sentence_encoder.embed_tokens.weight"][3, 3] = float("nan")
    folder = convert(state)
    assert "NaN or Inf in 2 of" in convert.screen
    bad = ["luna.embeddings.word_embeddings.weight", "luna.encoder.layers.1.fc1.weight"]
    assert sorted(report(folder)["non_finite"]) == bad
    assert AutoConfig.from_pretrained(folder).tie_word_embeddings is True
    assert load(folder, AutoModelForMaskedLM).luna.encoder.layers[1].fc1.weight[0, 0].isnan()


def test_half_precision_files_are_written_as_float32(convert, make):
    state = make.bert()
    state["model"] = {key: tensor.half() for key, tensor in state["model"].items()}
    folder = convert(state)
    model = load(folder, AutoModelForMaskedLM)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert report(folder)["dtype_in"] == {"float16": len(state["model"])}
    assert "float16 -> float32" in convert.screen


def test_minus_one_is_undone_in_float32(convert, make):
    """In half precision 1 + 2**-12 would be 1."""
    state = make.bert()
    norms = [key for key in state["model"] if key.endswith("layer_norm.weight")]
    for key in norms:
        state["model"][key] = torch.full((make.WIDTH,), 2.0**-12)
    state["model"] = {key: tensor.half() for key, tensor in state["model"].items()}
    model = load(convert(state), AutoModelForMaskedLM)
    assert torch.equal(model.luna.embeddings.layer_norm.weight, torch.full((make.WIDTH,), 1 + 2.0**-12))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtype_option(convert, make, dtype):
    folder = convert(make.bert(), "--dtype", dtype)
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    model = AutoModelForMaskedLM.from_pretrained(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
