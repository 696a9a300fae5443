"""The result for a sequence does not depend on other rows, or on the side or amount of padding."""

import pytest
import torch

from .luna import check_invariance, head_inputs, labels, results, tokens
from .mega import HEADS, NO_DROPOUT, VALUES, VARIANTS, make

CHUNK = 8
BOUNDARIES = [1, 3, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 5]
FUNCTIONS = ("softmax", "laplace", "relu2")


@pytest.mark.covering(1)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("head", HEADS)
def test_heads(head, variant):
    check_invariance(head, make(head, **VARIANTS[variant]))


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForSequencePairClassification"])
def test_mean_pooling(head):
    check_invariance(head, make(head, pooling="mean", pair_features="interaction", use_chunking=True, chunk_size=CHUNK))


@pytest.mark.parametrize("bias", ["simple", "rotary"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_chunk_boundaries(function, bias):
    """Sequences much shorter than a chunk, one position shorter, of equal length, and one position longer."""
    options = {"attention_activation": function, "relative_positional_bias": bias}
    check_invariance("Model", make("Model", use_chunking=True, chunk_size=CHUNK, **options), BOUNDARIES)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_one_chunk_is_full_attention(function):
    """Chunks only affect longer sequences."""
    full = make("Model", attention_activation=function)
    inputs = tokens([CHUNK, 3])
    for chunk in (CHUNK, 3 * CHUNK):
        chunked = make("Model", attention_activation=function, use_chunking=True, chunk_size=chunk)
        torch.testing.assert_close(chunked(**inputs).last_hidden_state, full(**inputs).last_hidden_state)
    longer = tokens([CHUNK + 1])
    chunked = make("Model", attention_activation=function, use_chunking=True, chunk_size=CHUNK)
    assert (chunked(**longer).last_hidden_state - full(**longer).last_hidden_state).abs().max() > 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients(variant):
    """Padding does not change the gradient of a loss over real tokens, also in training mode."""
    gradients = []
    for side, width in (("right", 21), ("left", 30)):
        model = make("ForMaskedLM", **VARIANTS[variant], **NO_DROPOUT).double().train()
        inputs = tokens([21, 2, 9], side, width)
        output = model(**inputs, labels=inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100))
        output.loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()} | dict(model.named_buffers()))
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForTokenClassification"])
def test_real_values(head, variant):
    """Padding may have any value."""
    model = make(head, **VALUES | VARIANTS[variant])
    lengths, width = [21, 1, 5, 13], 25
    rows = [torch.randn(length) for length in lengths]
    with torch.no_grad():
        for side in ("right", "left"):
            values, mask = torch.full((4, width), 100.0), torch.zeros(4, width, dtype=torch.long)
            for row, real in enumerate(rows):
                place = slice(None, len(real)) if side == "right" else slice(width - len(real), None)
                values[row, place], mask[row, place] = real, 1
            together = results(head, model(input_values=values, attention_mask=mask), mask)
            for real, actual in zip(rows, together, strict=True):
                expected = model(input_values=real[None]).logits[0]
                torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForMultipleChoice", "ForQuestionAnswering"])
def test_embeddings_instead_of_tokens(head):
    model, inputs = make(head, use_chunking=True, chunk_size=CHUNK), head_inputs(head, [21, 5])
    expected = results(head, model(**inputs), inputs["attention_mask"])
    embedded = model.get_input_embeddings()(inputs.pop("input_ids"))
    actual = results(head, model(inputs_embeds=embedded, **inputs), inputs["attention_mask"])
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def test_tokens_without_mask_are_masked_at_the_padding_token():
    for head in ("Model", "ForSequenceClassification"):
        model, inputs = make(head, pooling="mean"), tokens([9, 4])
        assert torch.equal(model(input_ids=inputs["input_ids"])[0], model(**inputs)[0])


@pytest.mark.parametrize(
    "head, variant",
    [("ForSequenceClassification", variant) for variant in VARIANTS] + [(head, "laplace chunks") for head in HEADS],
)
def test_a_row_of_padding(head, variant):
    """A row of padding has finite results and gradients, also in training, and does not affect others."""
    model = make(head, pooling="mean", **VARIANTS[variant])
    inputs = head_inputs(head, [9, 9])
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
