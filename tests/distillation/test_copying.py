"""Copied weights are bitwise equal for every pair of families, and the report is complete."""

import pytest
import torch
from torch import nn

from luna_mega import LunaConfig, LunaForMaskedLM, MegaConfig, MegaForCausalLM, MegaForMaskedLM
from luna_mega.distillation import Teacher, copy_weights, extend_positions
from tests.distillation.models import DECODERS, ENCODERS, PLAIN, make_batch, make_model, make_student, make_teacher


@pytest.mark.parametrize("kind", ["luna", "mega"])
@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS])
def test_copied_weights_are_equal(name, kind):
    teacher = make_teacher(name)
    student = make_student(teacher, kind)
    before = {key: tensor.clone() for key, tensor in student.state_dict().items()}
    report = copy_weights(teacher, student)
    ours, theirs = dict(student.named_parameters()), teacher.model.state_dict()
    for mine, source in (report.copied | report.started).items():
        if source == "0":
            assert not ours[mine].any()
        elif source in theirs and "c_attn" not in source:
            turned = name == "gpt2" and source.endswith(("c_fc.weight", "c_proj.weight"))  # Conv1D
            expected = theirs[source].T if turned else theirs[source]
            assert torch.equal(ours[mine][-len(expected) :], expected), mine  # after the row of padding
    assert sorted([*report.copied, *report.started, *report.new]) == sorted(ours)
    assert all(torch.equal(before[key], ours[key]) for key in report.new)
    used = [source.split(" + ")[0].split("[")[0] for source in (report.copied | report.started).values()]
    assert set(dict(teacher.model.named_parameters())) - set(used) - set(report.left) <= {
        *(key for key in theirs if "token_type" in key),
        *teacher.model.all_tied_weights_keys,
        *teacher.model.all_tied_weights_keys.values(),
    }
    assert {"layers.*" in line or "layers" not in line for line in str(report).splitlines()} == {True}


@pytest.mark.parametrize("name", PLAIN)
def test_luna_differs_from_its_teacher_only_in_packing(name):
    teacher = make_teacher(name)
    report = copy_weights(teacher, make_student(teacher, "luna"))
    assert all("pack" in key for key in report.new) and not report.left and not report.started


def test_fused_projections_are_split():
    teacher = make_teacher("gpt2")
    student = make_student(teacher, "luna")
    copy_weights(teacher, student)
    attention, theirs = student.luna.decoder.layers[1].attention, teacher.model.transformer.h[1].attn
    for index, linear in enumerate((attention.query, attention.key, attention.value)):
        columns = slice(16 * index, 16 * index + 16)
        assert torch.equal(linear.weight, theirs.c_attn.weight[:, columns].T)
        assert torch.equal(linear.bias, theirs.c_attn.bias[columns])
    assert torch.equal(attention.output.weight, theirs.c_proj.weight.T)


