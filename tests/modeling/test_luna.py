"""Features of Luna without a row: P as an input, an output and a memory; layers with rows of P; the first token."""

import copy
import pickle

import pytest
import torch

from luna_mega import LunaModel, read_segments
from luna_mega.modeling_common.layout import NO_PADDING
from tests.modeling import decoders, luna
from tests.modeling.contract import CLASSES, Division, check_division
from tests.modeling.decoders import padded, source, target
from tests.modeling.luna_decoders import make

IDS = torch.tensor([[4, 5, 6, 7, 8, 9]])


def plain(**fields):
    return make(is_encoder_decoder=True, **fields)


@torch.no_grad()
def test_prefix_as_projection():
    """`packed_states` replaces the learned P in every layer, also with a cache and in `generate`."""
    model = make()
    reader = LunaModel(plain().config.encoder_config).double().eval()
    read = reader(*padded([8, 3], 8, "right"))
    prefix = {"packed_states": read.packed_last_hidden_state, "packed_mask": read.packed_mask}
    ids, mask = padded([7, 3], 7, "left")
    complete = model(ids, mask, **prefix, output_attentions=True)
    assert (complete.logits - model(ids, mask).logits).abs().max() > 0.01
    assert not complete.attentions[0][1, :, :, 3:].any()  # masked rows of P
    first = model(ids[:, :4], mask[:, :4], **prefix, use_cache=True)
    second = model(ids[:, 4:], mask, cache=copy.deepcopy(first.cache))
    cached = torch.cat([first.logits, second.logits], 1)
    torch.testing.assert_close(cached[mask.bool()], complete.logits[mask.bool()])
    # The cache contains P already, so that a new one is ignored.
    again = model(ids[:, 4:], mask, cache=first.cache, **prefix)
    torch.testing.assert_close(again.logits, second.logits)
    separate = model(ids[1:, 4:], packed_states=read.packed_last_hidden_state[1:, :3]).logits
    torch.testing.assert_close(complete.logits[1:, 4:], separate)
    options = {"attention_mask": mask, "max_new_tokens": 6, "num_beams": 3, **prefix}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))


@torch.no_grad()
@pytest.mark.parametrize("name", ["luna Model", "luna decoder"])
def test_selected_states_of_the_packed_sequence(name):
    """`output_hidden_states` selects the same layers in P as in the tokens, for which transformers does it."""
    model = CLASSES[name].make()
    everything = model(IDS, output_hidden_states=True).packed_hidden_states
    for selection in (2, [0, -1], [1, 3], [-4, -3]):
        output = model(IDS, output_hidden_states=selection)
        kept = [state is not None for state in output.hidden_states]
        assert any(kept) and [state is not None for state in output.packed_hidden_states] == kept
        assert all(torch.equal(output.packed_hidden_states[i], everything[i]) for i in range(3) if kept[i])


@torch.no_grad()
def test_cache_of_another_projection_length():
    """It is an error, unless a P that was passed in filled the cache."""
    model, other = (make(projection_length=rows) for rows in (6, 4))
    past = other(IDS, use_cache=True).cache
    for cache in (past, copy.deepcopy(past), pickle.loads(pickle.dumps(past))):
        with pytest.raises(ValueError, match="it has projection_length 4, not 6; pass a new cache"):
            model(IDS, cache=cache)
    packed = torch.randn(1, 3, 24, dtype=torch.float64)
    past = model(IDS, packed_states=packed, use_cache=True).cache
    with pytest.raises(ValueError, match=r"`packed_states` must have the shape \[1, 3, 24\], got"):
        model(IDS, packed_states=torch.zeros(1, 4, 24), cache=past)
    with pytest.raises(ValueError, match=r"`packed_mask` must have the shape \[1, 3\] of P, got \[1, 4\]"):
        model(IDS, packed_states=packed, packed_mask=torch.ones(1, 4), cache=past)
    assert model(IDS, cache=past).logits.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("pre_norm", [False, True])
