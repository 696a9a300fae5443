"""The published Mega models of LRA, raw speech and language modeling: sizes, recipes, parameter counts."""

import pytest
import torch

from luna_mega import (
    MegaConfig,
    MegaForCausalLM,
    MegaForConditionalGeneration,
    MegaForSequenceClassification,
    MegaForSequencePairClassification,
)

# Preset -> vocabulary, millions of parameters in the original.
PUBLISHED = {
    "lra_listops": (21, 0.602),
    "lra_text": (261, 0.991),
    "lra_retrieval": (261, 1.485),
    "lra_image": (None, 2.839),
    "lra_pathfinder": (None, 1.387),
    "lra_pathfinder128": (None, 0.382),
    "sc_base": (None, 0.343),
    "sc_big": (None, 0.476),
}


def preset(name, **overrides):
    vocabulary, _ = PUBLISHED[name]
    return getattr(MegaConfig, name)(*([] if vocabulary is None else [vocabulary]), **overrides)


def model_class(name):
    return MegaForSequencePairClassification if name == "lra_retrieval" else MegaForSequenceClassification


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters(name):
    with torch.device("meta"):
        model = model_class(name)(preset(name))
    assert round(model.num_parameters() / 1e6, 3) == PUBLISHED[name][1]


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipe(name):
    config, tokens = preset(name), PUBLISHED[name][0] is not None
    assert config.input_type == ("tokens" if tokens else "values")
    assert config.attention_activation == ("softmax" if tokens else "laplace")
    assert {config.normalize_before_mega, config.normalize_before_ffn, config.final_norm} == {not tokens}
    assert (config.dropout_prob, config.classifier_dropout) == ((0.1, 0.1) if tokens else (0.0, 0.0))
    assert config.hidden_dropout_prob == config.attention_probs_dropout_prob == config.nffn_activation_dropout_prob == 0
    assert (config.pooling, config.relative_positional_bias) == ("mean", "simple")
    norms = {"lra_listops": "layernorm", "lra_pathfinder128": "syncbatchnorm"}
    assert config.normalization_type == norms.get(name, "scalenorm" if tokens else "batchnorm")
    assert config.attention_chunk == (1000 if name.startswith("sc_") else None)
    classes = {"lra_listops": 10, "lra_image": 10, "sc_base": 10, "sc_big": 10}
    assert config.num_labels == classes.get(name, 2)


@pytest.mark.parametrize("name", PUBLISHED)
def test_overrides_take_precedence(name):
    config = preset(name, num_hidden_layers=1, max_positions=64, use_chunking=True, chunk_size=16, num_labels=3)
    assert (config.num_hidden_layers, config.attention_chunk, config.num_labels) == (1, 16, 3)
    model = model_class(name)(config).eval()
    inputs = {"input_values": torch.randn(2, 41)}
    if config.input_type == "tokens":
        inputs = {"input_ids": torch.randint(4, 21, (2, 41))}
    if name == "lra_retrieval":
        inputs["pair_input_ids"] = inputs["input_ids"]
    assert model(**inputs).logits.shape == (2, 3)


@pytest.mark.parametrize(("name", "millions"), [("lm_wikitext103", 252.24), ("lm_enwik8", 39.14)])
def test_language_models(name, millions):
    config, adaptive = getattr(MegaConfig, name)(), name == "lm_wikitext103"
    with torch.device("meta"):
        model = MegaForCausalLM(config)
    assert round(model.num_parameters() / 1e6, 2) == millions
    assert (config.vocab_size, config.attention_chunk) == ((267744, 1024) if adaptive else (208, 2048))
    assert (config.relative_positional_bias, config.truncation, config.attention_activation) == (
        "rotary",
        8192,
        "softmax",
    )
    assert (config.normalization_type, config.normalize_before_mega, config.normalize_before_ffn) == (
        "layernorm",
        True,
        True,
    )
    assert (config.final_norm, config.final_norm_affine, config.scale_embedding) == (True, False, True)
    assert (config.dropout_prob, config.adaptive_softmax_dropout) == ((0.3, 0.2) if adaptive else (0.1, 0.0))
    others = {config.hidden_dropout_prob, config.attention_probs_dropout_prob, config.nffn_activation_dropout_prob}
    assert others == ({0.1} if adaptive else {0.0})
    assert config.tie_word_embeddings and config.tie_adaptive_projections is adaptive


def test_language_model_of_another_size():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "shared_representation_size": 6}
    for name, fields in (
        ("lm_wikitext103", {"adaptive_input_cutoffs": [9], "adaptive_softmax_cutoffs": [9]}),
        ("lm_enwik8", {}),
    ):
        model = MegaForCausalLM(getattr(MegaConfig, name)(40, chunk_size=4, **sizes, **fields)).eval()
        assert model(torch.randint(4, 40, (2, 11))).logits.shape == (2, 11, 40)


@pytest.mark.parametrize(
    ("name", "vocabulary", "millions"),
    [("wmt_en_de", 32768, 63.14), ("wmt_en_de", 33000, 63.26), ("wmt_en_de_big", 33000, 217.70)],
)
def test_translation(name, vocabulary, millions):
    """Millions of parameters: the base model has the original's number; for the big one none is published."""
    config = getattr(MegaConfig, name)(vocabulary)
    with torch.device("meta"):
        model = MegaForConditionalGeneration(config)
    assert round(model.num_parameters() / 1e6, 2) == millions
    if name == "wmt_en_de":
        body = model.num_parameters() - model.lm_head.weight.numel()
        assert round(body / 1e6, 2) == 46.36
    assert (config.normalize_before_mega, config.final_norm, config.scale_embedding) == (False, False, True)
    assert (config.relative_positional_bias, config.truncation, config.attention_chunk) == ("simple", None, None)
    assert config.dropout_prob == (0.15 if name == "wmt_en_de" else 0.3)
    others = {config.hidden_dropout_prob, config.attention_probs_dropout_prob, config.nffn_activation_dropout_prob}
    assert others == {0.1} and config.shares_embeddings and config.vocab_size == vocabulary


def test_translation_of_another_size():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "shared_representation_size": 6}
    model = MegaForConditionalGeneration(MegaConfig.wmt_en_de(40, num_decoder_layers=2, **sizes)).eval()
    ids = torch.randint(4, 40, (2, 11))
    assert model(ids, labels=ids).logits.shape == (2, 11, 40) and len(model.mega.decoder.layers) == 2
