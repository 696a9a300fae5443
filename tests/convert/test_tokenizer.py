"""Tokenizers of every kind of dictionary have the ids of the original's steps in plain Python.

`TOKENIZERS` has a row per kind; the tests after `test_equals_its_reference` are what no row can say.
"""

import functools
import json
import pickle
import random
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import pytest
import transformers
from hypothesis import given, strategies as st
from transformers import AutoTokenizer, RobertaTokenizer, TokenizersBackend

from luna_mega import LunaTokenizer
from luna_mega.convert import ConversionError
from luna_mega.convert.dictionaries import SPECIALS, read_dictionary
from luna_mega.convert.tokenizers import ConvertedTokenizer
from luna_mega.convert.tokenizers.gpt2_bpe import bpe_tokenizer, read_gpt2_bpe
from luna_mega.convert.tokenizers.translation import read_codes, translation_tokenizer
from luna_mega.convert.tokenizers.words import word_tokenizer
from luna_mega.hub.output import complete_folder

pytest.importorskip("regex")
from tests.convert.bpe import Gpt2, byte_alphabet  # noqa: E402  # requires regex

MERGES = ["Ġ t", "h e", "Ġt he", "a b", "ab c", "b c", "c a", "Ġ ab", "Ã ©", "abc ab", "Ġ Ġ", "Ġt h"]
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
]


class Reference(Gpt2):
    """Encode one text with a fixed dictionary."""

    def __init__(self, merges, symbols):
        super().__init__(merges)
        self.symbols = symbols

    def __call__(self, text):
        return self.encode(self.symbols, [text])[0]


def write_bpe(folder, merges=MERGES):
    folder.mkdir()
    pieces = [*byte_alphabet().values(), *(merge.replace(" ", "") for merge in merges), "<|endoftext|>"]
    (folder / "encoder.json").write_text(
        json.dumps({piece: index for index, piece in enumerate(pieces)}), encoding="utf-8"
    )
    (folder / "vocab.bpe").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    return folder


def dictionary_of(folder, symbols, end=""):
    path = folder / "dict.de.txt"
    path.write_text("".join(f"{symbol} 1\n" for symbol in symbols) + end, encoding="utf-8")
    return read_dictionary(path)


def without(symbols, *pieces):
    """Return the symbols without GPT-2's ids of these pieces."""
    number = Reference(MERGES, []).number
    return [symbol for symbol in symbols if symbol not in {number[piece] for piece in pieces}]


# The ids of all pieces of the small files in another order, followed by two filler symbols.
NUMBERS = [str(number) for number in range(256 + len(MERGES) + 1)]
random.Random(0).shuffle(NUMBERS)
NUMBERS += ["madeupword0000", "madeupword0001"]


def gpt2(folder, lacks):
    """Return the tokenizer of a dictionary that lacks some of GPT-2's pieces, and its reference."""
    symbols = without(NUMBERS, *lacks)
    tokenizer, missing = build(folder, write_bpe(folder / "bpe"), symbols)
    assert sorted(missing) == sorted(lacks) and len(tokenizer) == 4 + len(symbols) + 1
    return tokenizer, Reference(MERGES, symbols)


SYMBOLS = ["[MAX", "]", "9", "a", "é", "😀", "255", "the", "abc", "madeupword0000"]
CLS = 4 + len(SYMBOLS)


def words(folder, prepend_cls):
    """Return the tokenizer of an LRA dictionary; the reference is fairseq-preprocess and PrependTokenDataset."""
    index = {symbol: number for number, symbol in enumerate([*SPECIALS, *SYMBOLS, "<CLS>"])}
    tokenizer = word_tokenizer(dictionary_of(folder, SYMBOLS), "<CLS>", prepend_cls, 20)
    return tokenizer, lambda text: [CLS] * prepend_cls + [index.get(symbol, 3) for symbol in text.split()] + [2]


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


