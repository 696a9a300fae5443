"""Pooling and chunks by hand, other ways to pass inputs, rows of padding; `test_losses_of_rows.py` has all layouts."""

import pytest
import torch

from tests.marks import diagonal

from . import luna, mega, megalodon_decoders
from .luna import HEADS, POOLINGS, head_inputs, labels, tokens

FAMILIES = {"luna": luna, "mega": mega}
POOLED = ("ForSequenceClassification", "ForSequencePairClassification", "ForMultipleChoice")
CHUNK = 8
CHUNKS = {"use_chunking": True, "chunk_size": CHUNK}
FUNCTIONS = ("softmax", "laplace", "relu2")


# Pooling -> function that computes the vector of a sequence from its states `[T, d]` and its rows of P.
BY_HAND = {
    "cls": lambda model, states, packed: states[0],
    "last": lambda model, states, packed: states[-1],
    "mean": lambda model, states, packed: states.mean(dim=0),
    "packed_mean": lambda model, states, packed: packed.mean(dim=0),
    "packed_max": lambda model, states, packed: model.pooler.dense(packed).amax(dim=0),
    "packed_attention": lambda model, states, packed: model.pooler.layer_norm(
        model.pooler.attention(states[:1], packed[None], None)
    )[0],
}
DECODERS = {
    "luna": (luna, {"is_decoder": True}),
    "mega": (mega, {"is_decoder": True, "bidirectional": False}),
    "megalodon": (megalodon_decoders, {}),
}
CLASSIFIERS = {
    **{f"luna {pooling}": (luna, pooling, {}) for pooling in POOLINGS},
    **{f"mega {pooling}": (mega, pooling, {}) for pooling in ("cls", "last", "mean")},
    **{f"causal {name} {pooling}": (family, pooling, fields)
       for name, (family, fields) in DECODERS.items() for pooling in ("last", "mean")},
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("family, pooling, fields", CLASSIFIERS.values(), ids=CLASSIFIERS)
def test_poolings_by_hand(family, pooling, fields):
    """Scores equal those of vectors pooled by hand, with padding on either side and with an inferred mask."""
    model = family.make("ForSequenceClassification", pooling=pooling, num_labels=3, vocab_size=40, **fields).float()
    for side in ("left", "right"):
        inputs = tokens([9, 4, 1], side, 11)
        scores, inferred = model(**inputs).logits, model(inputs["input_ids"]).logits
        for row, (ids, mask) in enumerate(zip(*inputs.values(), strict=True)):
            body = model.base_model(ids[mask.bool()][None])
            packed = body.get("packed_last_hidden_state")
            packed = None if packed is None else packed[0][... if body.packed_mask is None else body.packed_mask[0] > 0]
            expected = model.classifier(BY_HAND[pooling](model, body.last_hidden_state[0], packed)[None])[0]
            torch.testing.assert_close(scores[row], expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(inferred[row], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head", POOLED)
@pytest.mark.parametrize("name, pooling", [("luna", "cls"), ("luna", "packed_mean"), ("mega", "cls")])
def test_causal_classifiers_read_the_last_token(name, pooling, head):
    """The first token of a decoder, and P, do not depend on the text."""
    family, fields = DECODERS[name]
    with pytest.raises(ValueError, match=f"pooling='{pooling}'.*set pooling to 'last' or 'mean'"):
        family.make(head, pooling=pooling, **fields)


def test_causal_masked_model_warns(caplog):
    for family, fields in (DECODERS["luna"], DECODERS["mega"]):
        caplog.clear()
        family.make("ForMaskedLM", **fields)
        assert "is_decoder=False to read both sides" in caplog.text


@pytest.mark.parametrize("pooling", ["cls", "packed_attention"])
def test_dropping_the_first_token(pooling):
    """`drop_first_token` gives the result of inputs without their first token, with padding on either side."""
    model = luna.make("ForSequenceClassification", pooling=pooling, drop_first_token=True)
    plain = luna.make("ForSequenceClassification", pooling=pooling)
    lengths = [21, 2, 5]
    for side in ("right", "left"):
        inputs = tokens(lengths, side, 30)
        by_hand = {name: torch.zeros(3, 29, dtype=torch.long) for name in inputs}
        for row, length in enumerate(lengths):
            start = 30 - length + 1 if side == "left" else 1
            for name, value in inputs.items():
                by_hand[name][row, : length - 1] = value[row, start : start + length - 1]
        got, types = model(**inputs).logits, torch.zeros_like(inputs["input_ids"])
        torch.testing.assert_close(got, plain(**by_hand).logits, atol=1e-5, rtol=1e-5)
        assert torch.equal(model(**inputs, token_type_ids=types).logits, got)  # as tokenizers of BERT return them


@pytest.mark.parametrize("pooling", ["mean", "packed_mean"])
def test_counting_padding_is_the_original_mean(pooling):
    """With `pool_padding`, the mean includes padding: all positions, or all rows of P used by the longest text."""
    model = luna.make("ForSequenceClassification", pooling=pooling, pool_padding=True)
    inputs = tokens([4, 2], width=5)
    outputs = model.luna(**inputs)
    states = outputs.last_hidden_state if pooling == "mean" else outputs.packed_last_hidden_state[:, :4]
    torch.testing.assert_close(model(**inputs).logits, model.classifier(states.mean(dim=1)))


@torch.no_grad()
@pytest.mark.parametrize("function", FUNCTIONS)
def test_one_chunk_is_full_attention(function):
    """Chunks only affect sequences that are longer than a chunk."""
    full, inputs, longer = mega.make("Model", attention_activation=function), tokens([CHUNK, 3]), tokens([CHUNK + 1])
    for chunk in (CHUNK, 3 * CHUNK):
        chunked = mega.make("Model", attention_activation=function, use_chunking=True, chunk_size=chunk)
        torch.testing.assert_close(chunked(**inputs).last_hidden_state, full(**inputs).last_hidden_state)
        difference = (chunked(**longer).last_hidden_state - full(**longer).last_hidden_state).abs().max()
        assert difference > 1e-3 if chunk == CHUNK else difference < 1e-5


@pytest.mark.parametrize(
    "family, head, fields",
    [
        *(("luna", "ForSequenceClassification", {"pooling": pooling}) for pooling in POOLINGS[1:]),
        *(("luna", head, {}) for head in ("Model", "ForQuestionAnswering", "ForMultipleChoice")),
        *(("mega", head, fields | {"pooling": "mean"}) for head, fields in diagonal(HEADS, mega.VARIANTS.values())),
    ],
)
def test_a_row_of_padding(family, head, fields):
    """A row of padding has finite results and gradients, also in training, and does not affect other rows."""
    model, inputs = FAMILIES[family].make(head, **fields), head_inputs(head, [9, 9])
    expected = model(**inputs)[0][0].detach()
    for name in inputs:
        if name.endswith("attention_mask"):
            inputs[name][1] = 0
    torch.testing.assert_close(model(**inputs)[0][0], expected, atol=1e-5, rtol=1e-5)
    output = model.train()(**inputs, **labels(head, inputs))[0]
    assert torch.isfinite(output).all()
    output.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert all(torch.isfinite(buffer).all() for buffer in model.buffers())
