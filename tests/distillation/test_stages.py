"""Calibration, alignment and distillation: the accuracy, inputs and effects of each stage."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import Trainer, TrainingArguments

from luna_mega import LunaConfig, LunaForMaskedLM, MegaConfig, MegaForMaskedLM
from luna_mega.distillation import (
    Teacher,
    align,
    aligned_parameters,
    calibrate,
    calibration,
    copy_weights,
    distill,
    distilling,
    train_only,
)
from tests.distillation.models import PLAIN, make_batch, make_model, make_student, make_teacher

PAIRS = [("bert", "luna"), ("modernbert", "luna"), ("roberta", "mega"), ("gpt2", "luna"), ("llama", "luna")]
PAIRS += [("gpt2", "mega"), ("qwen2", "mega")]


def told_apart(model):
    """Give a teacher positions in separate dimensions, and layers that hardly change them."""
    embeddings = model.base_model.embeddings
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layer." in name and "orm" not in name:
                parameter.mul_(0.1)
            if "orm" in name:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        embeddings.word_embeddings.weight[:, :8] = 0.0
        embeddings.position_embeddings.weight.zero_()
        rows = embeddings.position_embeddings.weight[-18:]  # after the row of padding
        rows[:8, :8] = 4 * torch.eye(8)
        if hasattr(embeddings, "token_type_embeddings"):
            embeddings.token_type_embeddings.weight[:, :8] = 0.0
    return Teacher(model)


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("kind", ["luna", "mega"])
def test_luna_and_mega_are_teachers_of_each_other(kind, pre_norm):
    """A Mega combines attention and input by a gate, so complete layers are aligned in both directions."""
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 3, "initializer_range": 0.3}
    torch.manual_seed(0)
    if kind == "luna":
        norms = {"normalize_before_mega": pre_norm, "normalize_before_ffn": pre_norm, "final_norm": pre_norm}
        teacher = Teacher(MegaForMaskedLM(MegaConfig(**sizes, **norms, nffn_hidden_size=24, max_positions=20)))
    else:
        config = LunaConfig(**sizes, pre_norm=pre_norm, num_attention_heads=2, intermediate_size=24)
        teacher = Teacher(LunaForMaskedLM(config))
    batch, student = make_batch(teacher), make_student(teacher, kind)
    report = copy_weights(teacher, student)
    assert sum(name.endswith(("fc1.weight", "fc2.weight")) for name in report.copied) == 6
    assert min(calibrate(teacher, student, [batch] * 2)) > 0
    names = aligned_parameters(teacher, student)
    assert any("fc1" in name for name in names)
    optimizer = torch.optim.AdamW(train_only(student, names), lr=1e-4)
    before = align(teacher, student.train(), batch)
    before.sum().backward()
    optimizer.step()
    assert (align(teacher, student, batch) < before).all()
    assert distill(teacher, student, batch).loss.isfinite()


@pytest.mark.parametrize("head", [None, "ForSequenceClassification"])
@pytest.mark.parametrize("name", PLAIN)
@torch.no_grad()
def test_student_with_one_row_per_position_equals_its_teacher(name, head):
    positions = 20 if name in ("roberta", "xlm-roberta", "camembert") else 18
    fields = {"num_labels": 3} if head else {}
    teacher = told_apart(make_model(name, head, max_position_embeddings=positions, **fields))
    student = make_student(teacher, "luna", projection_length=8)
    copy_weights(teacher, student)
    batch = make_batch(teacher, length=8)
    calibrate(teacher, student, [batch], gain=1e4, ridge=1e-9)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    mask = inputs["attention_mask"].bool()
    states = student(**inputs, output_hidden_states=True)
    theirs = teacher.model(**inputs, output_hidden_states=True)
    for got, reference in zip(states.hidden_states, theirs.hidden_states, strict=True):
        torch.testing.assert_close(got[mask], reference[mask], rtol=0, atol=1e-5)
    got, reference = (x.logits if head else x.logits[mask] for x in (states, theirs))
    torch.testing.assert_close(got, reference, rtol=0, atol=1e-4)
    assert align(teacher, student, batch).max() < 1e-8


@pytest.mark.parametrize("pre_norm", [False, True])
@torch.no_grad()
def test_heads_pack_their_parts_of_a_segment(pre_norm):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LunaConfig(**sizes, intermediate_size=24, projection_length=4, pre_norm=pre_norm, tie_key_value=False)
    model = LunaForMaskedLM(config)
    model.luna.embeddings.position_embeddings.weight.mul_(30.0)
    teacher = Teacher(model)
    student = make_student(teacher, "luna", projection_length=4)
    copy_weights(teacher, student)
    batch = {"input_ids": torch.randint(3, 40, (20, 12))}
    explained = calibrate(teacher, student, [batch], gain=30.0, ridge=1e-4)
    assert len(explained) == 2 and min(explained) > 0.9
    for weights in student(**batch, output_packed_attentions=True).packed_attentions:
        most = weights.mean(dim=0).argmax(dim=-1)
        first, last = most.T.unbind(dim=-1)  # of three positions, one head attends to two, and one to the last
        assert torch.equal(first // 3, torch.arange(4)) and (first % 3 < 2).all()
        assert torch.equal(last, torch.arange(4) * 3 + 2)


@pytest.mark.parametrize(
    ("tokens", "rows", "sizes"),
    [
        ([9] * 7, 7, [1] * 7),
        ([9] * 12, 4, [3] * 4),
        ([9] * 13, 5, [2, 2, 3, 3, 3]),
        ([9] * 9, 8, [1] * 7 + [2]),
        ([99] * 11 + [98], 4, [3] * 4),  # nearly even
        ([8, 8, 4, 4, 2, 2, 2, 1, 1], 4, [1, 1, 2, 5]),  # inputs of many lengths: short ones have one token per row
    ],
)
def test_segments_have_equal_numbers_of_tokens(tokens, rows, sizes):
    parts, of_heads = calibration._cut(tokens, rows, heads=2)
    first, last = ([parts.tolist().index(part) for part in of_heads[:, head]] for head in (0, 1))
    assert first == [sum(sizes[:row]) for row in range(rows)]
    assert [a == b for a, b in zip(first, last, strict=True)] == [size == 1 for size in sizes]
    assert parts.tolist() == sorted(parts) and parts.max() == of_heads.max() == sum(min(2, size) for size in sizes) - 1


def test_codes_of_parts_are_linear_discriminants():
    """Distances of the means are Mahalanobis distances, and the variance within a part is 1 in every direction."""
    torch.manual_seed(0)
    places = torch.randint(5, (400,))
    states = torch.randn(400, 8).double() @ torch.randn(8, 8).double() + torch.randn(5, 8).double()[places]
    analysis = calibration._Discriminant(6)  # no state belongs to the last one
    for rows, parts in zip(states.split(150), places.split(150), strict=True):
        analysis.add(rows, parts)
    weight, bias, means = analysis.solve(7, ridge=1e-12)
    seen = torch.stack([states[places == place].mean(dim=0) for place in range(5)])
    scatter = (states - seen[places]).T @ (states - seen[places]) / 400
    apart = seen[:, None] - seen
    wanted = torch.einsum("ijk,kl,ijl->ij", apart, scatter.inverse(), apart)
    got = (means[:5, None] - means[:5]).square().sum(dim=-1)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(means[5], torch.zeros(7).double())
    codes = states @ weight.T + bias - means[places]
    torch.testing.assert_close((codes.T @ codes / 400)[:4, :4], torch.eye(4).double(), rtol=0, atol=1e-6)
    assert not weight[4:].any()  # five means have four directions


@torch.no_grad()
def test_packs_of_a_longer_student_distinguish_windows():
    model, shares = make_model("roberta", max_position_embeddings=20), {}
    model.roberta.embeddings.position_embeddings.weight.mul_(10.0)
    teacher = Teacher(model, window=18)
    torch.manual_seed(0)
    batch = {"input_ids": torch.randint(3, teacher.config.vocab_size, (40, 36))}
    for how in ("copy", "windows"):
        student = make_student(teacher, "luna", projection_length=4, max_position_embeddings=36)
        copy_weights(teacher, student, positions=how)
        shares[how] = calibrate(teacher, student, [batch])
    assert min(shares["windows"]) > 0.8 > 0.6 > max(shares["copy"])


@pytest.mark.parametrize("name", PLAIN)
def test_calibration_reduces_the_error_of_attention(name):
    teacher = make_teacher(name)
    student = make_student(teacher, "luna", projection_length=12)
    copy_weights(teacher, student)
    batch = make_batch(teacher)
    before = align(teacher, student, batch)
    calibrate(teacher, student, [batch])
    assert (align(teacher, student, batch) < before).all()


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_a_step_of_alignment_lowers_its_loss(name, kind):
    teacher = make_teacher(name)
    student, batch = make_student(teacher, kind), make_batch(teacher)
    copy_weights(teacher, student)
    parameters = train_only(student, aligned_parameters(teacher, student))
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    before = align(teacher, student.train(), batch)
    before.sum().backward()
    assert {key for key, tensor in student.named_parameters() if tensor.grad is not None} == set(
        aligned_parameters(teacher, student)
    )
    optimizer.step()
    after = align(teacher, student, batch)
    assert after.shape == (3,) and (after < before).all()


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_layers_are_aligned_independently(name, kind):
    teacher = make_teacher(name)
    student = make_student(teacher, kind)
    copy_weights(teacher, student)
    train_only(student, aligned_parameters(teacher, student))
    align(teacher, student, make_batch(teacher))[1].backward()
    reached = [key for key, tensor in student.named_parameters() if tensor.grad is not None and tensor.grad.any()]
    own_rows = ["luna.embeddings.packed_"] if student.config.is_decoder and kind == "luna" else []
    assert reached and all("layers.1." in key or key.startswith(tuple(own_rows)) for key in reached)


@pytest.mark.parametrize(("name", "kind"), [("bert", "luna"), ("roberta", "mega")])
def test_padding_does_not_affect_losses(name, kind):
    teacher = make_teacher(name)
    student, batch = make_student(teacher, kind), make_batch(teacher)
    copy_weights(teacher, student)
    other = batch | {"input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 7)}
    if kind == "luna":
        assert calibrate(teacher, student, [batch]) == pytest.approx(calibrate(teacher, student, [other]), abs=1e-5)
    expected = align(teacher, student, batch)
    if name != "roberta":  # it derives positions from tokens that are not padding
        torch.testing.assert_close(align(teacher, student, other), expected)
    student.config.unpad_inputs = True
    torch.testing.assert_close(align(teacher, student, batch), expected)


@pytest.mark.parametrize("kind", ["luna", "mega"])
@pytest.mark.parametrize("name", ["bert", "distilbert", "roberta", "modernbert", "gpt2", "llama"])
def test_padding_side_does_not_affect_losses(name, kind):
    """Without `position_ids`, a teacher may include padding in its positions."""
    teacher = make_teacher(name)
    student, right = make_student(teacher, kind), make_batch(teacher)
    copy_weights(teacher, student)
    lengths = right["attention_mask"].sum(dim=1)
    left = {
        key: torch.stack([row.roll(12 - int(length)) for row, length in zip(tensor, lengths, strict=True)])
        for key, tensor in right.items()
    }
    torch.testing.assert_close(align(teacher, student, left), align(teacher, student, right), rtol=1e-5, atol=1e-6)
    got, reference = (distill(teacher, student, batch) for batch in (left, right))
    torch.testing.assert_close(got.loss, reference.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.teacher, reference.teacher, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["luna", "mega"])
def test_batch_of_padding_has_zero_loss(kind):
    teacher = make_teacher("bert")
    student = make_student(teacher, kind)
    train_only(student, aligned_parameters(teacher, student))
    batch = {"input_ids": torch.ones(2, 5, dtype=torch.long), "attention_mask": torch.zeros(2, 5, dtype=torch.long)}
    losses = align(teacher, student.train(), batch)
    losses.sum().backward()
    assert not losses.any()
    assert all(tensor.grad is None or not tensor.grad.any() for tensor in student.parameters())


def test_layer_matching_where_attention_matching_suffices():
    teacher = make_teacher("bert")
    student, batch = make_student(teacher, "luna"), make_batch(teacher)
    copy_weights(teacher, student)
    names = aligned_parameters(teacher, student, whole=True)
    train_only(student, names)
    losses = align(teacher, student.train(), batch, whole=True)
    losses.sum().backward()
    assert {key for key, tensor in student.named_parameters() if tensor.grad is not None} == set(names)
    assert any("fc1" in key for key in names) and (losses != align(teacher, student, batch)).all()
    states = teacher.show(batch).states[1][0]  # of the sequence without padding
    ids = batch["input_ids"][:1]
    got = student(input_ids=ids, output_hidden_states=True).hidden_states[1][0]
    expected = ((got - states).square().mean(-1) / states.var(-1)).mean()
    torch.testing.assert_close(align(teacher, student, {"input_ids": ids}, whole=True)[0], expected)


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2"])
def test_a_teacher_reads_longer_inputs_in_windows(name):
    teacher = make_teacher(name)
    student, batch = make_student(teacher, "luna", max_position_embeddings=30), make_batch(teacher, length=25)
    copy_weights(teacher, student)
    teacher.window = 10
    observed, places = teacher.show(batch), batch["labels"] != -100
    logits, seen = teacher.logits(batch, places), []
    for start in (0, 10, 20):
        part = {key: tensor[:, start : start + 10] for key, tensor in batch.items()}
        kept = part["attention_mask"].bool()
        for got, reference in zip(observed.states, teacher.show(part).states, strict=True):
            torch.testing.assert_close(got[:, start : start + 10][kept], reference[kept])
        for row in range(3):
            if part["labels"][row].max() >= 0:
                one = {key: tensor[row : row + 1] for key, tensor in part.items()}
                seen.append((row, start, teacher.logits(one, one["labels"] != -100)))
    expected = torch.cat([logits for _, _, logits in sorted(seen, key=lambda x: x[:2])])
    torch.testing.assert_close(logits, expected)
    assert distill(teacher, student, batch).loss.isfinite() and align(teacher, student, batch).isfinite().all()


@pytest.mark.parametrize("kind", [pytest.param("luna", marks=pytest.mark.slow), "mega"])
def test_a_run_that_is_resumed_equals_one_that_was_not(kind, tmp_path):
    """With Trainer and a `compute_loss` of one line, as in a script."""

    class Distiller(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return distill(teacher, model, inputs, num_items_in_batch=num_items_in_batch).loss

    teacher = make_teacher("bert")
    batch = make_batch(teacher)
    rows = [{key: tensor[row] for key, tensor in batch.items()} for row in (0, 1, 0, 1)]

    def train(folder, steps, resume=None):
        student = make_student(teacher, kind, **({"dropout": 0.1} if kind == "luna" else {"dropout_prob": 0.1}))
        options = {
            "max_steps": steps,
            "save_steps": 2,
            "lr_scheduler_type": "constant",
            "per_device_train_batch_size": 2,
        }
        arguments = TrainingArguments(str(folder), **options, report_to="none", disable_tqdm=True, use_cpu=True)
        Distiller(student, arguments, train_dataset=rows).train(resume_from_checkpoint=resume)
        return student.state_dict()

    complete, _ = train(tmp_path / "complete", 4), train(tmp_path / "parts", 2)
    resumed = train(tmp_path / "parts", 4, str(tmp_path / "parts" / "checkpoint-2"))
    assert all(torch.equal(resumed[key], tensor) for key, tensor in complete.items())


def test_padding_does_not_affect_calibration():
    teacher = make_teacher("bert")
    padded, cut = make_student(teacher, "luna"), make_student(teacher, "luna")
    batch = {key: tensor[:2] for key, tensor in make_batch(teacher).items()}
    separate = [
        {"input_ids": row[kept.bool()][None]}
        for row, kept in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    for student, batches in ((padded, [batch]), (cut, separate)):
        copy_weights(teacher, student)
        calibrate(teacher, student, batches)
    torch.testing.assert_close(padded.state_dict(), cut.state_dict(), rtol=1e-3, atol=1e-4)


def test_copied_layers_have_zero_alignment_loss():
    torch.manual_seed(0)
    teacher = Teacher(MegaForMaskedLM(MegaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=3)))
    student = make_student(teacher, "mega", use_chunking=True, chunk_size=12)
    copy_weights(teacher, student)
    assert align(teacher, student, make_batch(teacher)).max() < 1e-9


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert"])
@torch.no_grad()
def test_the_head_of_a_mega_is_solved(name):
    """With as many distinct states as unknowns, it reproduces the teacher's head, up to the bound."""
    teacher = make_teacher(name)
    student, batch = make_student(teacher, "mega"), make_batch(teacher)
    copy_weights(teacher, student)
    before = {key: tensor.clone() for key, tensor in student.state_dict().items() if not key.startswith("dense.")}
    kept = batch["attention_mask"].bool()
    kept = kept & (kept.cumsum(dim=1) <= 5)  # 11 states of 16 numbers
    batch["attention_mask"] = kept.long()
    (explained,) = calibrate(teacher, student, [batch], ridge=1e-12)
    assert explained > 0.999
    states = teacher.show(batch).states[-1][kept]
    inputs = []
    handle = teacher.module("decoder").register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    teacher.logits(batch, kept)
    handle.remove()
    norm = teacher.module("last_norm")
    got = student.dense(states if norm is None else norm(states)).tanh()
    torch.testing.assert_close(got, inputs[0].clamp(-0.99, 0.99), rtol=0, atol=1e-3)
    after = student.state_dict()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())


