"""MegaForCausalLM: a cached sequence gives what the whole gives, however it is cut and padded; generation."""

import pytest
import torch

from luna_mega import MegaCache, MegaConfig, MegaForCausalLM, MegaForMaskedLM

SHAPES = {
    "softmax": {},
    "laplace": {"attention_activation": "laplace"},
    "relu2 simple": {"attention_activation": "relu2", "relative_positional_bias": "simple", "max_positions": 40},
    "softmax chunks": {"use_chunking": True, "chunk_size": 4, "relative_positional_bias": "simple"},
    "laplace chunks": {"attention_activation": "laplace", "use_chunking": True, "chunk_size": 5},
    "relu2 chunks of 1": {"attention_activation": "relu2", "use_chunking": True, "chunk_size": 1},
    "truncated": {"truncation": 3, "use_chunking": True, "chunk_size": 4},
}


def make(**fields) -> MegaForCausalLM:
    torch.manual_seed(0)
    config = MegaConfig(
        vocab_size=30,
        hidden_size=12,
        intermediate_size=20,
        shared_representation_size=8,
        ema_projection_size=3,
        nffn_hidden_size=16,
        bidirectional=False,
        is_decoder=True,
        initializer_range=0.3,
        **({"num_hidden_layers": 2} | fields),
    )
    return MegaForCausalLM(config).double().eval()


@pytest.fixture(params=SHAPES)
def model(request):
    return make(**SHAPES[request.param])


def padded(lengths, total, side):
    """Tokens and mask `[B, total]`, with padding on the `side`."""
    ids, mask = torch.randint(3, 30, (len(lengths), total)), torch.zeros(len(lengths), total, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, total - length if side == "left" else 0 : total if side == "left" else length] = 1
    return ids.masked_fill(mask == 0, 1), mask


@torch.no_grad()
@pytest.mark.parametrize("cuts", [[1] * 17, [6, 1, 1, 9], [5, 12], [4, 4, 4, 4, 1], [16, 1], [1, 16]], ids=str)
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_cached_is_uncached(model, cuts, side):
    ids, mask = padded([17, 17] if side == "none" else [17, 9, 3, 12], 17, side)
    expected = model(ids, mask, use_cache=False)
    assert expected.past_key_values is None
    past, start, logits = None, 0, []
    for index, length in enumerate(cuts):
        end = start + length
        # The mask of the segment, or of all so far, as `generate` gives it.
        given = mask[:, start:end] if index % 2 else mask[:, :end]
        output = model(ids[:, start:end], given, past_key_values=past, use_cache=True)
        past, start = output.past_key_values, end
        logits.append(output.logits)
    assert past.get_seq_length() == 17
    torch.testing.assert_close(torch.cat(logits, 1)[mask.bool()], expected.logits[mask.bool()])


@torch.no_grad()
def test_a_sequence_does_not_depend_on_padding(model):
    ids, mask = padded([11, 17, 4], 17, "left")
    together = model(ids, mask, use_cache=False).logits
    for row, length in enumerate([11, 17, 4]):
        alone = model(ids[row : row + 1, 17 - length :]).logits
        torch.testing.assert_close(together[row : row + 1, 17 - length :], alone)


@torch.no_grad()
def test_no_position_sees_later_ones(model):
    ids, _ = padded([12], 12, "none")
    whole = model(ids).logits
    for length in (1, 4, 5, 11):
        torch.testing.assert_close(model(ids[:, :length]).logits, whole[:, :length])


def test_constant_memory():
    model = make(**SHAPES["laplace chunks"])
    past = MegaCache(model.config)
    sizes = []
    with torch.no_grad():
        for _ in range(4):
            model(torch.randint(3, 30, (2, 7)), past_key_values=past)
            layer = past.layers[0]
            sizes.append([layer.keys.shape, layer.values.shape, layer.mask.shape, layer.average.shape])
            assert layer.keys.untyped_storage().nbytes() == layer.keys.numel() * 8
    assert sizes[0] == sizes[-1] and past.get_seq_length() == 28
    assert sizes[0][0] == (2, 4, 8)


def test_gradients_flow_through_the_cache(model):
    """Back-propagation through segments gives the gradients of the whole."""
    ids, mask = padded([13, 8], 13, "left")
    model(ids, mask, use_cache=False).logits[mask.bool()].sin().sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    past = MegaCache(model.config)
    parts = [
        model(ids[:, a:b], mask[:, a:b], past_key_values=past, use_cache=True).logits
        for a, b in ((0, 6), (6, 7), (7, 13))
    ]
    torch.cat(parts, 1)[mask.bool()].sin().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=lambda text, name=name: f"{name}: {text}")


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": True, "num_return_sequences": 2},
        {"do_sample": False, "prefill_chunk_size": 3},
    ],
    ids=["greedy", "beams", "sampling", "chunked prefill"],
)
def test_generate(model, options):
    ids, mask = padded([7, 3], 7, "left")
    results = []
    for use_cache in (True, False):
        if not use_cache:
            options = {name: value for name, value in options.items() if name != "prefill_chunk_size"}
        torch.manual_seed(1)
        results.append(model.generate(ids, attention_mask=mask, max_new_tokens=9, use_cache=use_cache, **options))
    assert torch.equal(*results)
    assert results[0].shape[1] == 16 or (results[0][:, -1] != 0).any()


@torch.no_grad()
def test_cache_operations():
    model = make(**SHAPES["truncated"])
    ids, mask = padded([6, 4, 5], 6, "left")
    past = model(ids, mask).past_key_values
    past.reorder_cache(torch.tensor([2, 0, 0]))
    next_ids = torch.tensor([[4], [9], [4]])
    ordered = torch.tensor([2, 0, 0])
    expected = model(torch.cat([ids[ordered], next_ids], 1), torch.cat([mask[ordered], torch.ones(3, 1).long()], 1))
    torch.testing.assert_close(model(next_ids, past_key_values=past).logits[:, -1], expected.logits[:, -1])
    past.batch_repeat_interleave(2)
    assert past.layers[0].batch_size == 6
    past.crop(past.get_seq_length())
    with pytest.raises(ValueError, match="cannot be cropped from 7 to 3"):
        past.crop(3)
    past.reset()
    assert past.get_seq_length() == 0 and past.layers[0].batch_size is None


def test_errors():
    model = make()
    ids = torch.randint(3, 30, (2, 5))
    past = model(ids).past_key_values
    with pytest.raises(ValueError, match="does not fit this model and batch"):
        model(ids[:1], past_key_values=past)
    with pytest.raises(ValueError, match="does not fit this model and batch"):
        make(num_hidden_layers=1)(ids, past_key_values=past)
    with pytest.raises(ValueError, match="must be a MegaCache, got a tuple"):
        model(ids, past_key_values=((),))
    with pytest.raises(ValueError, match="output_attentions"):
        model(ids, past_key_values=past, output_attentions=True)
    with pytest.raises(ValueError, match="cache_implementation='static'"):
        model.generate(ids, cache_implementation="static")
    with pytest.raises(NotImplementedError, match="continuous batching"):
        model.generate_batch([[4, 5]])
    with pytest.raises(ValueError, match="is_decoder=True"):
        MegaForCausalLM(MegaConfig())
    with pytest.raises(ValueError, match="need a decoder"):
        MegaForMaskedLM(MegaConfig(vocab_size=30))(ids, use_cache=True)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="use_cache=False"):
        model.train()(ids, use_cache=True)