@functools.cache
def learned():
    """Return lines of words with umlauts and emojis, and the merges learned from them."""
    choose = random.Random(1)
    words = ["".join(choose.choices("abcdeöü😀", k=choose.randint(1, 8))) for _ in range(150)]
    lines = [" ".join(words[min(int(choose.expovariate(0.03)), 149)] for _ in range(12)) for _ in range(200)]
    return lines, learn(lines, 120)


def count_symbols(lines, merges, least=1):
    symbols = Counter(symbol for line in lines for word in line.split() for symbol in segment(word, merges))
    return [symbol for symbol, count in symbols.most_common() if count >= least] + ["madeupword0000"]


def write_codes(folder, merges, header="#version: 0.2\n", tail=""):
    codes = folder / "codes"
    codes.write_text(header + "".join(f"{' '.join(pair)}{tail}\n" for pair in merges), encoding="utf-8")
    return codes


def subwords(folder, least, header="#version: 0.2\n", tail=""):
    """Return a translation tokenizer of the symbols that occur at least so often, and its reference."""
    lines, merges = learned()
    symbols = count_symbols(lines, merges, least)
    tokenizer = translation_tokenizer(dictionary_of(folder, symbols), write_codes(folder, merges, header, tail), 20)
    return tokenizer, lambda text: reference(text, symbols, merges)


def write(folder, symbols, merges):
    return dictionary_of(folder, symbols), write_codes(folder, merges)


def split_already(folder):
    """Return the translation tokenizer of symbols without codes, and its reference."""
    symbols = ["ein", "Ha@@", "a@@", "us", ".", "abc", "madeupword0000"]
    index = {symbol: number for number, symbol in enumerate([*SPECIALS, *symbols])}
    tokenizer = translation_tokenizer(dictionary_of(folder, symbols), max_length=20)
    return tokenizer, lambda text: [*(index.get(symbol, 3) for symbol in text.split()), 2]


class Row(NamedTuple):
    """A kind of tokenizer: how to build it with its reference, its class, and whether a decoded text is the text."""

    build: Callable
    type: type
    restores: bool = False


TOKENIZERS = {
    "gpt2": Row(lambda folder: gpt2(folder, []), RobertaTokenizer, True),
    **{
        f"gpt2 without {' '.join(lacks)}": Row(lambda folder, lacks=lacks: gpt2(folder, lacks), LunaTokenizer)
        for lacks in (["Ġthe"], ["Ġt", "he"], ["abc", "h"], ["ab"], ["Ã©", "a", "abcab"], ["Ġthe", "ab", "Ã"])
    },
    "words": Row(lambda folder: words(folder, False), TokenizersBackend),
    "words after <CLS>": Row(lambda folder: words(folder, True), TokenizersBackend),
    "subword-nmt": Row(lambda folder: subwords(folder, 1), LunaTokenizer),
    "subword-nmt, thinned": Row(lambda folder: subwords(folder, 40), LunaTokenizer),
    "fastBPE, thinned": Row(lambda folder: subwords(folder, 40, "", " 17"), LunaTokenizer),
    "split already": Row(split_already, TokenizersBackend),
}


@functools.cache
def built(name, make):
    """Return the tokenizer and the reference of a row, with the copies that were saved and pickled."""
    folder = make("tokenizer")
    tokenizer, expected = TOKENIZERS[name].build(folder)
    tokenizer.save_pretrained(folder / "saved" / "target")
    copies = [
        pickle.loads(pickle.dumps(tokenizer)),
        AutoTokenizer.from_pretrained(folder / "saved", subfolder="target"),
    ]
    return tokenizer, expected, copies


@pytest.fixture(params=TOKENIZERS)
def row(request, tmp_path_factory):
    return request.param, *built(request.param, tmp_path_factory.mktemp)


TEXT = st.text(st.sampled_from(" abcdethéöü😀@9]\t\n\x1c\u2028"), max_size=30) | st.sampled_from(TEXTS)


