"""Luna's encoder-decoder: P and its recorded states, Auto classes, configurations."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from luna_mega import (
    LunaConfig,
    LunaForCausalLM,
    LunaForConditionalGeneration,
    LunaModel,
    LunaSeq2SeqConfig,
    LunaSeq2SeqModel,
)
from luna_mega.modeling_common.layout import DENSE
from tests.modeling.decoders import padded, source, target
from tests.modeling.luna_decoders import make


def seq2seq(**fields):
    return make(is_encoder_decoder=True, **fields)


@torch.no_grad()
@pytest.mark.parametrize("pre_norm", [False, True])
def test_recorded_states(pre_norm):
    model = seq2seq(pre_norm=pre_norm, num_decoder_layers=3, num_decoder_pack_attention_heads=2)
    inputs = source(model, 3) | target(model, padded([5, 4, 2], 5, "right")[0])
    options = {f"output_{name}": True for name in ("hidden_states", "attentions", "packed_attentions")}
    output = model(**inputs, **options)
    torch.testing.assert_close(output.logits, model(**inputs).logits)
    for states, layers, length in (
        (output.encoder_hidden_states, 2, 13),
        (output.decoder_hidden_states, 3, 5),
        (output.encoder_packed_hidden_states, 2, 6),
        (output.packed_hidden_states, 3, 6),
    ):
        assert [state.shape for state in states] == [(3, length, 24)] * (layers + 1)
    assert torch.equal(output.packed_hidden_states[0], output.encoder_packed_hidden_states[-1])
    assert [weights.shape for weights in output.encoder_attentions] == [(3, 4, 13, 6)] * 2
    assert [weights.shape for weights in output.cross_attentions] == [(3, 4, 5, 6)] * 3
    assert [weights.shape for weights in output.cross_packed_attentions] == [(3, 2, 6, 13)] * 3
    for weights in (*output.cross_attentions, *output.decoder_attentions, *output.cross_packed_attentions):
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))
    assert [weights.shape for weights in output.decoder_attentions] == [(3, 4, 5, 6)] * 3


@torch.no_grad()
def test_recording_by_the_configuration():
    model = seq2seq()
    model.config.output_hidden_states = True
    output = model(**source(model, 2), decoder_input_ids=torch.full((2, 3), 5))
    assert len(output.encoder_hidden_states) == len(output.decoder_hidden_states) == 3


@torch.no_grad()
def test_generate_records(tmp_path):
    model = seq2seq()
    output = model.generate(
        **source(model, 2),
        max_new_tokens=4,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_attentions=True,
        output_hidden_states=True,
    )
    assert [len(step) for step in output.cross_attentions] == [2] * 4
    assert {weights.shape for step in output.cross_attentions for weights in step} == {(2, 4, 1, 6)}
    assert len(output.decoder_hidden_states) == 4 and len(output.encoder_hidden_states) == 3


@torch.no_grad()
def test_projection_depends_only_on_the_source():
    model = seq2seq()
    ids = padded([5, 5], 5, "right")[0]
    one, other = (
        model.luna(**source(model, 2), **target(model, x)).packed_last_hidden_state for x in (ids, ids.flip(1))
    )
    assert torch.equal(one, other)


@torch.no_grad()
def test_positions_of_the_target():
    model = seq2seq()
    ids, mask = padded([5, 3], 5, "left")
    inputs = source(model, 2) | target(model, ids, mask)
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    expected = model(**inputs).logits
    assert torch.equal(model(**inputs, decoder_position_ids=counted).logits, expected)
    assert not torch.allclose(model(**inputs, decoder_position_ids=counted + 1).logits, expected)


@torch.no_grad()
def test_encoder_outputs_instead_of_the_source():
    model = seq2seq()
    given, ids = source(model, 3, "left"), padded([5, 4, 2], 5, "right")[0]
    expected = model(**given, decoder_input_ids=ids).logits
    outputs = model.get_encoder()(**given)
    assert torch.equal(model(encoder_outputs=outputs, decoder_input_ids=ids).logits, expected)
    # Without a mask, padding tokens are masked, also by the decoder.
    outputs = model.get_encoder()(given["input_ids"])
    assert torch.equal(model(encoder_outputs=outputs, decoder_input_ids=ids).logits, expected)
    embeds = model.get_input_embeddings()(given["input_ids"])
    inputs = {"inputs_embeds": embeds, "attention_mask": given["attention_mask"], "decoder_input_ids": ids}
    assert torch.equal(model(**inputs).logits, expected)
    assert torch.equal(model(encoder_outputs=outputs.to_tuple(), decoder_input_ids=ids).logits, expected)
    with pytest.raises(ValueError, match="must be the LunaModelOutput of the encoder, .* got a tuple with 1 tensors"):
        model(encoder_outputs=outputs.to_tuple()[:1], decoder_input_ids=ids)


def test_word_dropout_removes_complete_words():
    embeddings = seq2seq(word_dropout=0.5, dropout=0.0, embedding_norm=False, position_embedding_type="none").train()
    embeddings = embeddings.get_encoder().embeddings
    words, _ = embeddings(torch.ones(4, 50, 24).double(), DENSE, None, with_packed=False)
    assert {0.0, 2 * 24**0.5} >= {value.item() for value in words.unique()} or len(words.unique()) == 2
    assert (words == words[..., :1]).all() and 0.3 < (words[..., 0] == 0).double().mean() < 0.7


def test_auto_classes(tmp_path):
    for model, auto, expected in (
        (seq2seq(), AutoModelForSeq2SeqLM, LunaForConditionalGeneration),
        (seq2seq(), AutoModel, LunaSeq2SeqModel),
        (seq2seq().luna, AutoModel, LunaSeq2SeqModel),
        (make(), AutoModelForCausalLM, LunaForCausalLM),
        (make(), AutoModel, LunaModel),
    ):
        model.save_pretrained(tmp_path)
        loaded, report = auto.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is expected and not report["missing_keys"]
        assert type(auto.from_config(model.config)) is expected
        ours, theirs = loaded.state_dict(), model.state_dict()
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs.get(name, theirs.get(f"luna.{name}")), check_dtype=False)


def test_errors():
    model = seq2seq(position_embedding_type="learned", max_target_positions=6)
    given, ids = source(model, 2), torch.randint(3, 30, (2, 5))
    inputs = given | {"decoder_input_ids": ids}
    with pytest.raises(ValueError, match="sequence length 41 exceeds the 40 learned positions"):
        model(torch.randint(3, 30, (2, 41)), decoder_input_ids=ids)
    with pytest.raises(ValueError, match="sequence length 7 exceeds the 6 learned positions .*max_target_positions"):
        model(**given, decoder_input_ids=torch.randint(3, 30, (2, 7)))
    with pytest.raises(ValueError, match="the batch is empty: 2 sequences of length 0"):
        model(torch.ones(2, 0, dtype=torch.long), decoder_input_ids=ids)
    with pytest.raises(ValueError, match="length 0"):
        model.generate(torch.ones(2, 0, dtype=torch.long))
    padding = torch.tensor([[4, 5], [1, 1]])
    for mask in ({}, {"attention_mask": torch.tensor([[1, 1], [0, 0]])}):
        with pytest.raises(ValueError, match=r"the sources \[1\] contain only padding"):
            model.generate(padding, **mask)
    past = model(**inputs, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="contains 5 positions already, and `decoder_input_ids` has 1"):
        model.generate(**given, past_key_values=past)
    with pytest.raises(ValueError, match="must be a LunaSeq2SeqCache, got a LunaCache"):
        model(**inputs, past_key_values=past.self_attention_cache)
    with pytest.raises(ValueError, match="must be a LunaSeq2SeqCache, got a DynamicCache"):
        from transformers import DynamicCache

        model(**inputs, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="is an encoder or a decoder"):
        LunaModel(model.config)
    with pytest.raises(ValueError, match="requires a LunaSeq2SeqConfig, got a LunaConfig"):
        LunaForConditionalGeneration(LunaConfig())
    decoder = model.get_decoder()
    with pytest.raises(ValueError, match="`packed_states` is missing"):
        decoder(ids, encoder_hidden_states=torch.zeros(2, 9, 24).double())
    with pytest.raises(ValueError, match="needs encoder_hidden_states"):
        decoder(ids, packed_states=torch.zeros(2, 6, 24).double())
    context = {"packed_states": torch.zeros(2, 6, 24).double(), "encoder_hidden_states": torch.zeros(2, 9, 24).double()}
    with pytest.raises(ValueError, match=r"encoder_attention_mask must have the shape \[2, 9\]"):
        decoder(ids, **context, encoder_attention_mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match="require a decoder with add_cross_attention=True"):
        model.get_encoder()(ids, encoder_hidden_states=context["encoder_hidden_states"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"is_encoder_decoder": True, "is_decoder": True}, "omit is_decoder and add_cross_attention"),
        ({"add_cross_attention": True}, "add_cross_attention=True requires is_decoder=True"),
        ({"is_decoder": True, "input_type": "values"}, "a decoder needs input_type='tokens'"),
        ({"is_encoder_decoder": True, "input_type": "values"}, "a decoder needs input_type='tokens'"),
        (
            {"is_encoder_decoder": True, "decoder_vocab_size": 9, "share_encoder_decoder_embeddings": True},
            "equal vocabularies, got .* vocab_size=50265 and decoder_vocab_size=9",
        ),
        (
            {"is_encoder_decoder": True, "tie_word_embeddings": False, "share_encoder_decoder_embeddings": True},
            "requires tie_word_embeddings=True",
        ),
        ({"is_encoder_decoder": True, "decoder_start_token_id": 1}, "are both 1"),
        (
            {"is_encoder_decoder": True, "num_decoder_attention_heads": 7},
            "hidden_size .* divisible by num_attention_heads",
        ),
        ({"is_encoder_decoder": True, "num_decoder_layers": 0}, "num_decoder_layers must be at least 1, got 0"),
        ({"causal_activation": "relu"}, "causal_activation must be one of softplus, elu, got 'relu'"),
        ({"word_dropout": 1.0}, r"word_dropout must be in \[0, 1\)"),
    ],
    ids=str,
)
def test_configuration_errors(fields, message):
    with pytest.raises(StrictDataclassError, match=message):
        (LunaSeq2SeqConfig if fields.get("is_encoder_decoder") else LunaConfig)(**fields)
