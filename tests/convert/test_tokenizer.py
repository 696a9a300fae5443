"""Tokenizers of every kind of dictionary have the ids of the original's steps in plain Python.

`TOKENIZERS` has a row per kind; the tests after `test_copies` are what no row can say. `test_dictionary.py` converts
checkpoints with them.
"""

import functools
import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings, strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase, RobertaTokenizer, TokenizersBackend

from luna_mega import LunaTokenizer
from luna_mega.convert import ConversionError
from luna_mega.convert.dictionaries import SPECIALS, read_dictionary
from luna_mega.convert.tokenizers import ConvertedTokenizer
from luna_mega.convert.tokenizers.gpt2_bpe import bpe_tokenizer, read_gpt2_bpe
from luna_mega.convert.tokenizers.translation import translation_tokenizer
from luna_mega.convert.tokenizers.words import word_tokenizer
from luna_mega.hub.output import complete_folder

pytest.importorskip("regex")
from tests.convert.bpe import MERGES, Gpt2, segment, write_bpe  # noqa: E402  # requires regex

TEXTS = [
    "the abc the",
    " the  abc\n\n the",
    "abcabcab ababc bcabcc",
    "café é caché 😀 the",
    "it's a b's 12 34!? thee",
    "",
    "\tthe \u2028abc\x1cabc",
    "madeupword0000 <|endoftext|> thé",
    "[MAX 9 9 ]",
    "zz abcdabcd x y",
    "@@ a@@ @",
    "ein Ha@@ us Boot .",
]
GPT2 = Gpt2(MERGES)
PIECES = list(GPT2.number)
END_OF_TEXT = str(256 + len(MERGES))
# The ids of all pieces in another order, followed by two filler symbols.
NUMBERS = [str(number) for number in range(256 + len(MERGES) + 1)]
random.Random(0).shuffle(NUMBERS)
NUMBERS += ["madeupword0000", "madeupword0001"]
SYMBOLS = ["[MAX", "]", "9", "a", "é", "😀", "255", "the", "abc", "madeupword0000"]


class Built(NamedTuple):
    """A tokenizer, the original's steps from a text to ids and back, and whether the dictionary lacks pieces of codes.

    `gpt2` has GPT-2's pieces if the tokenizer uses them.
    """

    tokenizer: PreTrainedTokenizerBase
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    lacks: bool = False
    gpt2: Gpt2 | None = None


def dictionary_of(folder, symbols):
    """Return the dictionary of these symbols; a repeated one is overwritten."""
    known = [*SPECIALS, *symbols]
    ends = (" #fairseq:overwrite" if symbol in known[: 4 + index] else "" for index, symbol in enumerate(symbols))
    content = "".join(f"{symbol} 1{end}\n" for symbol, end in zip(symbols, ends, strict=True))
    (folder / "dict.de.txt").write_text(content, encoding="utf-8")
    return read_dictionary(folder / "dict.de.txt")


def gpt2(folder, lacks=(), without=(), more=()):
    """Build the tokenizer of a dictionary that lacks some of GPT-2's pieces, or has other symbols."""
    absent = {*without, *(GPT2.number[piece] for piece in lacks)}
    symbols = [symbol for symbol in NUMBERS if symbol not in absent] + [*more]
    files = folder / "bpe" if (folder / "bpe").exists() else write_bpe(folder / "bpe")
    tokenizer, missing = bpe_tokenizer(dictionary_of(folder, symbols), read_gpt2_bpe(files), "<mask>", 20)
    assert {*missing} == {*lacks} and len(tokenizer) == 4 + len(symbols) + 1
    return of_pieces(tokenizer, symbols, GPT2, bool(lacks))


def complete(folder):
    """Build the tokenizer of GPT-2's complete vocabulary."""
    data = Path(__file__).parents[3] / "shared" / "data"
    if not data.is_dir():
        pytest.skip("../shared (GPT-2's files and the dictionary of RoBERTa) is absent")
    dictionary, merges = read_dictionary(data / "roberta_bpe" / "dict.txt"), data / "gpt2_bpe" / "vocab.bpe"
    tokenizer, missing = bpe_tokenizer(dictionary, read_gpt2_bpe(data / "gpt2_bpe"), "<mask>", 20)
    assert missing == [] and len(tokenizer) == 50265
    pieces = Gpt2(merges.read_text(encoding="utf-8").split("\n")[1:-1])
    return of_pieces(tokenizer, list(dictionary.symbols), pieces)