@pytest.mark.parametrize("name", [*PLAIN, "modernbert", "gpt2", "llama"])
def test_embeddings_are_copied(name):
    """Embeddings of tokens, positions and types are equal with padding; a Luna of a rotary teacher adds positions."""
    teacher = make_teacher(name)
    student, batch = make_student(teacher, "luna"), make_batch(teacher)
    copy_weights(teacher, student)
    if teacher.module("positions") is None:
        student.luna.embeddings.position_embeddings.weight.data.zero_()
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    mask = inputs["attention_mask"].bool()
    got = student(**inputs, output_hidden_states=True).hidden_states[0]
    torch.testing.assert_close(got[mask], teacher.show(batch).states[0][mask], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_mega_copies_token_type_embeddings(name):
    teacher = make_teacher(name)
    student = make_student(teacher, "mega")
    copy_weights(teacher, student)
    theirs = teacher.module("token_types").weight
    assert torch.equal(student.mega.embedding_layer.token_type_embeddings.weight, theirs)


def test_other_norms_are_initialized_from_the_teacher():
    teacher = make_teacher("llama")
    luna, mega = make_student(teacher, "luna"), make_student(teacher, "mega")
    report = copy_weights(teacher, luna)
    assert report.started["luna.decoder.layer_norm.weight"] == "model.norm.weight"
    assert copy_weights(teacher, mega).copied["mega.final_norm.norm.weight"] == "model.norm.weight"
    assert mega.config.normalization_type == "rmsnorm"


@pytest.mark.parametrize(
    ("layers", "mapped"), [(None, [0, 2]), ([2, 0], [2, 0]), ([1, 1], [1, 1])], ids=["evenly", "listed", "twice"]
)
def test_other_numbers_of_layers(layers, mapped):
    teacher = make_teacher("bert")
    student = make_student(teacher, "luna", num_hidden_layers=2)
    copy_weights(teacher, student, layers)
    for layer, source in zip(student.luna.encoder.layers, mapped, strict=True):
        assert torch.equal(layer.fc1.weight, teacher.model.bert.encoder.layer[source].intermediate.dense.weight)


@pytest.mark.parametrize(
    "options",
    [{"hidden_act": "relu"}, {"intermediate_size": 20}, {"num_attention_heads": 4}, {"pre_norm": True}],
    ids=lambda options: next(iter(options)),
)
def test_layers_with_another_role_are_not_copied(options):
    teacher = make_teacher("bert")
    report = copy_weights(teacher, make_student(teacher, "luna", **options))
    assert not any("layers" in key for key in report.copied)


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "gpt2"])
def test_position_embeddings_have_no_unused_rows(name):
    """Padding may be the last of 50,000 tokens, and Luna's positions start after it by default."""
    teacher = make_teacher(name, pad_token_id=1 if name == "roberta" else 39)
    student = make_student(teacher, "luna")
    assert len(student.luna.embeddings.position_embeddings.weight) == 20
    batch = make_batch(teacher)
    copy_weights(teacher, student)
    if name != "modernbert":
        got = student(**{key: batch[key] for key in ("input_ids", "attention_mask")}, output_hidden_states=True)
        torch.testing.assert_close(got.hidden_states[0][0], teacher.show(batch).states[0][0], rtol=0, atol=1e-5)


def test_untied_head_is_not_copied_to_a_tied_one():
    teacher = make_teacher("llama")
    student = make_student(teacher, "luna", tie_word_embeddings=True)
    report = copy_weights(teacher, student)
    assert torch.equal(student.lm_head.weight, teacher.model.model.embed_tokens.weight)
    assert "lm_head.weight" in report.left


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
@pytest.mark.parametrize("kind", ["luna", "mega"])
def test_a_classifier_keeps_its_labels(name, kind):
    labels, ids = {0: "bad", 1: "good", 2: "both"}, {"bad": 0, "good": 1, "both": 2}
    teacher = make_teacher(name, "ForSequenceClassification", id2label=labels, label2id=ids)
    student = make_student(teacher, kind)
    copy_weights(teacher, student)
    assert student.config.id2label == labels and student.config.label2id == ids
    features = torch.randn(3, 12, 16)
    theirs = teacher.model
    if name == "roberta":
        expected = theirs.classifier(features)
    elif name == "bert":
        expected = theirs.classifier(theirs.bert.pooler(features))
    else:
        expected = theirs.classifier(theirs.pre_classifier(features[:, 0]).relu())
    assert torch.equal(student.classifier(features[:, 0]), expected)


def test_the_head_of_a_modern_classifier_is_new():
    teacher = make_teacher("modernbert", "ForSequenceClassification", num_labels=3)
    report = copy_weights(teacher, make_student(teacher, "luna"))
    assert any(key.startswith("classifier") for key in report.new)


