"""prepare_text.py combines the text of several data sets in a folder."""

import gzip

import pandas as pd
import pytest
from datasets import load_dataset
from huggingface_hub import DatasetCard

from tests.examples.runs import assert_error, write


@pytest.fixture
def sources(tmp_path):
    """Write two data sets with repeated and empty texts, one of texts and one of translations; return the options."""
    write([{"text": text} for text in ("One .", " Two . ", "One .", "")], tmp_path / "plain" / "train.jsonl")
    write([{"text": "Three ."}], tmp_path / "plain" / "unsupervised.jsonl")
    write([{"text": "Never read ."}], tmp_path / "plain" / "test.jsonl")
    pairs = [{"translation": {"en": text, "de": "x"}} for text in ("Two .", "Four .", "Five .")]
    write(pairs, tmp_path / "pairs" / "train.jsonl")
    return ["--source", str(tmp_path / "plain"), "text", "--source", str(tmp_path / "pairs"), "translation.en"]


def test_text_of_several_sources(script, sources, tmp_path):
    make, folders = script("prepare_text").main, [tmp_path / name for name in ("a", "b", "c")]
    for folder, seed in zip(folders, "001", strict=True):
        sizes = make([*sources, "--output_dir", str(folder), "--validation", "2", "--seed", seed])
        assert sizes == {"train": 3, "validation": 2}
    train, held, again, other = (
        pd.read_parquet(folder / f"{split}.parquet")
        for folder, split in zip((folders[0], *folders), ("train", *["validation"] * 3), strict=True)
    )
    assert sorted([*train["text"], *held["text"]]) == ["Five .", "Four .", "One .", "Three .", "Two ."]
    both = dict(zip([*train["text"], *held["text"]], [*train["source"], *held["source"]], strict=True))
    # a repeated text belongs to the first source that has it
    assert both["Two ."] == "plain" and both["Four ."] == "pairs"
    assert list(held["text"]) == list(again["text"]) != list(other["text"])

    card = DatasetCard.load(folders[0] / "README.md")
    assert "| plain | `text` | 3 |\n| pairs | `translation.en` | 2 |" in card.text and str(tmp_path) not in card.text
    assert {split: len(rows) for split, rows in load_dataset(str(folders[0])).items()} == {"train": 3, "validation": 2}


@pytest.mark.parametrize("name", ["train.txt", "train.jsonl", "train.csv", "train.txt.gz", "train.csv.gz"])
def test_byte_order_mark_is_not_part_of_a_text(script, tmp_path, name):
    rows = {"txt": "One .", "jsonl": '{"text": "One ."}', "csv": "text\nOne ."}
    content = f"\ufeff{rows[name.split('.')[1]]}\n".encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert script("prepare_text").read_texts(str(tmp_path), "text") == ["One ."]


@pytest.mark.parametrize(
    "change, message",
    [
        (["--source", "nowhere/at-all", "text"], "cannot load nowhere/at-all"),
        (["--validation", "5"], "--validation 5 must be between 0 and the 5 texts"),
        (["--source", "{plain}", "txt"], "has no column txt, only text"),
        (["--source", "{numbers}", "text"], "row 0: text is 7 instead of text"),
        (["--source", "{tests}", "text"], "has no split train or unsupervised"),
    ],
)
def test_unsupported_inputs_raise(script, sources, tmp_path, change, message):
    write([{"text": 7}], tmp_path / "numbers" / "train.jsonl")
    write([{"text": "a"}], tmp_path / "tests" / "test.jsonl")
    paths = {name: tmp_path / name for name in ("plain", "numbers", "tests")}
    change = [word.format(**paths) for word in change]
    assert_error(
        lambda: script("prepare_text").main([*sources, *change, "--output_dir", str(tmp_path / "out")]), message
    )
    assert not (tmp_path / "out").exists()