@given(texts=st.lists(TEXT, min_size=1, max_size=20))
def test_equals_its_reference(row, texts):
    """The ids are those of the original's steps, alone and in a batch; copies are the same tokenizer."""
    name, tokenizer, expected, copies = row
    ids = [expected(text) for text in texts]
    assert tokenizer(texts).input_ids == ids and tokenizer(texts[0]).input_ids == ids[0]
    assert set(tokenizer(texts[0])) == {"input_ids", "attention_mask"}
    for copy in copies:
        assert dict(copy(texts)) == dict(tokenizer(texts))
        if name.startswith("gpt2"):
            options = {"return_offsets_mapping": True, "return_special_tokens_mask": True}
            assert dict(copy(texts, **options)) == dict(tokenizer(texts, **options))
    if isinstance(expected, Reference):
        assert [tokenizer(text).tokens()[1:-1] for text in texts] == [expected.pieces(text) for text in texts]
    if TOKENIZERS[name].restores:
        assert tokenizer.batch_decode(ids, skip_special_tokens=True) == texts
    cut = tokenizer(texts, truncation=True, max_length=5, padding="max_length")
    assert all(len(row) == 5 and (row[-1] == 2 or row[-1] == 1) for row in cut["input_ids"])
    assert [sum(mask) for mask in cut["attention_mask"]] == [min(len(row), 5) for row in ids]


def test_facts(row):
    """Every id has one token, special ids are fairseq's, and copies keep class, length and padding."""
    name, tokenizer, expected, copies = row
    vocabulary = tokenizer.get_vocab()
    assert sorted(vocabulary.values()) == list(range(len(tokenizer))) and tokenizer.vocab_size == len(tokenizer)
    assert all(tokenizer.convert_ids_to_tokens(index) == token for token, index in vocabulary.items())
    for each in (tokenizer, *copies):
        assert type(each) is TOKENIZERS[name].type and each.get_vocab() == vocabulary and len(each) == len(tokenizer)
        assert [getattr(each, f"{role}_token_id") for role in ("bos", "pad", "eos", "unk")] == [0, 1, 2, 3]
        assert (each.model_max_length, each.padding_side, each.truncation_side) == (20, "right", "right")
    first, second = expected("abc the"), expected(" the")
    pair = [*first, 2, *second[1:]] if name.startswith("gpt2") else first + second
    assert tokenizer("abc the", " the").input_ids == pair


@pytest.fixture
def bpe(tmp_path):
    return write_bpe(tmp_path / "bpe")


def build(tmp_path, bpe, symbols):
    return bpe_tokenizer(dictionary_of(tmp_path, symbols), read_gpt2_bpe(bpe), "<mask>", 20)


def test_mask_takes_the_space_before_it(tmp_path, bpe):
    tokenizer, _ = build(tmp_path, bpe, NUMBERS)
    mask = tokenizer.mask_token_id
    assert mask == len(tokenizer) - 1
    the = tokenizer.convert_tokens_to_ids(["Ġthe", "a"])
    assert tokenizer(" the <mask>a", add_special_tokens=False).input_ids == [the[0], mask, the[1]]


def test_text_of_unknown_tokens_only(tmp_path, bpe):
    tokenizer, missing = build(tmp_path, bpe, ["madeupword0000"])
    assert len(missing) == 256 + len(MERGES) and len(tokenizer) == 6
    assert tokenizer("the abc").input_ids == [0, 3, 3, 3, 3, 2]  # the pieces are t, he, Ġ and abc


def test_end_of_text_is_no_loss(tmp_path, bpe):
    tokenizer, missing = build(tmp_path, bpe, [symbol for symbol in NUMBERS if symbol != str(256 + len(MERGES))])
    assert type(tokenizer) is RobertaTokenizer and missing == []


@pytest.fixture
def thinned(tmp_path, bpe):
    tokenizer, _ = build(tmp_path, bpe, without(NUMBERS, "Ġthe", "ab", "Ã"))
    return tokenizer