@pytest.mark.parametrize(
    ("how", "length", "rows"),
    [
        ("copy", 8, [0, 1, 2, 0, 1, 2, 0, 1]),
        ("mirror", 8, [0, 1, 2, 2, 1, 0, 0, 1]),
        ("interpolate", 5, [0, 0.5, 1, 1.5, 2]),
        ("copy", 2, [0, 1]),
        ("windows", 3, [0, 1, 2]),
        ("mirror", 3, [0, 1, 2]),
    ],
)
def test_positions_beyond_the_teachers(how, length, rows):
    table = torch.arange(3.0)[:, None].expand(3, 4)
    assert torch.equal(extend_positions(table, length, how), torch.tensor(rows)[:, None].expand(length, 4).float())


def test_every_window_of_positions_has_a_distinct_offset():
    table = torch.randn(5, 4096)
    marks = extend_positions(table, 18, "windows") - extend_positions(table, 18, "copy")
    assert not marks[:5].any()
    spread = marks[5:15].std(dim=-1) / table.std()
    torch.testing.assert_close(spread, torch.full_like(spread, 0.5), rtol=0.1, atol=0)
    for start, end in ((5, 10), (10, 15), (15, 18)):
        torch.testing.assert_close(marks[start:end], marks[start].expand(end - start, -1), rtol=0, atol=1e-6)
    assert nn.functional.cosine_similarity(marks[5], marks[10], dim=0).abs() < 0.5


@pytest.mark.parametrize("how", ["windows", "copy", "mirror", "interpolate"])
def test_a_longer_student(how):
    teacher = make_teacher("roberta")
    student = make_student(teacher, "luna", max_position_embeddings=50)
    copy_weights(teacher, student, positions=how)
    theirs = teacher.model.roberta.embeddings
    table = theirs.position_embeddings.weight[2:] + theirs.token_type_embeddings.weight[0]
    ours = student.luna.embeddings.position_embeddings.weight
    assert len(table) == 18 and torch.equal(ours[2:], extend_positions(table, 50, how))
    assert student(input_ids=torch.full((1, 50), 5)).logits.isfinite().all()


@torch.no_grad()
def test_a_luna_of_a_luna():
    torch.manual_seed(0)
    teacher = Teacher(LunaForMaskedLM(LunaConfig(**_SMALL, num_attention_heads=2, projection_length=6)))
    batch = make_batch(teacher)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    same, fewer = make_student(teacher, "luna"), make_student(teacher, "luna", projection_length=3)
    report = copy_weights(teacher, same)
    assert not report.new and not report.left
    assert torch.equal(same(**inputs).logits, teacher.model(**inputs).logits)
    copy_weights(teacher, fewer)
    rows = teacher.model.luna.embeddings.packed_embeddings
    torch.testing.assert_close(fewer.luna.embeddings.packed_embeddings, rows.view(3, 2, -1).mean(dim=1))


@pytest.mark.parametrize("bias", ["rotary", "simple"])
@pytest.mark.parametrize("is_decoder", [False, True])
@torch.no_grad()
def test_a_mega_in_chunks_of_a_full_one(is_decoder, bias):
    """In one chunk the student is its teacher."""
    torch.manual_seed(0)
    config = MegaConfig(**_SMALL, relative_positional_bias=bias, is_decoder=is_decoder, max_positions=20)
    teacher = Teacher((MegaForCausalLM if is_decoder else MegaForMaskedLM)(config))
    batch = make_batch(teacher)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    student = make_student(teacher, "mega", use_chunking=True, chunk_size=12)
    report = copy_weights(teacher, student)
    assert not report.new and not report.left
    mask = inputs["attention_mask"].bool()
    expected = teacher.model(**inputs).logits[mask]
    torch.testing.assert_close(student(**inputs).logits[mask], expected, rtol=0, atol=1e-5)


def test_a_teacher_in_half_precision():
    teacher = Teacher(make_model("bert").to(torch.bfloat16))
    student = make_student(teacher, "luna")
    copy_weights(teacher, student)
    words = student.luna.embeddings.word_embeddings.weight
    assert words.dtype == torch.float32
    assert torch.equal(words, teacher.model.bert.embeddings.word_embeddings.weight.float())


_SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
