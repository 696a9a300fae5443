"""Token types of Luna encoders, and embeddings of both families that are narrower than the model."""

import pytest
import torch

import luna_mega
from luna_mega import LunaForMaskedLM

from . import luna, mega
from .luna import make, tokens

FIELDS = {"type_vocab_size": 3, "embedding_size": 10}


def typed(inputs):
    ids = inputs["input_ids"]
    return inputs | {"token_type_ids": ((ids * 7) % 3).masked_fill(inputs["attention_mask"] == 0, 9)}


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
    torch.testing.assert_close(again(**inputs).logits, model(**inputs).logits)
    model.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_dropped_first_tokens_lose_their_types():
    model = make("ForSequenceClassification", **FIELDS, drop_first_token=True)
    inputs = typed(tokens([9, 4], "left"))
    cut = typed(tokens([9, 4], "left"))
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[[0, 1], [0, 5]] = False  # the first tokens of both texts
    model.config.drop_first_token = False
    cut = {name: value[keep].view(2, 8) for name, value in cut.items()}
    expected = model(**cut).logits
    model.config.drop_first_token = True
    torch.testing.assert_close(model(**inputs).logits, expected)


@pytest.mark.parametrize("family", [luna, mega])
def test_inputs_embeds_are_narrow(family):
    """`inputs_embeds` are outputs of the token embedding, before the projection to the model width."""
    with pytest.raises(ValueError, match=r"inputs_embeds \[B, T, 16\], .*got \[2, 9, 24\]"):
        family.make("Model", embedding_size=16)(inputs_embeds=torch.zeros(2, 9, 24))


@pytest.mark.parametrize("name", ["ForMaskedLM", "ForCausalLM"])
def test_tied_mega_heads_need_complete_vectors(name):
    fields = {"embedding_size": 16, "is_decoder": name == "ForCausalLM"}
    model_class = getattr(luna_mega, f"Mega{name}")
    with pytest.raises(ValueError, match="embedding_size=24, .* got 16; or pass tie_word_embeddings=False"):
        model_class(mega.tiny_config(**fields))
    model = model_class(mega.tiny_config(tie_word_embeddings=False, **fields))
    assert torch.isfinite(model(**tokens([9, 4])).logits).all()
