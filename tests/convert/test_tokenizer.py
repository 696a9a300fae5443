"""Tokenizers of every kind of dictionary have the ids of the original's steps in plain Python.

`TOKENIZERS` has a row per kind; the tests after `test_facts` are what no row can say. `test_dictionary.py` converts
checkpoints with them.
"""

import functools
import json
import pickle
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, strategies as st
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
    """A tokenizer, and the original's steps from a text to ids and back; `gpt2` if it has GPT-2's pieces."""

    tokenizer: PreTrainedTokenizerBase
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    gpt2: Gpt2 | None = None


def dictionary_of(folder, symbols):
    """Return the dictionary of these symbols; a repeated one is overwritten."""
    ends = (" #fairseq:overwrite" if symbol in symbols[:index] else "" for index, symbol in enumerate(symbols))
    content = "".join(f"{symbol} 1{end}\n" for symbol, end in zip(symbols, ends, strict=True))
    (folder / "dict.de.txt").write_text(content, encoding="utf-8")
    return read_dictionary(folder / "dict.de.txt")


def without(*pieces):
    """Return the symbols without GPT-2's ids of these pieces."""
    return [symbol for symbol in NUMBERS if symbol not in {GPT2.number[piece] for piece in pieces}]


def build_bpe(folder, symbols):
    return bpe_tokenizer(dictionary_of(folder, symbols), read_gpt2_bpe(write_bpe(folder / "bpe")), "<mask>", 20)


def of_pieces(tokenizer, symbols, pieces):
    """Return the tokenizer and the steps of fairseq: GPT-2's pieces, the dictionary, and the text of the pieces."""
    piece_of = {number: piece for piece, number in pieces.number.items()}
    names = [*SPECIALS, *(piece_of.get(symbol, symbol) for symbol in symbols)]
    return Built(
        tokenizer,
        lambda text: pieces.encode(symbols, [text])[0],
        lambda ids: pieces.decode([names[index] for index in ids]),
        pieces,
    )


def gpt2(folder, symbols=None, lacks=""):
    """Build the tokenizer of a dictionary that lacks some of GPT-2's pieces."""
    symbols = symbols or without(*lacks.split())
    tokenizer, missing = build_bpe(folder, symbols)
    assert sorted(missing) == sorted(lacks.split()) and len(tokenizer) == 4 + len(symbols) + 1
    return of_pieces(tokenizer, symbols, GPT2)


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


def by_symbol(tokenizer, symbols, split, start=()):
    """Return the tokenizer and the steps of fairseq: its dictionary, `encode_line`, and `process_bpe_symbol`."""
    names = [*SPECIALS, *symbols]
    index = {symbol: number for number, symbol in enumerate(names)}
    return Built(
        tokenizer,
        lambda text: [*start, *(index.get(symbol, 3) for symbol in split(text)), 2],
        lambda ids: (" ".join(names[index] for index in ids) + " ").replace("@@ ", "").rstrip(),
    )


def words(folder, prepend_cls):
    """Build the tokenizer of an LRA dictionary."""
    tokenizer = word_tokenizer(dictionary_of(folder, SYMBOLS), "<CLS>", prepend_cls, 20)
    return by_symbol(tokenizer, [*SYMBOLS, "<CLS>"], str.split, [4 + len(SYMBOLS)] * prepend_cls)


@functools.cache
def learned():
    """Return lines of words with umlauts and emojis, and merges of pairs in these words."""
    choose, merges = random.Random(1), []
    words = ["".join(choose.choices("abcdeöü😀", k=choose.randint(1, 8))) for _ in range(150)]
    while len(merges) < 120:
        pieces = segment(choose.choice(words), merges)
        if len(pieces) > 1:
            at = choose.randrange(len(pieces) - 1)
            merges.append(tuple(pieces[at : at + 2]))
    return [" ".join(words[min(int(choose.expovariate(0.03)), 149)] for _ in range(12)) for _ in range(200)], merges


def split_into(merges):
    """Return the function that splits a text into the symbols of subword-nmt."""

    def split(text):
        words = [segment(word, merges) for word in text.split()]
        return [x for *pieces, last in words for x in (*(f"{y}@@" for y in pieces), last.removesuffix("</w>"))]

    return split


