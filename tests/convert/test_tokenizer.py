"""Fast tokenizers made of GPT-2 BPE and a dictionary, compared with plain Python on small files."""

import json
import pickle
import random

import pytest
import transformers
from transformers import AutoTokenizer, RobertaTokenizer

from luna_mega import LunaTokenizer
from luna_mega.convert import ConversionError
from luna_mega.convert.dictionaries import read_dictionary
from luna_mega.convert.tokenizers import ConvertedTokenizer
from luna_mega.convert.tokenizers.gpt2_bpe import bpe_tokenizer, read_gpt2_bpe
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


@pytest.fixture
def bpe(tmp_path):
    return write_bpe(tmp_path / "bpe")


@pytest.fixture
def numbers():
    """Return the ids of all pieces of the small files in another order, followed by two filler symbols."""
    symbols = [str(number) for number in range(256 + len(MERGES) + 1)]
    random.shuffle(symbols)
    return [*symbols, "madeupword0000", "madeupword0001"]


def build(tmp_path, bpe, symbols, max_length=20):
    path = tmp_path / "symbols.txt"
    path.write_text("".join(f"{symbol} 1\n" for symbol in symbols), encoding="utf-8")
    return bpe_tokenizer(read_dictionary(path), read_gpt2_bpe(bpe), "<mask>", max_length)


def without(numbers, *pieces):
    number = Reference(MERGES, []).number
    return [symbol for symbol in numbers if symbol not in {number[piece] for piece in pieces}]


def test_complete_dictionary(tmp_path, bpe, numbers):
    tokenizer, missing = build(tmp_path, bpe, numbers)
    reference = Reference(MERGES, numbers)
    assert type(tokenizer) is RobertaTokenizer and missing == []
    assert len(tokenizer) == tokenizer.vocab_size == 4 + len(numbers) + 1
    for text in TEXTS:
        encoded = tokenizer(text)
        assert encoded["input_ids"] == reference(text), text
        assert set(encoded) == {"input_ids", "attention_mask"}
        assert tokenizer.decode(encoded["input_ids"], skip_special_tokens=True) == text
    assert tokenizer.convert_tokens_to_ids(["<s>", "<pad>", "</s>", "<unk>"]) == [0, 1, 2, 3]
    assert tokenizer.convert_tokens_to_ids("madeupword0001") == 4 + numbers.index("madeupword0001")
    assert (tokenizer.model_max_length, tokenizer.padding_side, tokenizer.truncation_side) == (20, "right", "right")


def test_mask_takes_the_space_before_it(tmp_path, bpe, numbers):
    tokenizer, _ = build(tmp_path, bpe, numbers)
    mask = tokenizer.mask_token_id
    assert mask == len(tokenizer) - 1
    the = tokenizer.convert_tokens_to_ids(["Ġthe", "a"])
    assert tokenizer(" the <mask>a", add_special_tokens=False).input_ids == [the[0], mask, the[1]]


def test_pairs(tmp_path, bpe, numbers):
    tokenizer, _ = build(tmp_path, bpe, numbers)
    first, second = (Reference(MERGES, numbers)(text) for text in ("abc the", " the"))
    assert tokenizer("abc the", " the").input_ids == [*first, 2, *second[1:]]


@pytest.mark.parametrize("lacks", [["Ġthe"], ["Ġt", "he"], ["abc", "h"], ["ab"], ["Ã©", "a", "abcab"]])
def test_missing_piece_is_one_unknown(tmp_path, bpe, numbers, lacks):
    symbols = without(numbers, *lacks)
    tokenizer, missing = build(tmp_path, bpe, symbols)
    reference = Reference(MERGES, symbols)
    assert sorted(missing) == sorted(lacks) and len(tokenizer) == 4 + len(symbols) + 1
    assert type(tokenizer) is LunaTokenizer
    words = ["".join(random.choices(" abct hé", k=random.randrange(9))) for _ in range(500)]
    texts = [*TEXTS, *words, "the".join(words[:9])]
    assert tokenizer(texts).input_ids == [reference(text) for text in texts]
    assert any(3 in reference(text) for text in texts)
    for text in texts:
        assert tokenizer(text).tokens()[1:-1] == reference.pieces(text)


