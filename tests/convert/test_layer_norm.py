import pytest
import torch

from luna_mega import LunaForMaskedLM
from luna_mega.convert import ConversionError
from luna_mega.convert.conventions import decide_layer_norm


@pytest.mark.parametrize(
    ("mean", "expected"),
    [
        (1.0, "standard"),
        (0.65, "standard"),
        (1.3, "standard"),
        (0.0, "plus-one"),
        (0.35, "plus-one"),
        (-0.3, "plus-one"),
    ],
)
def test_auto_decides_by_the_mean(mean, expected):
    decision = decide_layer_norm([torch.full((3,), mean - 0.01), torch.full((3,), mean + 0.01)], "auto")
    assert decision.convention == expected and decision.warning is None
    assert decision.mean == pytest.approx(mean)


@pytest.mark.parametrize("mean", [0.42, 0.5, 0.58, 1.5, -0.5, 40.0, float("nan")])
def test_ambiguous_mean_raises_in_auto_mode(mean):
    with pytest.raises(ConversionError, match="--layer-norm standard or --layer-norm plus-one"):
        decide_layer_norm([torch.full((3,), mean)], "auto")


def test_a_nan_does_not_hide_the_mean():
    assert decide_layer_norm([torch.tensor([1.0, float("nan"), 1.0])], "auto").convention == "standard"


@pytest.mark.parametrize("choice", ["standard", "plus-one"])
def test_explicit_choice(choice):
    other = {"standard": 0.0, "plus-one": 1.0}[choice]
    contradicted = decide_layer_norm([torch.full((3,), other)], choice)
    assert contradicted.convention == choice and "contradicts" in contradicted.warning
    assert decide_layer_norm([torch.full((3,), 1 - other)], choice).warning is None
    assert decide_layer_norm([torch.full((3,), 0.5)], choice).warning is None


def weights(folder):
    return LunaForMaskedLM.from_pretrained(folder).state_dict()


def test_both_conventions_give_the_same_model(convert, make):
    state = make.bert()
    standard = weights(convert(state))
    assert "standard (the mean of the norm weights is 1.0" in convert.screen
    convert.output = convert.output.with_name("plus-one")
    plus_one = weights(convert(state | {"model": make.minus_one(state["model"])}))
    assert "plus-one (the mean of the norm weights is " in convert.screen
    for name, tensor in standard.items():
        torch.testing.assert_close(plus_one[name], tensor, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize(("value", "options", "expected"), [(1.0, [], 1), (0.0, [], 1), (0.5, ["plus-one"], 1.5)])
def test_norms_with_one_value(convert, make, value, options, expected):
    """Constant norms of 1 or 0, as in untrained files, identify the convention; other constants require the option."""
    state = make.bert()
    for key, tensor in state["model"].items():
        if key.endswith("layer_norm.weight"):
            tensor.fill_(value)
    if options:
        assert "--layer-norm" in convert.error(state)
    folder = convert(state, *(["--layer-norm", *options] if options else []))
    assert weights(folder)["luna.embeddings.layer_norm.weight"].eq(expected).all()
    assert options or f"(the mean of the norm weights is {value:.3f})" in convert.screen
