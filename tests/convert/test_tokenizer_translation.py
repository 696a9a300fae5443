"""Tokenizers of translation models, compared with the steps of subword-nmt and fairseq in plain Python."""

import pickle
import random
from collections import Counter

import pytest
from transformers import AutoTokenizer, TokenizersBackend

from luna_mega import LunaTokenizer
from luna_mega.convert import ConversionError
from luna_mega.convert.dictionaries import SPECIALS, read_dictionary
from luna_mega.convert.tokenizers.translation import read_codes, translation_tokenizer


def spell(word):
    return (*word[:-1], word[-1] + "</w>")


def merge(pieces, pair):
    merged, at = [], 0
    while at < len(pieces):
        here = pieces[at : at + 2] == pair
        merged.append("".join(pair) if here else pieces[at])
        at += 2 if here else 1
    return tuple(merged)


def segment(word, merges):
    """Return the symbols of a word as `encode` and `segment` of subword-nmt's apply_bpe.py (version 0.2) do."""
    ranks = {pair: rank for rank, pair in reversed(list(enumerate(merges)))}
    pieces = spell(word)
    while len(pieces) > 1:
        pair = min(zip(pieces, pieces[1:], strict=False), key=lambda pair: ranks.get(pair, len(ranks)))
        if pair not in ranks:
            break
        pieces = merge(pieces, pair)
    return [*(f"{piece}@@" for piece in pieces[:-1]), pieces[-1].removesuffix("</w>")]


def learn(lines, count):
    """Return the merges that subword-nmt's learn_bpe.py finds: `count` times the most frequent pair of pieces."""
    words = Counter(word for line in lines for word in line.split())
    spelt, merges = {word: spell(word) for word in words}, []
    for _ in range(count):
        pairs = Counter()
        for word, pieces in spelt.items():
            for pair in zip(pieces, pieces[1:], strict=False):
                pairs[pair] += words[word]
        merges.append(max(pairs, key=lambda pair: (pairs[pair], pair)))
        spelt = {word: merge(pieces, merges[-1]) for word, pieces in spelt.items()}
    return merges


def reference(text, symbols, merges):
    """Return the ids from subword-nmt followed by fairseq's `encode_line`."""
    index = {symbol: number for number, symbol in enumerate([*SPECIALS, *symbols])}
    pieces = [piece for word in text.split() for piece in segment(word, merges)]
    return [*(index.get(piece, 3) for piece in pieces), 2]


def remove_bpe(sentence):
    """Remove `@@ ` as fairseq's `process_bpe_symbol` does."""
    return (sentence + " ").replace("@@ ", "").rstrip()


@pytest.fixture(scope="module")
def lines():
    """Return lines of words with one to eight letters, umlauts and emojis included; a few words are frequent."""
    choose = random.Random(1)
    words = ["".join(choose.choices("abcdeöü😀", k=choose.randint(1, 8))) for _ in range(150)]
    return [" ".join(words[min(int(choose.expovariate(0.03)), 149)] for _ in range(12)) for _ in range(200)]


@pytest.fixture(scope="module")
def merges(lines):
    return learn(lines, 120)


def write(tmp_path, symbols, merges=None, header="#version: 0.2\n", tail=""):
    path = tmp_path / "dict.de.txt"
    path.write_text("".join(f"{symbol} 1\n" for symbol in symbols), encoding="utf-8")
    if merges is None:
        return read_dictionary(path), None
    codes = tmp_path / "codes"
    codes.write_text(header + "".join(f"{' '.join(pair)}{tail}\n" for pair in merges), encoding="utf-8")
    return read_dictionary(path), codes


def count_symbols(lines, merges, least=1):
    symbols = Counter(symbol for line in lines for word in line.split() for symbol in segment(word, merges))
    return [symbol for symbol, count in symbols.most_common() if count >= least] + ["madeupword0000"]


