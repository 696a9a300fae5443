"""Fast tokenizers made of dictionaries of whitespace-separated symbols (Luna LRA)."""

import json
import pickle

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TokenizersBackend

from luna_mega.convert.dictionaries import SPECIALS, read_dictionary
from luna_mega.convert.tokenizers.words import word_tokenizer

SYMBOLS = ["[MAX", "]", "9", "a", "é", "😀", "255", "the", "madeupword0000"]
CLS = 4 + len(SYMBOLS)


def build(tmp_path, prepend_cls=True, symbols=SYMBOLS, max_length=6):
    path = tmp_path / "symbols.txt"
    path.write_text("".join(f"{symbol} 1\n" for symbol in symbols), encoding="utf-8")
    return word_tokenizer(read_dictionary(path), "<CLS>", prepend_cls, max_length)


def reference(text, prepend_cls=True):
    """Return the ids from fairseq-preprocess followed by PrependTokenDataset."""
    index = {symbol: number for number, symbol in enumerate([*SPECIALS, *SYMBOLS, "<CLS>"])}
    return [CLS] * prepend_cls + [index.get(symbol, 3) for symbol in text.split()] + [2]


TEXTS = [
    "[MAX 9 9 ]",
    "  the\ta \n\u2028 é\u00a0😀\x1c255 ",
    "thea the, THE",
    "",
    "</s> <unk> a<pad>a <mask> <CLS>a",
    "madeupword0000 the",
]


@pytest.mark.parametrize("prepend_cls", [True, False])
def test_ids(tmp_path, prepend_cls):
    tokenizer = build(tmp_path, prepend_cls)
    assert type(tokenizer) is TokenizersBackend and len(tokenizer) == CLS + 1
    for text in TEXTS:
        encoded = tokenizer(text)
        assert encoded["input_ids"] == reference(text, prepend_cls), text
        assert set(encoded) == {"input_ids", "attention_mask"}
    assert tokenizer.cls_token_id == CLS and tokenizer.pad_token_id == 1 and tokenizer.eos_token_id == 2
    assert tokenizer.unk_token_id == 3 and tokenizer.bos_token_id == 0


def test_special_tokens_only_match_complete_symbols(tmp_path):
    """Special tokens match complete symbols only, not parts of words."""
    assert build(tmp_path)("x</s>y", add_special_tokens=False).input_ids == [3]


def test_offsets_and_decode(tmp_path):
    tokenizer = build(tmp_path)
    text = " the\t😀  é"
    encoded = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
    assert [text[start:end] for start, end in encoded["offset_mapping"]] == ["", "the", "😀", "é", ""]
    assert encoded["special_tokens_mask"] == [1, 0, 0, 0, 1]
    assert tokenizer.decode(encoded["input_ids"]) == "<CLS> the 😀 é </s>"
    assert tokenizer.decode(encoded["input_ids"], skip_special_tokens=True) == "the 😀 é"


def test_truncation_keeps_the_end_and_can_do_as_the_original(tmp_path):
    tokenizer = build(tmp_path)
    text = "the a 9 255 é 😀"
    assert tokenizer(text, truncation=True).input_ids == [*reference(text)[:5], 2]
    original = tokenizer(f"<CLS> {text} </s>", add_special_tokens=False, truncation=True).input_ids
    assert original == reference(text)[:6]
    padded = tokenizer([text, "a"], truncation=True, padding="max_length")
    assert padded["input_ids"][1] == [CLS, 7, 2, 1, 1, 1] and padded["attention_mask"][1] == [1, 1, 1, 0, 0, 0]


def test_each_text_of_a_pair_is_a_sequence(tmp_path):
    assert build(tmp_path)("the a", "9").input_ids == reference("the a") + reference("9")


def test_words_that_are_split_already(tmp_path):
    tokenizer = build(tmp_path)
    encoded = tokenizer(["the", "255", "x"], is_split_into_words=True)
    assert encoded.input_ids == reference("the 255 x") and encoded.word_ids() == [None, 0, 1, 2, None]


def test_pickled_and_reloaded(tmp_path):
    tokenizer = build(tmp_path)
    tokenizer.save_pretrained(tmp_path / "saved")
    for other in (pickle.loads(pickle.dumps(tokenizer)), AutoTokenizer.from_pretrained(tmp_path / "saved")):
        assert type(other) is TokenizersBackend and other.get_vocab() == tokenizer.get_vocab()
        assert (other.model_max_length, other.padding_side) == (6, "right")
        assert dict(other(TEXTS)) == dict(tokenizer(TEXTS))


@pytest.mark.parametrize(
    ("kind", "args", "starts_with_cls"),
    [
        ("lra21", {}, True),
        ("lra21", {"sen_rep_type": "mp"}, True),
        ("lra21", {"use_p": True}, True),
        ("lra23", {"sen_rep_type": "cls"}, True),
        ("lra23", {"sen_rep_type": "mp"}, False),
    ],
)
def test_conversion(convert, make, kind, args, starts_with_cls):
    make.dictionary(convert.source / "src-bin" / "dict.txt")
    output = convert(getattr(make, kind)(**args))
    tokenizer = AutoTokenizer.from_pretrained(output)
    cls = [make.VOCABULARY - 1] * starts_with_cls
    assert tokenizer("w0 w2 x").input_ids == [*cls, 4, 6, 3, 2]
    assert tokenizer.model_max_length == make.POSITIONS and len(tokenizer) == make.VOCABULARY
    report = json.loads((output / "conversion_report.json").read_text(encoding="utf-8"))
    assert report["tokenizer"] == {
        "class": "TokenizersBackend",
        "kind": "whitespace-separated symbols",
        "size": make.VOCABULARY,
        "missing_pieces": [],
    }
    assert "whitespace-separated symbols, 17 ids" in convert.screen
    model = AutoModelForSequenceClassification.from_pretrained(output).eval()
    batch = tokenizer(["w0 w2 x", "w1 " * 30], padding=True, truncation=True, return_tensors="pt")
    assert batch["input_ids"].shape == (2, make.POSITIONS) and model(**batch).logits.isfinite().all()
