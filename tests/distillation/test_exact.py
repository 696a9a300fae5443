"""`from_teacher`: a Luna equals its teacher on texts of up to `projection_length` tokens, for all heads and padding."""

import pytest
import torch
import transformers

from luna_mega import LunaForSequenceClassification
from luna_mega.distillation import Teacher, fit_salience, from_teacher
from tests.distillation.models import ENCODERS, HEADS, make_model, save_teacher
from tests.marks import diagonal

LENGTH = 14
TYPED = ("bert", "electra")
MASKS = {
    "right": torch.arange(LENGTH) < torch.tensor([[LENGTH], [9], [2]]),
    "left": torch.arange(LENGTH) >= torch.tensor([[0], [5], [12]]),
    "gaps": torch.arange(LENGTH) % torch.tensor([[20], [3], [4]]) != 2,
}


def batch_of(name, side="right"):
    ids = torch.randint(3, 40, (3, LENGTH), generator=torch.Generator().manual_seed(4))
    mask = MASKS[side]
    batch = {"input_ids": ids.masked_fill(~mask, 1), "attention_mask": mask.long()}
    if name in TYPED:
        batch["token_type_ids"] = (torch.arange(LENGTH) > 6).long().expand(3, LENGTH).contiguous()
    return batch


def expected(model, batch):
    """Return the teacher's output with the positions of unmasked tokens, which only RoBERTa computes itself."""
    if model.config.model_type in ("bert", "electra"):
        batch = batch | {"position_ids": (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)}
    if model.config.model_type == "distilbert":
        embeds = model.base_model.embeddings
        places = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        words = embeds.word_embeddings(batch["input_ids"])
        index = torch.arange(batch["input_ids"].shape[-1])  # the model adds the embeddings of these positions itself
        words = words + embeds.position_embeddings(places) - embeds.position_embeddings(index)
        batch = {"inputs_embeds": words, "attention_mask": batch["attention_mask"]}
    return model(**batch)


def compare(got, reference, mask, head):
    got, reference = (
        x[:2] if head == "ForQuestionAnswering" else x[:1] for x in (got.to_tuple(), reference.to_tuple())
    )
    for ours, theirs in zip(got, reference, strict=True):
        if theirs.shape[:2] == mask.shape:
            ours, theirs = ours[mask], theirs[mask]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


# XLM-RoBERTa and CamemBERT have the architecture of RoBERTa.
CASES = [(name, head) for name in ("bert", "roberta", "distilbert", "electra") for head in HEADS]
CASES += [
    ("xlm-roberta", "Model"),
    ("xlm-roberta", "ForTokenClassification"),
    ("camembert", "ForSequenceClassification"),
]


@pytest.mark.parametrize(("name", "head"), CASES)
@torch.no_grad()
def test_equals_its_teacher(name, head, tmp_path):
    teacher = make_model(name, head)
    student = from_teacher(teacher, projection_length=LENGTH).model
    sides = ["right", "left", "gaps"] if head in ("Model", "ForMaskedLM", "ForTokenClassification") else ["right"]
    for side in sides:
        batch = batch_of(name, side)
        if head == "ForMultipleChoice":
            batch = {key: tensor[None] for key, tensor in batch.items()}
            got, reference = student(**batch), teacher(**batch)
        else:
            got, reference = student(**batch), expected(teacher, batch)
        compare(got, reference, MASKS[side], head)
    if name == "bert":
        student.save_pretrained(tmp_path)
        again = type(student).from_pretrained(tmp_path)
        torch.testing.assert_close(again(**batch)[0], got[0], rtol=0, atol=1e-6)
        assert all(torch.equal(x, again.state_dict()[key]) for key, x in student.state_dict().items())


@pytest.mark.parametrize(("name", "head"), [*diagonal(ENCODERS, HEADS), ("bert", "ForMaskedLM")])
def test_copied_weights_are_equal(name, head):
    """Copied weights are bitwise equal in half precision; positions are copied from the row after the padding token."""
    teacher = make_model(name, head, pad_token_id=1 if "bert" not in name[:4] else 39).bfloat16()
    student, _, report = from_teacher(teacher, max_length=15)
    copied, theirs = report.copied.copied, dict(teacher.named_parameters(remove_duplicate=False))
    for ours, source in copied.items():
        source, _, first = source.partition("[")
        expected, got = theirs[source][int(first.rstrip(":]") or 0) :], student.get_parameter(ours)
        if "position_embeddings" in ours:
            got = got[student.config.position_offset :]
        assert torch.equal(got, expected), ours
    names = dict(student.named_parameters())
    assert all(name.endswith("salience") for name in names.keys() - copied.keys())
    assert {*copied, *report.copied.new} == set(names)
    assert {name.rpartition("pooler.")[2] for name in report.copied.left} <= {"dense.weight", "dense.bias"}