@pytest.mark.parametrize(("header", "tail"), [("#version: 0.2\n", ""), ("", " 17")], ids=["subword-nmt", "fastBPE"])
@pytest.mark.parametrize("least", [1, 40], ids=["complete", "thinned"])
def test_ids(tmp_path, lines, merges, least, header, tail):
    symbols = count_symbols(lines, merges, least)
    dictionary, codes = write(tmp_path, symbols, merges, header, tail)
    tokenizer = translation_tokenizer(dictionary, codes, max_length=64)
    assert len(tokenizer) == tokenizer.vocab_size == 4 + len(symbols)
    texts = [*lines, "", "  abc\t dé 7ö ab\u2028c ", "zz abcdabcd </s> <unk>", "@@ a@@ @"]
    unknown = 0
    for text in texts:
        encoded = tokenizer(text)
        assert encoded["input_ids"] == reference(text, symbols, merges), text
        assert set(encoded) == {"input_ids", "attention_mask"}
        unknown += encoded["input_ids"].count(3)
    assert unknown > (100 if least > 1 else 5)
    assert tokenizer(texts)["input_ids"] == [reference(text, symbols, merges) for text in texts]
    ids = [tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    assert ids == [0, 1, 2, 3]
    assert (tokenizer.model_max_length, tokenizer.padding_side) == (64, "right")
    assert tokenizer("a b", "c").input_ids == [*tokenizer("a b").input_ids, *tokenizer("c").input_ids]
    assert tokenizer(lines[0], truncation=True, max_length=5).input_ids[-1] == 2


def test_decode(tmp_path, lines, merges):
    symbols = count_symbols(lines, merges, least=40)
    tokenizer = translation_tokenizer(*write(tmp_path, symbols, merges))
    names = [*SPECIALS, *symbols]
    for text in [*lines, "abc zz öz"]:
        ids = tokenizer(text).input_ids[:-1]
        assert tokenizer.decode(ids) == remove_bpe(" ".join(names[index] for index in ids)), text
    complete = translation_tokenizer(*write(tmp_path, count_symbols(lines, merges), merges))
    assert complete.batch_decode(complete(lines)["input_ids"], skip_special_tokens=True) == lines


def test_pickled_and_reloaded(tmp_path, lines, merges):
    symbols = count_symbols(lines, merges, least=40)
    tokenizer = translation_tokenizer(*write(tmp_path, symbols, merges), max_length=64)
    assert type(tokenizer) is LunaTokenizer
    expected = [reference(line, symbols, merges) for line in lines]
    assert pickle.loads(pickle.dumps(tokenizer))(lines)["input_ids"] == expected
    for subfolder in ("", "target"):
        tokenizer.save_pretrained(tmp_path / "saved" / subfolder)
        loaded = AutoTokenizer.from_pretrained(tmp_path / "saved", subfolder=subfolder)
        assert loaded(lines)["input_ids"] == expected and loaded.model_max_length == 64


def test_complete_vocabulary_needs_no_custom_class(tmp_path):
    """A vocabulary that contains every piece of the merges needs no custom tokenizer class."""
    symbols = ["a@@", "a", "b", "b@@", "ab", "ab@@"]
    tokenizer = translation_tokenizer(*write(tmp_path, symbols, [("a", "b</w>"), ("a", "b")]))
    assert type(tokenizer) is TokenizersBackend
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab abab").input_ids) == ["ab</w>", "ab", "ab</w>", "</s>"]


def test_first_of_two_equal_merges_counts(tmp_path):
    merges = [("a", "b"), ("b", "c</w>"), ("a", "b")]
    symbols = ["ab@@", "a@@", "bc", "c"]
    dictionary, codes = write(tmp_path, symbols, merges)
    assert read_codes(codes) == merges[:2]
    assert translation_tokenizer(dictionary, codes)("abc").input_ids == reference("abc", symbols, merges) == [4, 7, 2]


def test_text_that_is_split_already(tmp_path):
    symbols = ["ein", "Ha@@", "us", ".", "madeupword0000"]
    tokenizer = translation_tokenizer(write(tmp_path, symbols)[0])
    assert type(tokenizer) is TokenizersBackend and len(tokenizer) == 4 + len(symbols)
    text = " ein\tHa@@ us Boot . </s> Ha@@"
    index = {symbol: number for number, symbol in enumerate([*SPECIALS, *symbols])}
    assert tokenizer(text).input_ids == [*(index.get(symbol, 3) for symbol in text.split()), 2]
    assert tokenizer.decode(tokenizer("ein Ha@@ us Boot .").input_ids[:-1]) == "ein Haus <unk> ."
    assert tokenizer.decode(tokenizer("ein Ha@@").input_ids, skip_special_tokens=True) == "ein Ha"


def test_sentencepiece(tmp_path):
    symbols = ["▁ein", "▁Ha", "us", "."]
    tokenizer = translation_tokenizer(write(tmp_path, symbols)[0])
    assert tokenizer("▁ein ▁Ha us .").input_ids == [4, 5, 6, 7, 2]
    assert tokenizer.decode([4, 5, 6, 7, 2], skip_special_tokens=True) == "ein Haus."


def test_fixture(parity_folder):
    """The tokenizer of an original checkpoint's dictionary has ids from 4."""
    dictionary = read_dictionary(parity_folder("luna", "s2s_tied") / "dict.en.txt")
    tokenizer = translation_tokenizer(dictionary)
    assert tokenizer("w000@@ w001 nothing").input_ids == [4, 5, 3, 2]
    assert tokenizer.decode([4, 5]) == "w000w001"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"#version: 0.2\na b c\n", "line 2 is not a pair"),
        (b"a b</w>\n", "neither '#version: 0.2' nor counts"),
        (b"", "line 1 is not a pair"),
        (b"\x0a\x07<unk>\xff\xfe", "binary file"),
        (None, "no such file"),
    ],
)
def test_wrong_codes(tmp_path, content, message):
    dictionary, codes = write(tmp_path, ["a@@", "b"], [])
    codes.unlink() if content is None else codes.write_bytes(content)
    with pytest.raises(ConversionError, match=message):
        translation_tokenizer(dictionary, codes)


def test_codes_for_another_kind_of_dictionary(tmp_path):
    with pytest.raises(ConversionError, match="no symbol ends with @@"):
        translation_tokenizer(*write(tmp_path, ["▁a", "b"], [("a", "b")]))
