"""NaN and infinite input values are masked, used, or rejected with an error that names the argument."""

import pytest
import torch

import luna_mega
from luna_mega.modeling_common.masks import clean
from tests.marks import diagonal

from . import classes, decoders, luna, mega

FAMILIES = classes.ENCODERS
family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
PADDED = {"normalization_type": "batchnorm", "padded_batch_statistics": True}
ENCODERS = {
    **classes.VARIANTS,
    "luna, without padding": (luna, {"unpad_inputs": True}),
    "mega, without padding": (mega, {"unpad_inputs": True}),
    "mega, padding counts": (mega, PADDED),
    "mega, padding counts, norm on embeddings": (mega, PADDED | {"embedding_norm": True, **mega.NO_DROPOUT}),
}
# Infinities may also result from finite numbers, for example from uninitialized memory.
DIRT = [float("nan"), float("inf"), float("-inf"), 3e38, -1e15]


def soiled(x, mask):
    """Return `x` with NaN, infinities and very large numbers at masked positions."""
    dirt = torch.tensor(DIRT, dtype=x.dtype)[torch.arange(x.numel()) % len(DIRT)].view(x.shape)
    return torch.where(mask[(..., *(None,) * (x.dim() - mask.dim()))].bool(), x, dirt)


def run(model, name, values, mask, **inputs):
    """Return the outputs at unmasked positions, the gradients of the input and of all parameters, and the buffers."""
    values = values.detach().requires_grad_()
    model.zero_grad()
    torch.manual_seed(1)
    output = model(**{name: values}, attention_mask=mask, **inputs)
    states = output.last_hidden_state if "last_hidden_state" in output else output.logits
    kept = states if states.dim() == 2 else states[mask.bool()]
    kept.square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return kept.detach(), values.grad, gradients, [x.clone() for x in model.buffers()]


def check_clean(make, name, values, mask, expand=None, **inputs):
    """Check that NaN at padding does not change outputs, gradients or statistics, and has a gradient of 0."""
    place = mask if expand is None else expand(mask)
    clean, dirty = (run(make(), name, x, mask, **inputs) for x in (values, soiled(values, place)))
    assert clean[0].isfinite().all() and dirty[0].equal(clean[0]) and dirty[1].equal(clean[1])
    assert not dirty[1][~place.bool()].any() and dirty[1][place.bool()].any()
    for one, other in zip(clean[2] + clean[3], dirty[2] + dirty[3], strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("case, training", diagonal(ENCODERS, [True, True, False]))
def test_nan_in_masked_embeddings(case, training):
    (module, fields), side = ENCODERS[case], ["left", "right"][list(ENCODERS).index(case) % 2]
    mask = luna.tokens([9, 4, 1], side)["attention_mask"]
    vectors = torch.randn(3, 9, 24) * mask[..., None]  # models that count padding treat its embedding as 0
    check_clean(lambda: module.make("Model", **fields).train(training), "inputs_embeds", vectors, mask)


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


@family
def test_nan_in_masked_values(family):
    mask = luna.tokens([9, 4], "left")["attention_mask"]
    make = lambda: family.make("ForSequenceClassification", **family.VALUES)  # noqa: E731
    check_clean(make, "input_values", torch.randn(2, 9), mask)


def test_nan_in_masked_pixels():
    """Pixels of a masked patch may have any value."""
    fields = {"input_type": "patches", "image_size": 12, "patch_size": 4, "num_channels": 2, "pooling": "mean"}
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 0, 1], [1, 0, 0, 0, 1, 1, 1, 1, 1]])

    def pixels(mask):
        kept = mask.view(2, 1, 3, 3).repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
        return kept.expand(-1, 2, -1, -1)

    config = mega.tiny_config(**fields)
    make = lambda: luna.enlarged(luna_mega.MegaForImageClassification, config)  # noqa: E731
    check_clean(make, "pixel_values", torch.randn(2, 2, 12, 12), mask, pixels)


@pytest.mark.parametrize("name", [name for name in decoders.DECODER_ONLY if name in decoders.SOME])
def test_nan_in_left_padding_of_a_decoder(name):
    ids, mask = decoders.padded([7, 3], 7, "left")
    make = lambda: decoders.make(name, dtype=torch.float32)  # noqa: E731
    model = make()
    vectors = model.get_input_embeddings()(ids).detach()
    check_clean(make, "inputs_embeds", vectors, mask, use_cache=True)


@pytest.mark.parametrize("name, unpad", diagonal(decoders.WITH_ENCODER, [False, True, True]))
def test_nan_in_masked_sources_and_targets(name, unpad):
    """NaN at masked positions of sources, targets and encoder outputs has no effect."""
    model = decoders.make(name, dtype=torch.float32, unpad_inputs=unpad)
    width, target_mask = model.config.hidden_size, decoders.padded([5, 3], 5, "left")[1]
    mask, source = decoders.padded([7, 3], 7, "right")[1], torch.randn(2, 7, width)
    target = torch.randn(2, 5, width)
    given = {"inputs_embeds": source, "decoder_inputs_embeds": target}
    masks = {"attention_mask": mask, "decoder_attention_mask": target_mask}
    expected = model(**given, **masks).logits[target_mask.bool()]
    dirty = {"inputs_embeds": soiled(source, mask), "decoder_inputs_embeds": soiled(target, target_mask)}
    assert model(**dirty, **masks).logits[target_mask.bool()].equal(expected)
    encoded = model.get_encoder()(inputs_embeds=source, attention_mask=mask, return_dict=True)
    encoded.last_hidden_state = soiled(encoded.last_hidden_state, mask)
    if (packed := getattr(encoded, "packed_mask", None)) is not None:
        encoded.packed_last_hidden_state = soiled(encoded.packed_last_hidden_state, packed)
    assert (
        model(encoder_outputs=encoded, decoder_inputs_embeds=target, **masks).logits[target_mask.bool()].equal(expected)
    )


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


@pytest.mark.slow
def test_compiled_programs_do_not_read_mask_values():
    """A compiled model treats every mask value except 0 as True; checking values would synchronize the device."""
    model, ids = mega.make("Model", num_hidden_layers=1), torch.tensor([[5, 6, 7, 8]])
    mask = torch.tensor([[2.0, 3.0, 0.0, 1.0]])
    program = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        expected = model(ids, mask != 0).last_hidden_state
        torch.testing.assert_close(program(ids, mask).last_hidden_state, expected)


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