def test_fewer_layers_are_aligned_with_their_teacher_layers():
    teacher = make_teacher("roberta")
    batch = make_batch(teacher)
    luna, mega = (make_student(teacher, kind, num_hidden_layers=2) for kind in ("luna", "mega"))
    for student in (luna, mega):
        copy_weights(teacher, student)
    calibrate(teacher, luna, [batch])
    losses = [align(teacher, student, batch, layers) for student in (luna, mega) for layers in ([0, 2], [0, 1])]
    assert torch.equal(losses[0][0], losses[1][0]) and losses[0][1] != losses[1][1]
    assert torch.equal(losses[2][0], losses[3][0]) and losses[2][1] != losses[3][1]


def expected_losses(got, reference, targets, temperature):
    """Return cross-entropy and squared temperature times KL, computed directly."""
    own = -got.log_softmax(-1)[torch.arange(len(got)), targets].mean()
    theirs = (reference / temperature).softmax(-1)
    difference = theirs.log() - (got / temperature).log_softmax(-1)
    return own, temperature**2 * (theirs * difference).sum(-1).mean()


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert", "gpt2", "llama"])
@pytest.mark.parametrize("kind", ["luna", "mega"])
def test_loss_matches_the_formula(name, kind, monkeypatch):
    monkeypatch.setattr(distilling, "_ROWS", 3)  # of more positions
    teacher = Teacher(make_model(name).double())
    student, batch = make_student(teacher, kind).double(), make_batch(teacher)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    got, reference, labels = student(**inputs).logits, teacher.model(**inputs).logits, batch["labels"]
    if teacher.family.is_decoder:
        got, reference, labels = got[:, :-1], reference[:, :-1], labels[:, 1:]
    places = labels != -100
    own, theirs = expected_losses(got[places], reference[places], labels[places], 2.0)
    loss = distill(teacher, student, batch, share=0.3, temperature=2.0)
    torch.testing.assert_close(loss.labels, own.detach())
    torch.testing.assert_close(loss.teacher, theirs.detach())
    torch.testing.assert_close(loss.loss, 0.7 * own + 0.3 * theirs)
    assert loss.logits.shape == (places.sum(), 40)
    doubled = distill(teacher, student, batch, 0.3, 2.0, num_items_in_batch=2 * int(places.sum()))
    torch.testing.assert_close(2 * doubled.loss, loss.loss)
    loss.loss.backward()
    gradients = [tensor.grad for tensor in student.parameters() if tensor.requires_grad]
    expected = torch.autograd.grad(0.7 * own + 0.3 * theirs, [x for x in student.parameters() if x.requires_grad])
    torch.testing.assert_close(gradients, list(expected))


