"""P as a memory that is passed through the segments of a document."""

import pytest
import torch

from luna_mega import read_segments
from tests.modeling.decoders import padded
from tests.modeling.luna import VARIANTS, make

FIXED = {"dynamic_projection_length": False}


def last(model, *args, **options):
    """Return P after the last segment."""
    *_, output = read_segments(model, *args, **options)
    return output.packed_last_hidden_state


@torch.no_grad()
@pytest.mark.parametrize("variant", ["tied", "sinusoidal", "pre-norm", "shared layers"])
def test_a_document_does_not_depend_on_its_batch(variant):
    """P of a document depends neither on longer rows of the batch nor on right padding."""
    model = make("Model", **VARIANTS[variant] | FIXED).double()
    lengths = [23, 9, 16]
    ids, mask = padded(lengths, 23, "right")
    together = list(read_segments(model, ids, mask, segment_length=8))
    assert [output.last_hidden_state.shape[1] for output in together] == [8, 8, 7]
    for row, length in enumerate(lengths):
        separate = list(read_segments(model, ids[row : row + 1, :length], segment_length=8))
        memory = together[-1].packed_last_hidden_state[row]
        torch.testing.assert_close(memory, separate[-1].packed_last_hidden_state[0])
        for complete, part in zip(together, separate, strict=False):
            kept = part.last_hidden_state.shape[1]
            torch.testing.assert_close(complete.last_hidden_state[row, :kept], part.last_hidden_state[0])


@torch.no_grad()
def test_in_two_calls():
    model = make("Model", **FIXED)
    ids, _ = padded([24, 24], 24, "right")
    memory = last(model, ids[:, :16], segment_length=8)
    torch.testing.assert_close(
        last(model, ids[:, 16:], segment_length=8, packed_states=memory), last(model, ids, segment_length=8)
    )


@pytest.mark.parametrize(("segments", "reached"), [(None, [0, 1, 2, 3]), (1, [3]), (2, [2, 3]), (3, [3])])
def test_gradient_reaches_the_chosen_segments(segments, reached):
    model = make("Model", **FIXED)
    ids = torch.arange(4, 20).view(1, 16)  # all tokens differ, so that gradients identify their positions
    last(model, ids, segment_length=4, gradient_segments=segments).square().sum().backward()
    moved = model.get_input_embeddings().weight.grad[4:20].abs().sum(dim=1).view(4, 4) > 0
    assert moved.all(dim=1).nonzero().flatten().tolist() == reached
    assert moved.any(dim=1).nonzero().flatten().tolist() == reached


def test_errors():
    ids = torch.randint(4, 40, (2, 9))
    with pytest.raises(ValueError, match="dynamic_projection_length=False"):
        last(make("Model"), ids, segment_length=4)
    model = make("Model", **FIXED)
    with pytest.raises(ValueError, match="`segment_length` must be at least 1, got 0"):
        last(model, ids, segment_length=0)
    with pytest.raises(ValueError, match="`gradient_segments` must be at least 1, got -1"):
        last(model, ids, segment_length=4, gradient_segments=-1)
    with pytest.raises(ValueError, match="padding_side='right'"):
        last(model, *padded([9, 5], 9, "left"), segment_length=4)
    with pytest.raises(ValueError, match=r"`packed_states` must have the shape \[2, rows, 24\]"):
        last(model, ids, segment_length=4, packed_states=torch.zeros(1, 6, 24))
