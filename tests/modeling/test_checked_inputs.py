"""Arguments that used to be ignored or to cause wrong results now raise an error that names the value."""

import copy
import pickle

import pytest
import torch

from . import classes, luna_decoders, mega_decoders

MODELS = {"luna": classes.HEADS["luna Model"], "mega": classes.HEADS["mega Model"], **classes.DECODERS}
make = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
BANDS = {"adaptive_input_cutoffs": [10, 25], "adaptive_softmax_cutoffs": [10, 25], "adaptive_input_factor": 2}
IDS = torch.tensor([[4, 5, 6, 7, 8, 9]])


@torch.no_grad()
@pytest.mark.parametrize("token", [-1, -40, 30, 1000])
def test_tokens_outside_adaptive_bands(token):
    """Every token of the vocabulary has an embedding, and tokens outside the bands raise an error."""
    model = mega_decoders.make(**BANDS, adaptive_softmax_factor=2)
    vocabulary = torch.arange(30)[None]
    assert model.get_input_embeddings()(vocabulary).abs().sum(dim=-1).gt(0).sum() >= 29  # all except the padding token
    with pytest.raises(ValueError, match="the vocabulary of this model has 30 tokens"):
        model(torch.cat([vocabulary, torch.tensor([[token]])], dim=1))


@torch.no_grad()
@make
def test_seq_idx_of_another_shape(make):
    model = make()
    options = {"use_cache": False} if model.config.is_decoder else {}
    for seq_idx in (torch.tensor([0, 0, 0, 1, 1, 1]), torch.zeros(1, 8).long(), torch.zeros(1, 6), [0]):
        with pytest.raises(ValueError, match=r"`seq_idx` must be integers of the shape \[1, 6\] of the input"):
            model(IDS, seq_idx=seq_idx, **options)


@torch.no_grad()
@make
def test_hidden_states_of_a_padding_free_batch(make):
    """All states have the shape of the input; an error is raised if the mask would make the states shorter."""
    model, seq_idx = make(), torch.tensor([[0, 0, 0, 1, 1, 1]])
    options = {"output_hidden_states": True} | ({"use_cache": False} if model.config.is_decoder else {})
    states = model(IDS, seq_idx=seq_idx, **options).hidden_states
    assert {state.shape for state in states} == {(1, 6, model.config.hidden_size)}
    mask = torch.tensor([[1, 1, 1, 1, 1, 0]])
    with pytest.raises(ValueError, match="one row without padding, got 1 positions of padding"):
        model(IDS, mask, seq_idx=seq_idx, **options)
    with pytest.raises(ValueError, match="one row without padding, got 1 positions of padding"):
        model(IDS * mask + (1 - mask), seq_idx=seq_idx, **options)
    with pytest.raises(ValueError, match="one row without padding, got 2 rows"):
        model(IDS.repeat(2, 1), seq_idx=seq_idx.repeat(2, 1), **options)


@torch.no_grad()
@pytest.mark.parametrize("selection", [True, 2, [-1], [0, -1], [1, 7], [-9]], ids=str)
@pytest.mark.parametrize("make", [MODELS["luna"], MODELS["luna decoder"]], ids=["encoder", "decoder"])
def test_selected_states_of_the_packed_sequence(make, selection):
    """`output_hidden_states` selects the same layers in P as in the tokens."""
    model = make()
    everything = model(IDS, output_hidden_states=True)
    output = model(IDS, output_hidden_states=selection)
    kept = [[state is not None for state in output[name]] for name in ("hidden_states", "packed_hidden_states")]
    count = len(everything.hidden_states)
    indices = range(count) if selection is True else [selection] if isinstance(selection, int) else selection
    expected = {index % count for index in indices if -count <= index < count}
    assert kept == [[index in expected for index in range(count)]] * 2
    for index in expected:
        assert torch.equal(output.packed_hidden_states[index], everything.packed_hidden_states[index])


@torch.no_grad()
def test_cache_of_another_projection_length():
    model, other = (luna_decoders.make(projection_length=rows) for rows in (6, 4))
    past = other(IDS, use_cache=True).cache
    for cache in (past, copy.deepcopy(past), pickle.loads(pickle.dumps(past))):
        with pytest.raises(ValueError, match="it has projection_length 4, not 6; pass a new cache"):
            model(IDS, cache=cache)
    assert model(IDS, cache=model(IDS, use_cache=True).cache).logits.isfinite().all()
    # A P that is passed in may have any number of rows.
    packed = torch.randn(1, 3, 24, dtype=torch.float64)
    past = model(IDS, packed_states=packed, use_cache=True).cache
    assert model(IDS, cache=past).logits.isfinite().all()


@torch.no_grad()
def test_packed_sequence_with_a_cache():
    """The cache already contains P, so a new P is ignored, but it must equal the one that filled the cache."""
    model, packed = luna_decoders.make(), torch.randn(1, 3, 24, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0]])
    for given in ({"packed_states": packed}, {"packed_states": packed, "packed_mask": mask}):
        past = model(IDS, **given, use_cache=True).cache
        expected = model(IDS, cache=copy.deepcopy(past)).logits
        assert torch.equal(model(IDS, **given, cache=copy.deepcopy(past)).logits, expected)
        for shape in ((1, 4, 24), (2, 3, 24), (1, 3, 20), (3, 24)):
            with pytest.raises(ValueError, match=r"`packed_states` must have the shape \[1, 3, 24\], got"):
                model(IDS, packed_states=torch.zeros(shape), cache=copy.deepcopy(past))
        with pytest.raises(ValueError, match=r"`packed_mask` must have the shape \[1, 3\] of P, got \[1, 4\]"):
            model(IDS, packed_states=packed, packed_mask=torch.ones(1, 4), cache=copy.deepcopy(past))