def test_recorded_states_of_luna(pre_norm):
    """States of P are recorded, and weights in both directions; `test_contract.py` compares those of tokens."""
    model = plain(pre_norm=pre_norm, num_decoder_layers=3, num_decoder_pack_attention_heads=2)
    inputs = source(model, 3) | target(model, padded([5, 4, 2], 5, "right")[0])
    options = {f"output_{name}": True for name in ("hidden_states", "attentions", "packed_attentions")}
    output, encoded = model(**inputs, **options), model.get_encoder()(**source(model, 3), **options)
    assert [x.shape for x in output.packed_hidden_states] == [(3, 6, 24)] * 4
    assert torch.equal(output.packed_hidden_states[0], output.encoder_packed_hidden_states[-1])
    torch.testing.assert_close(encoded.packed_hidden_states[-1], encoded.packed_last_hidden_state)
    assert [x.shape for x in output.encoder_attentions] == [(3, 4, 13, 6)] * 2
    for weights, shape in (
        (encoded.packed_attentions, [(3, 4, 6, 13)] * 2),
        (output.cross_packed_attentions, [(3, 2, 6, 13)] * 3),
    ):
        assert [x.shape for x in weights] == shape
        assert all(torch.allclose(x.sum(-1), torch.ones_like(x.sum(-1))) for x in weights)
        assert not any(x.transpose(1, 3)[inputs["attention_mask"] == 0].any() for x in weights)


@torch.no_grad()
def test_positions_of_the_target():
    """They are counted without padding."""
    model, (ids, mask) = plain(), padded([5, 3], 5, "left")
    inputs = source(model, 2) | target(model, ids, mask)
    counted, expected = (mask.cumsum(1) - 1).clamp(min=0), model(**inputs).logits
    assert torch.equal(model(**inputs, decoder_position_ids=counted).logits, expected)
    assert not torch.allclose(model(**inputs, decoder_position_ids=counted + 1).logits, expected)


def test_word_dropout_removes_complete_words():
    fields = {"word_dropout": 0.5, "dropout": 0.0, "embedding_norm": False, "position_embedding_type": "none"}
    embeddings = plain(**fields).train().get_encoder().embeddings
    words, _ = embeddings(torch.ones(4, 50, 24).double(), NO_PADDING, None, with_packed=False)
    assert len(words.unique()) == 2
    assert (words == words[..., :1]).all() and 0.3 < (words[..., 0] == 0).double().mean() < 0.7


@pytest.mark.parametrize("pooling, types", [("cls", 3), ("packed_attention", 2)])
def test_dropping_the_first_token(pooling, types):
    """`drop_first_token` gives the result of inputs without their first token, with padding on either side."""
    fields, lengths = {"pooling": pooling, "type_vocab_size": types}, [21, 2, 5]
    model = luna.make("ForSequenceClassification", **fields, drop_first_token=True)
    plain = luna.make("ForSequenceClassification", **fields)
    for side in ("right", "left"):
        inputs = luna.tokens(lengths, side, 30)
        inputs["token_type_ids"] = inputs["input_ids"] % types
        scores = model(**inputs).logits
        for row, kept in enumerate(inputs["attention_mask"].bool()):
            separate = plain(**{name: x[row, kept][None, 1:] for name, x in inputs.items()}).logits
            torch.testing.assert_close(scores[row : row + 1], separate, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "packed_mean"])
def test_counting_padding_is_the_original_mean(pooling):
    """With `pool_padding`, the mean includes padding: all positions, or all rows of P used by the longest text."""
    model = luna.make("ForSequenceClassification", pooling=pooling, pool_padding=True)
    inputs = luna.tokens([4, 2], width=5)
    outputs = model.luna(**inputs)
    states = outputs.last_hidden_state if pooling == "mean" else outputs.packed_last_hidden_state[:, :4]
    torch.testing.assert_close(model(**inputs).logits, model.classifier(states.mean(dim=1)))


def test_layerdrop():
    model = luna.make("Model", layerdrop=0.9, num_hidden_layers=8, **luna.NO_DROPOUT)
    inputs = luna.tokens([9])
    assert torch.equal(*(model(**inputs).last_hidden_state for _ in range(2)))
    model.train()
    torch.manual_seed(0)
    lengths = {len(model(**inputs, output_hidden_states=True).packed_hidden_states) for _ in range(20)}
    assert min(lengths) < 4 and max(lengths) < 9


FIXED = {"dynamic_projection_length": False}


def last(model, *args, **options):
    """Return P after the last segment."""
    *_, output = read_segments(model, *args, **options)
    return output.packed_last_hidden_state


