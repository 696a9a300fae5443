import json

import pytest

from luna_mega.convert import ConversionError
from luna_mega.convert.dictionaries import read_dictionary


def read(tmp_path, text):
    (tmp_path / "dict.txt").write_bytes(text.encode())
    return read_dictionary(tmp_path / "dict.txt")


def test_symbols(tmp_path):
    """Lines are split at the last space, overwritten symbols keep both ids, and a byte order mark is no symbol."""
    dictionary = read(tmp_path, "\ufeffthe 9\nnew york 8\n\u2028x 7\r\nmadeupword0000 0\n")
    assert dictionary.symbols == ("the", "new york", "\u2028x", "madeupword0000")
    assert dictionary.labels == ("the", "new york", "\u2028x")
    assert read(tmp_path, "a 1\na 2 #fairseq:overwrite\n<s> 3 #fairseq:overwrite\n").symbols == ("a", "a", "<s>")


def test_size_counts_the_appended_symbol_once(tmp_path):
    assert read(tmp_path, "a 1\nb 1\n").size("<mask>") == 7
    assert read(tmp_path, "a 1\n<mask> 1\n").size("<mask>") == 6


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a 1\nb 1\na 2\n", "line 3 repeats 'a'"),
        ("a 1\n</s> 1\n", "line 2 repeats '</s>'"),
        ("a 1\nb\n", "line 2 is not"),
        ("a 1\n\nb 1\n", "line 2 is not"),
        ("a one\n", "line 1 is not"),
    ],
)
def test_broken_lines_are_named(tmp_path, text, expected):
    with pytest.raises(ConversionError, match=expected):
        read(tmp_path, text)


def test_not_text(tmp_path):
    (tmp_path / "dict.txt").write_bytes(b"a 1\n\xff\xfe 2\n")
    with pytest.raises(ConversionError, match="UTF-8"):
        read_dictionary(tmp_path / "dict.txt")


@pytest.mark.parametrize("folder", [".", "src-bin", "input0"])
def test_dictionary_near_the_checkpoint(convert, make, folder):
    vocabulary = make.dictionary(convert.source / folder / "dict.txt")
    assert (convert(make.bert()) / "dict.txt").read_bytes() == vocabulary.read_bytes()
    assert "no dictionary" not in convert.screen


def test_given_files_in_any_order(convert, make, tmp_path):
    make.dictionary(convert.source / "dict.txt", symbols=3)
    labels = tmp_path / "labels.txt"
    labels.write_text("positive 7\nnegative 5\nmadeupword0000 0\nmadeupword0001 0\n", encoding="utf-8")
    vocabulary = make.dictionary(tmp_path / "words.txt")
    output = convert(make.lra21(classes=2), "--dict", labels, vocabulary)
    assert (output / "dict.txt").read_bytes() == vocabulary.read_bytes()
    assert (output / "dict.label.txt").read_bytes() == labels.read_bytes()
    config = json.loads((output / "config.json").read_text(encoding="utf-8"))
    assert config["id2label"] == {"0": "positive", "1": "negative"}
    assert config["label2id"] == {"positive": 0, "negative": 1}


def test_label_dictionary_next_to_the_checkpoint(convert, make):
    make.dictionary(convert.source / "label" / "dict.txt", symbols=3, prefix="label")
    output = convert(make.bert(heads=[("cls_head", 3)], task="sentence_prediction"))
    assert json.loads((output / "config.json").read_text(encoding="utf-8"))["id2label"]["2"] == "label2"


@pytest.mark.parametrize("difference", [-1, 1])
@pytest.mark.parametrize("given", [False, True])
def test_wrong_vocabulary(convert, make, difference, given):
    path = make.dictionary(convert.source / "dict.txt", symbols=make.SYMBOLS + difference)
    message = convert.error(make.bert(), *(["--dict", path] if given else []))
    assert str(path) in message
    assert f"{make.VOCABULARY} embeddings" in message and f"<mask> = {make.VOCABULARY + difference}" in message


def test_mismatched_labels_are_omitted_with_a_warning(convert, make):
    make.dictionary(convert.source / "label-bin" / "dict.txt", symbols=4)
    output = convert(make.lra21(classes=2))
    assert "4 labels for 2 classes: not used" in convert.screen
    assert not (output / "dict.label.txt").exists()


def test_missing_and_ambiguous_files(convert, make, tmp_path):
    assert "no such file" in convert.error(make.bert(), "--dict", tmp_path / "nowhere.txt")
    first = make.dictionary(tmp_path / "a.txt")
    second = make.dictionary(tmp_path / "b.txt", prefix="v")
    assert "pass one of them" in convert.error(make.bert(), "--dict", first, second)
    convert(make.bert(), "--dict", first, make.dictionary(tmp_path / "copy.txt"))


def test_a_model_of_pixels_has_no_vocabulary(convert, make):
    path = make.dictionary(convert.source / "dict.txt")
    state = make.lra23(image=True, sen_rep_type="mp")
    convert(state)
    convert.output = convert.output.with_name("again")
    assert "do not fit" in convert.error(state, "--dict", path)