def of_pieces(tokenizer, symbols, pieces, lacks=False):
    """Return the tokenizer and the steps of fairseq: GPT-2's pieces, the dictionary, and the text of the pieces."""
    piece_of = {number: piece for piece, number in pieces.number.items()}
    names = [*SPECIALS, *(piece_of.get(symbol, symbol) for symbol in symbols)]
    return Built(
        tokenizer,
        lambda text: pieces.encode(symbols, [text])[0],
        lambda ids: pieces.decode([names[index] for index in ids]),
        lacks,
        pieces,
    )


def by_symbol(tokenizer, symbols, split, start=(), lacks=False):
    """Return the tokenizer and the steps of fairseq: its dictionary, `encode_line`, and `process_bpe_symbol`."""
    names = [*SPECIALS, *symbols]
    index = {symbol: number for number, symbol in enumerate(names)}
    return Built(
        tokenizer,
        lambda text: [*start, *(index.get(symbol, 3) for symbol in split(text)), 2],
        lambda ids: (" ".join(names[index] for index in ids) + " ").replace("@@ ", "").rstrip(),
        lacks,
    )


def words(folder, prepend_cls):
    """Build the tokenizer of an LRA dictionary."""
    tokenizer = word_tokenizer(dictionary_of(folder, SYMBOLS), "<CLS>", prepend_cls, 20)
    return by_symbol(tokenizer, [*SYMBOLS, "<CLS>"], str.split, [4 + len(SYMBOLS)] * prepend_cls)


def write_codes(folder, merges, header="#version: 0.2\n", end=""):
    codes = folder / "codes"
    codes.write_text(header + "".join(f"{' '.join(pair)}{end}\n" for pair in merges), encoding="utf-8")
    return codes


def symbol_of(piece):
    return piece.removesuffix("</w>") if piece.endswith("</w>") else f"{piece}@@"


def subwords(folder, merges, symbols, *form):
    """Build the tokenizer of a translation model with codes."""
    pieces = {piece for pair in merges for piece in (*pair, "".join(pair))}
    tokenizer = translation_tokenizer(dictionary_of(folder, symbols), write_codes(folder, merges, *form), 20)
    lacks = not {*map(symbol_of, pieces)} <= {*symbols}
    return by_symbol(
        tokenizer, symbols, lambda x: [symbol_of(y) for w in x.split() for y in segment(w, merges)], (), lacks
    )


@st.composite
def codes(draw):
    """Return merges and symbols of some or all of their pieces."""
    pieces, merges = [x + end for x in "abc😀" for end in ("", "</w>")], []
    for _ in range(draw(st.integers(1, 12))):
        first = draw(st.sampled_from([piece for piece in pieces if not piece.endswith("</w>")]))
        merges.append((first, draw(st.sampled_from(pieces))))
        pieces.append("".join(merges[-1]))
    merges += draw(st.lists(st.sampled_from(merges), max_size=3))
    symbols = [symbol_of(piece) for piece in dict.fromkeys(pieces)]
    some = st.lists(st.sampled_from(symbols), unique=True).map(lambda found: [*found, "d@@", "madeupword0000"])
    return merges, draw(some | st.just([*symbols, "madeupword0000"]))


def split_already(folder):
    """Build the tokenizer of a translation model without codes."""
    symbols = ["ein", "Ha@@", "a@@", "us", ".", "abc", "madeupword0000"]
    return by_symbol(translation_tokenizer(dictionary_of(folder, symbols), max_length=20), symbols, str.split)


