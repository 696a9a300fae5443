"""The error of a calibrated attention on held-out batches, and the scale of the logits of causal students."""

import math

import pytest
import torch

from luna_mega.distillation import calibrate, calibration_error, copy_weights, scale_logits
from tests.distillation.models import make_batch, make_student, make_teacher


def test_error_of_the_attention():
    """The error is 0 with a row for every position, larger with fewer rows, and about 1 without calibration."""
    teacher = make_teacher("bert")
    batch, errors = make_batch(teacher), {}
    for rows in (12, 6):
        student = make_student(teacher, "luna", projection_length=rows)
        copy_weights(teacher, student)
        errors["none"] = calibration_error(teacher, student, batch)
        shares = calibrate(teacher, student, [batch])
        assert min(shares) == 1.0
        errors[rows] = calibration_error(teacher, student, batch)
    assert max(errors[12]) < 0.05 < max(errors[6]) < 0.6 < min(errors["none"])


@pytest.mark.parametrize(("name", "kind"), [("llama", "mega"), ("llama", "luna"), ("gpt2", "mega"), ("gpt2", "luna")])
def test_causal_students_start_at_most_at_the_uniform_loss(name, kind):
    teacher = make_teacher(name, scale=1.0)
    student, batch = make_student(teacher, kind), make_batch(teacher)
    copy_weights(teacher, student)
    before, uniform = student(**batch).loss.item(), math.log(40)
    factor = scale_logits(student, batch)
    after = student(**batch).loss.item()
    assert before > uniform >= after - 1e-2 and 0 < factor < 1
    assert scale_logits(student, batch) == 1.0
    student.train()(**batch).loss.backward()
    layer = next(parameter for key, parameter in student.named_parameters() if "layers.1" in key)
    assert layer.grad is not None and layer.grad.abs().max() > 0
    assert torch.isfinite(layer.grad).all()


def test_the_scale_of_logits_requires_few_of_them():
    """All logits of 16 blocks of 1,024 tokens of SmolLM2 have 3.2 GB."""
    student, rows = make_student(make_teacher("llama"), "mega"), []
    student.lm_head.register_forward_hook(lambda module, args, output: rows.append(len(output)))
    scale_logits(student, {"input_ids": torch.randint(3, 40, (200, 12))})
    assert rows == [1024]


@pytest.mark.parametrize(
    ("name", "kind", "bias"), [("llama", "mega", -2.0), ("modernbert", "mega", -2.0), ("gpt2", "mega", 0.0)]
)
def test_new_layers_of_a_mega_keep_most_of_their_input(name, kind, bias):
    """With a bias of 0, the update gates of the 30 layers of SmolLM2 leave 2^-30 of the embeddings."""
    for layer in make_student(make_teacher(name), kind).mega.layers:
        gates, others = layer.mega_layer.mx_proj.bias.detach().split([16, len(layer.mega_layer.mx_proj.bias) - 16])
        assert (gates == bias).all() and not others.any()
