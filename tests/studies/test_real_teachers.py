"""Studies of a sentence encoder and its Luna, with a random BERT and small data."""

import json
import random
import types

import pandas
import pytest
import torch
from transformers import BertConfig, BertModel, BertTokenizer

from luna_mega.distillation import from_teacher

WORDS = [f"{first}{second}" for first in "bdfgklmnprst" for second in ("a", "e", "i", "o", "u")]
PAIRS = ((256, 128), (256, 64), (512, 256), (512, 128))  # tokens and rows
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "."]


@pytest.fixture
def folders(tmp_path):
    """Folders of a teacher with 600 positions and of data with reviews, pairs and articles of 500 words."""
    torch.manual_seed(0)
    draw = random.Random(0)
    teacher, data = tmp_path / "teacher", tmp_path / "data"
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=66, **sizes, initializer_range=0.3)).save_pretrained(teacher)
    (teacher / "vocab.txt").write_text("\n".join([*SPECIAL, *WORDS]))
    BertTokenizer(str(teacher / "vocab.txt"), model_max_length=512).save_pretrained(teacher)

    def text(count=500):
        return " ".join("." if index % 15 == 14 else draw.choice(WORDS) for index in range(count))

    pairs = {"sentence1": [text(9) for _ in range(14)], "sentence2": [text(9) for _ in range(14)], "label": range(14)}
    articles = [line for _ in range(4) for line in (" = Title = \n", text(1200) + " \n")]
    tables = {
        "imdb": {split: {"text": [text() for _ in range(14)]} for split in ("train", "test")},
        "glue_stsb": {"validation": pairs},
        "race_high": {split: {"article": [text(100) for _ in range(9)]} for split in ("train", "validation")},
        "wikitext2": {"train": {"text": [text(), " <unk> "]}},
        "wikitext2_raw": {split: {"text": ["\n", *articles]} for split in ("validation", "test")},
    }
    for name, splits in tables.items():
        for split, table in splits.items():
            (data / name).mkdir(parents=True, exist_ok=True)
            pandas.DataFrame(table).to_parquet(data / name / f"{split}-00000.parquet")
    return ["--teacher", teacher, "--data", data]


@pytest.fixture
def trained(folders, tmp_path):
    """Folder of a Luna."""
    from_teacher(str(folders[1]), 24, 1024).model.save_pretrained(tmp_path / "trained")
    return tmp_path / "trained"


@pytest.fixture
def measure(script, folders, capsys):
    """Call a study and returns the measurements it prints."""

    def main(name, *options):
        script(name).main([*map(str, folders), *map(str, options)])
        return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]

    return main


def test_teacher_and_luna(measure, trained):
    found = measure("real_teachers", "--rows", "24", "--part", "stsb", "long", "packed", "--trained", trained)
    teacher, *lunas = (row["spearman"] for row in found if row["what"].startswith("stsb"))
    assert lunas == [teacher, teacher]
    for part in ("long: Luna", f"long: trained Luna {trained}", "packed: Luna with P"):
        kinds = {(row["texts"], row["tokens"], row["rows"]) for row in found if row["what"] == part}
        assert kinds == {(name, *pair) for name in ("IMDB", "Wikipedia") for pair in PAIRS}


def test_long_documents(measure, trained):
    options = ["--rows", "24", "--lengths", "40", "640", "--most", "4", "--trained", trained]
    found = measure("long_documents", *options)
    same = {row["what"]: row for row in found if row.get("tokens") == 40}
    longer = {row["what"]: row for row in found if row.get("tokens") == 640}
    assert len(same) == len(longer) == 7
    # 40 tokens are within the window and the rows of the larger Luna.
    for name in ("windows", "full attention", "Luna, l = 48", f"trained Luna {trained}, l = 48"):
        for score in ("half", "sentence"):
            assert same[f"documents: {name}"][score] == same["documents: teacher, truncated"][score]
    assert all(row["articles"] == 4 and row["seconds"] > 0 for row in longer.values())


def test_far_evidence(measure, trained):
    options = ["--length", "32", "--steps", "2", "--batch_size", "3", "--eval_batches", "2"]
    methods = ("full", "half", "quarter", "linear", "mlp", "attention")
    found = measure("far_evidence", "--methods", *methods, *options)
    found += measure("far_evidence", "--methods", "half", "--trained", trained, *options)
    assert [row["what"] for row in found] == [f"far evidence: {method}" for method in (*methods, "half")]
    assert all(row["texts"] == 6 and 0 <= row["accuracy"] <= 100 and row["memory"] >= 0 for row in found)


def test_halves_of_other_passages(script, folders):
    """The label is 1 exactly if the second half follows the first in its passage."""
    study = script("far_evidence")
    args = types.SimpleNamespace(length=32, data=folders[3])
    texts = study.Texts(args, BertTokenizer.from_pretrained(folders[1]))
    passages = [texts.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts.passages["train"]]
    (batch, labels), *others = texts.batches("train", 0, 1, 8)
    assert not others and batch.shape == (8, 32) and len(set(labels.tolist())) == 2
    for ids, label in zip(batch.tolist(), labels, strict=True):
        assert (ids[1:-1] in [passage[:30] for passage in passages]) == bool(label)


def test_texts(script, folders, tmp_path):
    script("sentence_texts").main(["--data", str(folders[3]), "--output", str(tmp_path / "texts")])
    texts = pandas.read_parquet(tmp_path / "texts" / "train.parquet").text
    assert [len(text.split()) for text in texts[:2]] == [250, 250] and "<unk>" not in "".join(texts)
    assert len(texts) == 4 and set(texts[2:]) < set(
        pandas.read_parquet(folders[3] / "imdb" / "train-00000.parquet").text
    )
    assert len(pandas.read_parquet(tmp_path / "texts" / "test.parquet")) == 14