TWICE = [("a", "b"), ("b", "c</w>"), ("a", "b")], ["ab@@", "a@@", "bc", "c", "madeupword0000"]  # the first counts
LACKS = st.sets(st.sampled_from(PIECES), max_size=4) | st.sampled_from([{"Ġthe"}, {"ab", "Ã"}, set(PIECES)])
# Name -> strategy of functions that build the tokenizer with its reference, and its class if no piece is missing.
TOKENIZERS: dict[str, tuple[st.SearchStrategy, type]] = {
    "gpt2": (st.just(gpt2), RobertaTokenizer),
    "gpt2, complete": (st.just(functools.cache(complete)), RobertaTokenizer),
    "gpt2 without <|endoftext|>": (st.just(functools.partial(gpt2, without=[END_OF_TEXT])), RobertaTokenizer),
    "gpt2, a symbol twice": (st.just(functools.partial(gpt2, more=[NUMBERS[5]])), RobertaTokenizer),
    "gpt2, thinned": (LACKS.map(lambda lacks: functools.partial(gpt2, lacks=lacks)), RobertaTokenizer),
    "words": (st.just(functools.partial(words, prepend_cls=False)), TokenizersBackend),
    "words after <CLS>": (st.just(functools.partial(words, prepend_cls=True)), TokenizersBackend),
    "subword-nmt": ((codes() | st.just(TWICE)).map(lambda x: lambda folder: subwords(folder, *x)), TokenizersBackend),
    "fastBPE": (codes().map(lambda x: lambda folder: subwords(folder, *x, "", " 17")), TokenizersBackend),
    "split already": (st.just(split_already), TokenizersBackend),
}
TEXT = st.text(st.sampled_from(" abcdethéöü😀@9]\t\n\x1c\u2028"), max_size=30) | st.sampled_from(TEXTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizer")


@pytest.mark.parametrize("name", TOKENIZERS)
@given(texts=st.lists(TEXT, min_size=1, max_size=20), data=st.data())
def test_equals_its_reference(folder, name, texts, data):
    """Ids and texts are those of the original's steps, for one text and for a batch."""
    build, kind = TOKENIZERS[name]
    tokenizer, encode, decode, lacks, pieces = data.draw(build)(folder)
    assert type(tokenizer) is (LunaTokenizer if lacks else kind)
    ids = [encode(text) for text in texts]
    assert tokenizer(texts).input_ids == ids and tokenizer(texts[0]).input_ids == ids[0]
    assert set(tokenizer(texts[0])) == {"input_ids", "attention_mask"}
    assert [tokenizer.decode(row) for row in ids] == [decode(row) for row in ids]
    plain = [decode([index for index in row if index not in tokenizer.all_special_ids]) for row in ids]
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == plain
    if pieces:
        assert [tokenizer(text).tokens()[1:-1] for text in texts] == [pieces.pieces(text) for text in texts]
        found = (each(texts, return_offsets_mapping=True, padding=True) for each in (tokenizer, pieces.roberta))
        assert next(found)["offset_mapping"] == next(found)["offset_mapping"]
        assert plain == texts or lacks
    cut = tokenizer(texts, truncation=True, max_length=5, padding="max_length")
    assert all(len(row) == 5 and (row[-1] == 2 or row[-1] == 1) for row in cut["input_ids"])
    assert [sum(mask) for mask in cut["attention_mask"]] == [min(len(row), 5) for row in ids]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=3)
@given(data=st.data())
def test_copies(folder, name, data):
    """Every id has one token, special ids are fairseq's, and saved and pickled copies are equal."""
    tokenizer, encode, _, _, pieces = data.draw(TOKENIZERS[name][0])(folder)
    vocabulary = tokenizer.get_vocab()
    assert sorted(vocabulary.values()) == list(range(len(tokenizer))) and tokenizer.vocab_size == len(tokenizer)
    assert all(tokenizer.convert_ids_to_tokens(index) == token for token, index in vocabulary.items())
    assert "madeupword0000" in vocabulary
    tokenizer.save_pretrained(folder / "saved" / "target")
    saved = AutoTokenizer.from_pretrained(folder / "saved", subfolder="target")
    options = {"return_offsets_mapping": True, "return_special_tokens_mask": True}
    for each in (tokenizer, pickle.loads(pickle.dumps(tokenizer)), saved):
        assert type(each) is type(tokenizer) and each.get_vocab() == vocabulary and len(each) == len(tokenizer)
        assert [getattr(each, f"{role}_token_id") for role in ("bos", "pad", "eos", "unk")] == [0, 1, 2, 3]
        assert (each.model_max_length, each.padding_side, each.truncation_side) == (20, "right", "right")
        assert dict(each(TEXTS, **options)) == dict(tokenizer(TEXTS, **options))
    first, second = encode("abc the"), encode(" the")
    assert tokenizer("abc the", " the").input_ids == ([*first, 2, *second[1:]] if pieces else first + second)


