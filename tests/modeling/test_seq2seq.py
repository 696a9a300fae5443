"""Encoder-decoders of both families: embeddings, labels, outputs of encoders as sources, and Auto classes."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tests.modeling.contract import soil
from tests.modeling.decoders import SOME, TRANSLATING, WITH_ENCODER, make, make_plain, padded, source


@pytest.fixture(params=[name for name in WITH_ENCODER if name in SOME or "fixed length" in name])
def model(request):
    return make(request.param)


@pytest.mark.parametrize(
    ("family", "fields", "count"),
    [
        ("luna", {}, 1),
        ("mega", {"share_encoder_decoder_embeddings": False}, 2),
        ("luna", {"decoder_vocab_size": 35}, 2),
        ("mega", {"decoder_vocab_size": 30}, 1),
        ("mega", {"tie_word_embeddings": False}, 3),
    ],
)
def test_embeddings(family, fields, count, tmp_path):
    """Source, target and output share weights as configured, also in a loaded or resized model."""
    model = make_plain(family, is_encoder_decoder=True, **fields)
    model.save_pretrained(tmp_path)
    for loaded in (model, AutoModelForSeq2SeqLM.from_pretrained(tmp_path)):
        size = fields.get("decoder_vocab_size", 30)
        if size == 30:
            loaded.resize_token_embeddings(size := 33)
            loaded(**dict.fromkeys(("input_ids", "decoder_input_ids"), torch.full((2, 4), 32)))
        sides = loaded.get_encoder(), loaded.get_decoder()
        tables = [*(side.get_input_embeddings().weight for side in sides), loaded.get_output_embeddings().weight]
        assert len({table.data_ptr() for table in tables}) == count and len(tables[2]) == size
        assert loaded.get_input_embeddings().weight is tables[0]
        assert loaded.config.decoder_config.vocab_size == size
    embeddings = torch.nn.Embedding(30, model.config.hidden_size)
    model.set_input_embeddings(embeddings)
    assert model.get_encoder().get_input_embeddings() is embeddings
    assert (model.get_decoder().get_input_embeddings() is embeddings) is model.config.shares_embeddings


def test_labels(model):
    """Labels may be padded on either side: the target starts directly before the first label."""
    labels, given = torch.tensor([[7, 8, 9, 2], [5, 2, -100, -100]]), source(model, 2)
    shifted = model.prepare_decoder_input_ids_from_labels(labels)
    assert shifted.tolist() == [[2, 7, 8, 9], [2, 5, 2, 1]]
    output = model(**given, labels=labels)
    torch.testing.assert_close(output.loss, cross_entropy(output.logits.transpose(1, 2), labels), check_dtype=False)
    torch.testing.assert_close(output.logits, model(**given, decoder_input_ids=shifted).logits)
    half = model(**given, labels=labels, num_items_in_batch=torch.tensor(12)).loss
    torch.testing.assert_close(half, output.loss / 2)
    left = torch.stack([labels[0], labels[1].roll(2)])
    assert model.prepare_decoder_input_ids_from_labels(labels=left).tolist() == [[2, 7, 8, 9], [1, 1, 2, 5]]
    torch.testing.assert_close(model(**given, labels=left).loss, output.loss)
    others = torch.tensor([[-100, 7, -100, -100, 8], [-100] * 5])  # gaps, which are padding, and no label
    assert model.prepare_decoder_input_ids_from_labels(others).tolist() == [[1, 2, 1, 1, 7], [2, 1, 1, 1, 1]]


@torch.no_grad()
def test_encoder_outputs_instead_of_the_source(model):
    """The source may be an output of the encoder (object or tuple, with NaN at padding) or embeddings."""
    given, ids = source(model, 3, "left"), padded([5, 4, 2], 5, "right")[0]
    expected, mask = model(**given, decoder_input_ids=ids).logits, given["attention_mask"]
    returned = model.get_encoder()(**given)
    for outputs in (returned, returned.to_tuple()):
        logits = model(encoder_outputs=outputs, attention_mask=mask, decoder_input_ids=ids).logits
        assert torch.equal(logits, expected)
    if model.config.model_type.startswith("mega"):
        for options in ({"output_hidden_states": True}, {}):
            states = model.get_encoder()(**given, **options)
            outputs = model(encoder_outputs=states.to_tuple(), attention_mask=mask, decoder_input_ids=ids)
            assert torch.equal(outputs.logits, expected)
            assert (outputs.encoder_hidden_states or ()) == (states.hidden_states or ())
        logits = model(
            input_ids=given["input_ids"], encoder_outputs=states.to_tuple()[:1], decoder_input_ids=ids
        ).logits
        assert torch.equal(logits, expected)  # the mask is inferred from the tokens
    if "packed_mask" in returned:  # a packed source has a mask
        assert torch.equal(model(encoder_outputs=returned, decoder_input_ids=ids).logits, expected)
        returned.packed_last_hidden_state = soil(returned.packed_last_hidden_state, returned.packed_mask)
    returned.last_hidden_state = soil(returned.last_hidden_state, mask)
    logits = model(encoder_outputs=returned, attention_mask=mask, decoder_input_ids=ids).logits
    assert torch.equal(logits, expected)
    embeds = model.get_decoder().get_input_embeddings()(ids)
    inputs = {"decoder_inputs_embeds": embeds, "decoder_attention_mask": ids != 1}
    torch.testing.assert_close(model(**given, **inputs).logits, expected)


@pytest.mark.parametrize("family", TRANSLATING)
def test_auto_classes(family, tmp_path):
    """A folder can be loaded with and without the head, and each side is a model of its own."""
    both, decoder = make_plain(family, is_encoder_decoder=True), make_plain(family)
    for model, auto, expected in (
        (both, AutoModelForSeq2SeqLM, both),
        (both, AutoModel, both.base_model),
        (both.get_encoder(), AutoModel, both.get_encoder()),
        (both.get_decoder(), AutoModel, both.get_decoder()),
        (decoder, AutoModelForCausalLM, decoder),
        (decoder, AutoModel, decoder.base_model),
    ):
        model.save_pretrained(tmp_path)
        loaded, report = auto.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is type(auto.from_config(model.config)) is type(expected)
        pooler = {name for name in report["missing_keys"] if "pooler" in name}  # Mega's head has no pooler
        assert report["missing_keys"] == pooler
        state = {name: x for name, x in loaded.state_dict().items() if name not in pooler}
        torch.testing.assert_close(state, {name: expected.state_dict()[name] for name in state}, check_dtype=False)
        assert loaded.config.to_json_string() == model.config.to_json_string()
