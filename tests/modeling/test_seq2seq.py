"""Encoder-decoders of both families: sources, labels, embeddings, recorded states, saved folders, Trainer, errors."""

from functools import cache

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
)

from luna_mega.modeling_common.layout import DENSE
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


def test_source_of_padding_is_ignored(model):
    given, ids = source(model, 3), padded([5, 4, 2], 5, "right")[0]
    given["attention_mask"][1] = 0
    expected = model(**given, decoder_input_ids=ids).logits
    given["input_ids"][1] = 7
    logits = model(**given, decoder_input_ids=ids).logits
    torch.testing.assert_close(logits, expected)
    logits.sin().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.float64)


def decoder(model, **states):
    return model.get_decoder()(torch.tensor([[4]]), **states)


LEARNED = {"position_embedding_type": "learned", "max_target_positions": 6}
SIMPLE = {"relative_positional_bias": "simple", "max_positions": 24, "decoder_max_positions": 30}
IDS = torch.tensor([[5, 6, 7, 8, 9], [7, 6, 5, 4, 3]])
# Family ("" for all), fields, call, text of the error.
ERRORS = [
    ("", {}, lambda m, given: m(**given), "decoder_input_ids and decoder_inputs_embeds"),
    ("", {}, lambda m, given: m(**given, decoder_input_ids=IDS, decoder_inputs_embeds=zeros(2, 5, 4)), "exactly one"),
    ("", {}, lambda m, given: m(IDS[:, :0], decoder_input_ids=IDS), "2 sequences of length 0"),
    ("", {}, lambda m, given: m(**given, decoder_input_ids=IDS[:, :0]), "2 sequences of length 0"),
    ("", {}, lambda m, given: m(decoder_input_ids=IDS), "input_ids and inputs_embeds"),
    ("", {}, lambda m, given: m(**given, labels=IDS.flatten()), r"`labels` .* \[B, T\] of a target, got \[10\]"),
    ("", {}, lambda m, given: type(m.get_encoder())(m.config), "Model is an encoder or a decoder"),
    ("", {}, lambda m, given: type(m)(m.config.encoder_config), "requires a (Luna|Mega)Seq2SeqConfig"),
    ("", {}, lambda m, given: type(m.base_model)(m.config.encoder_config), "requires a (Luna|Mega)Seq2SeqConfig"),
    ("", {}, lambda m, given: m.get_encoder()(IDS, encoder_hidden_states=zeros(2, 2, 12)), "encoder_hidden_states"),
    ("", {}, lambda m, given: m(encoder_outputs=m.get_encoder()(**given), attention_mask=given["attention_mask"][:, 1:],
     decoder_input_ids=IDS), r"encoder_attention_mask .*\[2, 13\], got \[2, 12\]"),
    ("luna", {}, lambda m, given: m(encoder_outputs=m.get_encoder()(**given).to_tuple()[:1], decoder_input_ids=IDS),
     "LunaModelOutput .* got a tuple with 1 tensors"),
    ("luna", LEARNED, lambda m, given: m(IDS.repeat(1, 9), decoder_input_ids=IDS), "45 exceeds the 40"),
    ("luna", LEARNED, lambda m, given: m(**given, decoder_input_ids=IDS.repeat(1, 2)), "10 exceeds the 6 "),
    ("luna", {}, lambda m, given: decoder(m, encoder_hidden_states=zeros(1, 9, 24)), "`packed_states` is missing"),
    ("luna", {}, lambda m, given: decoder(m, packed_states=zeros(1, 6, 24)), "needs encoder_hidden_states"),
    ("luna", {}, lambda m, given: decoder(m, packed_states=zeros(1, 6, 24), encoder_hidden_states=zeros(1, 9, 24),
     encoder_attention_mask=torch.ones(1, 5)), r"encoder_attention_mask .*\[1, 9\]"),
    ("mega", SIMPLE, lambda m, given: m(IDS.repeat(1, 5), decoder_input_ids=IDS), "24 positions, got 25"),
    ("mega", SIMPLE, lambda m, given: m.generate(IDS, max_length=32), "max_length=32 requires 31 .* has 30"),
    ("mega", {}, lambda m, given: m(**given, decoder_input_ids=IDS, decoder_position_ids=IDS), "decoder_position_ids"),
    ("mega", {}, lambda m, given: decoder(m), "needs encoder_hidden_states"),
    *(("mega", {}, lambda m, given, shape=shape: decoder(m, encoder_hidden_states=zeros(*shape)), r"\[1, S, 12\]")
      for shape in ((2, 3, 12), (1, 3, 11), (1, 0, 12))),
]  # fmt: skip


