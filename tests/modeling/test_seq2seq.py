"""Encoder-decoders of both families: embeddings, labels, outputs of encoders as sources, and saved folders."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
)

from tests.modeling.decoders import SOME, TRANSLATING, WITH_ENCODER, make, make_plain, padded, source, target

SEPARATE = {"decoder_vocab_size": 35}
UNTIED = {"tie_word_embeddings": False}
OWN = {"share_encoder_decoder_embeddings": False}


@pytest.fixture(params=[name for name in WITH_ENCODER if name in SOME])
def model(request):
    return make(request.param)


@pytest.fixture(params=TRANSLATING)
def family(request):
    return request.param


def plain(family, **fields):
    return make_plain(family, is_encoder_decoder=True, **fields)


def words(model):
    """Return the embedding weights of source and target, and the output weight."""
    sides = model.get_encoder(), model.get_decoder()
    return [*(side.get_input_embeddings().weight for side in sides), model.get_output_embeddings().weight]


@pytest.mark.parametrize(
    ("family", "fields", "count"), [("luna", {}, 1), ("mega", OWN, 2), ("luna", SEPARATE, 2), ("mega", UNTIED, 3)]
)
def test_embeddings(family, fields, count, tmp_path):
    """Source, target and output share weights as configured, also in a loaded model."""
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
    """A saved folder can be loaded with and without the head."""
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


@pytest.mark.parametrize(
    ("family", "fields"), [("luna", {}), ("mega", UNTIED), ("luna", OWN), ("mega", {"decoder_vocab_size": 30})]
)
def test_resize(family, fields):
    """The vocabulary can be resized with and without the head."""
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
    """Labels may be padded on either side: the target starts directly before the first label."""
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
    """The source may be an encoder output (object or tuple) or embeddings."""
    given, ids = source(model, 3, "left"), padded([5, 4, 2], 5, "right")[0]
    expected, mask = model(**given, decoder_input_ids=ids).logits, given["attention_mask"]
    encoder = model.get_encoder()
    returned = encoder(**given)
    for outputs in (returned, returned.to_tuple(), encoder(**given, return_dict=False)):
        logits = model(encoder_outputs=outputs, attention_mask=mask, decoder_input_ids=ids).logits
        assert torch.equal(logits, expected)
    if "packed_mask" in returned:  # a packed source has a mask; it may also be inferred
        for outputs in (returned, returned.to_tuple(), encoder(given["input_ids"])):
            assert torch.equal(model(encoder_outputs=outputs, decoder_input_ids=ids).logits, expected)
    embeds = model.get_input_embeddings()(given["input_ids"])
    inputs = {"inputs_embeds": embeds, "attention_mask": mask, "decoder_input_ids": ids}
    assert torch.equal(model(**inputs).logits, expected)
    embeds = model.get_decoder().get_input_embeddings()(ids)
    inputs = {"decoder_inputs_embeds": embeds, "decoder_attention_mask": ids != 1}
    torch.testing.assert_close(model(**given, **inputs).logits, expected)


def test_auto_classes(family, tmp_path):
    both, decoder = plain(family), make_plain(family)  # `test_save_and_load` loads encoder-decoders
    for model, auto, expected in (
        (both.base_model, AutoModel, both.base_model),
        (decoder, AutoModelForCausalLM, decoder),
        (decoder, AutoModel, decoder.base_model),
    ):
        model.save_pretrained(tmp_path)
        loaded, report = auto.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is type(auto.from_config(model.config)) is type(expected)
        pooler = {name for name in report["missing_keys"] if "pooler" in name}  # Mega's head has no pooler
        assert report["missing_keys"] == pooler
        state = {name: x for name, x in loaded.state_dict().items() if name not in pooler}
        torch.testing.assert_close(state, expected.state_dict(), check_dtype=False)


@torch.no_grad()
def test_encoder_and_decoder_configurations_state_their_role(model):
    """Each side keeps its role if `is_decoder` is set in the configuration, as generation tests of transformers do."""
    config = model.config
    config.is_decoder = True
    again = type(model)(config).to(torch.float64).eval()
    again.load_state_dict(model.state_dict())
    sides = again.get_encoder().config, again.get_decoder().config
    assert [(side.is_decoder, side.add_cross_attention) for side in sides] == [(False, False), (True, True)]
    inputs = source(model, 2) | {"max_new_tokens": 4, "do_sample": False}
    assert again.generate(**inputs).equal(model.generate(**inputs))
