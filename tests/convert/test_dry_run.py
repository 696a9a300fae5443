"""`luna-mega convert FILE --dry-run`: the report of a conversion, without files."""

import json

import pytest
import transformers

from luna_mega.convert import convert_checkpoint
from luna_mega_cli import main
from tests.convert import fuzz, luna
from tests.errors import command_error

# Class, and a part of the sizes.
EXPECTED = {
    "luna_bert": ("LunaForSequenceClassification", "hidden_size 16, "),
    "luna_lra, 2021": ("LunaForSequenceClassification", "hidden_size 16, "),
    "luna_lra, 2023": ("LunaForSequenceClassification", "hidden_size 16, "),
    "luna_seq2seq": ("LunaForConditionalGeneration", "vocab_size 19, "),
    "mega_lra": ("MegaForSequenceClassification", "hidden_size 16, "),
    "mega_lra, pixels": ("MegaForSequenceClassification", "hidden_size 16, "),
    "mega_lm": ("MegaForCausalLM", "vocab_size 32, "),
    "mega_lm, adaptive": ("MegaForCausalLM", "vocab_size 32, "),
    "mega_seq2seq": ("MegaForConditionalGeneration", "vocab_size 19, "),
    "mega_image": ("MegaForImageClassification", "hidden_size 16, "),
    "megalodon": ("MegalodonForCausalLM", "hidden_size 16, "),
}


def rows(capsys, *argv):
    """Return the rows that a dry run prints: name -> text."""
    assert main(["convert", *map(str, argv), "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return dict(line.split(maxsplit=1) for line in printed.out.splitlines())


@pytest.mark.parametrize("kind", fuzz.BUILDERS)
def test_every_format(kind, tmp_path, monkeypatch, capsys):
    file = fuzz.save(fuzz.build(fuzz.BUILDERS[kind]), tmp_path)
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    found = rows(capsys, file)
    assert found["read"].startswith(f"{file.name}: {kind.partition(',')[0]} of the ") and found["written"] == "nothing"
    model_class, sizes = EXPECTED[kind]
    assert found["class"] == model_class and sizes in f"{found['sizes']}, "
    assert ("labels" in found) == ("Classification" in model_class)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("kind", ["luna_bert", "mega_lra, pixels", "megalodon"])
def test_a_conversion_says_how_to_load_its_folder(kind, tmp_path, capsys):
    """The row `load` is code that loads the folder."""
    output = tmp_path / "converted"
    assert main(["convert", str(fuzz.save(fuzz.build(fuzz.BUILDERS[kind]), tmp_path)), "--output", str(output)]) == 0
    row = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())["load"]
    call, _, condition = row.partition(" after ")
    assert condition == "`import luna_mega`; without luna-mega, add trust_remote_code=True"
    auto_class = call.split(".")[0]
    assert type(eval(call, {auto_class: getattr(transformers, auto_class)})).__name__ == EXPECTED[kind][0]


def test_what_is_missing(convert, make, capsys):
    """The notes name a missing dictionary and tokenizer, and the heads that are not converted."""
    convert.save(make.bert(heads=[("a", 3), ("b", 2)]))
    report = convert_checkpoint(convert.file, None)
    notes = "\n".join(report.notes)
    assert "no dictionary: the folder has no dict.txt" in notes and "no tokenizer: --bpe DIR" in notes
    reasons = {row["reason"] for row in report.dropped}
    assert reasons == {f"head not chosen; --head {name} converts it" for name in "ab"} and report.labels == []
    luna.dictionary(convert.source / "dict.txt")
    luna.dictionary(convert.source / "label-bin" / "dict.txt", symbols=3, prefix="label")
    assert rows(capsys, convert.file, "--head", "a")["labels"] == "3: label0, label1, label2"


def test_report_as_json(convert, make, capsys):
    """A dry run prints the report of the conversion."""
    file = convert.save(make.lra21())
    contents = []
    for option in (["--dry-run"], ["--output", str(convert.output)]):
        assert main(["convert", str(file), *option, "--json"]) == 0
        contents.append(json.loads(capsys.readouterr().out))
    dry, written = contents
    own = ("output", "files", "load")
    assert [dry.pop(name) for name in own] == [None, [], ""] and all(written.pop(name) for name in own)
    assert dry == written and dry["sizes"]["hidden_size"] == 16 and dry["labels"] == ["LABEL_0", "LABEL_1"]


def test_a_file_of_no_known_format(convert, make, capsys, tmp_path):
    convert.save(make.checkpoint({"x.weight": make.torch.zeros(2)}, arch="a"))
    assert "not a Luna or Mega checkpoint" in command_error(capsys, "convert", convert.file, "--dry-run")
    assert command_error(capsys, "convert", convert.file, "--dry-run") == convert.error()