def test_missing_pieces_have_no_other_ids(thinned):
    size, vocab = len(thinned), thinned.get_vocab()
    assert thinned.mask_token_id == size - 1
    assert thinned.convert_tokens_to_ids(["Ġthe", "he", "<mask>"]) == [3, vocab["he"], size - 1]
    assert thinned.convert_ids_to_tokens([0, vocab["he"], 2], skip_special_tokens=True) == ["he"]
    assert thinned.decode(thinned("abc the é Ã").input_ids) == "<s>abc<unk> é <unk>\ufffd</s>"
    assert thinned.decode(thinned("he")) == "<s>he</s>"
    assert thinned.decode(vocab["he"]) == "he" and thinned.decode([[vocab["he"]]]) == ["he"]
    padded = thinned(["the", "abc the abc"], padding=True, return_tensors="pt", return_offsets_mapping=True)
    assert int(padded["input_ids"].max()) < size and int(padded["input_ids"][0, -1]) == 1
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


def test_thinned_tokenizer_cannot_be_retrained(thinned):
    with pytest.raises(NotImplementedError, match="RobertaTokenizer"):
        thinned.train_new_from_iterator([["the"]], 300)


@pytest.mark.parametrize("lacks", [(), ("abc",)])
def test_space_before_the_first_word(tmp_path, bpe, lacks):
    build(tmp_path, bpe, without(NUMBERS, *lacks))[0].save_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved", add_prefix_space=True)
    tokenizer.save_pretrained(tmp_path / "again")
    for other in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "again")):
        encoded = other("the abc", add_special_tokens=False, return_offsets_mapping=True)
        assert encoded.tokens() == ["Ġthe", "Ġ", "abc"]
        assert encoded["offset_mapping"] == [(0, 3), (4, 4), (4, 7)]
        words = other(["the", "abc"], add_special_tokens=False, is_split_into_words=True)
        assert words.tokens() == encoded.tokens() and words.word_ids() == [0, 1, 1]


def test_both_kinds_of_folder(tmp_path, bpe):
    other = tmp_path / "hf"
    other.mkdir()
    (other / "merges.txt").write_bytes((bpe / "vocab.bpe").read_bytes().removesuffix(b"\n"))
    # RoBERTa's vocab.json has the ids of RoBERTa's own dictionary
    pieces = ["<s>", "<pad>", *reversed(json.loads((bpe / "encoder.json").read_text(encoding="utf-8")))]
    (other / "vocab.json").write_text(
        json.dumps({piece: index for index, piece in enumerate(pieces)}), encoding="utf-8"
    )
    assert read_gpt2_bpe(other) == read_gpt2_bpe(bpe)


def checkpoint_with_dictionary(convert, make, symbols):
    """Return a luna_bert checkpoint of 12 symbols, and write its dictionary to the same directory."""
    assert len(symbols) == make.SYMBOLS
    (convert.source / "dict.txt").write_text("".join(f"{symbol} 1\n" for symbol in symbols), encoding="utf-8")
    return make.bert()


@pytest.fixture
def twelve():
    number = Reference(MERGES, []).number
    return [number[piece] for piece in ("Ġthe", "he", "a", "b", "c", "Ġ", "abc", "t", "Ġab")] + [
        f"madeupword000{filler}" for filler in range(3)
    ]


