"""Labels of the heads: shapes, values and ignored positions."""

from functools import partial

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from luna_mega.modeling_common.labels import next_tokens, shift_right

from . import classes, decoders, luna, mega, mega_decoders, megalodon_decoders

FAMILIES = {"luna": luna, "mega": mega}
family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
IGNORED = -100


def spans(family, **fields):
    return family.make("ForQuestionAnswering", **fields)


@torch.no_grad()
@family
def test_span_scores_at_padding(family):
    """Scores at padding are the lowest number, also if the mask is inferred, so that `argmax` returns a token."""
    model, inputs = spans(family), luna.tokens([9, 4], "left", 14)
    kept = inputs.pop("attention_mask").bool()
    given, inferred = model(**inputs, attention_mask=kept), model(**inputs)
    for logits in (given.start_logits, given.end_logits, inferred.start_logits, inferred.end_logits):
        assert (logits[~kept] == torch.finfo(logits.dtype).min).all() and (logits[kept].abs() < 100).all()


@torch.no_grad()
@family
def test_span_loss_does_not_depend_on_padding(family):
    """The loss does not depend on padding; labels at padding or beyond the end are not counted."""
    model, losses = spans(family), []
    for width in (12, 14, 32, 48):
        inputs = luna.tokens([12, 5], "right", width)
        labels = {"start_positions": torch.tensor([3, 1]), "end_positions": torch.tensor([[11], [7]])}
        losses.append(model(**inputs, **labels).loss)
        # the batch has two starts and one end
        losses.append(model(**inputs, **labels, num_items_in_batch=2).loss * 2 / 1.5)
    first, counted = losses[0], losses[::2]
    for loss in counted:
        torch.testing.assert_close(loss, first)
    for loss in losses[1::2]:
        torch.testing.assert_close(loss, losses[1])


@family
def test_span_labels(family):
    model, inputs = spans(family), luna.tokens([9, 4])
    for name, missing in (("start_positions", "end_positions"), ("end_positions", "start_positions")):
        with pytest.raises(ValueError, match=f"`{missing}` is missing; pass `start_positions` and `end_positions`"):
            model(**inputs, **{name: torch.tensor([1, 2])})
    right = torch.tensor([1, 2])
    for wrong in (torch.tensor([1]), torch.tensor([[1, 2]]), torch.tensor(1)):
        with pytest.raises(ValueError, match=r"`end_positions` must have the shape \[2\], got"):
            model(**inputs, start_positions=right, end_positions=wrong)
    with pytest.raises(ValueError, match="has no loss for a padding-free batch; pad the batch"):
        ids = inputs["input_ids"].view(1, -1)
        model(ids, seq_idx=torch.tensor([[0] * 9 + [1] * 9]), start_positions=right[:1], end_positions=right[:1])


@family
@pytest.mark.parametrize("head", ["ForMaskedLM", "ForTokenClassification"])
def test_labels_of_another_shape(family, head):
    """Labels with the right number of entries in another shape raise an error, since they would be misassigned."""
    regression, numbers = family.make("ForSequenceClassification", num_labels=1), luna.tokens([5, 4, 3])
    assert torch.equal(*(regression(**numbers, labels=x).loss for x in (torch.ones(3), torch.ones(3, 1))))
    with pytest.raises(ValueError, match=r"`labels` must have the shape \[3\]"):
        regression(**numbers, labels=torch.ones(1, 3))
    model, inputs = family.make(head), luna.tokens([8, 8])
    for shape in ((8, 2), (16,), (1, 2, 8), (2, 7)):
        with pytest.raises(ValueError, match=r"`labels` must have the shape \[2, 8\]"):
            model(**inputs, labels=torch.ones(shape, dtype=torch.long))


POOLED = {
    "luna": (luna, "ForSequenceClassification", {}),
    "megalodon": (megalodon_decoders, "ForSequenceClassification", {"num_labels": 3, "dtype": torch.float32}),
    "mega pairs": (mega, "ForSequencePairClassification", {}),
}
RIGHT = {
    "single_label_classification": [torch.tensor([0, 2, 1]), torch.tensor([[0], [2], [1]])],
    "multi_label_classification": [torch.eye(3)],
    "regression": [torch.eye(3)],
}
LOSSES = dict(zip(RIGHT, (cross_entropy, binary_cross_entropy_with_logits, mse_loss), strict=True))
WRONG = {
    "single_label_classification": [torch.tensor([[0, 2, 1]]), torch.tensor([0, 2]), torch.ones(3, 3).long()],
    "multi_label_classification": [torch.ones(3), torch.ones(1, 3), torch.ones(9)],
    "regression": [torch.ones(3), torch.ones(1, 3), torch.ones(3, 1)],
}


