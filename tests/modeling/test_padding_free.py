"""Padding-free batches, and `unpad_inputs`, which converts a padded batch to a padding-free one in the model."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DataCollatorWithFlattening

from tests.marks import diagonal, slow_but

from . import classes, decoders, luna, mega

LENGTHS = [17, 1, 8, 23, 5]


LANGUAGE_MODELS = [*classes.VARIANTS, *decoders.DECODER_ONLY]
# The fast cases: positions of Luna; chunks, batch statistics and truncated averages of Mega; all kinds of decoders.
SOME = {
    *("luna tied", "luna no positions, no embedding norm", "luna P not contextual", "mega laplace chunks"),
    *("mega one direction, truncated", "mega batchnorm, norms around", "mega simple chunks, shift, no ffn"),
    *decoders.SOME,
}


def language_model(name):
    """Return a language model in float64 without dropout."""
    if name in decoders.DECODER_ONLY:
        return decoders.make(name, vocab_size=40)
    family, fields = classes.VARIANTS[name]
    return family.make("ForMaskedLM", **fields).double()


def with_each(*values):
    """Combine each model with one value; models that are not in `SOME` are marked as slow."""
    pairs = diagonal(LANGUAGE_MODELS, values)
    return slow_but([(name, value) for name, value in pairs if name in SOME], pairs)


def sequences():
    """Return tokens and labels; the first label is ignored, because the collator inserts a separator there."""
    items = [luna.tokens([length])["input_ids"][0] for length in LENGTHS]
    return [{"input_ids": ids, "labels": torch.cat([ids.new_full((1,), -100), ids[1:]])} for ids in items]


def flattened(items, **options):
    return DataCollatorWithFlattening(return_tensors="pt", **options)(items)


def one_by_one(model, items):
    """Return the logits of all tokens and the gradients of the summed loss, with one call per sequence."""
    logits, total = [], 0.0
    for item in items:
        output = model(item["input_ids"][None], **without_cache(model))
        logits.append(output.logits[0])
        total = total + summed_loss(model, output.logits, item["labels"][None])
    total.backward()
    return torch.cat(logits), taken_gradients(model)


def is_decoder(model):
    return model.config.is_decoder


def without_cache(model):
    return {"use_cache": False} if is_decoder(model) else {}


def summed_loss(model, logits, labels):
    if is_decoder(model):
        logits, labels = logits[:, :-1], labels[:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def taken_gradients(model):
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


def assert_equal_gradients(actual, expected):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            actual[name], gradient, rtol=1e-7, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize(("name", "marker"), with_each("position_ids", "cu_seq_lens", "seq_idx", "two rows"))
def test_padding_free_equals_separate_sequences(name, marker):
    model, items = language_model(name), sequences()
    expected, gradients = one_by_one(model, items)
    if marker == "cu_seq_lens":
        batch = flattened(items, return_position_ids=False, return_flash_attn_kwargs=True)
    elif marker == "seq_idx":
        batch = flattened(items, return_position_ids=False, return_seq_idx=True)
    else:
        batch = flattened(items)
    if marker == "two rows":  # 26 + 28 tokens; the last row has two positions of left padding
        first, second = flattened(items[:3]), flattened(items[3:])
        batch = {name: torch.cat([first[name][:, :26], second[name][:, :26]]) for name in first}
        expected, gradients = one_by_one(model, [*items[:3], items[3], cut(items[4], 3)])
    labels = batch.pop("labels")
    output = model(**batch)
    assert output.logits.shape[:2] == labels.shape and output.get("cache") is None
    torch.testing.assert_close(output.logits.flatten(0, 1), expected, rtol=1e-7, atol=1e-9)
    summed_loss(model, output.logits, labels).backward()
    assert_equal_gradients(taken_gradients(model), gradients)


def cut(item, length):
    return {name: value[:length] for name, value in item.items()}


@pytest.mark.parametrize(("name", "side"), with_each("left", "right"))
def test_unpadded_equals_padded(name, side):
    """Results are equal, also for a row of padding and in training, which updates batch norm statistics."""
    model, inputs = language_model(name), luna.tokens(LENGTHS, side)
    inputs["attention_mask"][1] = 0
    kept, results = inputs["attention_mask"].bool(), []
    for unpad in (False, True):
        model.config.unpad_inputs = unpad
        for module in model.modules():
            if hasattr(module, "running_mean"):
                module.train()
        output = model(**inputs, **without_cache(model))
        output.logits[kept].sin().sum().backward()
        results.append((output.logits[kept].detach(), taken_gradients(model)))
    (padded, gradients), (unpadded, actual) = results
    torch.testing.assert_close(unpadded, padded, rtol=1e-7, atol=1e-9)
    # Parameters that only affect padding have no gradient.
    assert_equal_gradients(actual, {name: gradient for name, gradient in gradients.items() if name in actual})


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


def test_learned_positions_limit_the_batch():
    with pytest.raises(ValueError, match="learned positions"):
        luna.make("Model", max_position_embeddings=5)(IDS, **GIVEN)


@pytest.mark.parametrize("family", [luna, mega])
def test_all_outputs_of_the_collator(family):
    items = [{"input_ids": item["input_ids"]} for item in sequences()]
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


@pytest.mark.parametrize("family", decoders.TRANSLATING)
def test_encoder_decoders_unpad_their_source(family):
    """`unpad_inputs` unpads the source only; results with a padded target are unchanged."""
    ids, mask = decoders.padded([7, 3], 7, "right")
    results = []
    for unpad in (False, True):
        model = decoders.make_plain(family, is_encoder_decoder=True, unpad_inputs=unpad)
        inputs = decoders.source(model, 2) | decoders.target(model, ids, mask)
        results.append(model(**inputs, use_cache=False).logits[mask.bool()])
    torch.testing.assert_close(*results)


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
