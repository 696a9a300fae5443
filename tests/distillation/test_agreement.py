"""The comparison with the teacher for texts of several lengths equals a computation with one text at a time."""

import json

import pytest
import torch

import luna_mega_cli
from luna_mega.distillation import Teacher
from luna_mega.distillation.agreement import compare_lengths
from luna_mega.distillation.exact import convert_encoder
from luna_mega.distillation.sentences import SentenceModules
from tests.distillation.models import bert_tokenizer, make_model, save_teacher

TABLE, ROWS, LONGEST = 20, 6, 48
GENERATOR = torch.Generator().manual_seed(4)
TEXTS = [
    " ".join(f"w{word}" for word in torch.randint(25, (size,), generator=GENERATOR).tolist())
    for size in (3, 4, 8, 9, 10, 14, 15, 16, 25, 30, 40, 55, 60, 70)
]
CENTERED, NEIGHBOR, EQUAL, ORDER = (
    "centered cosine", "same nearest neighbor", "equal predictions", "pairs in the same order",
)  # fmt: skip


def prepare(head, rows=ROWS, longest=LONGEST, **fields):
    torch.manual_seed(5)
    teacher = Teacher(make_model("bert", head, pad_token_id=0, **{"num_hidden_layers": 3} | fields))
    student, tokenizer, report = convert_encoder(teacher, bert_tokenizer(), (rows, longest, "interpolate"))
    with torch.no_grad():
        for layer in student.base_model.encoder.layers:
            layer.attention.salience.normal_()
    return teacher, student, tokenizer, report.lengths


def chosen(tokenizer, length, shorter):
    """Return the token ids `[1, T]` of each text that is longer than `shorter`, truncated to `length`."""
    ids = [tokenizer(text, truncation=True, max_length=length, return_tensors="pt")["input_ids"] for text in TEXTS]
    return [x for x, text in zip(ids, TEXTS, strict=True) if len(text.split()) + 2 > shorter]


def windows(ids):
    if ids.shape[1] <= TABLE:
        return [ids]
    return [torch.cat([ids[:, :1], part, ids[:, -1:]], 1) for part in ids[:, 1:-1].split(TABLE - 2, dim=1)]


def neighbors(vectors):
    """Return the index of the nearest neighbor of every vector."""
    similarity = torch.nn.functional.cosine_similarity(vectors[:, None], vectors[None], dim=-1)
    others = [[index for index in range(len(vectors)) if index != row] for row in range(len(vectors))]
    return [max(indices, key=lambda index: similarity[row, index]) for row, indices in enumerate(others)]


@pytest.mark.parametrize("modules", [None, SentenceModules(("cls",))])
@torch.no_grad()
def test_vectors(modules):
    teacher, student, tokenizer, lengths = prepare("Model")
    pool = (lambda states: states[0, 0]) if modules else (lambda states: states[0].mean(0) / states[0].mean(0).norm())
    report = compare_lengths(teacher, student, tokenizer, TEXTS, lengths, modules)
    assert [(row["length"], row["windows"]) for row in report.rows] == [
        (6, False),
        (12, False),
        (20, False),
        (48, True),
    ]
    for row, shorter in zip(report.rows, (0, 6, 12, 20), strict=True):
        ids = chosen(tokenizer, row["length"], shorter)
        theirs = [
            torch.stack([pool(teacher.model(x).last_hidden_state) for x in windows(part)]).mean(0) for part in ids
        ]
        theirs = torch.stack(theirs)
        theirs = theirs if modules else theirs / theirs.norm(dim=1, keepdim=True)
        ours = torch.stack([pool(student(part).last_hidden_state) for part in ids])
        cosine = torch.cosine_similarity(ours - theirs.mean(0), theirs - theirs.mean(0)).mean()
        same = [a == b for a, b in zip(neighbors(ours), neighbors(theirs), strict=True)]
        assert row["texts"] == len(ids)
        assert row[CENTERED] == pytest.approx(cosine.item(), abs=1e-5)
        assert row[NEIGHBOR] == pytest.approx(sum(same) / len(same))
    assert report.rows[0][CENTERED] == pytest.approx(1, abs=1e-5) and report.rows[-1][CENTERED] < 0.99
    assert "| 48 (mean of the teacher's windows) |" in str(report)


