"""Mega's encoder-decoder: weights, limits of the biases, configurations."""

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from luna_mega import (
    MegaConfig,
    MegaForCausalLM,
    MegaForConditionalGeneration,
    MegaModel,
    MegaSeq2SeqModel,
)
from tests.modeling import mega_decoders
from tests.modeling.decoders import padded
from tests.modeling.mega_decoders import WITH_ENCODER


def make(**fields):
    return mega_decoders.make(is_encoder_decoder=True, **fields)


@pytest.fixture(params=WITH_ENCODER)
def model(request):
    return make(**WITH_ENCODER[request.param])


def batch(source_side="right", target_side="right"):
    source, source_mask = padded([13, 4, 9], 13, source_side)
    target, target_mask = padded([11, 17, 6], 17, target_side)
    names = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
    return dict(zip(names, (source, source_mask, target, target_mask), strict=True))


@torch.no_grad()
def test_weights_match_the_output(model):
    """`output_attentions=True` uses another code path of cross-attention."""
    inputs = batch("left", "left")
    keep = inputs["decoder_attention_mask"].bool()
    plain, recorded = (
        model(**inputs),
        model(**inputs, output_attentions=True, output_hidden_states=True, use_cache=False),
    )
    torch.testing.assert_close(plain.logits[keep], recorded.logits[keep])
    decoder = model.config.decoder_config
    assert len(recorded.cross_attentions) == len(recorded.decoder_attentions) == decoder.num_hidden_layers
    assert len(recorded.encoder_attentions) == model.config.num_hidden_layers
    assert len(recorded.decoder_hidden_states) == decoder.num_hidden_layers + 1
    assert len(recorded.encoder_hidden_states) == model.config.num_hidden_layers + 1
    for weights in recorded.cross_attentions:
        assert weights.shape == (3, 1, 17, 13)
        assert (weights.permute(0, 3, 1, 2)[inputs["attention_mask"] == 0] == 0).all()
        if decoder.attention_activation == "softmax":
            torch.testing.assert_close(weights.sum(-1), torch.ones(3, 1, 17).double())


def test_bad_input():
    model, inputs = make(**WITH_ENCODER["laplace simple post-norm"]), batch()
    source, mask, target = (inputs[name] for name in ("input_ids", "attention_mask", "decoder_input_ids"))
    past = model(**inputs).past_key_values
    with pytest.raises(ValueError, match="supports at most 24 positions, got 25"):
        model(torch.full((1, 25), 4), decoder_input_ids=target[:1])
    with pytest.raises(ValueError, match="max_length=32 requires 31 positions .* relative bias has 30"):
        model.generate(source, max_length=32)
    with pytest.raises(ValueError, match=r"another source.*\(3, 5, 8\)"):
        model(source[:, :5], mask[:, :5], target, past_key_values=past)
    with pytest.raises(ValueError, match="does not fit this model and batch"):
        make(truncation=3)(**inputs, past_key_values=past)
    with pytest.raises(ValueError, match="Mega models do not support decoder_position_ids"):
        model(**inputs, decoder_position_ids=target)
    with pytest.raises(ValueError, match="output_attentions"):
        model(**inputs, past_key_values=past, output_attentions=True)
    with pytest.raises(ValueError, match=r"encoder_attention_mask must have the shape \[3, 13\], got \[3, 12\]"):
        model(**inputs | {"encoder_outputs": BaseModelOutput(torch.zeros(3, 13, 12)), "attention_mask": mask[:, 1:]})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decoder_start_token_id": 1}, "are both 1"),
        ({"decoder_start_token_id": 30}, r"decoder_start_token_id .*\(0 to 29\), got 30"),
        ({"is_decoder": True, "bidirectional": False}, "omit is_decoder"),
        ({"input_type": "values"}, "needs input_type='tokens'"),
        ({"adaptive_input_cutoffs": [9], "adaptive_softmax_cutoffs": [9]}, "no adaptive vocabulary"),
        ({"embedding_size": 7}, "needs embedding_size=12"),
        ({"num_decoder_layers": 0}, "num_decoder_layers must be at least 1, got 0"),
        ({"decoder_shared_representation_size": 5}, "even `shared_representation_size`, got 5"),
        ({"decoder_vocab_size": 23, "share_encoder_decoder_embeddings": True}, "decoder_vocab_size=23"),
        ({"tie_word_embeddings": False, "share_encoder_decoder_embeddings": True}, "tie_word_embeddings=False"),
    ],
    ids=str,
)
def test_bad_configurations(fields, message):
    with pytest.raises(Exception, match=message):
        make(**fields)


def test_classes_and_configurations_that_do_not_fit():
    config = make().config
    with pytest.raises(ValueError, match="is an encoder or a decoder"):
        MegaModel(config)
    with pytest.raises(ValueError, match="requires a configuration with is_decoder=True"):
        MegaForCausalLM(config)
    for cls in (MegaSeq2SeqModel, MegaForConditionalGeneration):
        with pytest.raises(ValueError, match="requires a MegaSeq2SeqConfig, got a MegaConfig"):
            cls(MegaConfig())
    with pytest.raises(ValueError, match="encoder_hidden_states require a decoder"):
        MegaModel(config.encoder_config)(torch.tensor([[4]]), encoder_hidden_states=torch.zeros(1, 2, 12))
    decoder = MegaModel(config.decoder_config)
    with pytest.raises(ValueError, match=r"needs encoder_hidden_states \[B, S, d\]"):
        decoder(torch.tensor([[4]]))
    for shape in ((2, 3, 12), (1, 3, 11), (1, 0, 12)):
        with pytest.raises(ValueError, match=r"shape \[1, S, 12\]"):
            decoder(torch.tensor([[4]]), encoder_hidden_states=torch.zeros(shape))
