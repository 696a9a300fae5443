"""Batches whose padding exceeds the positions of a model are supported if their tokens fit."""

import pytest
import torch

from tests.marks import diagonal

from . import decoders, luna, luna_decoders, mega, mega_decoders

TABLE, WIDTH = 16, 40
LONG, WIDE = 40, 52  # `LONG` is the number of positions of the decoders
SIMPLE = {"relative_positional_bias": "simple", "max_positions": TABLE}
ENCODERS = {
    **{f"luna {head}": lambda head=head, **fields: luna.make(head, max_position_embeddings=TABLE, **fields)
       for head in ("Model", "ForMaskedLM", "ForSequenceClassification")},
    "mega Model": lambda **fields: mega.make("Model", **SIMPLE, **fields),
    "mega one direction": lambda **fields: mega.make("ForMaskedLM", bidirectional=False, **SIMPLE, **fields),
    "mega relu2": lambda **fields: mega.make("ForMaskedLM", attention_activation="relu2", **SIMPLE, **fields),
}  # fmt: skip
DECODERS = {
    "luna": lambda: luna_decoders.make(position_embedding_type="learned"),
    "luna seq2seq": lambda: luna_decoders.make(is_encoder_decoder=True, position_embedding_type="learned"),
    "mega": lambda: mega_decoders.make(**SIMPLE | {"max_positions": LONG}),
    "mega seq2seq": lambda: mega_decoders.make(
        is_encoder_decoder=True, decoder_max_positions=LONG, **SIMPLE | {"max_positions": LONG}
    ),
}  # fmt: skip


def batch(lengths, width, side):
    """Return rows of these lengths with padding on the left, the right or both sides."""
    ids, mask = torch.ones(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        first = {"right": 0, "left": width - length, "both": (width - length) // 2}[side]
        ids[row, first : first + length] = torch.arange(length) % 15 + 4
        mask[row, first : first + length] = 1
    return ids, mask


@pytest.mark.parametrize(
    "name, fields", diagonal(ENCODERS, [{}, {"unpad_inputs": True}, {"attn_implementation": "eager"}]), ids=str
)
@torch.no_grad()
def test_encoders(name, fields):
    model = ENCODERS[name](**fields)
    for lengths in ([TABLE, 3], [5]):
        ids, mask = batch(lengths, max(lengths), "right")
        expected = model(ids, attention_mask=mask)[0]
        for side in ("right", "left", "both"):
            wide, kept = batch(lengths, WIDTH, side)
            actual = model(wide, attention_mask=kept)[0]
            if actual.dim() == 3:
                actual, wanted = actual[kept.bool()], expected[mask.bool()]
            torch.testing.assert_close(actual, wanted if expected.dim() == 3 else expected, rtol=0, atol=1e-5)
    for ids, mask in (batch([TABLE + 1, 3], WIDTH, "left"), batch([TABLE + 1], TABLE + 1, "right")):
        with pytest.raises(ValueError, match=f"length {TABLE + 1} exceeds|got {TABLE + 1}"):
            model(ids, attention_mask=mask)


@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_decoders(name):
    """Decoders accept padding beyond their positions in one call, and in steps after a cache."""
    model = DECODERS[name]()
    prefix = "decoder_" if model.config.is_encoder_decoder else ""
    ids, mask = batch([LONG, 3], LONG, "right")
    source = decoders.source(model, 2)
    expected = model(**source, **{f"{prefix}input_ids": ids}, **{f"{prefix}attention_mask": mask}).logits[mask.bool()]
    if source:
        given = batch([13, 4], WIDE, "left")
        source_ids = given[0].masked_scatter(given[1].bool(), source["input_ids"][source["attention_mask"].bool()])
        source = {"input_ids": source_ids, "attention_mask": given[1]}
    for side in ("right", "left"):
        wide, kept = batch([LONG, 3], WIDE, side)
        inputs = {f"{prefix}input_ids": wide, f"{prefix}attention_mask": kept}
        torch.testing.assert_close(model(**source, **inputs, use_cache=False).logits[kept.bool()], expected)
        torch.testing.assert_close(model(**source, **inputs, use_cache=True).logits[kept.bool()], expected)
    cache, steps, first = None, [], WIDE - 6
    for part in (slice(0, first), *(slice(column, column + 1) for column in range(first, WIDE))):
        inputs = {f"{prefix}input_ids": wide[:, part], f"{prefix}attention_mask": kept[:, : part.stop]}
        output = model(**source, **inputs, cache=cache, use_cache=True)
        cache, steps = output.cache, [*steps, output.logits]
    torch.testing.assert_close(torch.cat(steps, dim=1)[kept.bool()], expected)
    ids = batch([LONG + 1], LONG + 1, "right")[0]
    with pytest.raises(ValueError, match=f"length {LONG + 1} exceeds|got {LONG + 1}"):
        model(**{key: value[:1] for key, value in source.items()}, **{f"{prefix}input_ids": ids})