def test_gradients_are_the_teachers():
    teacher = make_model("bert", "ForSequenceClassification", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    student = from_teacher(teacher, projection_length=LENGTH).model.train()
    batch = batch_of("bert") | {"labels": torch.tensor([0, 1, 1])}
    for model in (teacher.train(), student):
        model(**batch).loss.backward()
    pairs = {
        "luna.embeddings.word_embeddings": "bert.embeddings.word_embeddings",
        "luna.embeddings.token_type_embeddings": "bert.embeddings.token_type_embeddings",
        "luna.encoder.layers.0.attention.key": "bert.encoder.layer.0.attention.self.key",
        "classifier.out_proj": "classifier",
    }
    for ours, theirs in pairs.items():
        ours, theirs = student.get_submodule(ours).weight.grad, teacher.get_submodule(theirs).weight.grad
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("bert", "Model"),
        ("bert", "ForMaskedLM"),
        ("roberta", "ForTokenClassification"),
        ("roberta", "ForSequenceClassification"),
    ],
)
def test_dropout_is_the_teachers(name, head):
    """With the same random numbers, outputs in training are equal too. BERT's pooling layer has no dropout."""
    teacher = make_model(name, head, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2)
    student = from_teacher(teacher, projection_length=LENGTH).model
    results = []
    for model in (student, teacher):
        torch.manual_seed(5)
        results.append(model.train()(**batch_of(name)))
    compare(*results, MASKS["right"], head)


def test_fields_of_the_teacher():
    teacher = make_model("distilbert", "ForSequenceClassification", num_labels=3, dropout=0.2, seq_classif_dropout=0.3)
    config = from_teacher(teacher, projection_length=5).model.config
    assert (config.num_labels, config.dropout, config.classifier_dropout) == (3, 0.2, 0.3)
    assert (config.projection_length, config.max_position_embeddings, config.pad_token_id) == (5, 20, 1)
    assert (config.position_table_size, config.position_extension) == (None, None)
    assert config.classifier_activation == "relu" and not config.type_vocab_size


@torch.no_grad()
def test_fit_of_the_salience():
    """If the logits of a layer depend only on the key, packing with the fitted salience is almost lossless."""
    model = make_model("bert", num_hidden_layers=1, num_attention_heads=1)
    model.encoder.layer[0].attention.self.query.weight.zero_()
    plain, fitted = (from_teacher(model, projection_length=4).model for _ in range(2))
    generator = torch.Generator().manual_seed(7)
    batches = [{"input_ids": torch.randint(3, 40, (64, 16), generator=generator)} for _ in range(8)]
    shares, tokens = fit_salience(Teacher(model), fitted, batches, ridge=1e-6)
    assert tokens == 8 * 64 * 16 and len(shares) == 1 and 0.9 < shares[0] <= 1
    assert model.config._attn_implementation == "sdpa"
    reference = model(**batches[0]).last_hidden_state
    errors = [(student(**batches[0]).last_hidden_state - reference).norm() for student in (plain, fitted)]
    assert errors[1] < 0.1 * errors[0]


def test_longer_than_the_teacher():
    model = from_teacher(make_model("bert"), projection_length=6, max_length=50).model
    assert (model.config.position_table_size, model.config.position_extension) == (20, "interpolate")
    ids = torch.randint(3, 40, (1, 50))
    assert torch.isfinite(model(input_ids=ids).last_hidden_state).all()


def test_a_bare_encoder_leaves_its_pooler(tmp_path):
    model = make_model("bert")
    report = from_teacher(model).report
    assert report.copied.left == ["pooler.dense.weight", "pooler.dense.bias"] and report.fit is None
    assert "not copied: pooler.dense.weight, pooler.dense.bias (the pooling layer" in str(report)
    assert "salience: 0" in str(report)


@pytest.mark.parametrize("name", ENCODERS)
def test_a_new_classifier(name, tmp_path):
    """`num_labels` converts any encoder to a classifier; a BERT's pooling layer is copied."""
    bare = save_teacher(tmp_path / "bare", name)
    torch.manual_seed(3)
    student = from_teacher(str(bare), LENGTH, num_labels=5).model
    assert type(student) is LunaForSequenceClassification and student.config.num_labels == 5
    torch.manual_seed(3)
    auto = transformers.AutoModelForSequenceClassification
    teacher = auto.from_pretrained(bare, num_labels=5).eval()
    if name == "bert":
        pooler = transformers.AutoModel.from_pretrained(bare).pooler.dense
        assert torch.equal(student.classifier.dense[0].weight, pooler.weight)
    compare(student(**batch_of(name)), expected(teacher, batch_of(name)), MASKS["right"], "ForSequenceClassification")
    head = save_teacher(tmp_path / "head", name, "ForSequenceClassification", num_labels=3)
    for labels, kept in ((3, True), (2, False)):
        student = from_teacher(str(head), LENGTH, num_labels=labels).model
        teacher = auto.from_pretrained(head)
        outputs = [module for key, module in teacher.named_modules() if key.endswith(("out_proj", "classifier"))][-1:]
        assert student.config.num_labels == labels
        assert (student.classifier.out_proj.weight.equal(outputs[0].weight)) == kept


def test_a_folder_is_read_with_the_head_of_its_architecture(tmp_path):
    folder = save_teacher(tmp_path / "head", head="ForSequenceClassification")
    model, own, report = from_teacher(str(folder), texts=["a b c", "d e"], max_length=100)
    assert type(model) is LunaForSequenceClassification
    assert own.model_max_length == 100 and len(report.fit) == 2 and report.tokens == 9
