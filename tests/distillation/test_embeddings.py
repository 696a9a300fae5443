"""Vectors of a teacher in windows, lengths of texts, and numbers of rows in training."""

from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl, TrainerState

from luna_mega.distillation import from_teacher
from luna_mega.distillation.embeddings import RandomRows, cut_texts, teacher_vectors
from luna_mega.distillation.sentences import SentenceModules
from tests.distillation.models import bert_tokenizer, make_model, xlm_tokenizer
from tests.errors import check_error

TEXTS = ["a b c d e f g h i j a c e", "b d f h j", ""]  # 15, 7 and 2 tokens


class Embedder:
    """A mock with the parts of a SentenceTransformer that are used."""

    device = "cpu"

    def __init__(self, name="bert", pooling="mean", **options):
        self.model, self.tokenizer = make_model(name, pad_token_id=0), bert_tokenizer(**options)
        self.modules = SentenceModules((pooling,), normalizes=True)

    def __call__(self, batch):
        states = self.model(**batch).last_hidden_state
        return {"sentence_embedding": self.modules.embed(states, batch["attention_mask"].bool())}


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_long_texts_have_the_mean_of_their_windows(pooling):
    teacher = Embedder(pooling=pooling)
    long, short, _ = (teacher.tokenizer(text, return_tensors="pt")["input_ids"][0] for text in TEXTS)
    parts = [torch.cat([long[:1], long[1:9], long[14:]]), torch.cat([long[:1], long[9:14], long[14:]]), short]
    with torch.no_grad():
        inputs = ({"input_ids": part[None], "attention_mask": torch.ones(1, len(part)).long()} for part in parts)
        first, second, third = (teacher(each)["sentence_embedding"] for each in inputs)
    expected = torch.cat([(first + second) / 2, third])
    torch.testing.assert_close(teacher_vectors(teacher, TEXTS[:2], window=10), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("side", ["right", "left"])
def test_vectors_do_not_depend_on_padding_and_batch(side):
    teacher = Embedder(padding_side=side)
    vectors = teacher_vectors(teacher, TEXTS, window=10)
    for text, vector in zip(TEXTS, vectors, strict=True):
        torch.testing.assert_close(teacher_vectors(teacher, [text], window=10)[0], vector, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tokenizer", [bert_tokenizer(), xlm_tokenizer()], ids=["bert", "xlm"])
def test_cut_texts(tokenizer):
    """A shortened text has the tokens that the tokenizer returns with truncation."""
    texts = [" ".join(f"w{i}" for i in range(n)) for n in (20, 8, 1, 0)]
    for length in (3, 5, 10, 22, 30):
        cut = cut_texts(tokenizer, texts, [length] * len(texts))
        expected = tokenizer(texts, truncation=True, max_length=length)["input_ids"]
        assert tokenizer(cut)["input_ids"] == expected
    assert cut == texts
    assert cut_texts(tokenizer, texts[:2], [3, 4]) == ["w0", "w0 w1"]


def test_random_rows():
    """The number of rows depends on the seed and the step; between steps, the configured number applies."""
    student = from_teacher(make_model("bert"), projection_length=12).model
    callback, control = RandomRows(student, [3, 4, 5]), TrainerControl()

    def rows(seed, step):
        args, state = SimpleNamespace(seed=seed), TrainerState(global_step=step)
        callback.on_step_begin(args, state, control)
        (found,) = {layer.attention.projection_length for layer in student.encoder.layers}
        assert student.config.projection_length == found
        callback.on_step_end(args, state, control)
        assert {layer.attention.projection_length for layer in student.encoder.layers} == {12}
        assert student.config.projection_length == 12
        return found

    drawn = [rows(0, step) for step in range(20)]
    assert set(drawn) == {3, 4, 5} and drawn == [rows(0, step) for step in range(20)]
    assert drawn != [rows(1, step) for step in range(20)]
    check_error(lambda: RandomRows(make_model("bert"), [4]), ValueError, "projection_lengths=[4]")
