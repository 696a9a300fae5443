"""The encoder-decoders of both models: sources, labels, embeddings, saved folders, Trainer, bad input."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from tests.modeling.decoders import TRANSLATING, WITH_ENCODER, make, make_plain, padded, slow_but_some, source, target

SEPARATE = {"decoder_vocab_size": 35}
UNTIED = {"tie_word_embeddings": False}
OWN = {"share_encoder_decoder_embeddings": False}


@pytest.fixture(params=slow_but_some(WITH_ENCODER))
def model(request):
    return make(request.param)


@pytest.fixture(params=TRANSLATING)
def family(request):
    return request.param


def plain(family, **fields):
    return make_plain(family, is_encoder_decoder=True, **fields)


def words(model):
    """The weights of source, target and output."""
    sides = model.get_encoder(), model.get_decoder()
    return [*(side.get_input_embeddings().weight for side in sides), model.get_output_embeddings().weight]


@pytest.mark.parametrize(("fields", "count"), [({}, 1), (OWN, 2), (SEPARATE, 2), (UNTIED, 3)], ids=str)
def test_embeddings(family, fields, count, tmp_path):
    """Shared, per language, and a separate output weight; also in a loaded model."""
    model = plain(family, **fields)
    model.save_pretrained(tmp_path)
    for loaded in (model, AutoModelForSeq2SeqLM.from_pretrained(tmp_path)):
        assert len({weight.data_ptr() for weight in words(loaded)}) == count
        assert len(words(loaded)[2]) == fields.get("decoder_vocab_size", 30)
        assert loaded.get_input_embeddings().weight is words(loaded)[0]
    embeddings = torch.nn.Embedding(30, model.config.hidden_size)
    model.set_input_embeddings(embeddings)
    assert model.get_encoder().get_input_embeddings() is embeddings
    assert (model.get_decoder().get_input_embeddings() is embeddings) is model.config.shares_embeddings


def test_save_and_load(model, tmp_path):
    """A folder loads with a head and without."""
    inputs = source(model, 2) | target(model, padded([5, 4], 5, "left")[0])
    model.save_pretrained(tmp_path)
    loaded, loading = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model) and not any(loading.values())
    assert loaded.config.to_json_string() == model.config.to_json_string()
    torch.testing.assert_close(loaded.eval()(**inputs).logits, model(**inputs).logits)
    body = AutoModel.from_pretrained(tmp_path)
    assert type(body) is type(AutoModel.from_config(model.config)) is type(model.base_model)
    expected = model.base_model(**inputs).last_hidden_state
    torch.testing.assert_close(body(**inputs).last_hidden_state, expected)


@pytest.mark.parametrize("fields", [{}, UNTIED, OWN, {"decoder_vocab_size": 30}], ids=str)
def test_resize(family, fields):
    """The vocabulary of a model is resized with a head and without."""
    model = plain(family, **fields)
    inputs = {"input_ids": torch.full((2, 4), 32), "decoder_input_ids": torch.full((2, 3), 32)}
    body, tied = plain(family, **fields).base_model, len({weight.data_ptr() for weight in words(model)})
    for resized in (model, body):
        resized.resize_token_embeddings(33)
        assert resized.config.vocab_size == resized.config.decoder_config.vocab_size == 33
    assert [len(weight) for weight in words(model)] == [33] * 3
    assert len({weight.data_ptr() for weight in words(model)}) == tied
    assert model(**inputs).logits.shape == (2, 3, 33) and body(**inputs).last_hidden_state.isfinite().all()


def test_resize_of_two_vocabularies(family):
    for model in (plain(family, **SEPARATE), plain(family, **SEPARATE).base_model):
        with pytest.raises(NotImplementedError, match="source and target have different vocabularies of 30 and 35"):
            model.resize_token_embeddings(40)


def test_labels(model):
    """Padding on either side: the target starts directly before the first label."""
    labels = torch.tensor([[7, 8, 9, 2], [5, 2, -100, -100]])
    shifted = model.prepare_decoder_input_ids_from_labels(labels)
    assert shifted.tolist() == [[2, 7, 8, 9], [2, 5, 2, 1]]
    output = model(**source(model, 2), labels=labels)
    torch.testing.assert_close(output.loss, cross_entropy(output.logits.transpose(1, 2), labels), check_dtype=False)
    torch.testing.assert_close(output.logits, model(**source(model, 2), decoder_input_ids=shifted).logits)
    half = model(**source(model, 2), labels=labels, num_items_in_batch=torch.tensor(12)).loss
    torch.testing.assert_close(half, output.loss / 2)
    left = torch.stack([labels[0], labels[1].roll(2)])
    assert model.prepare_decoder_input_ids_from_labels(labels=left).tolist() == [[2, 7, 8, 9], [1, 1, 2, 5]]
    torch.testing.assert_close(model(**source(model, 2), labels=left).loss, output.loss)
    nothing = torch.full((1, 3), -100)
    assert model.prepare_decoder_input_ids_from_labels(nothing).tolist() == [[2, 1, 1]]
    kept = model(**source(model, 2), decoder_input_ids=shifted, labels=labels[:, 2:], logits_to_keep=2)
    torch.testing.assert_close(kept.logits, output.logits[:, 2:])


@torch.no_grad()
def test_encoder_outputs_instead_of_the_source(model):
    """Encoder outputs as an object or a tuple; embeddings instead of tokens."""
    given, ids = source(model, 3, "left"), padded([5, 4, 2], 5, "right")[0]
    expected, mask = model(**given, decoder_input_ids=ids).logits, given["attention_mask"]
    encoder = model.get_encoder()
    returned = encoder(**given)
    for outputs in (returned, returned.to_tuple(), encoder(**given, return_dict=False)):
        logits = model(encoder_outputs=outputs, attention_mask=mask, decoder_input_ids=ids).logits
        assert torch.equal(logits, expected)
    embeds = model.get_input_embeddings()(given["input_ids"])
    inputs = {"inputs_embeds": embeds, "attention_mask": mask, "decoder_input_ids": ids}
    assert torch.equal(model(**inputs).logits, expected)
    embeds = model.get_decoder().get_input_embeddings()(ids)
    inputs = {"decoder_inputs_embeds": embeds, "decoder_attention_mask": ids != 1}
    torch.testing.assert_close(model(**given, **inputs).logits, expected)


@torch.no_grad()
def test_tuples(family):
    """`return_dict=False`, as an argument and in the configuration, of which encoder and decoder have copies."""
    model = plain(family)
    inputs = source(model, 2) | target(model, padded([5, 4], 5, "left")[0])
    expected = model(**inputs).logits
    assert torch.equal(model(**inputs, return_dict=False)[0], expected)
    assert torch.equal(plain(family, return_dict=False)(**inputs)[0], expected)


@torch.no_grad()
def test_source_of_padding_is_ignored(model):
    given, ids = source(model, 3), padded([5, 4, 2], 5, "right")[0]
    given["attention_mask"][1] = 0
    logits = model(**given, decoder_input_ids=ids).logits
    assert logits.isfinite().all()
    given["input_ids"][1] = 7
    torch.testing.assert_close(model(**given, decoder_input_ids=ids).logits, logits)


def test_a_source_of_padding_has_finite_gradients(model):
    ids = torch.ones(2, 4, dtype=torch.long)
    ids[0] = 7
    loss = model.train()(ids, labels=torch.full((2, 3), 8)).loss
    loss.backward()
    assert loss.isfinite() and all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"label_smoothing_factor": 0.1}], ids=str)
def test_trainer(tmp_path, family, options, tokenizer):
    model = plain(family, dtype=torch.float32, vocab_size=len(tokenizer))
    rows = torch.randint(5, len(tokenizer), (8, 11)).tolist()
    data = [{"input_ids": row[: 4 + i], "labels": row[i:]} for i, row in enumerate(rows)]
    arguments = Seq2SeqTrainingArguments(
        output_dir=tmp_path,
        max_steps=10,
        learning_rate=3e-3,
        predict_with_generate=True,
        generation_max_length=6,
        generation_num_beams=2,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    trainer = Seq2SeqTrainer(model, arguments, DataCollatorForSeq2Seq(tokenizer, model), data, data)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.9 * before
    assert trainer.predict(data).predictions.shape[0] == 8


def test_bad_input(family):
    model = plain(family)
    given, ids = source(model, 2), padded([5, 4], 5, "right")[0]
    for both in ({}, {"decoder_input_ids": ids, "decoder_inputs_embeds": torch.zeros(2, 5, 4)}):
        with pytest.raises(ValueError, match="exactly one of decoder_input_ids and decoder_inputs_embeds"):
            model(**given, **both)
    with pytest.raises(ValueError, match="batch is empty: 2 sequences of length 0"):
        model(given["input_ids"][:, :0], decoder_input_ids=ids)
    with pytest.raises(ValueError, match="batch is empty: 2 sequences of length 0"):
        model(**given, decoder_input_ids=ids[:, :0])
    with pytest.raises(ValueError, match="pass exactly one of input_ids and inputs_embeds"):
        model(decoder_input_ids=ids)
    with pytest.raises(ValueError, match="is an encoder or a decoder"):
        type(model.get_encoder())(model.config)
    for part in (model, model.base_model):
        with pytest.raises(ValueError, match="requires a (Luna|Mega)Seq2SeqConfig, got a (Luna|Mega)Config"):
            type(part)(model.config.encoder_config)


@torch.no_grad()
def test_encoder_and_decoder_configurations_state_their_role(model):
    """The generation tests of transformers set `is_decoder` in every generative model's configuration."""
    config = model.config
    config.is_decoder = True
    again = type(model)(config).to(torch.float64).eval()
    again.load_state_dict(model.state_dict())
    sides = again.get_encoder().config, again.get_decoder().config
    assert [(side.is_decoder, side.add_cross_attention) for side in sides] == [(False, False), (True, True)]
    inputs = source(model, 2) | {"max_new_tokens": 4, "do_sample": False}
    assert again.generate(**inputs).equal(model.generate(**inputs))
