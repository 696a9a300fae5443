"""Conversion of every parity fixture through the command line. Numbers are compared in tests/parity."""

import json

import pytest
import torch
from transformers import AutoModelForMultipleChoice, AutoModelForSequenceClassification

from luna_mega.convert.safe_load.reader import read_checkpoint
from luna_mega_cli import main
from tests.convert.test_golden import check_arrived


def expected_class(meta):
    if meta["kind"] == "luna_lra":
        return "LunaForSequencePairClassification" if meta["pair"] else "LunaForSequenceClassification"
    return "LunaForMultipleChoice" if meta["args"]["task"] == "sentence_ranking" else "LunaForMaskedLM"


def test_every_fixture(parity_folder, tmp_path, capsys):
    for fixture in parity_folder.all("luna", "bert_*", "head_bert_*", "lra*"):
        meta = json.loads((fixture / "meta.json").read_text())
        output = tmp_path / fixture.name
        assert main(["convert", str(fixture / "checkpoint.pt"), "--output", str(output)]) == 0, capsys.readouterr().err
        report = json.loads((output / "conversion_report.json").read_text())
        assert report["model_class"] == expected_class(meta), fixture.name
        assert report["source"]["revision"] == meta["revision"]
        assert report["decisions"]["layer_norm"] == ("plus-one" if meta["revision"] == "head" else "standard")
        check_arrived(read_checkpoint(fixture / "checkpoint.pt"), output, report)
        assert (output / "dict.txt").is_file() is (fixture / "dict.txt").is_file()


def test_every_head(parity_folder, tmp_path):
    for fixture in parity_folder.all("luna", "bert_heads"):
        heads = json.loads((fixture / "meta.json").read_text())["heads"]
        assert heads
        for name, sizes in heads.items():
            output = tmp_path / name
            assert main(["convert", str(fixture / "checkpoint.pt"), "--output", str(output), "--head", name]) == 0
            model = AutoModelForSequenceClassification.from_pretrained(output)
            assert model.config.num_labels == sizes["num_classes"]
            assert model.config.classifier_hidden_size == (sizes["inner_dim"] or model.config.hidden_size)


def test_half_precision_fixture(parity_folder, tmp_path):
    for fixture in parity_folder.all("luna", "bert_ranking_fp16"):
        assert main(["convert", str(fixture / "checkpoint.pt"), "--output", str(tmp_path / "out")]) == 0
        model = AutoModelForMultipleChoice.from_pretrained(tmp_path / "out")
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("family", "pattern", "expected"),
    [
        ("mega", "15_flash_[em]*a_*", "a Mega checkpoint, but of none of the kinds that are known"),
        ("mega", "0[134]_*", "a Mega checkpoint, but of none of the kinds that are known"),
    ],
)
def test_other_models_raise(parity_folder, tmp_path, capsys, family, pattern, expected):
    files = [folder / "checkpoint.pt" for folder in parity_folder.all(family, pattern)]
    for file in files:
        assert main(["convert", str(file), "--output", str(tmp_path / "out")]) == 1
        message = capsys.readouterr().err
        assert expected in message and message.count("\n") == 1, message
    assert not list(tmp_path.iterdir())
