"""Luna checkpoints: heads, tasks, contradictions between args and tensors, dtypes.

`test_golden.py` has the configuration of every kind of checkpoint.
"""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from tests.convert.folders import half, load

HEADS = {
    "sentence_classification_head": "cls",
    "pooling_classification_head": "packed_max",
    "attention_classification_head": "packed_attention",
}


@pytest.mark.parametrize("name", HEADS)
def test_every_kind_of_head_by_name(convert, make, name):
    state = make.bert(heads=[(other, 3) for other in HEADS], pooler_activation_fn="relu", pooler_dropout=0.3)
    report = convert.report(state, "--head", name)
    folder = convert.output
    model = load(folder, AutoModelForSequenceClassification)
    assert model.config.architectures == ["LunaForSequenceClassification"] and model.config.num_labels == 3
    assert model.config.pooling == HEADS[name]
    assert (model.config.classifier_activation, model.config.classifier_dropout) == ("relu", 0.3)
    source = f"classification_heads.{name}."
    mapped = {row["source"]: row["target"] for row in report["mapped"]}
    ours = model.state_dict()
    for key, tensor in state["model"].items():
        if key.startswith(source):
            assert torch.equal(ours[mapped[key]], tensor)
    dropped = {row["source"] for row in report["dropped"]}
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


def test_unknown_head_name(convert, make):
    assert "'{layer}'" in convert.error(make.bert(heads=[("{layer}", 2)]))


LAYER = "encoder.sentence_encoder.layers.1"


@pytest.mark.parametrize("tied", [True, False])
def test_lm_weight_against_its_flag(convert, make, tied):
    """An output weight that differs from the embedding is not tied.

    An equal one is tied unless `untie_weights_luna` is set.
    """
    config = AutoConfig.from_pretrained(convert(make.bert(tied_lm=tied, untie_weights_luna=tied)))
    assert config.tie_word_embeddings is False
    assert ("args.untie_weights_luna" in convert.screen) is not tied


def test_nan_is_reported_and_converted(convert, make):
    state = make.bert()
    state["model"][f"{LAYER}.fc1.weight"][0, 0] = float("nan")
    state["model"]["encoder.sentence_encoder.embed_tokens.weight"][3, 2] = float("inf")
    state["model"]["encoder.sentence_encoder.embed_tokens.weight"][3, 3] = float("nan")
    report = convert.report(state)
    assert "NaN or Inf in 2 of" in convert.screen
    bad = ["luna.embeddings.word_embeddings.weight", "luna.encoder.layers.1.fc1.weight"]
    assert sorted(report["non_finite"]) == bad
    assert AutoConfig.from_pretrained(convert.output).tie_word_embeddings is True
    assert load(convert.output, AutoModelForMaskedLM).luna.encoder.layers[1].fc1.weight[0, 0].isnan()


def test_minus_one_is_undone_in_float32(convert, make):
    """One is added to the norm weights in float32; in half precision, 1 + 2**-12 would be 1."""
    state = make.bert()
    norms = [key for key in state["model"] if key.endswith("layer_norm.weight")]
    for key in norms:
        state["model"][key] = torch.full((make.WIDTH,), 2.0**-12)
    model = load(convert(half(state)), AutoModelForMaskedLM)
    assert torch.equal(model.luna.embeddings.layer_norm.weight, torch.full((make.WIDTH,), 1 + 2.0**-12))


@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16"])
def test_dtypes(convert, make, dtype):
    """Weights in half precision are written as float32 unless the option specifies another dtype."""
    state = half(make.bert())
    report = convert.report(state, *(["--dtype", dtype] if dtype else []))
    model = load(convert.output, AutoModelForMaskedLM)
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype or "float32")}
    assert report["dtype_in"] == {"float16": len(state["model"])} and report["dtype_out"] == (dtype or "float32")
    assert f"float16 -> {dtype or 'float32'}" in convert.screen


def test_buffers_may_be_absent(convert, make):
    state = make.lra23()
    del state["model"]["encoder.encoder.projected_positions"]
    del state["model"]["encoder.encoder.embed_positions._float_tensor"]
    assert load(convert(state)).config.position_embedding_type == "sinusoidal"


def test_sinusoids_in_half_precision(convert, make):
    convert(half(make.lra23()))


def test_without_embedding_norm(convert, make):
    state = make.lra23(encoder_normalize_before=False)
    state["model"] = {key: tensor for key, tensor in state["model"].items() if "emb_layer_norm" not in key}
    assert load(convert(state)).config.embedding_norm is False
