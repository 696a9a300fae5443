"""What is particular to MegaForCausalLM: how long its memory is, and what it refuses."""

import pytest
import torch

from luna_mega import MegaCache, MegaConfig, MegaForCausalLM, MegaForMaskedLM
from tests.modeling.mega_decoders import ALONE, make


@torch.no_grad()
def test_attention_in_chunks_remembers_one_chunk():
    model, sizes = make(**ALONE["laplace chunks"]), []
    past = MegaCache(model.config)
    for _ in range(4):
        model(torch.randint(3, 30, (2, 7)), past_key_values=past)
        layer = past.layers[0]
        sizes.append([layer.keys.shape, layer.values.shape, layer.mask.shape, layer.average.shape])
        assert layer.keys.untyped_storage().nbytes() == layer.keys.numel() * 8
    assert sizes[0] == sizes[-1] and past.get_seq_length() == 28
    assert sizes[0][0] == (2, 4, 8)


def test_errors():
    model = make()
    ids = torch.randint(3, 30, (2, 5))
    past = model(ids).past_key_values
    for other in ({"use_chunking": True, "chunk_size": 4}, {"truncation": 3}):
        with pytest.raises(ValueError, match="does not fit this model and batch"):
            make(**other)(ids, past_key_values=past)
    with pytest.raises(ValueError, match="does not fit this model and batch"):
        model.generate(ids[:1], past_key_values=past)
    with pytest.raises(ValueError, match="length 0"):
        model(ids[:, :0])
    with pytest.raises(ValueError, match="output_attentions"):
        model(ids, past_key_values=past, output_attentions=True)
    with pytest.raises(ValueError, match="is_decoder=True"):
        MegaForCausalLM(MegaConfig())
    with pytest.raises(ValueError, match="need a decoder"):
        MegaForMaskedLM(MegaConfig(vocab_size=30))(ids, use_cache=True)
