"""Luna decoders: P as an input, weights over the rows of P, eager attention."""

import pytest
import torch

from luna_mega import LunaConfig, LunaForCausalLM, LunaModel
from tests.modeling.decoders import padded
from tests.modeling.luna_decoders import make


@torch.no_grad()
def test_prefix_as_projection():
    """`packed_states` replaces the learned P in every layer, also with a cache and in `generate`."""
    model = make()
    reader = LunaModel(make(is_encoder_decoder=True).config.encoder_config).double().eval()
    read = reader(*padded([8, 3], 8, "right"))
    prefix = {"packed_states": read.packed_last_hidden_state, "packed_mask": read.packed_mask}
    ids, mask = padded([7, 3], 7, "left")
    complete = model(ids, mask, **prefix).logits
    assert (complete - model(ids, mask).logits).abs().max() > 0.01
    first = model(ids[:, :4], mask[:, :4], **prefix, use_cache=True)
    second = model(ids[:, 4:], mask, cache=first.cache)
    cached = torch.cat([first.logits, second.logits], 1)
    torch.testing.assert_close(cached[mask.bool()], complete[mask.bool()])
    separate = model(ids[1:, 4:], packed_states=read.packed_last_hidden_state[1:, :3]).logits
    torch.testing.assert_close(complete[1:, 4:], separate)
    options = {"attention_mask": mask, "max_new_tokens": 6, "num_beams": 3, **prefix}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))


@torch.no_grad()
def test_attentions():
    """Attention weights are the same in one call and with a cache; a masked row of P has no weight."""
    model = make()
    ids, mask = padded([7, 3], 7, "left")
    prefix = {
        "packed_states": torch.randn(2, 4, 24).double(),
        "packed_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
    }
    complete = model(ids, mask, **prefix, output_attentions=True)
    torch.testing.assert_close(complete.logits, model(ids, mask, **prefix).logits)
    first = model(ids[:, :4], mask[:, :4], **prefix, output_attentions=True, use_cache=True)
    second = model(ids[:, 4:], mask, cache=first.cache, output_attentions=True)
    for weights, *parts in zip(complete.attentions, first.attentions, second.attentions, strict=True):
        assert weights.shape == (2, 4, 7, 4) and (weights[1, :, :, 2:] == 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 7).double())
        torch.testing.assert_close(
            torch.cat(parts, dim=2)[mask[:, None].expand(2, 4, 7).bool()], weights[mask[:, None].expand(2, 4, 7).bool()]
        )


def test_errors_specific_to_decoders():
    model = make()
    ids = torch.randint(3, 30, (2, 5))
    with pytest.raises(ValueError, match=r"`packed_states` must have the shape \[2, rows, 24\], got \[1, 3, 24\]"):
        model(ids, packed_states=torch.zeros(1, 3, 24).double())
    with pytest.raises(ValueError, match=r"`packed_mask` must have the shape \[2, 3\] .* got \[2, 4\]"):
        model(ids, packed_states=torch.zeros(2, 3, 24).double(), packed_mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match="`packed_states` is missing; pass it with its `packed_mask`"):
        model(ids, packed_mask=torch.ones(2, 6))
    with pytest.raises(ValueError, match="is_decoder=True"):
        LunaForCausalLM(LunaConfig())