def test_special_tokens_in_text(tmp_path):
    """Special tokens in a text are recognized, as in transformers; an option treats them as text, as in fairseq."""
    tokenizer, encode, *_ = gpt2(tmp_path)
    mask, (the, a) = len(tokenizer) - 1, tokenizer.convert_tokens_to_ids(["Ġthe", "a"])
    assert tokenizer(" the <mask>a").input_ids == [0, the, mask, a, 2]  # <mask> takes the space before it
    assert tokenizer("a<unk></s>").input_ids == [0, a, 3, 2, 2]
    assert tokenizer("a <unk> the</s>", split_special_tokens=True).input_ids == encode("a <unk> the</s>")


@pytest.fixture
def thinned(tmp_path):
    return gpt2(tmp_path, ["Ġthe", "ab", "Ã"]).tokenizer


def test_missing_pieces_have_no_other_ids_and_tokens_are_added(thinned, tmp_path):
    size, he = len(thinned), thinned.get_vocab()["he"]
    assert thinned.convert_tokens_to_ids(["Ġthe", "he", "<mask>"]) == [3, he, size - 1]
    assert (thinned.decode(he), thinned.decode([[he]]), thinned.decode(thinned("he"))) == ("he", ["he"], "<s>he</s>")
    assert thinned.convert_ids_to_tokens([3, he, size - 1], skip_special_tokens=True) == ["he"]
    overflowing = thinned("abc the" * 9, max_length=6, truncation=True, return_overflowing_tokens=True)
    assert len(overflowing.input_ids) > 3 and max(map(max, overflowing.input_ids)) < size
    assert thinned.add_tokens(["xyz"]) == 1 and thinned.add_special_tokens({"extra_special_tokens": ["<e>"]}) == 1
    assert len(thinned) == size + 2 and thinned.vocab_size == size
    assert thinned.get_added_vocab()["xyz"] == thinned.get_vocab()["xyz"] == size
    ids = thinned("abc xyz<e> the").input_ids
    assert size in ids and size + 1 in ids and max(ids) == size + 1
    assert thinned.decode(ids) == "<s>abc xyz<e><unk></s>"
    thinned.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again("abc xyz<e> the").input_ids == ids and len(again) == size + 2
    with pytest.raises(NotImplementedError, match="RobertaTokenizer"):
        thinned.train_new_from_iterator([["the"]], 300)


@pytest.mark.parametrize("lacks", [(), ("abc",)])
def test_space_before_the_first_word(tmp_path, lacks):
    gpt2(tmp_path, lacks).tokenizer.save_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved", add_prefix_space=True)
    tokenizer.save_pretrained(tmp_path / "again")
    for other in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "again")):
        encoded = other("the abc", add_special_tokens=False, return_offsets_mapping=True)
        assert encoded.tokens() == ["Ġthe", "Ġ", "abc"]
        assert encoded["offset_mapping"] == [(0, 3), (4, 4), (4, 7)]
        words = other(["the", "abc"], add_special_tokens=False, is_split_into_words=True)
        assert words.tokens() == encoded.tokens() and words.word_ids() == [0, 1, 1]


def test_forms_of_gpt2s_files(tmp_path):
    """RoBERTa's vocab.json and merges.txt, and files with a byte order mark, are GPT-2's files."""
    bpe, other = write_bpe(tmp_path / "bpe"), tmp_path / "hf"
    expected = read_gpt2_bpe(bpe)
    other.mkdir()
    (other / "merges.txt").write_bytes((bpe / "vocab.bpe").read_bytes().removesuffix(b"\n"))
    pieces = ["<s>", "<pad>", *reversed(json.loads((bpe / "encoder.json").read_text(encoding="utf-8")))]
    ids = json.dumps({piece: index for index, piece in enumerate(pieces)})  # of RoBERTa's own dictionary
    (other / "vocab.json").write_text(ids, encoding="utf-8")
    assert read_gpt2_bpe(other) == expected
    for file in bpe.iterdir():
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert read_gpt2_bpe(bpe) == expected


