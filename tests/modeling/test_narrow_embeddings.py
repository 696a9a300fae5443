"""Token types of Luna encoders, and embeddings that are narrower than the model."""

import pytest
import torch

from luna_mega import LunaForMaskedLM

from .luna import HEADS, VALUES, check_invariance, make, tiny_config, tokens

FIELDS = {"type_vocab_size": 3, "embedding_size": 10}


def typed(inputs):
    ids = inputs["input_ids"]
    return inputs | {"token_type_ids": ((ids * 7) % 3).masked_fill(inputs["attention_mask"] == 0, 9)}


@pytest.mark.parametrize("fields", [{}, {"unpad_inputs": True}], ids=["padded", "unpadded"])
@pytest.mark.parametrize("head", [head for head in HEADS if head != "ForSequencePairClassification"])
def test_results_do_not_depend_on_padding(head, fields):
    model = make(head, **FIELDS, **fields)
    check_invariance(head, lambda **inputs: model(**typed(inputs)))


def test_types_are_embeddings():
    model, inputs = make("Model", **FIELDS), tokens([9, 9])
    plain = model(**inputs).last_hidden_state
    types = torch.zeros_like(inputs["input_ids"])
    torch.testing.assert_close(model(**inputs, token_type_ids=types).last_hidden_state, plain)
    other = model(**inputs, token_type_ids=types + 1).last_hidden_state
    assert (other - plain).abs().max() > 1e-3
    table = model.embeddings.token_type_embeddings.weight
    embeds = model.embeddings.word_embeddings(inputs["input_ids"]) + table[1] - table[0]
    torch.testing.assert_close(model(inputs_embeds=embeds).last_hidden_state, other, rtol=0, atol=1e-5)


def test_head_writes_narrow_vectors_and_comes_back(tmp_path):
    model, inputs = make("ForMaskedLM", **FIELDS), typed(tokens([9, 9]))
    assert model.lm_head.decoder.weight is model.luna.embeddings.word_embeddings.weight
    assert model.luna.embeddings.word_embeddings.weight.shape == (40, 10)
    model.save_pretrained(tmp_path)
    again = LunaForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    model.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_padding_free():
    model, inputs = make("Model", **FIELDS), typed(tokens([5, 5]))
    expected = model(**inputs).last_hidden_state.reshape(1, 10, -1)
    flat = {name: inputs[name].reshape(1, 10) for name in ("input_ids", "token_type_ids")}
    bounds = torch.tensor([0, 5, 10]).int()
    got = model(**flat, cu_seq_lens_q=bounds, max_length_q=5).last_hidden_state
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("types", "message"),
    [(torch.zeros(2, 8, dtype=torch.long), r"shape \[2, 9\] of the input, got \[2, 8\]"),
     (torch.full((2, 9), 3), "from 3 to 3; they must be at least 0, and less than the `type_vocab_size` 3")],
    ids=["shape", "range"],
)  # fmt: skip
def test_wrong_types(types, message):
    with pytest.raises(ValueError, match=message):
        make("Model", **FIELDS)(**tokens([9, 9]), token_type_ids=types)


def test_dropped_first_tokens_lose_their_types():
    model = make("ForSequenceClassification", **FIELDS, drop_first_token=True)
    inputs = typed(tokens([9, 4], "left"))
    cut = typed(tokens([9, 4], "left"))
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[[0, 1], [0, 5]] = False  # the first tokens
    model.config.drop_first_token = False
    cut = {name: value[keep].view(2, 8) for name, value in cut.items()}
    expected = model(**cut).logits
    model.config.drop_first_token = True
    assert torch.equal(model(**inputs).logits, expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"is_encoder_decoder": True, "type_vocab_size": 2}, "a decoder does not support type_vocab_size, got 2"),
     ({"is_decoder": True, "embedding_size": 8}, "a decoder does not support embedding_size, got 8"),
     (VALUES | {"type_vocab_size": 2}, "type_vocab_size=2 requires input_type='tokens'"),
     ({"initialization": "local", "embedding_size": 8}, "does not support embedding_size=8"),
     ({"type_vocab_size": -1}, "type_vocab_size must be at least 0, got -1"),
     ({"embedding_size": 0}, "embedding_size must be at least 1, got 0")],
    ids=str,
)  # fmt: skip
def test_wrong_configurations(fields, message):
    with pytest.raises(Exception, match=message):
        tiny_config(**fields)
