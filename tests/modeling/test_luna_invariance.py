"""The result for a sequence does not depend on other rows, or on the side or amount of padding."""

import pytest
import torch

from .luna import HEADS, POOLINGS, VARIANTS, check_invariance, head_inputs, make, tiny_config


@pytest.mark.covering(1)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("head", HEADS)
def test_heads(head, variant):
    check_invariance(head, make(head, **VARIANTS[variant]))


@pytest.mark.covering(1)
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForSequencePairClassification", "ForMultipleChoice"])
def test_poolings(head, pooling):
    check_invariance(head, make(head, pooling=pooling))
    check_invariance(head, make(head, pooling=pooling, dynamic_projection_length=False, pair_features="interaction"))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_dropping_the_first_token(pooling):
    """The result equals removing the token from the inputs, with padding on either side."""
    model = make("ForSequenceClassification", pooling=pooling, drop_first_token=True)
    plain = make("ForSequenceClassification", pooling=pooling)
    plain.load_state_dict(model.state_dict())
    lengths = [21, 2, 5]
    for side in ("right", "left"):
        inputs = head_inputs("ForSequenceClassification", lengths, side, 30)
        by_hand = {name: torch.zeros(3, 29, dtype=torch.long) for name in inputs}
        for row, length in enumerate(lengths):
            start = 30 - length + 1 if side == "left" else 1
            for name, value in inputs.items():
                by_hand[name][row, : length - 1] = value[row, start : start + length - 1]
        torch.testing.assert_close(model(**inputs).logits, plain(**by_hand).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "head, pooling",
    [(head, "cls") for head in HEADS] + [("ForSequenceClassification", pooling) for pooling in POOLINGS[1:]],
)
def test_a_row_of_padding(head, pooling):
    """A row of padding has finite results and gradients and does not affect other rows."""
    model = make(head, pooling=pooling)
    inputs = head_inputs(head, [7, 7])
    expected = model(**inputs)[0][0].detach()
    for name in inputs:
        if name.endswith("attention_mask"):
            inputs[name][1] = 0
    output = model(**inputs)[0]
    assert torch.isfinite(output).all()
    torch.testing.assert_close(output[0], expected, atol=1e-5, rtol=1e-5)
    output.square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("pooling", ["mean", "packed_mean"])
def test_counting_padding_is_the_original_mean(pooling):
    """`pool_padding`: the mean runs over all positions, or over all rows of P that the longest sequence uses."""
    model = make("ForSequenceClassification", pooling=pooling, pool_padding=True)
    inputs = head_inputs("ForSequenceClassification", [4, 2], width=5)
    outputs = model.luna(**inputs)
    states = outputs.last_hidden_state if pooling == "mean" else outputs.packed_last_hidden_state[:, :4]
    expected = model.classifier(states.mean(dim=1))
    torch.testing.assert_close(model(**inputs).logits, expected)


def test_tokens_without_mask_are_masked_at_the_padding_token():
    model = make("Model")
    inputs = head_inputs("Model", [9, 4])
    expected = model(**inputs).last_hidden_state
    torch.testing.assert_close(model(input_ids=inputs["input_ids"]).last_hidden_state, expected)


def test_values_with_mask():
    model = HEADS["ForSequenceClassification"](tiny_config(input_type="values", pooling="mean")).eval()
    values = torch.randn(2, 9)
    separate = model(input_values=values[1:, :4]).logits
    mask = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])
    torch.testing.assert_close(
        model(input_values=values, attention_mask=mask).logits[1:], separate, atol=1e-5, rtol=1e-5
    )
    left = torch.cat([torch.zeros(1, 5), values[1:, :4]], dim=1)
    torch.testing.assert_close(
        model(input_values=left, attention_mask=mask[1:].flip(1)).logits, separate, atol=1e-5, rtol=1e-5
    )
