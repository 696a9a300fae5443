"""Mega checkpoints of LRA and raw speech: values read from tensors and args, the two branches, invalid files."""

import pytest
import torch
from transformers import AutoTokenizer

from luna_mega.convert import convert_checkpoint
from tests.convert.folders import half, load
from tests.convert.mega import BODY, POSITIONS, SYMBOLS, VOCABULARY, mega


def fields(config, *names):
    return tuple(getattr(config, name) for name in names)


@pytest.mark.parametrize(("length", "expected"), [(7, 7), (0, None), (-1, None), (None, None)])
def test_truncation(convert, length, expected):
    state = mega()
    state["args"].truncation_length = length
    assert load(convert(state)).config.truncation == expected


@pytest.mark.parametrize(("pooling", "starts"), [("cls", True), ("mp", False)])
def test_dictionary_and_tokenizer(convert, make, pooling, starts):
    make.dictionary(convert.source / "dict.txt")
    make.dictionary(convert.source / "label-bin" / "dict.txt", symbols=3, prefix="class")
    model = load(convert(mega(sen_rep_type=pooling, classes=3)))
    assert model.config.pooling == ("cls" if starts else "mean")
    assert model.config.id2label == {0: "class0", 1: "class1", 2: "class2"}
    tokenizer = AutoTokenizer.from_pretrained(convert.output)
    assert tokenizer("w0 w3").input_ids == [VOCABULARY - 1] * starts + [4, 7, 2]
    assert tokenizer.model_max_length == POSITIONS
    assert ("every sequence starts with <CLS>, id 16" in convert.screen) is starts


def test_dictionary_with_cls_and_one_of_another_model(convert, make):
    dictionary = make.dictionary(convert.source / "dict.txt")
    dictionary.write_text(dictionary.read_text(encoding="utf-8") + "<CLS> 1\n", encoding="utf-8")
    assert (convert(mega()) / "dict.txt").is_file()
    convert.output = convert.output.with_name("other")
    make.dictionary(dictionary, symbols=SYMBOLS + 1)
    assert "symbols do not fit the model" in convert.error(mega())


@pytest.mark.parametrize(
    ("normalization", "expected"), [([0.48, 0.24], "(x / 255 - 0.48) / 0.24"), (None, "(x / 255 - 0.5) / 0.5")]
)
def test_pixels(convert, normalization, expected):
    state = mega("mega_lra_cifar10", values=True, classes=10, chunk=8, pixel_normalization=normalization)
    model = load(convert(state))
    assert fields(model.config, "input_type", "attention_chunk", "num_labels") == ("values", 8, 10)
    assert model(input_values=torch.randn(2, 21)).logits.shape == (2, 10)
    assert expected in convert.screen and "dictionary" not in convert.screen


def test_branches(convert):
    """The order of the tensors identifies the branch, since names and shapes are the same in both."""
    for branch, weight, damping in (("main", "delta", "alpha"), ("flash", "alpha", "delta")):
        state = mega(branch=branch)
        convert.output = convert.output.with_name(branch)
        model = load(convert(state))
        average, source = model.mega.layers[1].mega_layer.ema_gate, f"{BODY}.layers.1.mega_layer.move"
        assert torch.equal(average.damping_factor, state["model"][f"{source}.{weight}"])
        assert torch.equal(average.decay_factor, state["model"][f"{source}.{damping}"])
        assert model.config.ema_shift is (branch == "flash")
        assert f"of the branch {branch}" in convert.screen


def test_branch_on_request(convert):
    state = mega(branch="main")
    assert load(convert(state, "--ema-convention", "flash")).config.ema_shift is True
    assert "--ema-convention flash contradicts the order of the tensors" in convert.screen
    convert.output = convert.output.with_name("agreed")
    convert(state, "--ema-convention", "main")
    assert "contradicts" not in convert.screen


@pytest.mark.parametrize("order", ["sorted", "one layer", "reversed"])
def test_order_of_neither_branch(convert, order):
    state = mega()
    names = list(state["model"])
    if order == "one layer":
        first = names.index(f"{BODY}.layers.1.mega_layer.move.delta")
        names[first : first + 2] = names[first : first + 2][::-1]
    else:
        names.sort(reverse=order == "reversed")
    state["model"] = {name: state["model"][name] for name in names}
    message = convert.error(state)
    assert "pass --ema-convention main or --ema-convention flash" in message and str(convert.file) in message
    assert load(convert(state, "--ema-convention", "flash")).config.ema_shift is True
    assert "contradicts" not in convert.screen


def test_half_precision(convert):
    state = half(mega("mega_lra_cifar10", values=True, norm_type="batchnorm", prenorm=True))
    model = load(convert(state))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    counter = model.mega.final_norm.norm.num_batches_tracked
    assert counter.dtype == torch.long and counter == 70001
    convert.output = convert.output.with_name("half")
    folder = convert(state, "--dtype", "float16")
    assert torch.equal(load(folder).mega.final_norm.norm.num_batches_tracked, counter)


def test_counters_may_be_absent(convert):
    state = mega("mega_lra_cifar10", values=True, norm_type="batchnorm")
    state["model"] = {key: t for key, t in state["model"].items() if "num_batches" not in key}
    assert load(convert(state)).mega.layers[0].nffn.norm.norm.num_batches_tracked == 0


def test_dropout_of_the_head(convert):
    """Dropout is applied before every layer of the head, with the dropout probability of the encoder."""
    head, inputs = load(convert(mega(dropout=0.5, act_dropout=0.0))).classifier.train(), []
    for linear in (head.dense, head.out_proj):
        linear.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    head(torch.ones(100, 16))
    assert set(inputs[0].unique().tolist()) == {0.0, 2.0}
    assert all(0.4 < (states == 0).float().mean() < 0.6 for states in inputs)


def test_nan_is_reported_and_a_placeholder_is_not(convert):
    state = mega(rotary=True)
    state["model"][f"{BODY}.layers.0.mega_layer.rel_pos_bias._float_tensor"].fill_(float("nan"))
    convert(state)
    assert "NaN" not in convert.screen
    state["model"][f"{BODY}.layers.0.mega_layer.h_proj.bias"][0] = float("nan")
    convert.output = convert.output.with_name("nan")
    convert(state)
    assert "NaN or Inf in 1 of" in convert.screen


def test_convention_is_not_for_luna(convert, make, tmp_path):
    assert "Luna has no moving average" in convert.error(make.lra21(), "--ema-convention", "main")
    with pytest.raises(ValueError, match="ema_convention must be one of auto, main, flash, got 'x'"):
        convert_checkpoint(convert.file, tmp_path / "out", ema_convention="x")