def write_codes(folder, merges, header="#version: 0.2\n", tail=""):
    codes = folder / "codes"
    codes.write_text(header + "".join(f"{' '.join(pair)}{tail}\n" for pair in merges), encoding="utf-8")
    return codes


def subwords(folder, symbols, merges, header="#version: 0.2\n", tail=""):
    """Build the tokenizer of a translation model with codes."""
    codes = write_codes(folder, merges, header, tail)
    return by_symbol(translation_tokenizer(dictionary_of(folder, symbols), codes, 20), symbols, split_into(merges))


def frequent(folder, least, *form):
    """Build the tokenizer of the symbols that occur at least so often in the lines."""
    lines, merges = learned()
    counts = Counter(symbol for line in lines for symbol in split_into(merges)(line))
    symbols = [symbol for symbol, count in counts.most_common() if count >= least]
    return subwords(folder, [*symbols, "madeupword0000"], merges, *form)


def split_already(folder):
    """Build the tokenizer of a translation model without codes."""
    symbols = ["ein", "Ha@@", "a@@", "us", ".", "abc", "madeupword0000"]
    return by_symbol(translation_tokenizer(dictionary_of(folder, symbols), max_length=20), symbols, str.split)


COMPLETE = ["a@@", "a", "b", "b@@", "ab", "ab@@"]
TWICE = [("a", "b"), ("b", "c</w>"), ("a", "b")]  # the first of two equal merges counts
# Name -> how to build the tokenizer with its reference, and its class.
TOKENIZERS: dict[str, tuple[Callable[..., Built], type]] = {
    "gpt2": (gpt2, RobertaTokenizer),
    "gpt2, complete": (complete, RobertaTokenizer),
    "gpt2, a symbol twice": (lambda folder: gpt2(folder, [*NUMBERS, NUMBERS[5]]), RobertaTokenizer),
    "gpt2 without <|endoftext|>": (
        lambda folder: gpt2(folder, [symbol for symbol in NUMBERS if symbol != END_OF_TEXT]),
        RobertaTokenizer,
    ),
    **{
        f"gpt2 without {lacks[:20]}": (functools.partial(gpt2, lacks=lacks), LunaTokenizer)
        for lacks in ("Ġthe", "Ġt he", "abc h", "ab", "Ã© a abcab", "Ġthe ab Ã", " ".join(GPT2.number))
    },
    "words": (lambda folder: words(folder, False), TokenizersBackend),
    "words after <CLS>": (lambda folder: words(folder, True), TokenizersBackend),
    "subword-nmt": (lambda folder: frequent(folder, 1), LunaTokenizer),
    "subword-nmt, thinned": (lambda folder: frequent(folder, 40), LunaTokenizer),
    "fastBPE, thinned": (lambda folder: frequent(folder, 40, "", " 17"), LunaTokenizer),
    "subword-nmt, every piece": (
        lambda folder: subwords(folder, COMPLETE, [("a", "b</w>"), ("a", "b")]),
        TokenizersBackend,
    ),
    "subword-nmt, a pair twice": (lambda folder: subwords(folder, ["ab@@", "a@@", "bc", "c"], TWICE), LunaTokenizer),
    "split already": (split_already, TokenizersBackend),
}


@functools.cache
def built(name, make):
    """Return the tokenizer with the reference of a row, and the copies that were saved and pickled."""
    folder = make("tokenizer")
    made = TOKENIZERS[name][0](folder)
    made.tokenizer.save_pretrained(folder / "saved" / "target")
    saved = AutoTokenizer.from_pretrained(folder / "saved", subfolder="target")
    return made, [pickle.loads(pickle.dumps(made.tokenizer)), saved]


@pytest.fixture(params=TOKENIZERS)
def row(request, tmp_path_factory):
    return request.param, *built(request.param, tmp_path_factory.mktemp)


TEXT = st.text(st.sampled_from(" abcdethéöü😀@9]\t\n\x1c\u2028"), max_size=30) | st.sampled_from(TEXTS)