@pytest.mark.parametrize(
    "problem",
    ["single_label_classification", "multi_label_classification", "regression"],
    ids=lambda x: x.split("_")[0],
)
def test_the_loss_of_a_classifier(problem):
    teacher = Teacher(make_model("bert", "ForSequenceClassification", num_labels=3, problem_type=problem).double())
    student, batch = make_student(teacher, "luna").double(), make_batch(teacher)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    got, reference, labels = student(**inputs).logits, teacher.model(**inputs).logits, batch["labels"]
    if problem.startswith("single"):
        own, theirs = expected_losses(got, reference, labels, 2.0)
    else:
        batch["labels"] = labels = torch.rand(3, 3, dtype=torch.float64)
        if problem == "regression":
            own, theirs = functional.mse_loss(got, labels), functional.mse_loss(got, reference)
        else:
            own = functional.binary_cross_entropy_with_logits(got, labels)
            theirs = 4 * functional.binary_cross_entropy_with_logits(got / 2, (reference / 2).sigmoid())
    loss = distill(teacher, student, batch, share=0.25, temperature=2.0)
    torch.testing.assert_close(loss.loss, 0.75 * own + 0.25 * theirs)


def test_without_a_share_the_teacher_does_not_run():
    teacher = make_teacher("gpt2")
    student = make_student(teacher, "luna", max_position_embeddings=50)
    batch = {"input_ids": torch.randint(3, 40, (1, 50))}
    batch["labels"] = batch["input_ids"]
    with pytest.raises(ValueError, match="share=0"):
        distill(teacher, student, batch)
    loss = distill(teacher, student, batch, share=0.0)
    expected = student(input_ids=batch["input_ids"], attention_mask=torch.ones(1, 50), labels=batch["labels"]).loss
    torch.testing.assert_close(loss.loss, expected)


