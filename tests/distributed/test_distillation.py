"""Alignment and distillation under DDP and FSDP2: mean gradients over ranks equal the gradients of one process."""

import copy

import pytest
import torch.distributed as dist

from luna_mega.distillation import align, aligned_parameters, copy_weights, distill, train_only
from tests.distillation.models import make_batch, make_student, make_teacher
from tests.distributed import cases

SLOW = [("gpt2", "luna"), ("roberta", "mega")]
PAIRS = [("bert", "luna"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)]


def difference(name: str, kind: str, wrap, stage: str) -> float:
    """Return the largest difference of gradients between ranks with a part of the batch and one process."""
    teacher = make_teacher(name)
    student, batch = make_student(teacher, kind), make_batch(teacher)
    copy_weights(teacher, student)
    train_only(student, aligned_parameters(teacher, student) if stage == "align" else None)

    def backward(model, rank):
        part = {key: tensor[rank::2] for key, tensor in batch.items()}
        loss = align(teacher, model, part).sum() if stage == "align" else distill(teacher, model, part).loss
        loss.backward()

    wrapped = wrap(copy.deepcopy(student).train())
    backward(wrapped, dist.get_rank())
    for rank in range(2):
        backward(student.train(), rank)
    pairs = zip(cases.unwrap(wrapped).parameters(), student.parameters(), strict=True)
    return max(
        float((cases.full_tensor(got.grad) - reference.grad / 2).abs().max())
        for got, reference in pairs
        if reference.requires_grad
    )


@pytest.mark.parametrize("stage", ["align", "distill"])
@pytest.mark.parametrize("wrap", [cases.ddp, cases.fsdp_of_accelerate])
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_gradients_equal_one_process(ranks, name, kind, wrap, stage):
    assert max(ranks(2, difference, name, kind, wrap, stage)) < 1e-6
