"""NaN and infinite input values are masked, used, or rejected with an error that names the argument.

`test_losses_of_rows.py` has NaN at padding of all classes.
"""

import pytest
import torch

import luna_mega
from luna_mega.modeling_common.masks import clean

from . import classes, decoders, luna, mega
from .test_losses_of_rows import soil

FAMILIES = classes.ENCODERS
family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
PADDED = {"normalization_type": "batchnorm", "padded_batch_statistics": True}
PATCHES = {"input_type": "patches", "image_size": 12, "patch_size": 4, "num_channels": 2, "pooling": "mean"}


@pytest.mark.parametrize("fields", [PADDED, PADDED | {"embedding_norm": True, **mega.NO_DROPOUT}, PATCHES])
def test_nan_in_training(fields):
    """NaN at padding changes nothing if padding counts in statistics, or in patches of images."""
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 0, 1], [1, 0, 0, 0, 1, 1, 1, 1, 1]])
    name, values, place, head = "inputs_embeds", torch.randn(2, 9, 24) * mask[..., None], mask, mega.HEADS["Model"]
    if fields is PATCHES:
        name, values, head = "pixel_values", torch.randn(2, 2, 12, 12), luna_mega.MegaForImageClassification
        place = mask.view(2, 1, 3, 3).repeat_interleave(4, dim=2).repeat_interleave(4, dim=3).expand(-1, 2, -1, -1)
    found = []
    for x in (values, soil(values, place)):
        model, x = luna.enlarged(head, mega.tiny_config(**fields)).train(), x.detach().requires_grad_()
        torch.manual_seed(1)
        output = model(**{name: x}, attention_mask=mask)[0]
        output = output if output.dim() == 2 else output[mask.bool()]
        output.square().sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([output.detach(), x.grad, *gradients, *model.buffers()])
    assert all(map(torch.equal, *found)) and found[0][0].isfinite().all()
    assert not found[1][1][~place.bool()].any() and found[1][1][place.bool()].any()


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_nan_in_masked_outputs_of_an_encoder(family):
    model, mask = decoders.make_plain(family, is_encoder_decoder=True), decoders.padded([7, 3], 7, "right")[1]
    ids = torch.full((2, 5), 5)
    encoded = model.get_encoder()(torch.full((2, 7), 6), attention_mask=mask)
    expected = model(encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=ids).logits
    encoded.last_hidden_state = soil(encoded.last_hidden_state, mask)
    if (packed := getattr(encoded, "packed_mask", None)) is not None:
        encoded.packed_last_hidden_state = soil(encoded.packed_last_hidden_state, packed)
    assert model(encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=ids).logits.equal(expected)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int16, torch.bool], ids=str
)
def test_masked_positions_are_zeroed_in_every_dtype(dtype):
    mask, values = torch.tensor([[True, False, False, True]]), torch.ones(1, 4, dtype=dtype)
    if dtype.is_floating_point:
        values[0, :3] = torch.tensor([float("inf"), float("inf"), float("nan")])
        assert clean(values, mask).tolist() == [[float("inf"), 0, 0, 1]]
    else:
        assert clean(values, mask) is values


MASKS = {
    "additive": ([0.0, 0.0, float("-inf"), 0.0], r"has values from -inf to 0.0, .*attention_mask == 0"),
    "NaN": ([1.0, float("nan"), 1.0, 1.0], "has values from nan to nan"),
    "weights": ([1.0, 0.5, 1.0, 1.0], "has values from 0.5 to 1.0"),
    "numbers of documents": ([1, 1, 2, 2], "has values from 1 to 2"),
    "minus": ([1, 1, -1, 1], "has values from -1 to 1"),
}


