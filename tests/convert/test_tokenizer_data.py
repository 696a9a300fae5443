"""The true vocabulary on real text: 10,000 texts of WikiText-2 and RACE, against plain Python and transformers."""

import json
import pickle
import random
import time

import pytest
import torch
from transformers import AddedToken, AutoTokenizer, RobertaTokenizer, pipeline

from luna_mega import LunaTokenizer
from luna_mega.convert.dictionaries import read_dictionary
from luna_mega.convert.tokenizers.gpt2_bpe import bpe_tokenizer, read_gpt2_bpe

parquet = pytest.importorskip("pyarrow.parquet")
regex = pytest.importorskip("regex")

PIECES = regex.compile(r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""")


@pytest.fixture(scope="module")
def data(shared_dir):
    return shared_dir / "data"


@pytest.fixture(scope="module")
def texts(data):
    """5,000 sentences of WikiText-2, and 5,000 lines, questions and options of RACE."""
    lines = parquet.read_table(data / "wikitext2_raw" / "test-00000-of-00001.parquet")["text"].to_pylist()
    wiki = [sentence for line in lines for sentence in regex.split(r"(?<= [.?!])(?= )", line)]
    race = []
    for row in parquet.read_table(data / "race_high" / "validation-00000-of-00001.parquet").to_pylist():
        race += [*row["article"].split("\n"), row["question"], *row["options"]]
    rng = random.Random(0)
    return [text for all_texts in (wiki, race) for text in rng.sample(sorted({*all_texts} - {""}), 5000)]


@pytest.fixture(scope="module")
def symbols(data):
    lines = (data / "roberta_bpe" / "dict.txt").read_text().splitlines()
    return [line.split(" ")[0] for line in lines]


@pytest.fixture(scope="module")
def complete(data):
    return bpe_tokenizer(
        read_dictionary(data / "roberta_bpe" / "dict.txt"), read_gpt2_bpe(data / "gpt2_bpe"), "<mask>", 512
    )


@pytest.fixture(scope="module")
def thinned(data, symbols, tmp_path_factory):
    """A dictionary without a third of the pieces, common and rare, and its tokenizer."""
    left = random.Random(1).sample(symbols, len(symbols) * 2 // 3)
    path = tmp_path_factory.mktemp("thinned") / "dict.txt"
    path.write_text("".join(f"{symbol} 1\n" for symbol in left))
    tokenizer, missing = bpe_tokenizer(read_dictionary(path), read_gpt2_bpe(data / "roberta_bpe"), "<mask>", 512)
    return left, tokenizer, missing


@pytest.fixture(scope="module")
def robertas(data):
    vocab = json.loads((data / "roberta_bpe" / "vocab.json").read_text(encoding="utf-8"))
    merges = (data / "roberta_bpe" / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]
    return RobertaTokenizer(
        vocab=vocab,
        merges=[tuple(merge.split()) for merge in merges],
        mask_token=AddedToken("<mask>", lstrip=True, special=True),
    )


class Gpt2:
    """GPT-2's encoder.py in plain Python: the pieces of a text as GPT-2 ids, and the bytes of a piece."""

    def __init__(self, folder):
        self.encoder = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
        merges = (folder / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:-1]
        self.ranks = {tuple(merge.split()): rank for rank, merge in enumerate(merges)}
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        self.alphabet = dict(zip(shown + [b for b in range(256) if b not in shown], self.encoder, strict=False))
        self.num_bytes = {number: len(piece) for piece, number in self.encoder.items()}
        self.seen = {}

    def __call__(self, text):
        ids = []
        for word in PIECES.findall(text):
            if word not in self.seen:
                self.seen[word] = [self.encoder[piece] for piece in self.bpe(word)]
            ids += self.seen[word]
        return ids

    def bpe(self, word):
        symbols = [self.alphabet[byte] for byte in word.encode()]
        while True:
            ranked = [
                (self.ranks[pair], at)
                for at, pair in enumerate(zip(symbols, symbols[1:], strict=False))
                if pair in self.ranks
            ]
            if not ranked:
                return symbols
            at = min(ranked)[1]
            symbols[at : at + 2] = ["".join(symbols[at : at + 2])]

    def offsets(self, text):
        """Character range of every piece, without the spaces at its ends."""
        of_byte = [at for at, character in enumerate(text) for _ in character.encode()]
        ranges, start = [], 0
        for number in self(text):
            end = start + self.num_bytes[number]
            first, last = of_byte[start], of_byte[end - 1] + 1
            start = end
            while first < last and text[first] == " ":
                first += 1
            while last > first and text[last - 1] == " ":
                last -= 1
            ranges.append((first, last))
        return ranges


@pytest.fixture(scope="module")
def gpt2(data):
    return Gpt2(data / "gpt2_bpe")


def remap(gpt2, symbols, texts):
    index = {symbol: 4 + line for line, symbol in enumerate(symbols)}
    return [[0, *(index.get(str(number), 3) for number in gpt2(text)), 2] for text in texts]


def test_ids(texts, symbols, complete, gpt2):
    tokenizer, missing = complete
    assert type(tokenizer) is RobertaTokenizer and missing == [] and len(tokenizer) == 50265
    assert tokenizer(texts).input_ids == remap(gpt2, symbols, texts)


@pytest.mark.slow
def test_ids_of_a_thinned_dictionary(texts, thinned, gpt2):
    left, tokenizer, missing = thinned
    assert type(tokenizer) is LunaTokenizer and len(missing) > 15_000 and len(tokenizer) == 4 + len(left) + 1
    expected = remap(gpt2, left, texts)
    assert tokenizer(texts).input_ids == expected
    assert sum(ids.count(3) for ids in expected) > 50_000


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["complete", "thinned"])
def test_offsets(texts, kind, request, gpt2):
    tokenizer = request.getfixturevalue(kind)[-2]
    found = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    assert found == [gpt2.offsets(text) for text in texts]


