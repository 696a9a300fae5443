"""Mega without a moving average (Figure 4 of the paper, h = 0) and without a relative bias."""

import pytest
import torch

from tests.modeling import mega, mega_decoders

ABSENT = mega.VARIANTS["no average, no bias"]
PARTS = {"ema_projection_size": "ema_gate.", "relative_positional_bias": "rel_pos_bias."}


def encode(model, embeddings):
    with torch.no_grad():
        return model(inputs_embeds=embeddings).last_hidden_state


@pytest.mark.parametrize("field", PARTS)
@pytest.mark.parametrize("fields", [{}, {"is_encoder_decoder": True}], ids=["encoder", "encoder-decoder"])
def test_absent_parts_have_no_parameters(field, fields):
    names = mega_decoders.make(**fields).state_dict().keys()
    without = mega_decoders.make(**fields, **{field: ABSENT[field]}).state_dict().keys()
    assert without == {name for name in names if PARTS[field] not in name} and without < names


@pytest.mark.parametrize("function", ["softmax", "laplace", "relu2"])
def test_order_matters_only_with_a_part(function):
    """Without both parts, permuted inputs have permuted outputs; an average or a bias makes the order matter."""
    order, embeddings = torch.randperm(11), torch.randn(2, 11, 24, dtype=torch.float64)
    for kept in ((), ("ema_projection_size",), ("relative_positional_bias",)):
        fields = {field: value for field, value in ABSENT.items() if field not in kept}
        model = mega.make("Model", **fields, attention_activation=function, hidden_size=24).double()
        states, permuted = encode(model, embeddings), encode(model, embeddings[:, order])
        if kept:
            assert (permuted - states[:, order]).abs().max() > 1e-3
        else:
            torch.testing.assert_close(permuted, states[:, order])


def test_chunks_are_independent_without_an_average():
    fields = {"use_chunking": True, "chunk_size": 4}
    for dimensions in (0, 3):
        model = mega.make("Model", **fields, ema_projection_size=dimensions, hidden_size=24).double()
        embeddings = torch.randn(1, 12, 24, dtype=torch.float64, requires_grad=True)
        states = model(inputs_embeds=embeddings).last_hidden_state
        (gradient,) = torch.autograd.grad(states[:, 4:8].square().sum(), embeddings)
        assert gradient[:, 4:8].any() and gradient[:, :4].any() == gradient[:, 8:].any() == (dimensions > 0)


def test_a_decoder_without_an_average_ignores_the_truncation_of_the_encoder():
    model = mega_decoders.make(is_encoder_decoder=True, truncation=3, decoder_ema_projection_size=0)
    assert model.mega.encoder.layers[0].mega_layer.ema_gate.truncation == 3
    assert model.mega.decoder.layers[0].mega_layer.ema_gate is None
