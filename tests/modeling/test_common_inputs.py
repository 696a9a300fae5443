"""Luna and Mega accept the same inputs and raise the same errors for invalid ones."""

import inspect
import re

import pytest
import torch
import transformers
from transformers import AutoModelForMaskedLM

from . import luna, mega

FAMILIES = [luna, mega]
family = pytest.mark.parametrize("family", FAMILIES, ids=["luna", "mega"])
ONE_SEQUENCE = [head for head in luna.HEADS if head != "ForSequencePairClassification"]


INVALID = [
    ({"input_ids": torch.zeros(0, 5, dtype=torch.long), "attention_mask": None}, "batch is empty: 0 sequences"),
    ({"input_ids": torch.zeros(2, 0, dtype=torch.long), "attention_mask": None}, "2 sequences of length 0"),
    ({"input_ids": None}, "exactly one of input_ids and inputs_embeds"),
    ({"inputs_embeds": torch.zeros(2, 9, 24)}, "exactly one of input_ids and inputs_embeds"),
    ({"input_values": torch.zeros(2, 9)}, "input_type='tokens'"),
    ({"input_ids": torch.zeros(9, dtype=torch.long)}, r"input_ids` must have the shape \[B, T\], or .* got \[9\]"),
    ({"input_ids": torch.tensor(9)}, r"input_ids` must have the shape \[B, T\], or .* got \[\]"),
    ({"input_ids": torch.zeros(2, 9, 3, dtype=torch.long)}, r"got \[2, 9, 3\]"),
    ({"input_ids": None, "inputs_embeds": torch.zeros(2, 9, 23)}, r"inputs_embeds \[B, T, 24\], got .* 23\]"),
    ({"input_ids": None, "inputs_embeds": torch.zeros(2, 24)}, r"got \[2, 24\]"),
    (
        {"attention_mask": torch.ones(2, 8)},
        r"attention_mask must have the shape \[2, 9\] of the input, got \[2, 8\]",
    ),
    ({"attention_mask": torch.ones(2, 1, 9, 9)}, "attention_mask must have the shape"),
    ({"head_mask": torch.zeros(2, 9)}, "(Luna|Mega) models do not support head_mask; omit the argument"),
    ({"is_causal": True}, "(Luna|Mega) models do not support is_causal"),
    ({"use_cache": True}, "require a decoder"),
]


@family
def test_inputs(family):
    """Invalid inputs raise the same errors, even if a head reads the inputs before the base model."""
    fields = {"drop_first_token": True} if family is luna else {}
    for model in (family.make("Model"), family.make("ForSequenceClassification", **fields)):
        for change, message in INVALID:
            with pytest.raises(ValueError, match=message):
                model(**luna.head_inputs("Model", [9, 4]) | change)


@family
@pytest.mark.parametrize("head", ONE_SEQUENCE)
def test_positions_of_all_rows(family, head):
    """`position_ids` `[T]` apply to every row, also if a head reads the inputs before the base model."""
    model, ids = family.make(head), luna.head_inputs(head, [9, 9])["input_ids"]
    assert torch.equal(model(ids, position_ids=torch.arange(9))[0], model(ids)[0])


@family
@pytest.mark.parametrize("head", ONE_SEQUENCE[1:])
def test_positional_arguments_are_those_of_bert(family, head):
    model, inputs = family.make(head), luna.head_inputs(head, [9, 4])
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    expected = model(inputs_embeds=embeds, attention_mask=inputs["attention_mask"])[0]
    assert torch.equal(model(None, inputs["attention_mask"], None, None, embeds)[0], expected)
    columns = [*inspect.signature(model.forward).parameters][:5]
    assert columns == [*inspect.signature(getattr(transformers, f"Bert{head}").forward).parameters][1:6]


@family
def test_values_have_no_vocabulary(family):
    name, model = family.__name__.split(".")[-1].capitalize(), family.make("Model", **family.VALUES)
    for head in ("ForMaskedLM", "ForMultipleChoice", "ForQuestionAnswering"):
        with pytest.raises(ValueError, match=f"{name}{head} needs input_type='tokens', got 'values'"):
            family.make(head, **family.VALUES)
    for change in (
        lambda: model.set_input_embeddings(torch.nn.Embedding(3, 24)),
        lambda: model.resize_token_embeddings(9),
    ):
        with pytest.raises(ValueError, match=f"{name}Model needs input_type='tokens'"):
            change()
    with pytest.raises(ValueError, match="exactly one of input_values and inputs_embeds"):
        model(**luna.head_inputs("Model", [9]))
    with pytest.raises(ValueError, match=r"input_values` must have the shape \[B, T\], or .* got \[2, 9, 2\]"):
        model(input_values=torch.zeros(2, 9, 2))


def without_embedding(model):
    """Return the model with an embedding that fails when called, because checks have to run first."""
    model.get_input_embeddings().register_forward_pre_hook(lambda *_: pytest.fail("the embedding ran before the check"))
    return model


@family
def test_pairs_and_choices(family):
    inputs = luna.head_inputs("ForSequencePairClassification", [9, 4])
    fewer = inputs | {"pair_input_ids": inputs["pair_input_ids"][:1], "pair_attention_mask": None}
    with pytest.raises(ValueError, match="2 first inputs, but 1 second inputs"):
        without_embedding(family.make("ForSequencePairClassification"))(**fewer)
    several = inputs | {f"pair_{name}": inputs[f"pair_{name}"][:, None] for name in ("input_ids", "attention_mask")}
    with pytest.raises(ValueError, match=r"must have the shape \[B, T\].*got \[2, 1, "):
        family.make("ForSequencePairClassification", num_labels=1)(**several)
    with pytest.raises(ValueError, match=r"input_ids \[B, options, T\].*got \[2, 9\]"):
        family.make("ForMultipleChoice")(**luna.head_inputs("Model", [9, 4]))


@family
def test_attention_implementations(family, tmp_path):
    """Only "sdpa" (the kernels) and "eager" (the reference) are supported; other values do not change the model."""
    model, inputs = family.make("ForMaskedLM"), luna.tokens([9, 4])
    assert model.config._attn_implementation == "sdpa"
    expected = model(**inputs).logits
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(**inputs).logits, expected)
    model.save_pretrained(tmp_path)
    for name in ("sdpa", "eager"):
        loaded = AutoModelForMaskedLM.from_pretrained(tmp_path, attn_implementation=name)
        assert loaded.config._attn_implementation == name
        torch.testing.assert_close(loaded(**inputs).logits, expected)
    for name in ("flash_attention_2", "flex_attention", "kernels-community/flash-attn3", "paged|eager", "fastest"):
        message = f'"{re.escape(name)}"` is not supported: \\w+ has its own kernels; omit .* or pass .eager'
        with pytest.raises(ValueError, match=message):
            AutoModelForMaskedLM.from_pretrained(tmp_path, attn_implementation=name)
        with pytest.raises(ValueError, match=message):
            AutoModelForMaskedLM.from_config(family.tiny_config(), attn_implementation=name)
        with pytest.raises(ValueError, match=message):
            model.set_attn_implementation(name)
        assert model.config._attn_implementation == "eager"
