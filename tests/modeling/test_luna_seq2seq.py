"""What is particular to Luna's encoder-decoder: outputs, embeddings, labels, Auto classes, Trainer, bad input."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from luna_mega import LunaConfig, LunaForCausalLM, LunaForConditionalGeneration, LunaModel, LunaSeq2SeqModel
from tests.modeling.luna_decoders import make, padded, source, target

SEPARATE = {"decoder_vocab_size": 35}
UNTIED = {"tie_word_embeddings": False}


def seq2seq(**fields):
    return make(is_encoder_decoder=True, **fields)


def weights(*modules):
    return {module.weight.data_ptr() for module in modules}


@pytest.mark.parametrize(("fields", "count"), [({}, 1), (SEPARATE, 2), (UNTIED, 3)], ids=["one", "two", "three"])
def test_embeddings(fields, count, tmp_path):
    """One for all, one for each language, and an output weight of its own; saved and loaded."""
    for model in (seq2seq(**fields), None):
        if model is None:
            model = LunaForConditionalGeneration.from_pretrained(tmp_path)
        encoder, decoder = model.get_encoder(), model.get_decoder()
        modules = encoder.get_input_embeddings(), decoder.get_input_embeddings(), model.get_output_embeddings()
        assert len(weights(*modules)) == count
        assert modules[2].weight.shape == (fields.get("decoder_vocab_size", 30), 24)
        model.save_pretrained(tmp_path)


@pytest.mark.parametrize("fields", [{}, UNTIED, {"share_encoder_decoder_embeddings": False}], ids=str)
def test_resize(fields):
    model = seq2seq(**fields)
    model.resize_token_embeddings(33)
    assert model.config.vocab_size == model.config.decoder_config.vocab_size == 33
    inputs = {"input_ids": torch.full((2, 4), 32), "decoder_input_ids": torch.full((2, 3), 32)}
    assert model(**inputs).logits.shape == (2, 3, 33)


def test_resize_of_two_vocabularies():
    with pytest.raises(NotImplementedError, match="source and target have vocabularies of 30 and 35"):
        seq2seq(**SEPARATE).resize_token_embeddings(40)


def test_labels():
    model = seq2seq()
    labels = torch.tensor([[7, 8, 9, 2], [5, 2, -100, -100]])
    given = model.prepare_decoder_input_ids_from_labels(labels)
    assert given.tolist() == [[2, 7, 8, 9], [2, 5, 2, 1]]
    output = model(**source(model, 2), labels=labels)
    logits = model(**source(model, 2), decoder_input_ids=given).logits
    torch.testing.assert_close(output.logits, logits)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(output.loss, expected, check_dtype=False)
    halved = model(**source(model, 2), labels=labels, num_items_in_batch=torch.tensor(12)).loss
    torch.testing.assert_close(halved, output.loss / 2)


@torch.no_grad()
@pytest.mark.parametrize("pre_norm", [False, True])
def test_recorded_states(pre_norm):
    model = seq2seq(pre_norm=pre_norm, num_decoder_layers=3, num_decoder_pack_attention_heads=2)
    inputs = source(model, 3) | target(model, padded([5, 4, 2], 5, "right")[0])
    options = {f"output_{name}": True for name in ("hidden_states", "attentions", "packed_attentions")}
    output = model(**inputs, **options)
    torch.testing.assert_close(output.logits, model(**inputs).logits)
    for states, layers, length in (
        (output.encoder_hidden_states, 2, 9),
        (output.decoder_hidden_states, 3, 5),
        (output.encoder_packed_hidden_states, 2, 6),
        (output.packed_hidden_states, 3, 6),
    ):
        assert [state.shape for state in states] == [(3, length, 24)] * (layers + 1)
    assert torch.equal(output.packed_hidden_states[0], output.encoder_packed_hidden_states[-1])
    assert [weights.shape for weights in output.encoder_attentions] == [(3, 4, 9, 6)] * 2
    assert [weights.shape for weights in output.cross_attentions] == [(3, 4, 5, 6)] * 3
    assert [weights.shape for weights in output.cross_packed_attentions] == [(3, 2, 6, 9)] * 3
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
def test_the_projection_depends_on_the_source_alone():
    model = seq2seq()
    ids = padded([5, 5], 5, "right")[0]
    one, other = (
        model.luna(**source(model, 2), **target(model, x)).packed_last_hidden_state for x in (ids, ids.flip(1))
    )
    assert torch.equal(one, other)


@torch.no_grad()
def test_encoder_outputs_in_place_of_the_source():
    model = seq2seq()
    given, ids = source(model, 3, "left"), padded([5, 4, 2], 5, "right")[0]
    expected = model(**given, decoder_input_ids=ids).logits
    outputs = model.get_encoder()(**given)
    assert torch.equal(model(encoder_outputs=outputs, decoder_input_ids=ids).logits, expected)
    # Without a mask, what is padding among the tokens is left out, and so it is by the decoder.
    outputs = model.get_encoder()(given["input_ids"])
    assert torch.equal(model(encoder_outputs=outputs, decoder_input_ids=ids).logits, expected)
    embeds = model.get_input_embeddings()(given["input_ids"])
    inputs = {"inputs_embeds": embeds, "attention_mask": given["attention_mask"], "decoder_input_ids": ids}
    assert torch.equal(model(**inputs).logits, expected)
    assert torch.equal(model(encoder_outputs=outputs.to_tuple(), decoder_input_ids=ids).logits, expected)
    with pytest.raises(ValueError, match="must be the LunaModelOutput of the encoder, .* got a tuple with 1 tensors"):
        model(encoder_outputs=outputs.to_tuple()[:1], decoder_input_ids=ids)


def test_a_source_of_padding_is_finite():
    model = seq2seq().train()
    ids = torch.ones(2, 4, dtype=torch.long)
    ids[0] = 7
    loss = model(ids, labels=torch.full((2, 3), 8)).loss
    loss.backward()
    assert loss.isfinite() and all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_word_dropout_leaves_out_whole_words():
    embeddings = seq2seq(word_dropout=0.5, dropout=0.0, embedding_norm=False, position_embedding_type="none").train()
    embeddings = embeddings.get_encoder().embeddings
    words = embeddings(torch.ones(4, 50, 24).double(), None, None)
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


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_trainer(tmp_path, smoothing, tokenizer):
    model = make(torch.float32, is_encoder_decoder=True, vocab_size=len(tokenizer))
    data = [
        {"input_ids": row[: 3 + i % 4], "labels": row[: 2 + i % 3]} for i, row in enumerate(torch.randint(5, 9, (8, 7)))
    ]
    data = [{name: value.tolist() for name, value in row.items()} for row in data]
    arguments = Seq2SeqTrainingArguments(
        output_dir=tmp_path,
        max_steps=4,
        learning_rate=1e-3,
        label_smoothing_factor=smoothing,
        predict_with_generate=True,
        generation_max_length=6,
        generation_num_beams=2,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Seq2SeqTrainer(
        model, arguments, DataCollatorForSeq2Seq(tokenizer, model), train_dataset=data, eval_dataset=data
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    assert trainer.predict(data).predictions.shape[0] == 8


def test_errors():
    model = seq2seq(position_embedding_type="learned", max_target_positions=6)
    given, ids = source(model, 2), torch.randint(3, 30, (2, 5))
    inputs = given | {"decoder_input_ids": ids}
    with pytest.raises(ValueError, match="sequences of length 41 exceed the 40 learned positions"):
        model(torch.randint(3, 30, (2, 41)), decoder_input_ids=ids)
    with pytest.raises(ValueError, match="sequences of length 7 exceed the 6 learned positions .*max_target_positions"):
        model(**given, decoder_input_ids=torch.randint(3, 30, (2, 7)))
    with pytest.raises(ValueError, match="the batch is empty: 2 sequences of length 0"):
        model(torch.ones(2, 0, dtype=torch.long), decoder_input_ids=ids)
    with pytest.raises(ValueError, match="length 0"):
        model.generate(torch.ones(2, 0, dtype=torch.long))
    padding = torch.tensor([[4, 5], [1, 1]])
    for mask in ({}, {"attention_mask": torch.tensor([[1, 1], [0, 0]])}):
        with pytest.raises(ValueError, match=r"nothing but padding in the sources \[1\]"):
            model.generate(padding, **mask)
    past = model(**inputs, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="past_key_values has 5 positions already, and the target 1"):
        model.generate(**given, past_key_values=past)
    with pytest.raises(ValueError, match="must be a LunaSeq2SeqCache, got a LunaCache"):
        model(**inputs, past_key_values=past.self_attention_cache)
    with pytest.raises(ValueError, match="must be a LunaSeq2SeqCache, got a DynamicCache"):
        from transformers import DynamicCache

        model(**inputs, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="takes? no token_type_ids"):
        model(**inputs, token_type_ids=ids)
    with pytest.raises(ValueError, match="is one side only"):
        LunaModel(model.config)
    with pytest.raises(ValueError, match="is_encoder_decoder=True"):
        LunaForConditionalGeneration(LunaConfig())
    decoder = model.get_decoder()
    with pytest.raises(ValueError, match="needs packed_states, the P of its encoder"):
        decoder(ids)
    with pytest.raises(ValueError, match="needs encoder_hidden_states"):
        decoder(ids, packed_states=torch.zeros(2, 6, 24).double())
    context = {"packed_states": torch.zeros(2, 6, 24).double(), "encoder_hidden_states": torch.zeros(2, 9, 24).double()}
    with pytest.raises(ValueError, match=r"encoder_attention_mask must have the shape \[2, 9\]"):
        decoder(ids, **context, encoder_attention_mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match="needs a decoder with add_cross_attention=True"):
        model.get_encoder()(ids, encoder_hidden_states=context["encoder_hidden_states"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"is_encoder_decoder": True, "is_decoder": True}, "leave is_decoder and add_cross_attention out"),
        ({"add_cross_attention": True}, "add_cross_attention=True needs is_decoder=True"),
        ({"is_decoder": True, "input_type": "values"}, "a decoder needs input_type='tokens'"),
        ({"is_encoder_decoder": True, "input_type": "values"}, "a decoder needs input_type='tokens'"),
        (
            {"is_encoder_decoder": True, "decoder_vocab_size": 9, "share_encoder_decoder_embeddings": True},
            "equal vocabularies, got .* vocab_size=50265 and decoder_vocab_size=9",
        ),
        (
            {"is_encoder_decoder": True, "tie_word_embeddings": False, "share_encoder_decoder_embeddings": True},
            "needs tie_word_embeddings=True",
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
        LunaConfig(**fields)
