"""Rows without a token have states of 0, whatever the other rows, the masked inputs and the layout are."""

from functools import partial

import pytest
import torch

from tests.marks import diagonal

from . import classes, decoders, luna, luna_decoders, mega


def classify(family, **fields):
    return partial(classes.HEADS[f"{family} ForSequenceClassification"], **fields)


HEADS = {
    **classes.HEADS,
    **classes.DECODERS,
    **{f"luna {pooling}, {variant}": classify("luna", pooling=pooling, **luna.VARIANTS[variant])
       for pooling, variant in diagonal(luna.POOLINGS, ["fixed length", "pre-norm", "P not contextual"])},
    **{f"mega {pooling}, {variant}": classify("mega", pooling=pooling, **mega.VARIANTS[variant])
       for pooling, variant in diagonal(("cls", "mean"), mega.VARIANTS)},
}  # fmt: skip
HEADS |= {f"megalodon {pooling}": classify("megalodon", pooling=pooling) for pooling in ("last", "mean")}
HEADS["luna without the first token"] = classify("luna", drop_first_token=True)
# Lengths of the rows (the first row has no token), side of the padding, and number of columns.
BATCHES = {
    "alone": ([0], "right", 9),
    "short": ([0], "right", 1),
    "with a long row": ([0, 23, 5], "right", 23),
    "padded on the left": ([0, 4, 1], "left", 7),
    "with the same": ([0, 0, 0], "left", 5),
}


def batch(name, lengths, side, width, dropped):
    """Return inputs whose first rows have no token; `dropped` is the token id at padding."""
    ids, mask = luna.tokens([1] * len(lengths), width=width).values()
    for row, length in enumerate(lengths):
        place = slice(width - length, None) if side == "left" else slice(None, length)
        ids[row], mask[row] = dropped, 0
        ids[row, place], mask[row, place] = torch.arange(length) % 20 + 4, 1
    inputs = {"input_ids": ids, "attention_mask": mask}
    if "Pair" in name:
        inputs |= {f"pair_{key}": value for key, value in inputs.items()}
    if "Choice" in name:
        other = luna.tokens([3] * len(lengths), width=max(3, width))
        pad = max(0, 3 - width)
        given = {key: torch.nn.functional.pad(value, (0, pad)) for key, value in inputs.items()}
        inputs = {key: torch.stack([value, other[key]], dim=1) for key, value in given.items()}
    return inputs


@torch.no_grad()
def first_row(name, model, inputs):
    """Return the results for the first row.

    For results with one entry per position, check that all entries are equal up to rounding and return the first one.
    """
    output = model(**inputs)
    found = []
    for key in ("last_hidden_state", "pooler_output", "logits", "start_logits", "end_logits"):
        if (value := output.get(key)) is not None:
            row = value[0]
            if value.dim() == 3 or "_logits" in key:
                torch.testing.assert_close(row, row[:1].expand_as(row), msg=key)
                row = row[0]
            assert row.isfinite().all() and (key != "last_hidden_state" or not row.any()), key
            found.append(row.flatten())
    return torch.cat(found)


@pytest.mark.parametrize("name", decoders.a_third(HEADS))
def test_one_result(name):
    expected, models = None, [HEADS[name](unpad_inputs=unpad) for unpad in (False, True)]
    for number, (case, (lengths, side, width)) in enumerate(BATCHES.items()):
        if "first token" in name and width == 1:
            continue
        model = models[number % 2]
        actual = first_row(name, model, batch(name, lengths, side, width, 7 if number % 3 else 1))
        expected = actual if expected is None else expected
        error = (actual - expected).abs().max()
        assert error < 1e-5, f"{case}, unpad_inputs={model.config.unpad_inputs}: {error}"


@pytest.mark.parametrize("name", ["luna ForSequenceClassification", "mega ForMaskedLM", "luna decoder"])
def test_inferred_mask_and_loss(name):
    """Without an `attention_mask`, a row of padding tokens counts as empty, and it has no gradient."""
    model = HEADS[name]()
    inputs = batch(name, [0, 6, 3], "right", 6, 1)
    explicit = first_row(name, model, inputs)
    ids = inputs.pop("input_ids")
    torch.testing.assert_close(first_row(name, model, {"input_ids": ids}), explicit)
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_(True)
    model.train()(inputs_embeds=embeds, **inputs).logits.square().sum().backward()
    assert not embeds.grad[0].any() and embeds.grad[1, 0].any()


@pytest.mark.parametrize("family", decoders.TRANSLATING)
@pytest.mark.parametrize("unpad", [False, True], ids=["padded", "unpadded"])
@torch.no_grad()
def test_empty_sources_and_targets(family, unpad):
    model = decoders.make_plain(family, dtype=torch.float32, is_encoder_decoder=True, unpad_inputs=unpad)
    ids, mask = decoders.padded([5, 5], 5, "right")
    for side in ("", "decoder_"):
        results = []
        for number, (lengths, _, width) in enumerate(BATCHES.values()):
            inputs = batch("", lengths, "right", width, 7 if number % 2 else 1)
            empty = {f"{side}{key}": value for key, value in inputs.items()}
            full = {"input_ids": ids[:1], "attention_mask": mask[:1]}
            full = {key: value.expand(len(lengths), -1) for key, value in full.items()}
            other = {f"{'' if side else 'decoder_'}{key}": value for key, value in full.items()}
            results.append(model(**empty, **other).logits[0, 0])
        assert torch.stack(results).isfinite().all()
        torch.testing.assert_close(torch.stack(results), results[0].expand(len(results), -1), rtol=0, atol=1e-5)


@torch.no_grad()
def test_cached_rows_are_not_empty():
    """A row without tokens in a later call continues its sequence; other rows keep their results."""
    model = luna_decoders.make(torch.float32)
    ids, mask = decoders.padded([6, 6], 6, "right")
    cache = model(ids[:, :4], mask[:, :4], use_cache=True).cache
    mask = mask.clone()
    mask[1, 4:] = 0
    later = model(ids[:, 4:], mask, cache=cache, use_cache=True).logits
    torch.testing.assert_close(later[0], model(ids, use_cache=False).logits[0, 4:], rtol=0, atol=1e-5)


def test_programs_clear_empty_rows():
    model = luna.make("ForSequenceClassification", num_hidden_layers=1)
    inputs = batch("", [3, 9], "right", 9, 1)
    program = torch.export.export(model, (), inputs, strict=False).module()
    for lengths in ([0, 9], [0, 4]):
        inputs = batch("", lengths, "right", 9, 7)
        torch.testing.assert_close(program(**inputs).logits, model(**inputs).logits, rtol=0, atol=1e-5)


def test_classification_head_of_zeros():
    """The logits of an empty row are the classifier's output for a vector of zeros."""
    model = luna.make("ForSequenceClassification", pooling="mean")
    logits = model(**batch("", [0, 3], "right", 5, 7)).logits[0]
    torch.testing.assert_close(logits, model.classifier(torch.zeros(1, model.config.hidden_size))[0])