def test_text_of_unknown_tokens_only(tmp_path, bpe):
    tokenizer, missing = build(tmp_path, bpe, ["madeupword0000"])
    assert len(missing) == 256 + len(MERGES) and len(tokenizer) == 6
    assert tokenizer("the abc").input_ids == [0, 3, 3, 3, 3, 2]  # the pieces are t, he, Ġ and abc


def test_end_of_text_is_no_loss(tmp_path, bpe, numbers):
    tokenizer, missing = build(tmp_path, bpe, [symbol for symbol in numbers if symbol != str(256 + len(MERGES))])
    assert type(tokenizer) is RobertaTokenizer and missing == []


@pytest.fixture
def thinned(tmp_path, bpe, numbers):
    tokenizer, _ = build(tmp_path, bpe, without(numbers, "Ġthe", "ab", "Ã"))
    return tokenizer


def test_thinned_vocabulary_has_no_other_ids(thinned):
    size = len(thinned)
    vocab = thinned.get_vocab()
    assert sorted(vocab.values()) == list(range(size)) and thinned.vocab_size == size
    assert thinned.mask_token_id == size - 1
    assert thinned.convert_tokens_to_ids(["Ġthe", "he", "<mask>"]) == [3, vocab["he"], size - 1]
    for token, index in vocab.items():
        assert thinned.convert_ids_to_tokens(index) == token
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


@pytest.mark.parametrize("lacks", [(), ("Ġthe", "ab")])
def test_pickled_and_reloaded(tmp_path, bpe, numbers, lacks):
    tokenizer, _ = build(tmp_path, bpe, without(numbers, *lacks))
    tokenizer.save_pretrained(tmp_path / "saved")
    for other in (pickle.loads(pickle.dumps(tokenizer)), AutoTokenizer.from_pretrained(tmp_path / "saved")):
        assert type(other) is type(tokenizer)
        assert other.get_vocab() == tokenizer.get_vocab() and len(other) == len(tokenizer)
        assert other.model_max_length == 20 and other.padding_side == "right"
        texts = [*TEXTS, "a <mask> the"]
        for options in ({}, {"return_offsets_mapping": True, "return_special_tokens_mask": True}):
            assert dict(other(texts, **options)) == dict(tokenizer(texts, **options))


@pytest.mark.parametrize("lacks", [(), ("abc",)])
def test_space_before_the_first_word(tmp_path, bpe, numbers, lacks):
    build(tmp_path, bpe, without(numbers, *lacks))[0].save_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved", add_prefix_space=True)
    tokenizer.save_pretrained(tmp_path / "again")
    for other in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "again")):
        encoded = other("the abc", add_special_tokens=False, return_offsets_mapping=True)
        assert encoded.tokens() == ["Ġthe", "Ġ", "abc"]
        assert encoded["offset_mapping"] == [(0, 3), (4, 4), (4, 7)]
        words = other(["the", "abc"], add_special_tokens=False, is_split_into_words=True)
        assert words.tokens() == encoded.tokens() and words.word_ids() == [0, 1, 1]


def test_both_kinds_of_folder(tmp_path, bpe, numbers):
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


def test_overwritten_line_is_the_later_id(tmp_path, bpe, numbers):
    path = tmp_path / "symbols.txt"
    path.write_text(
        "".join(f"{symbol} 1\n" for symbol in numbers) + f"{numbers[5]} 1 #fairseq:overwrite\n", encoding="utf-8"
    )
    tokenizer, missing = bpe_tokenizer(read_dictionary(path), read_gpt2_bpe(bpe), "<mask>", 20)
    assert missing == [] and len(tokenizer) == 4 + len(numbers) + 2
    assert tokenizer.convert_ids_to_tokens(4 + 5) == tokenizer.convert_ids_to_tokens(4 + len(numbers)) + " (id 9)"


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