@pytest.mark.parametrize(
    ("head", "fields", "name"),
    [
        ("ForSequenceClassification", {"num_labels": 3}, EQUAL),
        ("ForSequenceClassification", {"num_labels": 3, "problem_type": "multi_label_classification"}, EQUAL),
        ("ForSequenceClassification", {"num_labels": 1}, ORDER),
        ("ForMultipleChoice", {}, ORDER),
        ("ForTokenClassification", {"num_labels": 3}, EQUAL),
        ("ForQuestionAnswering", {}, EQUAL),
        ("ForMaskedLM", {}, EQUAL),
    ],
)
@torch.no_grad()
def test_predictions(head, fields, name):
    longest = TABLE if head == "ForTokenClassification" else LONGEST
    teacher, student, tokenizer, lengths = prepare(head, longest=longest, **fields)
    if head == "ForTokenClassification":
        for config in (student.config, teacher.model.config):
            config.id2label = {0: "A", 1: "O", 2: "B"}
    report = compare_lengths(teacher, student, tokenizer, TEXTS, lengths)

    def read(model, ids):
        output = model(ids[:, None] if head == "ForMultipleChoice" else ids)
        return torch.stack(output[:2], dim=-1)[0] if head == "ForQuestionAnswering" else output.logits[0]

    def of_teacher(ids):
        parts = [read(teacher.model, part) for part in windows(ids)]
        if head in ("ForSequenceClassification", "ForMultipleChoice"):
            return torch.stack(parts).mean(0)
        return torch.cat([*(part[:-1] if i == 0 else part[1:-1] for i, part in enumerate(parts)), parts[-1][-1:]])

    for row, shorter in zip(report.rows, (0, 6, 12, 20), strict=False):
        ids = chosen(tokenizer, row["length"], shorter)
        pairs = [(read(student, part), of_teacher(part)) for part in ids]
        if name == ORDER:
            a, b = (torch.stack([pair[side] for pair in pairs]).flatten() for side in (0, 1))
            same = [(a[i] > a[j]) == (b[i] > b[j]) for i in range(len(a)) for j in range(i)]
        elif head == "ForQuestionAnswering":
            same = [(a.argmax(0) == b.argmax(0)).all() for a, b in pairs]
        elif "problem_type" in fields:
            same = [x for a, b in pairs for x in (a > 0) == (b > 0)]
        else:
            labels = [(x, y) for a, b in pairs for x, y in zip(*(z.argmax(-1).flatten() for z in (a, b)), strict=True)]
            if head == "ForTokenClassification":
                labels = [(x, y) for x, y in labels if x != 1 or y != 1]
            same = [x == y for x, y in labels]
        # all windows of a text contain its first token
        slack = len(ids) / len(same) if head == "ForMaskedLM" and row["windows"] else 1e-9
        assert row[name] == pytest.approx(float(torch.tensor(same).double().mean()), abs=slack)
    assert report.rows[0][name] == 1 and min(row[name] for row in report.rows) < 1


def test_many_texts_are_sampled(monkeypatch):
    monkeypatch.setattr("luna_mega.distillation.agreement._READ", 5)
    teacher, student, tokenizer, lengths = prepare("Model")
    report = compare_lengths(teacher, student, tokenizer, TEXTS, lengths)
    assert report.rows[0]["texts"] == 5  # every third of 14


def test_texts_that_are_too_short():
    teacher, student, tokenizer, lengths = prepare("Model")
    report = compare_lengths(teacher, student, tokenizer, TEXTS[:4], lengths)
    assert [row["length"] for row in report.rows] == [6] and report.missing == [12, 20, 48]
    assert str(report).endswith("not compared, because too few of the texts are longer: 12, 20, 48 tokens")


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
def test_report_and_card(head, tmp_path, capsys):
    teacher, texts = save_teacher(tmp_path / "teacher", head=head, max_position_embeddings=32), tmp_path / "texts.txt"
    texts.write_text("\n".join(TEXTS), encoding="utf-8")
    argv = ["distill", str(teacher), "--texts", str(texts), "--projection-length", "6", "--max-length", "48"]
    assert luna_mega_cli.main([*argv, "--output", str(tmp_path / "out")]) == 0
    output, card = capsys.readouterr().out, (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    name = EQUAL if head != "Model" else f"{CENTERED} | {NEIGHBOR}"
    (first,) = [line for line in output.splitlines() if line.startswith("| 6 |")]
    for text in (output, card):
        assert f"| tokens | texts | {name} |" in text and first in text and "squeezed positions" in text
    assert luna_mega_cli.main([*argv, "--output", str(tmp_path / "json"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["conversion"]["agreement"]["rows"]
    assert [row["length"] for row in rows] == [6, 12, 32, 48]
    tokenizer = json.loads((tmp_path / "out" / "tokenizer.json").read_text(encoding="utf-8"))
    assert tokenizer["truncation"] is None and tokenizer["padding"] is None
