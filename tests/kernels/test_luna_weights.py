"""`return_weights` of Luna's ops returns the weights and does not change the results."""

import pytest
import torch

from luna_mega.kernels.api import LunaCausalState, luna_attention, luna_causal_attention, luna_pack
from tests.kernels.test_luna_attention import make_inputs
from tests.kernels.test_luna_causal_attention import Inputs


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_pack_and_unpack_weights(backend):
    """Returning weights does not change the output, and the weights applied to the values reproduce it."""
    (x, context, _), mask = make_inputs(7, 11, "some")
    (p, _, _), pack_mask = make_inputs(5, 11, "some")[0], torch.rand(2, 5) < 0.8
    options = {"context_mask": mask, "pack_mask": pack_mask, "backend": backend}
    expected = luna_attention(x, p, context, context, lambda packed: (packed, packed), **options)
    *actual, weights, pack_weights = luna_attention(
        x, p, context, context, lambda packed: (packed, packed), return_weights=True, **options
    )
    torch.testing.assert_close(actual, list(expected))
    torch.testing.assert_close(torch.einsum("bhlm,bmhk->blhk", pack_weights, context), expected[1])
    torch.testing.assert_close(torch.einsum("bhtl,blhk->bthk", weights, expected[1]), expected[0])
    with pytest.raises(ValueError, match="luna_pack does not return weights with cu_seqlens"):
        luna_pack(p, context[:1], context[:1], cu_seqlens=torch.tensor([0, 4, 11]), return_weights=True)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_causal_weights(backend):
    """Every backend returns the weights over unmasked rows of P, and the output and state without the option."""
    inputs = Inputs(9, "middle", stateful=True, pack_masked=True)
    state = LunaCausalState(*inputs.leaves[5:], inputs.count)
    options = {"mask": inputs.mask, "pack_mask": inputs.pack_mask, "state": state, "backend": backend}
    expected = luna_causal_attention(*inputs.leaves[:5], return_state=True, **options)
    output, weights, after = luna_causal_attention(
        *inputs.leaves[:5], return_state=True, return_weights=True, **options
    )
    torch.testing.assert_close((output, *after), (expected[0], *expected[1]))
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones_like(weights[..., 0]))
    assert (weights.movedim(-1, 1)[~inputs.pack_mask] == 0).all()
    separate = luna_causal_attention(*inputs.leaves[:5], return_weights=True, **options)
    assert len(separate) == 2 and torch.equal(separate[1], weights)
    flat = [x[:1].detach() for x in inputs.leaves[:5]]
    with pytest.raises(ValueError, match="luna_causal_attention does not return weights with cu_seqlens"):
        luna_causal_attention(*flat, cu_seqlens=torch.tensor([0, 9]), return_weights=True)
