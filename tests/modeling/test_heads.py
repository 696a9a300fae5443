"""Pooling by hand, losses of every kind of label, and predictions of Trainer."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from transformers import Trainer, TrainingArguments

from luna_mega import LunaConfig, LunaForMaskedLM, MegaConfig, MegaForMaskedLM
from luna_mega.modeling_common.labels import next_tokens, shift_right
from tests.modeling import luna, mega, megalodon_decoders
from tests.modeling.mega import NO_DROPOUT

family = pytest.mark.parametrize("family", [luna, mega], ids=["luna", "mega"])

POOLED = ("ForSequenceClassification", "ForSequencePairClassification", "ForMultipleChoice")
# Pooling -> function that computes the vector of a sequence from its states `[T, d]` and its rows of P.
BY_HAND = {
    "cls": lambda model, states, packed: states[0],
    "last": lambda model, states, packed: states[-1],
    "mean": lambda model, states, packed: states.mean(dim=0),
    "packed_mean": lambda model, states, packed: packed.mean(dim=0),
    "packed_max": lambda model, states, packed: model.pooler.dense(packed).amax(dim=0),
    "packed_attention": lambda model, states, packed: model.pooler.layer_norm(
        model.pooler.attention(states[:1], packed[None], None)
    )[0],
}
DECODERS = {
    "luna": (luna, {"is_decoder": True}),
    "mega": (mega, {"is_decoder": True, "bidirectional": False}),
    "megalodon": (megalodon_decoders, {}),
}
CLASSIFIERS = {
    **{f"luna {pooling}": (luna, pooling, {}) for pooling in luna.POOLINGS},
    **{f"mega {pooling}": (mega, pooling, {}) for pooling in ("cls", "last", "mean")},
    **{f"causal {name} {pooling}": (family, pooling, fields)
       for name, (family, fields) in DECODERS.items() for pooling in ("last", "mean")},
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("family, pooling, fields", CLASSIFIERS.values(), ids=CLASSIFIERS)
def test_poolings_by_hand(family, pooling, fields):
    """Scores equal those of vectors pooled by hand, with padding on either side and with an inferred mask."""
    model = family.make("ForSequenceClassification", pooling=pooling, num_labels=3, vocab_size=40, **fields).float()
    for side in ("left", "right"):
        inputs = luna.tokens([9, 4, 1], side, 11)
        scores, inferred = model(**inputs).logits, model(inputs["input_ids"]).logits
        for row, (ids, mask) in enumerate(zip(*inputs.values(), strict=True)):
            body = model.base_model(ids[mask.bool()][None])
            packed = body.get("packed_last_hidden_state")
            packed = None if packed is None else packed[0][... if body.packed_mask is None else body.packed_mask[0] > 0]
            expected = model.classifier(BY_HAND[pooling](model, body.last_hidden_state[0], packed)[None])[0]
            torch.testing.assert_close(scores[row], expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(inferred[row], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head", POOLED)
@pytest.mark.parametrize("name, pooling", [("luna", "cls"), ("luna", "packed_mean"), ("mega", "cls")])
def test_causal_classifiers_read_the_last_token(name, pooling, head):
    """The first token of a decoder, and P, do not depend on the text."""
    family, fields = DECODERS[name]
    with pytest.raises(ValueError, match=f"pooling='{pooling}'.*set pooling to 'last' or 'mean'"):
        family.make(head, pooling=pooling, **fields)


def test_causal_masked_model_warns(caplog):
    for family, fields in (DECODERS["luna"], DECODERS["mega"]):
        caplog.clear()
        family.make("ForMaskedLM", **fields)
        assert "is_decoder=False to read both sides" in caplog.text


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


LABELED = {
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
@pytest.mark.parametrize("case", LABELED)
def test_labels_of_sequences(case):
    """The loss follows `problem_type`; labels that PyTorch would broadcast or flatten raise an error."""
    module, head, fields = LABELED[case]
    model, inputs = module.make(head, **fields), luna.head_inputs(head, [5, 4, 3])
    inputs = {name: value.clamp(max=29) for name, value in inputs.items()}
    for model.config.problem_type, function in LOSSES.items():
        for labels in RIGHT[model.config.problem_type]:
            output = model(**inputs, labels=labels)
            expected = function(output.logits, labels.flatten() if function is cross_entropy else labels)
            torch.testing.assert_close(output.loss, expected, check_dtype=False)
        for labels in WRONG[model.config.problem_type]:
            with pytest.raises(ValueError, match=r"`labels` must have the shape \[3"):
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


SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
LUNA = {"num_attention_heads": 2, "projection_length": 4, "dropout": 0.0, "attention_dropout": 0.0}
MODELS = {
    "luna": lambda **fields: LunaForMaskedLM(LunaConfig(**SIZES, **LUNA, **fields)),
    "mega": lambda **fields: MegaForMaskedLM(MegaConfig(**SIZES, **NO_DROPOUT, **fields)),
}


@pytest.mark.parametrize("model_type", MODELS)
def test_trainer_aligns_predictions_and_labels(model_type, tmp_path):
    """`Trainer.predict` returns a prediction for every label, and the same loss as without `sparse_prediction`."""
    torch.manual_seed(0)
    ids = torch.randint(4, 40, (5, 9))
    labels = ids.masked_fill(torch.rand(5, 9) < 0.7, -100)
    rows = Dataset.from_dict({"input_ids": ids, "labels": labels}).with_format("torch")
    dense, sparse = MODELS[model_type](), MODELS[model_type](sparse_prediction=True)
    sparse.load_state_dict(dense.state_dict())
    options = {"per_device_eval_batch_size": 2, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    results = [Trainer(x, TrainingArguments(str(tmp_path), **options)).predict(rows) for x in (dense, sparse)]
    for one, other in zip(*results, strict=True):
        if isinstance(one, np.ndarray):
            np.testing.assert_allclose(other, one, atol=1e-6)
    assert results[1].metrics["test_loss"] == pytest.approx(results[0].metrics["test_loss"], abs=1e-6)
    assert results[1].predictions.shape[:2] == results[1].label_ids.shape
