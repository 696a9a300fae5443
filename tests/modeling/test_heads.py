"""Properties of heads that no row expresses: pooling by hand, kinds of labels, and scores at padding."""

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from luna_mega.modeling_common.outputs import CACHE
from tests.modeling import contract, luna
from tests.modeling.contract import CLASSES, MEMBERS, Batch, collate, row_of

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
CAUSAL = {"is_decoder": True}
POOLINGS = [("luna", {"pooling": pooling}) for pooling in luna.POOLINGS]
POOLINGS += [("mega", {"pooling": pooling}) for pooling in ("cls", "last", "mean")]
POOLINGS += [("luna", CAUSAL | {"pooling": "mean"}), ("mega", CAUSAL | {"pooling": "last", "pad_token_id": None})]


@torch.no_grad()
@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForMultipleChoice"])
@pytest.mark.parametrize("family, fields", POOLINGS)
def test_poolings_by_hand(family, fields, head):
    """Scores are those of vectors pooled by hand."""
    member = CLASSES[f"{family} {head}"]
    model = member.make(**fields)
    ids = row_of(member, 0, 9)[0]["input_ids"][None]
    vectors = []
    for row in ids.view(-1, 1, 9):
        body = model.base_model(row)
        packed = body.get("packed_last_hidden_state")
        packed = None if packed is None else packed[0][... if body.packed_mask is None else body.packed_mask[0] > 0]
        vectors.append(BY_HAND[fields["pooling"]](model, body.last_hidden_state[0], packed))
    features = torch.stack(vectors)
    if family == "mega" and head == "ForMultipleChoice":  # as in transformers v4, its classifier reads the pooler
        features = model.base_model.pooler(features)
    torch.testing.assert_close(model(ids).logits, model.classifier(features).view(1, -1))


@pytest.mark.parametrize("name", [name for name, member in CLASSES.items() if member.head != "Model"])
def test_a_subclass_has_the_loss_of_its_class(name):
    """Transformers derives the loss from the name of a class, which a user chooses freely."""
    member = CLASSES[name]
    model, (inputs, _) = member.make(), collate(member, Batch("right", (9, 4)))
    own = type("Own", (type(model),), {})(model.config).to(model.dtype).eval()
    own.load_state_dict(model.state_dict())
    torch.testing.assert_close(own(**inputs).loss, model(**inputs).loss, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize(
    "name", [name for name, member in CLASSES.items() if member.head not in ("Model", *contract.DECODERS)]
)
def test_heads_that_return_no_cache_make_none(name):
    """It would take memory and disable `unpad_inputs`."""
    member, bodies = CLASSES[name], []
    model = member.make(**{} if name.startswith("megalodon") else {"is_decoder": True, "pooling": "last"})
    model.base_model.register_forward_hook(lambda module, inputs, output: bodies.append(output))
    model(**collate(member, Batch("right", (9, 4)))[0])
    assert bodies and not any(CACHE in body for body in bodies)


@torch.no_grad()
@pytest.mark.parametrize("family", ["luna", "mega"])
def test_spans(family):
    """Scores at padding are the lowest number, so that `argmax` returns a token; positions outside do not count."""
    member = CLASSES[f"{family} ForQuestionAnswering"]
    model = member.make()
    for layout in ("left", "inferred"):
        inputs, kept = collate(member, Batch(layout, (9, 4)))
        output = model(**inputs)
        for logits in (output.start_logits, output.end_logits):
            assert (logits[~kept] == torch.finfo(logits.dtype).min).all() and (logits[kept].abs() < 100).all()
    inputs |= {"start_positions": torch.tensor([3, 1]), "end_positions": torch.tensor([[2], [9]])}
    starts, ends = (
        cross_entropy(logits.float(), target, reduction="none")
        for logits, target in ((output.start_logits, torch.tensor([3, 1])), (output.end_logits, torch.tensor([2, 0])))
    )
    torch.testing.assert_close(model(**inputs).loss, (starts.mean() + ends[0]) / 2, check_dtype=False)
    # The batch has two starts and one end.
    counted = model(**inputs, num_items_in_batch=4).loss
    torch.testing.assert_close(counted, (starts.sum() + ends[0]) / 8, check_dtype=False)


@pytest.mark.parametrize("family", ["luna", "mega"])
def test_a_masked_language_model_of_one_direction_warns(family, caplog):
    CLASSES[f"{family} ForMaskedLM"].make(is_decoder=True)
    assert "predicts masked tokens from earlier tokens only" in caplog.text


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
@pytest.mark.parametrize("name", ["luna ForSequenceClassification", "megalodon mean", "mega pairs, mean"])
def test_labels_of_sequences(name):
    """The loss follows `problem_type`; labels that PyTorch would broadcast or flatten raise an error."""
    member = MEMBERS[name]
    model, (inputs, _) = member.make(num_labels=3), collate(member, Batch("right", (5, 4, 3)))
    for model.config.problem_type, function in LOSSES.items():
        for inputs["labels"] in RIGHT[model.config.problem_type]:
            output, labels = model(**inputs), inputs["labels"]
            expected = function(output.logits, labels.flatten() if function is cross_entropy else labels)
            torch.testing.assert_close(output.loss, expected, check_dtype=False)
        for inputs["labels"] in WRONG[model.config.problem_type]:
            with pytest.raises(ValueError, match=r"`labels` must have the shape \[3"):
                model(**inputs)
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.int32):  # transformers would choose a loss by the type
        inputs["labels"] = torch.tensor([0, 1, 1], dtype=dtype)
        for model.config.problem_type in (None, "single_label_classification"):
            before = model.config.problem_type
            with pytest.raises(ValueError, match=rf"class ids from 0 to 2 \(torch.int64\), .* got {dtype} of shape"):
                model(**inputs)
            assert model.config.problem_type == before