@torch.no_grad()
@pytest.mark.parametrize("variant", ["tied", "pre-norm"])
def test_segments_of_a_document(variant):
    """P of a document depends neither on its batch nor on right padding nor on the number of calls."""
    model, lengths = luna.make("Model", **luna.VARIANTS[variant] | FIXED).double(), [23, 9, 16]
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
    memory = last(model, ids[:1, :16], segment_length=8)
    again = last(model, ids[:1, 16:], segment_length=8, packed_states=memory)
    torch.testing.assert_close(again[0], together[-1].packed_last_hidden_state[0])


@pytest.mark.parametrize(("segments", "reached"), [(None, [0, 1, 2, 3]), (1, [3]), (2, [2, 3]), (3, [3])])
def test_gradient_reaches_the_chosen_segments(segments, reached):
    model = luna.make("Model", **FIXED, pad_token_id=None)
    ids = torch.arange(4, 20).view(1, 16)  # all tokens differ, so that gradients identify their positions
    last(model, ids, segment_length=4, gradient_segments=segments).square().sum().backward()
    moved = model.get_input_embeddings().weight.grad[4:20].abs().sum(dim=1).view(4, 4) > 0
    assert moved.all(dim=1).nonzero().flatten().tolist() == reached
    assert moved.any(dim=1).nonzero().flatten().tolist() == reached


def test_errors_of_segments():
    ids, model = torch.randint(4, 40, (2, 9)), luna.make("Model", **FIXED)
    with pytest.raises(ValueError, match="dynamic_projection_length=False"):
        last(luna.make("Model"), ids, segment_length=4)
    for message, options in (
        ("`segment_length` must be at least 1, got 0", {"segment_length": 0}),
        ("`gradient_segments` must be at least 1, got -1", {"gradient_segments": -1}),
        ("padding_side='right'", {"attention_mask": padded([9, 5], 9, "left")[1]}),
        (r"`packed_states` must have the shape \[2, rows, 24\]", {"packed_states": torch.zeros(1, 6, 24)}),
    ):
        with pytest.raises(ValueError, match=message):
            last(model, ids, **{"segment_length": 4} | options)


OWN_ROWS = {"contextual_projection": False, "num_hidden_layers": 4}
DEEP = {  # and the layers that are kept
    "decoder": (lambda: make(num_hidden_layers=4), [1, 1, 0, 3, 2]),
    "encoder": (lambda: luna.make("ForMaskedLM", **OWN_ROWS).double(), [2, 0, 3, 1]),
    "model": (lambda: luna.make("Model", **OWN_ROWS).double(), [0, 3]),
    "Megalodon": (lambda: decoders.make_plain("megalodon", num_hidden_layers=4), [1, 1, 0, 3, 2]),
}


def keep_layers(model, chosen):
    """Keep only the chosen layers of a model, as a user would do."""
    stack = next(module for module in model.modules() if hasattr(module, "layers"))
    stack.layers = torch.nn.ModuleList(copy.deepcopy(stack.layers[index]) for index in chosen)
    model.config.num_hidden_layers = len(chosen)
    return model


def new_model(model, chosen):
    """Return a new model with the weights of these layers and their rows of P."""
    model = keep_layers(copy.deepcopy(model), chosen)
    weights = {name: x[chosen] if "packed_embeddings" in name else x for name, x in model.state_dict().items()}
    new = type(model)(copy.deepcopy(model.config)).double().eval()
    new.load_state_dict(weights)
    return new


def outputs(model):
    output = model(*padded([9, 4], 11, "right"), output_hidden_states=True)
    return [x for name, x in output.items() if name in ("logits", "last_hidden_state") or "packed_hidden" in name]


@pytest.mark.parametrize("name", DEEP)
def test_chosen_layers(name, tmp_path):
    """A model, its folder, and its cache have the layers that a user chose, which may be repeated."""
    model, chosen = DEEP[name][0](), DEEP[name][1]
    expected = outputs(new_model(model, chosen))
    keep_layers(model, chosen)
    torch.testing.assert_close(outputs(copy.deepcopy(model)), expected)
    for state in (None, model.state_dict()):  # Trainer passes the weights
        model.save_pretrained(tmp_path, state_dict=state)
        torch.testing.assert_close(outputs(model), expected)
        loaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values())
        torch.testing.assert_close(outputs(loaded.double().eval()), expected)
    if model.config.is_decoder:
        check_division(model, Division((5, 1, 1, 5), (12, 9)))
