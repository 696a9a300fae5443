"""Distillation of sentence vectors."""

import pytest
import torch

from luna_mega.distillation import from_teacher
from luna_mega.distillation.embeddings import embedding_loss, parameter_groups, set_projection_length, teacher_vectors
from luna_mega.distillation.sentences import SentenceModules
from luna_mega.distillation.windows import cut_texts
from tests.distillation.models import ENCODERS, make_model
from tests.errors import check_error

MODULES = SentenceModules(("mean",), True, None, {}, {}, {})


@pytest.fixture
def teacher():
    return make_model("bert")


def batch_of(*lengths):
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(3, 40, mask.shape, generator=torch.Generator().manual_seed(0)).masked_fill(~mask, 1)
    return {"input_ids": ids, "attention_mask": mask.long()}


def test_loss_of_an_exact_student_is_zero(teacher):
    student = from_teacher(teacher, projection_length=12).model
    assert embedding_loss(teacher, student, MODULES, batch_of(12, 5), window=20).abs() < 1e-6


def test_training_step(teacher):
    student = from_teacher(teacher, projection_length=12).model
    set_projection_length(student, 4)
    groups = parameter_groups(student, 1e-3)
    assert [len(group["params"]) for group in groups][1] == 3 and groups[1]["lr"] == 3e-3
    loss = embedding_loss(teacher, student, MODULES, batch_of(12, 5), window=20)
    loss.backward()
    assert loss > 1e-4 and all(layer.attention.salience.grad.any() for layer in student.encoder.layers)
    assert student.embeddings.word_embeddings.weight.grad is None
    torch.optim.AdamW(groups).step()


def test_states_of_short_texts_are_in_the_loss(teacher):
    student = from_teacher(teacher, projection_length=12).model
    set_projection_length(student, 4)
    batch, both = batch_of(15, 9, 3), {"window": 10, "state_weight": 2.0}
    vectors = embedding_loss(teacher, student, MODULES, batch, window=10)
    distances = []
    for length, row in ((9, 1), (3, 2)):  # the first text is longer than the window
        text = {name: tensor[row : row + 1, :length] for name, tensor in batch.items()}
        got, want = (model(**text, output_hidden_states=True).hidden_states[1:] for model in (student, teacher))
        distances.append(1 - torch.cosine_similarity(torch.stack(got), torch.stack(want), dim=-1).flatten(1))
    expected = vectors + 2 * torch.cat(distances, dim=1).mean()
    torch.testing.assert_close(embedding_loss(teacher, student, MODULES, batch, **both), expected, rtol=0, atol=1e-6)
    long = batch_of(15)
    assert embedding_loss(teacher, student, MODULES, long, **both) == embedding_loss(
        teacher, student, MODULES, long, window=10
    )


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_long_texts_have_the_mean_of_their_windows(teacher, pooling):
    modules, batch = SentenceModules((pooling,), True, None, {}, {}, {}), batch_of(15, 7)
    got = teacher_vectors(teacher, modules, batch, window=10)
    ids = batch["input_ids"]
    parts = [torch.cat([ids[0, :1], ids[0, 1:9], ids[0, 14:]]), torch.cat([ids[0, :1], ids[0, 9:14], ids[0, 14:]])]
    parts.append(ids[1, :7])
    separate = [
        modules.embed(teacher(part[None]).last_hidden_state, torch.ones(1, len(part), dtype=torch.bool))[0]
        for part in parts
    ]
    mean = torch.nn.functional.normalize(separate[0] + separate[1], dim=-1)
    torch.testing.assert_close(got, torch.stack([mean, separate[2]]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_vectors_do_not_depend_on_padding_and_batch(name):
    """Short and long texts have the same vectors with padding on either side and with other texts in the batch."""
    model, lengths = make_model(name), (9, 1, 16)
    batch = batch_of(*lengths)
    if name in ("bert", "electra"):
        batch["token_type_ids"] = (torch.arange(16) > 4).long().repeat(3, 1)
    vectors = teacher_vectors(model, MODULES, batch, window=10)
    for row, length in enumerate(lengths):
        text = {key: tensor[row : row + 1, :length] for key, tensor in batch.items()}
        padded = {key: torch.nn.functional.pad(x, (4, 0), value=int(key == "input_ids")) for key, x in text.items()}
        for inputs in (text, padded):
            got = teacher_vectors(model, MODULES, inputs, window=10)
            torch.testing.assert_close(got[0], vectors[row], rtol=0, atol=1e-5)
        if length <= 10:
            want = MODULES.embed(model(**text).last_hidden_state, text["attention_mask"].bool())
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("side", ["right", "left"])
def test_cut_texts(side):
    """The first tokens and the last one of a text remain, as if the tokenizer had truncated it."""
    batch = batch_of(9)
    if side == "left":
        batch = {name: tensor.flip(1) for name, tensor in batch.items()}
    for length in (3, 5, 9, 12):
        cut = cut_texts(batch, length)
        for name in batch:
            assert cut[name].shape == cut["attention_mask"].shape and cut[name].dtype == batch[name].dtype
        for row, mask in enumerate(batch["attention_mask"].bool()):
            ids = batch["input_ids"][row][mask].tolist()
            expected = ids if len(ids) <= length else [*ids[: length - 1], ids[-1]]
            assert cut["input_ids"][row][cut["attention_mask"][row].bool()].tolist() == expected


def test_window_of_a_table_with_a_padding_row():
    roberta = make_model("roberta")
    student = from_teacher(roberta, projection_length=12, max_length=24).model
    assert embedding_loss(roberta, student, MODULES, batch_of(24), window=18).isfinite()
    check_error(lambda: embedding_loss(roberta, student, MODULES, batch_of(24), window=19), ValueError, "window=19")


def test_errors(teacher):
    student, batch = from_teacher(teacher, projection_length=12).model, batch_of(12)
    other = SentenceModules(("max",), True, None, {}, {}, {})
    cases = {
        "window=21": lambda: embedding_loss(teacher, student, MODULES, batch, window=21),
        "rows=0": lambda: set_projection_length(student, 0),
        "max": lambda: embedding_loss(teacher, student, other, batch, window=20),
    }
    for named, call in cases.items():
        check_error(call, ValueError, named)
