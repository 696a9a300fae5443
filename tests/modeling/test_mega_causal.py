"""MegaForCausalLM: size of the cache, and errors."""

import pytest
import torch

from luna_mega import MegaConfig, MegaForCausalLM
from tests.modeling.mega_decoders import DECODER_ONLY, make


@torch.no_grad()
def test_beams_move_in_place():
    model, ids = make(**DECODER_ONLY["laplace chunks"]), torch.randint(3, 30, (3, 8))
    past = model(ids, use_cache=True).cache
    place = past.layers[0].values.data_ptr()
    for order in ([0, 1, 2], [1, 1, 0], [2, 0, 0]):
        past.reorder_cache(torch.tensor(order))
        ids = torch.cat([ids[order], torch.randint(3, 30, (3, 1))], 1)
        output = model(ids[:, -1:], cache=past)
        torch.testing.assert_close(output.logits[:, -1], model(ids, use_cache=False).logits[:, -1])
    assert past.layers[0].values.data_ptr() == place


def test_tensors_saved_by_autograd_are_not_overwritten():
    model, ids = make(**DECODER_ONLY["laplace chunks"]), torch.randint(3, 30, (2, 8))
    output = model(ids, use_cache=True)
    with torch.no_grad():
        model(ids[:, :1], cache=output.cache)
    output.logits.sum().backward()
    given = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(ids, use_cache=False).logits.sum().backward()
    torch.testing.assert_close(given, [parameter.grad for parameter in model.parameters()])


def test_errors():
    model = make()
    ids = torch.randint(3, 30, (2, 5))
    past = model(ids).cache
    for other in ({"use_chunking": True, "chunk_size": 4}, {"truncation": 3}):
        with pytest.raises(ValueError, match="does not fit this model and batch"):
            make(**other)(ids, cache=past)
    with pytest.raises(ValueError, match="output_attentions"):
        model(ids, cache=past, output_attentions=True)
    with pytest.raises(ValueError, match="is_decoder=True"):
        MegaForCausalLM(MegaConfig())
