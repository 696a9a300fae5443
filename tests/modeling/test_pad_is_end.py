"""Decoders whose padding token is their end token, as with tokenizers that have no padding token."""

import pytest
import torch

from . import decoders, luna

FAMILIES = pytest.mark.parametrize("family", decoders.FAMILIES)
ENCODED = pytest.mark.parametrize("family", decoders.TRANSLATING)


@torch.no_grad()
@FAMILIES
@pytest.mark.parametrize("end", [1, [7, 1]])
def test_end_tokens_are_not_masked(family, end, messages):
    """Without a mask the result equals that with a mask of ones, and one message is logged."""
    model = decoders.make_plain(family, pad_token_id=1, eos_token_id=end)
    ids = torch.tensor([[4, 1, 5, 6, 1, 7], [1, 8, 9, 1, 1, 4]])
    expected = model(ids, torch.ones_like(ids), labels=ids)
    for _ in range(2):
        actual = model(ids, labels=ids)
        assert torch.equal(actual.logits, expected.logits) and torch.equal(actual.loss, expected.loss)
    assert len(messages) == 1 and "does not infer an attention mask" in messages[0]


@FAMILIES
def test_embeddings_of_end_tokens_are_trained(family):
    model = decoders.make_plain(family, pad_token_id=1, eos_token_id=[7, 1], tie_word_embeddings=False)
    ids = torch.tensor([[4, 1, 5, 6, 1, 7]])
    model(ids, torch.ones_like(ids), labels=ids).loss.backward()
    assert model.get_input_embeddings().weight.grad[1].any()
    assert type(model)(model.config).get_input_embeddings().weight[1].any()


@torch.no_grad()
def test_encoders_and_other_padding_tokens(messages):
    ids, mask = luna.tokens([6, 3]).values()
    for model in (luna.make("ForMaskedLM", eos_token_id=1), decoders.make_plain("luna", vocab_size=40)):
        assert torch.equal(model(ids).logits, model(ids, mask).logits) and not messages


@torch.no_grad()
@ENCODED
def test_targets_with_end_tokens(family):
    """Targets made from labels keep their end tokens and mask left padding."""
    model = decoders.make_plain(family, is_encoder_decoder=True, eos_token_id=1, decoder_start_token_id=2)
    labels = torch.tensor([[5, 1, 6, 1, -100, -100], [-100, -100, 5, 1, 6, 1]])
    source = {name: value[:1].expand(2, -1) for name, value in decoders.source(model, 1).items()}
    output = model(**source, labels=labels)
    torch.testing.assert_close(output.logits[1, 2:], output.logits[0, :4])
    separate = model(**{name: value[:1] for name, value in source.items()}, labels=labels[:1, :4])
    torch.testing.assert_close(output.logits[0, :4], separate.logits[0])
    torch.testing.assert_close(output.loss, separate.loss)
    target = torch.tensor([[2, 5, 1, 6]])
    first = {name: value[:1] for name, value in source.items()}
    chosen = model.generate(**first, decoder_input_ids=target, max_new_tokens=1, do_sample=False)[0, -1]
    assert chosen == model(**first, decoder_input_ids=target).logits[0, -1].argmax()