def test_errors(family):
    make = cache(lambda fields: plain(family, **dict(fields)))
    for own, fields, call, text in ERRORS:
        if own in ("", family):
            model = make(tuple(fields.items()))
            with pytest.raises(ValueError, match=text):
                call(model, source(model, 2))


def test_errors_of_a_cache(family):
    """A cache contains the states of its source; another source raises an error."""
    model, ids = plain(family), IDS
    given = source(model, 2) | {"decoder_input_ids": ids}
    past = model(**given).cache
    with pytest.raises(ValueError, match=r"another source.*5|`packed_states` .* \[2, 5, 24\]"):
        model(ids, decoder_input_ids=ids, cache=past)


@torch.no_grad()
@pytest.mark.parametrize("pre_norm", [False, True])
def test_recorded_states_of_luna(pre_norm):
    model = plain("luna", pre_norm=pre_norm, num_decoder_layers=3, num_decoder_pack_attention_heads=2)
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
    for weights, layers, shape in (
        (output.encoder_attentions, 2, (3, 4, 13, 6)),
        (output.decoder_attentions, 3, (3, 4, 5, 6)),
        (output.cross_attentions, 3, (3, 4, 5, 6)),
        (output.cross_packed_attentions, 3, (3, 2, 6, 13)),
    ):
        assert [x.shape for x in weights] == [shape] * layers
        assert shape[2] == 13 or all(torch.allclose(x.sum(-1), torch.ones_like(x.sum(-1))) for x in weights)


@torch.no_grad()
@pytest.mark.parametrize("name", ["mega seq2seq: softmax", "mega seq2seq: relu2 chunks"])
def test_recorded_states_of_mega(name):
    """`output_attentions=True`, which uses another code path of cross-attention, does not change results."""
    model = make(name)
    ids, mask = padded([11, 17, 6], 17, "left")
    inputs = source(model, 3, "left") | target(model, ids, mask)
    recorded = model(**inputs, output_attentions=True, output_hidden_states=True, use_cache=False)
    torch.testing.assert_close(model(**inputs).logits[mask.bool()], recorded.logits[mask.bool()])
    decoder, layers = model.config.decoder_config, model.config.num_hidden_layers
    counts = {"cross_attentions": 0, "decoder_attentions": 0, "decoder_hidden_states": 1}
    assert {name: len(recorded[name]) - decoder.num_hidden_layers for name in counts} == counts
    assert (len(recorded.encoder_attentions), len(recorded.encoder_hidden_states)) == (layers, layers + 1)
    for weights in recorded.cross_attentions:
        assert weights.shape == (3, 1, 17, 13)
        assert (weights.permute(0, 3, 1, 2)[inputs["attention_mask"] == 0] == 0).all()
        if decoder.attention_activation == "softmax":
            torch.testing.assert_close(weights.sum(-1), torch.ones(3, 1, 17).double())


@torch.no_grad()
def test_positions_of_the_target_and_the_source_of_p():
    """P depends only on the source, and positions of the target are counted without padding."""
    model = plain("luna")
    ids, mask = padded([5, 3], 5, "left")
    given = source(model, 2)
    one, other = (model.luna(**given, **target(model, x)).packed_last_hidden_state for x in (ids, ids.flip(1)))
    assert torch.equal(one, other)
    inputs = given | target(model, ids, mask)
    counted, expected = (mask.cumsum(1) - 1).clamp(min=0), model(**inputs).logits
    assert torch.equal(model(**inputs, decoder_position_ids=counted).logits, expected)
    assert not torch.allclose(model(**inputs, decoder_position_ids=counted + 1).logits, expected)


def test_word_dropout_removes_complete_words():
    fields = {"word_dropout": 0.5, "dropout": 0.0, "embedding_norm": False, "position_embedding_type": "none"}
    embeddings = plain("luna", **fields).train().get_encoder().embeddings
    words, _ = embeddings(torch.ones(4, 50, 24).double(), DENSE, None, with_packed=False)
    assert len(words.unique()) == 2
    assert (words == words[..., :1]).all() and 0.3 < (words[..., 0] == 0).double().mean() < 0.7


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