@given(texts=st.lists(TEXT, min_size=1, max_size=20))
def test_equals_its_reference(row, texts):
    """Ids and texts are those of the original's steps, for one text and for a batch, also with copied tokenizers."""
    name, (tokenizer, encode, decode, pieces), copies = row
    ids = [encode(text) for text in texts]
    assert tokenizer(texts).input_ids == ids and tokenizer(texts[0]).input_ids == ids[0]
    assert set(tokenizer(texts[0])) == {"input_ids", "attention_mask"}
    assert [tokenizer.decode(row) for row in ids] == [decode(row) for row in ids]
    plain = [decode([index for index in row if index not in tokenizer.all_special_ids]) for row in ids]
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == plain
    for copy in copies:
        assert dict(copy(texts)) == dict(tokenizer(texts))
        if pieces:
            options = {"return_offsets_mapping": True, "return_special_tokens_mask": True}
            assert dict(copy(texts, **options)) == dict(tokenizer(texts, **options))
    if pieces:
        assert [tokenizer(text).tokens()[1:-1] for text in texts] == [pieces.pieces(text) for text in texts]
        found = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
        assert found["offset_mapping"] == [pieces.offsets(text) for text in texts]
        assert plain == texts or type(tokenizer) is LunaTokenizer
    cut = tokenizer(texts, truncation=True, max_length=5, padding="max_length")
    assert all(len(row) == 5 and (row[-1] == 2 or row[-1] == 1) for row in cut["input_ids"])
    assert [sum(mask) for mask in cut["attention_mask"]] == [min(len(row), 5) for row in ids]


def test_facts(row):
    """Every id has one token, special ids are fairseq's, and copies keep class, length and padding."""
    name, (tokenizer, encode, _, pieces), copies = row
    vocabulary = tokenizer.get_vocab()
    assert sorted(vocabulary.values()) == list(range(len(tokenizer))) and tokenizer.vocab_size == len(tokenizer)
    assert all(tokenizer.convert_ids_to_tokens(index) == token for token, index in vocabulary.items())
    for each in (tokenizer, *copies):
        assert type(each) is TOKENIZERS[name][1] and each.get_vocab() == vocabulary and len(each) == len(tokenizer)
        assert [getattr(each, f"{role}_token_id") for role in ("bos", "pad", "eos", "unk")] == [0, 1, 2, 3]
        assert (each.model_max_length, each.padding_side, each.truncation_side) == (20, "right", "right")
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
    return build_bpe(tmp_path, without("Ġthe", "ab", "Ã"))[0]


def test_missing_pieces_have_no_other_ids(thinned):
    size, he = len(thinned), thinned.get_vocab()["he"]
    assert thinned.convert_tokens_to_ids(["Ġthe", "he", "<mask>"]) == [3, he, size - 1]
    assert thinned.convert_ids_to_tokens([0, he, 2], skip_special_tokens=True) == ["he"]
    assert (thinned.decode(he), thinned.decode([[he]]), thinned.decode(thinned("he"))) == ("he", ["he"], "<s>he</s>")
    overflowing = thinned("abc the" * 9, max_length=6, truncation=True, return_overflowing_tokens=True)
    assert len(overflowing.input_ids) > 3 and max(map(max, overflowing.input_ids)) < size


def test_thinned_tokenizer_takes_new_tokens(thinned, tmp_path):
    size = len(thinned)
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
    build_bpe(tmp_path, without(*lacks))[0].save_pretrained(tmp_path / "saved")
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


def test_sentencepiece(tmp_path):
    tokenizer = translation_tokenizer(dictionary_of(tmp_path, ["▁ein", "▁Ha", "us", "."]))
    assert tokenizer("▁ein ▁Ha us .").input_ids == [4, 5, 6, 7, 2]
    assert tokenizer.decode([4, 5, 6, 7, 2], skip_special_tokens=True) == "ein Haus."


def test_a_word_of_two_at_signs(tmp_path):
    """The symbol `@@` is a word, not the start of one."""
    codes = write_codes(tmp_path, [("@", "@</w>")])
    tokenizer = translation_tokenizer(dictionary_of(tmp_path, ["@@", "a@@", "a"]), codes)
    assert tokenizer("a @@ aa").input_ids == [6, 4, 5, 6, 2]
    assert tokenizer.decode([6, 4, 5, 6]) == "a @@ aa"
