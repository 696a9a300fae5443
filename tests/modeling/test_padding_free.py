"""Padding-free batches, and `unpad_inputs`, which converts a padded batch to a padding-free one in the model.

`test_losses_of_rows.py` compares results and gradients of all classes.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DataCollatorWithFlattening

from . import decoders, luna, mega

LENGTHS = [17, 1, 8, 23, 5]


def flattened(items, **options):
    return DataCollatorWithFlattening(return_tensors="pt", **options)(items)


@pytest.mark.parametrize("family", [luna, mega])
@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification", "ForTokenClassification"])
def test_unpadding_does_not_affect_heads(family, head):
    inputs = luna.tokens(LENGTHS, "left")
    model = family.make(head).double()
    padded = model(**inputs)
    model.config.unpad_inputs = True
    unpadded = model(**inputs)
    for name in ("packed_last_hidden_state", "packed_mask", "pooler_output"):
        if getattr(padded, name, None) is not None:
            torch.testing.assert_close(unpadded[name], padded[name], msg=name)
    first = (padded[0], unpadded[0])
    if head != "ForSequenceClassification":
        kept = inputs["attention_mask"].bool()
        assert head != "Model" or not first[1][~kept].any()
        first = [states[kept] for states in first]
    torch.testing.assert_close(*first)
    recorded = model(**inputs, output_hidden_states=True).hidden_states
    assert recorded[0].shape[:2] == inputs["input_ids"].shape


@pytest.mark.parametrize("bounds", [[0, 4, 14], [0, 7, 14]])
def test_a_padding_free_batch_has_no_pooler_output(bounds):
    """A padding-free batch has no pooler output, even if it has as many sequences as rows."""
    model, inputs = mega.make("Model"), luna.tokens([7, 7])["input_ids"]
    assert model(inputs).pooler_output is not None
    assert model(inputs, cu_seq_lens_q=torch.tensor(bounds), max_length_q=10).pooler_output is None


@pytest.mark.parametrize("family", [luna, mega])
def test_padding_adds_no_computation(family):
    """Unpadding a batch that is three quarters padding removes more than half of the multiplications."""
    inputs, flops = luna.tokens([40, 4, 3, 2, 1]), []
    for unpad in (False, True):
        model = family.make("Model", unpad_inputs=unpad)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(**inputs)
        linear = [count for op, count in counter.get_flop_counts()["Global"].items() if op.__name__ in ("addmm", "mm")]
        flops.append(sum(linear))
    assert flops[1] < 0.45 * flops[0]  # Luna's P still has one entry per row


@pytest.mark.parametrize("family", [luna, mega])
def test_padding_free_trains_like_separate_sequences(family):
    """Feature dropout drops channels per sequence of a padding-free batch: two equal sequences differ."""
    model = family.make("Model", **({"use_feature_dropout": True} if family is mega else {})).train()
    batch = flattened([{"input_ids": torch.full((4,), 7)} for _ in range(6)])
    batch.pop("labels")
    states = model(**batch).last_hidden_state.view(6, 4, -1)
    assert not torch.allclose(states[0], states[1])


IDS, BOUNDS = luna.tokens([9])["input_ids"], torch.tensor([0, 3, 9], dtype=torch.int32)
GIVEN = {"cu_seq_lens_q": BOUNDS}
# Head, inputs, text of the error.
ERRORS = [
    ("ForSequenceClassification", GIVEN, "ForSequenceClassification does not support padding-free"),
    ("ForMultipleChoice", GIVEN | {"input_ids": IDS[:, None]}, "ForMultipleChoice does not support padding-free"),
    ("Model", GIVEN | {"output_attentions": True}, "no attention weights"),
    ("Model", {"cu_seq_lens_q": torch.tensor([0, 5, 4], dtype=torch.int32)}, "cu_seqlens must increase"),
    ("Model", {"cu_seq_lens_k": BOUNDS}, "`cu_seq_lens_q` is missing; pass it with cu_seq_lens_k"),
    ("Model", {"max_length_q": 6}, "`cu_seq_lens_q` is missing; pass it with max_length_q"),
    ("Model", {"seq_idx": None, "max_length_k": 6}, "`cu_seq_lens_q` is missing; pass it with max_length_k"),
    ("Model", GIVEN | {"cu_seq_lens_k": BOUNDS + 1}, "`cu_seq_lens_k` differs from `cu_seq_lens_q`"),
    ("Model", GIVEN | {"cu_seq_lens_k": BOUNDS[:2]}, "`cu_seq_lens_k` differs from `cu_seq_lens_q`"),
    ("Model", GIVEN | {"max_length_q": 6, "max_length_k": 7}, "`max_length_k` is 7, but `max_length_q` is 6"),
    ("Model", GIVEN | {"max_length_k": 6}, "`max_length_k` is 6, but `max_length_q` is None"),
    ("Model", GIVEN | {"max_length_q": 5}, "max_seqlen is 5, but a sequence has length 6"),
    ("Model", GIVEN | {"attention_mask": torch.ones(1, 9)}, "`attention_mask` .* `cu_seq_lens_q`"),
    ("Model", GIVEN | {"seq_idx": torch.tensor([[0] * 4 + [1] * 5])}, "disagree about sequence boundaries"),
]


@pytest.mark.parametrize("family", [luna, mega])
def test_unsupported_and_contradictory_inputs_raise(family):
    models = {head: family.make(head) for head, *_ in ERRORS}
    for head, inputs, text in ERRORS:
        with pytest.raises(ValueError, match=text):
            models[head](**{"input_ids": IDS} | inputs)


@pytest.mark.parametrize("family", [luna, mega])
def test_positions_limit_the_batch(family):
    """Tokens, but not padding, must fit into the table of positions; `test_losses_of_rows.py` has wider batches."""
    fields = (
        {"relative_positional_bias": "simple", "max_positions": 8} if family is mega else {"max_position_embeddings": 8}
    )
    model = family.make("Model", **fields)
    for inputs in (luna.tokens([9, 3], "left"), {"input_ids": IDS}):
        with pytest.raises(ValueError, match="length 9 exceeds the 8|8 positions, got 9"):
            model(**inputs)
    if family is luna:
        with pytest.raises(ValueError, match="learned positions"):
            luna.make("Model", max_position_embeddings=5)(IDS, **GIVEN)


@pytest.mark.parametrize("family", [luna, mega])
def test_all_outputs_of_the_collator(family):
    items = [{"input_ids": luna.tokens([length])["input_ids"][0]} for length in LENGTHS]
    batch = flattened(items, return_flash_attn_kwargs=True, return_seq_idx=True)
    batch.pop("labels")
    model = family.make("Model").double()
    torch.testing.assert_close(model(**batch)[0], model(batch["input_ids"], position_ids=batch["position_ids"])[0])


def test_position_ids_of_mega():
    """`position_ids` define sequence starts and must be consistent with the mask."""
    inputs = luna.tokens([9, 4])
    positions = torch.arange(1, 10).expand(2, -1)
    with pytest.raises(ValueError, match="`position_ids` differ from the positions of `attention_mask`"):
        mega.make("Model")(**inputs, position_ids=positions)
    ids = inputs["input_ids"]
    torch.testing.assert_close(mega.make("Model")(ids, position_ids=positions)[0], mega.make("Model")(ids)[0])


@pytest.mark.parametrize(
    ("name", "side"),
    [("mega: laplace chunks", "left"), ("mega: truncated", "right"), ("megalodon: heads", "left")],
)
@torch.no_grad()
def test_mega_uses_positions_of_the_mask(name, side):
    """Mega counts positions from the mask, and accepts `position_ids` of servers and trainers that agree with it."""
    model, (ids, mask) = decoders.make(name), decoders.padded([9, 4], 9, side)
    positions = mask.cumsum(dim=1) - 1
    for given in (positions, positions.masked_fill(mask == 0, 1), positions.masked_fill(mask == 0, -7)):
        assert model(ids, mask, position_ids=given).logits.equal(model(ids, mask).logits)
    with pytest.raises(ValueError, match="`position_ids` differ from the positions of `attention_mask`"):
        model(ids, mask, position_ids=positions + 1)
    if side == "right":
        return
    for second in (mask, mask[:, 6:]):
        for offset, right in ((0, True), (1, False)):
            past = model(ids[:, :6], mask[:, :6], use_cache=True).cache
            inputs = {"position_ids": positions[:, 6:] + offset, "cache": past}
            if right:
                expected = model(ids, mask).logits[:, 6:]
                torch.testing.assert_close(model(ids[:, 6:], second, **inputs).logits, expected)
            else:
                with pytest.raises(ValueError, match="`position_ids` differ from the positions of `attention_mask`"):
                    model(ids[:, 6:], second, **inputs)