# File, content (None: no file), a part of the error.
FILES = [
    ("encoder.json", b"{", "encoder.json: not JSON"),
    ("encoder.json", b"[]", "not a JSON object"),
    ("encoder.json", b'{"!": 0, "#": 1}', "'\"' has id None, by vocab.bpe it has 1"),
    ("vocab.bpe", b"#version: 0.2\n", "the file is empty"),
    ("vocab.bpe", b"#version: 0.2\nq q\n", "'qq' has id None, by vocab.bpe it has 256"),
    ("codes", b"#version: 0.2\na b c\n", "line 2 is not a pair"),
    ("codes", b"a b</w>\n", "neither '#version: 0.2' nor counts"),
    ("codes", b"\x0a\x07<unk>\xff\xfe", "binary file"),
    ("codes", None, "no such file"),
    ("dictionary", "▁a".encode(), "no symbol ends with @@"),
]


@pytest.mark.parametrize(("file", "content", "named"), FILES)
def test_wrong_files(tmp_path, file, content, named):
    bpe, path = write_bpe(tmp_path / "bpe"), tmp_path / "codes"
    write_codes(tmp_path, [("a", "b")])
    symbols = [content.decode() if file == "dictionary" else "a@@", "b"]
    if content is None:
        path.unlink()
    elif file != "dictionary":
        (path if file == "codes" else bpe / file).write_bytes(content)
    with pytest.raises(ConversionError) as error:
        read_gpt2_bpe(bpe)
        translation_tokenizer(dictionary_of(tmp_path, symbols), path)
    assert named in str(error.value)


def test_full_disk(tmp_path, thinned):
    output = tmp_path / "full"
    with pytest.raises(ConversionError, match="cannot write tokenizer.json"), complete_folder(output) as folder:
        (folder / "tokenizer.json").symlink_to("/dev/full")
        ConvertedTokenizer(thinned, "GPT-2 byte-pair encoding", []).save(folder)


def test_symbols_of_words(tmp_path):
    """Special tokens only match complete symbols; ranges are those of symbols; words may be split already."""
    tokenizer, encode, *_ = words(tmp_path, True)
    assert tokenizer("x</s>y", add_special_tokens=False).input_ids == [3]
    text = " the\t😀  é"
    encoded = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
    assert [text[start:end] for start, end in encoded["offset_mapping"]] == ["", "the", "😀", "é", ""]
    assert encoded["special_tokens_mask"] == [1, 0, 0, 0, 1]
    encoded = tokenizer(["the", "255", "x"], is_split_into_words=True)
    assert encoded.input_ids == encode("the 255 x") and encoded.word_ids() == [None, 0, 1, 2, None]


def test_truncation_keeps_the_end_and_can_do_as_the_original(tmp_path):
    tokenizer, encode, *_ = words(tmp_path, True)
    text, options = "the a 9 255 é 😀", {"truncation": True, "max_length": 6}
    assert tokenizer(text, **options).input_ids == [*encode(text)[:5], 2]
    original = tokenizer(f"<CLS> {text} </s>", add_special_tokens=False, **options).input_ids
    assert original == encode(text)[:6]


# Symbols of a translation model, a text, its ids and the decoded text. The symbol `@@` is a word, not the start of one.
TRANSLATIONS = [
    (["▁ein", "▁Ha", "us", "."], "▁ein ▁Ha us .", [4, 5, 6, 7, 2], "ein Haus."),
    (["</s>", "▁a"], "▁a </s>", [5, 2, 2], "a"),  # the end of a text keeps its id
    (["@@", "a@@", "a"], "a @@ aa", [6, 4, 5, 6, 2], "a @@ aa"),
]


@pytest.mark.parametrize(("symbols", "text", "ids", "decoded"), TRANSLATIONS)
def test_symbols_of_translation(tmp_path, symbols, text, ids, decoded):
    codes = write_codes(tmp_path, [("@", "@</w>")]) if "@@" in symbols else None
    tokenizer = translation_tokenizer(dictionary_of(tmp_path, symbols), codes)
    assert tokenizer(text).input_ids == ids and tokenizer.decode(ids, skip_special_tokens=True) == decoded