@family
def test_invalid_masks_raise(family):
    ids, pair = torch.tensor([[5, 6, 7, 8]]), family.make("ForSequencePairClassification")
    for mask, message in MASKS.values():
        mask = torch.tensor([mask])
        for head in ("Model", "ForSequenceClassification"):
            with pytest.raises(ValueError, match=f"^`attention_mask` {message}"):
                family.make(head)(ids, mask)
        with pytest.raises(ValueError, match="^`pair_attention_mask` has values"):
            pair(ids, pair_input_ids=ids, pair_attention_mask=mask)
    right = [torch.tensor([[1, 1, 0, 1]], dtype=dtype) for dtype in (torch.bool, torch.long, torch.int32, torch.half)]
    model = family.make("Model")
    expected, *others = (model(ids, mask).last_hidden_state for mask in right)
    assert all(other.equal(expected) for other in others)


@pytest.mark.parametrize("family", FAMILIES)
def test_invalid_masks_raise_in_encoder_and_decoder(family):
    model = decoders.make_plain(family, is_encoder_decoder=True)
    ids, mask = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0.0, 0.0, 0.0, float("-inf")]])
    for name in ("attention_mask", "decoder_attention_mask"):
        with pytest.raises(ValueError, match=f"^`{name}` has values from -inf to 0.0"):
            model(ids, decoder_input_ids=ids, **{name: mask})
    for inputs in ({"input_ids": ids}, {"encoder_outputs": model.get_encoder()(ids)}):
        with pytest.raises(ValueError, match="^`attention_mask` has values"):
            model.generate(**inputs, attention_mask=mask, max_new_tokens=2)
    encoded, extra = model.get_encoder()(ids), {}
    if family == "luna":
        extra = {"packed_states": encoded.packed_last_hidden_state}
        with pytest.raises(ValueError, match="^`packed_mask` has values"):
            model.get_encoder()(ids, packed_mask=mask, packed_states=torch.zeros(1, 4, 24, dtype=torch.float64))
    with pytest.raises(ValueError, match="^`encoder_attention_mask` has values"):
        model.get_decoder()(ids, encoder_hidden_states=encoded.last_hidden_state, encoder_attention_mask=mask, **extra)


@pytest.mark.parametrize("family", FAMILIES)
def test_encoder_decoders_reject_position_ids(family):
    model, ids = decoders.make_plain(family, is_encoder_decoder=True), torch.tensor([[5, 6, 7, 8]])
    for part, positions in ((model, "abc"), (model.base_model, torch.zeros(1, 4, dtype=torch.long))):
        with pytest.raises(ValueError, match="`position_ids` is ambiguous for an encoder-decoder"):
            part(ids, decoder_input_ids=ids, position_ids=positions)


POSITIONS = {
    "reserved": ([[0, 1, 2, -1]], "`position_ids` are from -1 to 2; they must be at least 0"),
    "reserved, the other": ([[0, 1, 2, -2]], "`position_ids` are from -2 to 2"),
    "before the table": ([[0, 1, 2, -3]], "`position_ids` are from -3 to 2"),
    "beyond the table": ([[0, 1, 2, 48]], "`position_ids` are from 0 to 48.* less than the 48"),
    "another shape": ([[0, 1, 2]], r"position_ids must have the shape \[1, 4\] of the input, got \[1, 3\]"),
    "no integers": ([[0.0, 1.0, 2.0, 3.0]], "position_ids must be a tensor of integers, got Tensor of torch.float32"),
}


@pytest.mark.parametrize("positions, message", POSITIONS.values(), ids=POSITIONS)
def test_positions_outside_the_table(positions, message):
    ids, positions = torch.tensor([[5, 6, 7, 8]]), torch.tensor(positions)
    for mask in (torch.ones(1, 4), None):
        with pytest.raises(ValueError, match=message):
            luna.make("Model")(ids, mask, position_ids=positions)
    with pytest.raises(ValueError, match="position_ids must be a tensor of integers, got str"):
        luna.make("Model")(ids, position_ids="abc")


def test_positions_of_padding_have_no_effect():
    model, inputs = luna.make("Model"), luna.tokens([9, 4], "left")
    expected, kept = model(**inputs).last_hidden_state, inputs["attention_mask"].bool()
    for filler in (-1, 1, -3, 1000):
        positions = (inputs["attention_mask"].cumsum(dim=1) - 1).masked_fill(~kept, filler)
        states = model(**inputs, position_ids=positions).last_hidden_state
        assert states[kept].equal(expected[kept])