@pytest.mark.filterwarnings("error:Using a target size")
@pytest.mark.parametrize("case", POOLED)
def test_labels_of_sequences(case):
    """The loss follows `problem_type`; labels that PyTorch would broadcast or flatten raise an error."""
    family, head, fields = POOLED[case]
    model, inputs = family.make(head, **fields), luna.head_inputs(head, [5, 4, 3])
    inputs = {name: value.clamp(max=29) for name, value in inputs.items()}
    for model.config.problem_type, function in LOSSES.items():
        for labels in RIGHT[model.config.problem_type]:
            output = model(**inputs, labels=labels)
            expected = function(output.logits, labels.flatten() if function is cross_entropy else labels)
            torch.testing.assert_close(output.loss, expected, check_dtype=False)
        for labels in WRONG[model.config.problem_type]:
            with pytest.raises(ValueError, match=r"`labels` must have the shape \[3"):
                model(**inputs, labels=labels)


@family
def test_labels_of_choices(family):
    model, inputs = family.make("ForMultipleChoice"), luna.head_inputs("ForMultipleChoice", [5, 4, 3])
    assert model(**inputs, labels=torch.tensor([0, 1, 0])).loss.isfinite()
    for labels in (torch.tensor([0, 1]), torch.tensor([[0], [1], [0]]), torch.ones(3, 2)):
        with pytest.raises(ValueError, match=r"`labels` must have the shape \[3\]"):
            model(**inputs, labels=labels)


LABELED = classes.HEADS | classes.DECODERS | classes.SEQ2SEQ
ADAPTIVE = {"adaptive_softmax_cutoffs": [9], "tie_word_embeddings": False, "dtype": torch.float32}
LABELED |= {"mega adaptive decoder": partial(mega_decoders.make, **ADAPTIVE)}


@pytest.mark.parametrize("name", decoders.a_third(name for name in LABELED if not name.endswith("Model")))
def test_labels_that_are_no_ids(name):
    """The errors name the ids that labels can be: for numbers with a fraction, and on a CPU for other ids."""
    model, head = LABELED[name](), name.split()[-1]
    inputs = {key: value.clamp(max=22) for key, value in luna.head_inputs(head, [5, 4]).items()}
    given = luna.labels("ForMaskedLM" if head in ("decoder", "seq2seq", "ForCausalLM") else head, inputs)
    for field, labels in given.items():
        with pytest.raises(ValueError, match=rf"`{field}` must .*\b(ids|indices)\b.*, got torch\.float32"):
            model(**inputs, **given | {field: labels.float()})
    for wrong in [] if head == "ForQuestionAnswering" else [-5, 1000]:
        labels = given["labels"].clone()
        labels.view(-1)[1] = wrong
        with pytest.raises(ValueError, match=rf"`labels` are from .*{wrong}.* ids from 0 to \d+, or -100"):
            model(**inputs, labels=labels)


def test_next_tokens():
    labels = torch.tensor([[1, 2, 3, 4, 5, 6]])
    mask = torch.tensor([[0, 1, 0, 1, 1, 0]]).bool()
    starts = torch.tensor([[1, 0, 0, 1, 0, 0]]).bool()
    none = IGNORED
    assert next_tokens(None, None) is None
    assert next_tokens(labels, None).tolist() == [[2, 3, 4, 5, 6, none]]
    assert next_tokens(labels, None, mask).tolist() == [[none, 4, none, 5, none, none]]
    assert next_tokens(labels, None, None, starts).tolist() == [[2, 3, none, 5, 6, none]]
    assert next_tokens(labels, None, mask, starts).tolist() == [[none, none, none, 5, none, none]]
    assert next_tokens(labels + 9, labels, mask).tolist() == [[none, 2, none, 4, 5, none]]
    assert next_tokens(labels, None, torch.zeros_like(mask)).tolist() == [[none] * 6]


def test_shift_right():
    """`shift_right` replaces -100 by padding, also between labels: each label is predicted from the previous one."""
    labels = torch.tensor([[IGNORED, 7, IGNORED, IGNORED, 8, 9, IGNORED, IGNORED], [IGNORED] * 8, list(range(3, 11))])
    expected = [[1, 2, 1, 1, 7, 8, 9, 1], [2, 1, 1, 1, 1, 1, 1, 1], [2, 3, 4, 5, 6, 7, 8, 9]]
    inputs, mask = shift_right(labels, 2, 1)
    assert inputs.tolist() == expected and torch.equal(mask, inputs != 1)