def test_conversion(convert, make, bpe, twelve):
    output = convert(checkpoint_with_dictionary(convert, make, twelve), "--bpe", bpe)
    tokenizer = AutoTokenizer.from_pretrained(output)
    text = "abc the abx"
    assert tokenizer(text).input_ids == Reference(MERGES, twelve)(text)
    assert tokenizer.model_max_length == make.POSITIONS and len(tokenizer) == make.VOCABULARY
    report = json.loads((output / "conversion_report.json").read_text(encoding="utf-8"))
    entry = report["tokenizer"]
    assert (entry["class"], entry["size"]) == ("LunaTokenizer", make.VOCABULARY)
    assert "x" in entry["missing_pieces"] and "abc" not in entry["missing_pieces"]
    assert len(entry["missing_pieces"]) == 256 + len(MERGES) - 9
    assert sorted(report["files"]) == sorted(file.name for file in output.iterdir())
    assert "259 pieces become <unk>" in convert.screen and "needs trust_remote_code=True" in convert.screen
    assert "no tokenizer" not in convert.screen
    assert "AutoTokenizer" in (output / "README.md").read_text(encoding="utf-8")
    model = transformers.AutoModelForMaskedLM.from_pretrained(output)
    assert model(**tokenizer([text, "a <mask>"], padding=True, return_tensors="pt")).logits.shape[-1] == len(tokenizer)


def test_without_bpe_a_note_names_the_option(convert, make, twelve):
    output = convert(checkpoint_with_dictionary(convert, make, twelve))
    assert "no tokenizer: --bpe DIR" in convert.screen
    assert not (output / "tokenizer.json").exists()
    assert "AutoTokenizer" not in (output / "README.md").read_text(encoding="utf-8")
    assert json.loads((output / "conversion_report.json").read_text(encoding="utf-8"))["tokenizer"] is None
    with pytest.raises(ValueError, match="the folder has no tokenizer.*--bpe"):
        AutoTokenizer.from_pretrained(output)


def test_overwritten_line_is_the_later_id(tmp_path, bpe):
    dictionary = dictionary_of(tmp_path, NUMBERS, f"{NUMBERS[5]} 1 #fairseq:overwrite\n")
    tokenizer, missing = bpe_tokenizer(dictionary, read_gpt2_bpe(bpe), "<mask>", 20)
    assert missing == [] and len(tokenizer) == 4 + len(NUMBERS) + 2
    assert tokenizer.convert_ids_to_tokens(4 + 5) == tokenizer.convert_ids_to_tokens(4 + len(NUMBERS)) + " (id 9)"


def test_bpe_errors_are_one_line(convert, make, bpe, twelve):
    state = make.bert()
    assert "there is no dictionary next to the checkpoint; pass it with --dict" in convert.error(state, "--bpe", bpe)
    state = checkpoint_with_dictionary(convert, make, twelve)
    assert "has neither encoder.json and vocab.bpe nor" in convert.error(state, "--bpe", convert.source)
    make.dictionary(convert.source / "dict.txt")
    assert "symbol 'w0' is not a number" in convert.error(state, "--bpe", bpe)
    checkpoint_with_dictionary(convert, make, [*twelve[:-1], "70000"])
    assert "symbol '70000' is no GPT-2 id; they end at 268" in convert.error(state, "--bpe", bpe)
    assert "LRA has no byte-pair encoding" in convert.error(make.lra21(), "--bpe", bpe)
    make.dictionary(convert.source / "dict.txt", symbols=make.SYMBOLS + 1)
    assert f"{make.VOCABULARY} embeddings" in convert.error(state, "--bpe", bpe)


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("encoder.json", b"{", "encoder.json: not JSON"),
        ("encoder.json", b"[]", "not a JSON object"),
        ("encoder.json", b"\xff", "encoder.json: not JSON"),
        ("encoder.json", b'{"!": 0, "#": 1}', "'\"' has id None, by vocab.bpe it has 1"),
        ("encoder.json", b'{"!": 4}', "'!' has id 4, by vocab.bpe it has 0"),
        ("vocab.bpe", b"#version: 0.2\n", "the file is empty"),
        ("vocab.bpe", b"#version: 0.2\na b c\n", "'a b c' is not a pair"),
        ("vocab.bpe", b"#version: 0.2\nq q\n", "'qq' has id None, by vocab.bpe it has 256"),
    ],
)
def test_files_that_are_not_gpt2s(bpe, file, content, expected):
    (bpe / file).write_bytes(content)
    with pytest.raises(ConversionError) as error:
        read_gpt2_bpe(bpe)
    assert expected in str(error.value)