@pytest.mark.slow
def test_decode(texts, complete):
    ids = complete[0](texts, add_special_tokens=False).input_ids
    assert complete[0].batch_decode(ids) == texts


@pytest.mark.slow
def test_pickled_and_reloaded(texts, complete, thinned, tmp_path):
    for tokenizer in (complete[0], thinned[1]):
        tokenizer.save_pretrained(tmp_path / type(tokenizer).__name__)
        expected = dict(tokenizer(texts[:2000], return_offsets_mapping=True))
        for other in (
            pickle.loads(pickle.dumps(tokenizer)),
            AutoTokenizer.from_pretrained(tmp_path / type(tokenizer).__name__),
        ):
            assert dict(other(texts[:2000], return_offsets_mapping=True)) == expected


@pytest.mark.slow
def test_equals_transformers_roberta(texts, complete, robertas):
    tokenizer = complete[0]
    assert tokenizer.get_vocab() == robertas.get_vocab()
    masked = [text.replace(" the", " <mask>", 1) for text in texts]
    pairs = {"text": masked[:-1], "text_pair": masked[1:], "truncation": True, "max_length": 60}
    for options in ({"text": masked}, pairs):
        options |= {"return_offsets_mapping": True, "return_special_tokens_mask": True}
        assert dict(tokenizer(**options)) == dict(robertas(**options))


def test_special_tokens_in_text(complete, symbols, gpt2):
    """Special tokens in a text are recognized, as in transformers; one option treats them as text, as in fairseq."""
    texts = ["a <unk> in WikiText</s>"]
    assert complete[0](texts).input_ids[0].count(3) == 1
    assert complete[0](texts, split_special_tokens=True).input_ids == remap(gpt2, symbols, texts)


@pytest.mark.slow
def test_speed(texts, complete, thinned, robertas, monkeypatch):
    """Processor time: the best of seven alternating rounds for every 250 texts; `pytest -s` shows the rates."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    tokenizers = {"transformers' RoBERTa": robertas, "complete": complete[0], "thinned": thinned[1]}
    seconds, tokens = dict.fromkeys(tokenizers, 0.0), 0
    for first in range(0, len(texts), 250):
        batch = texts[first : first + 250]
        times = {name: [] for name in tokenizers}
        for _ in range(7):
            for name, tokenizer in tokenizers.items():
                start = time.process_time()
                ids = tokenizer(batch).input_ids
                times[name].append(time.process_time() - start)
        seconds = {name: seconds[name] + min(times[name]) for name in tokenizers}
        tokens += sum(map(len, ids))
    for name in tokenizers:
        ratio = seconds[name] / seconds["transformers' RoBERTa"]
        print(f"\n{name:25}{tokens / seconds[name]:12,.0f} tokens/s, {ratio:.3f} of its time", end="")
        assert ratio < 1.1, name


def test_fill_mask_after_conversion(convert, make, data, texts):
    state, embedding = make.bert(), torch.randn(50265, make.WIDTH)
    state["model"]["encoder.sentence_encoder.embed_tokens.weight"] = embedding
    state["model"] |= {"encoder.lm_head.weight": embedding, "encoder.lm_head.bias": torch.randn(50265)}
    output = convert(state, "--dict", data / "roberta_bpe" / "dict.txt", "--bpe", data / "gpt2_bpe")
    assert "RobertaTokenizer, GPT-2 byte-pair encoding, 50,265 ids\n" in convert.screen
    fill = pipeline("fill-mask", model=str(output))
    question = next(text for text in texts if " the " in text and len(text) < 60).replace(" the ", " <mask> ", 1)
    answers = fill(question, top_k=3)
    ids = fill.tokenizer(question, return_tensors="pt")
    logits = fill.model(**ids).logits[0, ids["input_ids"][0] == 50264]
    assert [answer["token"] for answer in answers] == logits.topk(3).indices[0].tolist()
    for answer in answers:
        assert (
            answer["token_str"] == fill.tokenizer.decode([answer["token"]])
            and answer["token_str"] in answer["sequence"]
        )