def test_nothing_to_predict():
    teacher = make_teacher("bert")
    student, batch = make_student(teacher, "luna"), make_batch(teacher)
    for items in (None, 0, torch.tensor(0)):
        loss = distill(teacher, student, batch | {"labels": torch.full((3, 12), -100)}, num_items_in_batch=items).loss
        loss.backward()
        assert loss == 0.0


def test_students_of_another_width_only_support_distill():
    teacher = make_teacher("bert")
    student, batch = make_student(make_teacher("bert", hidden_size=8), "luna"), make_batch(teacher)
    assert distill(teacher, student, batch).loss.isfinite()
    with pytest.raises(ValueError, match="hidden_size is 8 and the teacher's 16"):
        align(teacher, student, batch)


def test_wrapped_students_and_teachers_in_half_precision():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, **inputs):
            return self.module(**inputs)

    teacher = make_teacher("bert")
    student, batch = make_student(teacher, "luna"), make_batch(teacher)
    copy_weights(teacher, student)
    wrapped = Wrapper(student)
    assert torch.equal(align(teacher, wrapped, batch), align(teacher, student, batch))
    assert torch.equal(distill(teacher, wrapped, batch).loss, distill(teacher, student, batch).loss)
    teacher.model.to(torch.bfloat16)
    assert align(teacher, student, batch).dtype == distill(teacher, student, batch).loss.dtype == torch.float32
    assert min(calibrate(teacher, student, [batch])) > 0