def test_byte_order_marks(bpe):
    expected = read_gpt2_bpe(bpe)
    for file in bpe.iterdir():
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert read_gpt2_bpe(bpe) == expected


def test_full_disk(tmp_path, thinned):
    output = tmp_path / "full"
    with pytest.raises(ConversionError, match="cannot write tokenizer.json"), complete_folder(output) as folder:
        (folder / "tokenizer.json").symlink_to("/dev/full")
        ConvertedTokenizer(thinned, "GPT-2 byte-pair encoding", []).save(folder)


def test_special_tokens_only_match_complete_symbols(tmp_path):
    """Special tokens match complete symbols only, not parts of words."""
    assert words(tmp_path, True)[0]("x</s>y", add_special_tokens=False).input_ids == [3]


def test_offsets_and_decoding_of_words(tmp_path):
    tokenizer = words(tmp_path, True)[0]
    text = " the\t😀  é"
    encoded = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
    assert [text[start:end] for start, end in encoded["offset_mapping"]] == ["", "the", "😀", "é", ""]
    assert encoded["special_tokens_mask"] == [1, 0, 0, 0, 1]
    assert tokenizer.decode(encoded["input_ids"]) == "<CLS> the 😀 é </s>"
    assert tokenizer.decode(encoded["input_ids"], skip_special_tokens=True) == "the 😀 é"


def test_truncation_keeps_the_end_and_can_do_as_the_original(tmp_path):
    tokenizer, expected = words(tmp_path, True)
    text, options = "the a 9 255 é 😀", {"truncation": True, "max_length": 6}
    assert tokenizer(text, **options).input_ids == [*expected(text)[:5], 2]
    original = tokenizer(f"<CLS> {text} </s>", add_special_tokens=False, **options).input_ids
    assert original == expected(text)[:6]


def test_words_that_are_split_already(tmp_path):
    tokenizer, expected = words(tmp_path, True)
    encoded = tokenizer(["the", "255", "x"], is_split_into_words=True)
    assert encoded.input_ids == expected("the 255 x") and encoded.word_ids() == [None, 0, 1, 2, None]


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
def test_conversion_of_words(convert, make, kind, args, starts_with_cls):
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
    model = transformers.AutoModelForSequenceClassification.from_pretrained(output).eval()
    batch = tokenizer(["w0 w2 x", "w1 " * 30], padding=True, truncation=True, return_tensors="pt")
    assert batch["input_ids"].shape == (2, make.POSITIONS) and model(**batch).logits.isfinite().all()


def test_decoding_of_translations(tmp_path):
    lines, merges = learned()
    symbols = count_symbols(lines, merges, least=40)
    tokenizer = translation_tokenizer(*write(tmp_path, symbols, merges))
    names = [*SPECIALS, *symbols]
    for text in [*lines, "abc zz öz"]:
        ids = tokenizer(text).input_ids[:-1]
        assert tokenizer.decode(ids) == remove_bpe(" ".join(names[index] for index in ids)), text
    complete = translation_tokenizer(*write(tmp_path, count_symbols(lines, merges), merges))
    assert complete.batch_decode(complete(lines)["input_ids"], skip_special_tokens=True) == lines


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


def test_decoding_of_text_that_is_split_already(tmp_path):
    tokenizer, _ = split_already(tmp_path)
    assert tokenizer.decode(tokenizer("ein Ha@@ us Boot .").input_ids[:-1]) == "ein Haus <unk> ."
    assert tokenizer.decode(tokenizer("ein Ha@@").input_ids, skip_special_tokens=True) == "ein Ha"
    assert tokenizer.decode([2], skip_special_tokens=True) == ""


def test_sentencepiece(tmp_path):
    symbols = ["▁ein", "▁Ha", "us", "."]
    tokenizer = translation_tokenizer(dictionary_of(tmp_path, symbols))
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
