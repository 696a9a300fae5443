"""The complete GPT-2 vocabulary on 2,000 texts of WikiText-2 and RACE, compared with plain Python and transformers."""

import json
import random

import pytest
import torch
from transformers import AddedToken, RobertaTokenizer, pipeline

from luna_mega.convert import convert_checkpoint
from luna_mega.convert.dictionaries import read_dictionary
from luna_mega.convert.tokenizers.gpt2_bpe import bpe_tokenizer, read_gpt2_bpe

parquet = pytest.importorskip("pyarrow.parquet")
regex = pytest.importorskip("regex")
from tests.convert import luna  # noqa: E402
from tests.convert.bpe import Gpt2  # noqa: E402  # requires regex
from tests.convert.contract import save  # noqa: E402
from tests.marks import slow_but  # noqa: E402


@pytest.fixture(scope="module")
def data(shared_dir):
    return shared_dir / "data"


@pytest.fixture(scope="module")
def texts(data):
    """Return 1,000 sentences of WikiText-2, and 1,000 lines, questions and options of RACE."""
    lines = parquet.read_table(data / "wikitext2_raw" / "test-00000-of-00001.parquet")["text"].to_pylist()
    wiki = [sentence for line in lines for sentence in regex.split(r"(?<= [.?!])(?= )", line)]
    race = []
    for row in parquet.read_table(data / "race_high" / "validation-00000-of-00001.parquet").to_pylist():
        race += [*row["article"].split("\n"), row["question"], *row["options"]]
    rng = random.Random(0)
    return [text for all_texts in (wiki, race) for text in rng.sample(sorted({*all_texts} - {""}), 1000)]


@pytest.fixture(scope="module")
def symbols(data):
    lines = (data / "roberta_bpe" / "dict.txt").read_text(encoding="utf-8").splitlines()
    return [line.split(" ")[0] for line in lines]


@pytest.fixture(scope="module")
def complete(data):
    return bpe_tokenizer(
        read_dictionary(data / "roberta_bpe" / "dict.txt"), read_gpt2_bpe(data / "gpt2_bpe"), "<mask>", 512
    )


@pytest.fixture(scope="module")
def robertas(data):
    vocab = json.loads((data / "roberta_bpe" / "vocab.json").read_text(encoding="utf-8"))
    merges = (data / "roberta_bpe" / "merges.txt").read_text(encoding="utf-8").splitlines()[1:]
    return RobertaTokenizer(
        vocab=vocab,
        merges=[tuple(merge.split()) for merge in merges],
        mask_token=AddedToken("<mask>", lstrip=True, special=True),
    )


@pytest.fixture(scope="module")
def gpt2(data):
    return Gpt2((data / "gpt2_bpe" / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:-1])


@pytest.mark.parametrize("step", slow_but([4], [4, 1]))
def test_ids(texts, symbols, complete, gpt2, step):
    (tokenizer, missing), texts = complete, texts[::step]
    assert type(tokenizer) is RobertaTokenizer and missing == [] and len(tokenizer) == 50265
    assert tokenizer(texts).input_ids == gpt2.encode(symbols, texts)


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
    """Special tokens in a text are recognized, as in transformers; an option treats them as text, as in fairseq."""
    texts = ["a <unk> in WikiText</s>"]
    assert complete[0](texts).input_ids[0].count(3) == 1
    assert complete[0](texts, split_special_tokens=True).input_ids == gpt2.encode(symbols, texts)


def test_fill_mask_after_conversion(tmp_path, data, texts):
    state, embedding = luna.bert(), torch.randn(50265, luna.WIDTH)
    state["model"]["encoder.sentence_encoder.embed_tokens.weight"] = embedding
    state["model"] |= {"encoder.lm_head.weight": embedding, "encoder.lm_head.bias": torch.randn(50265)}
    options = {"dictionaries": [data / "roberta_bpe" / "dict.txt"], "bpe": data / "gpt2_bpe"}
    report = convert_checkpoint(save(state, tmp_path), tmp_path / "model", **options)
    assert "RobertaTokenizer, GPT-2 byte-pair encoding, 50,265 ids\n" in str(report)
    fill = pipeline("fill-mask", model=str(tmp_path / "model"))
    question = next(text for text in texts if " the " in text and len(text) < 60).replace(" the ", " <mask> ", 1)
    answers = fill(question, top_k=3)
    ids = fill.tokenizer(question, return_tensors="pt")
    logits = fill.model(**ids).logits[0, ids["input_ids"][0] == 50264]
    assert [answer["token"] for answer in answers] == logits.topk(3).indices[0].tolist()
    for answer in answers:
        word = answer["token_str"]
        assert word == fill.tokenizer.decode([answer["token"]]) and word in answer["sequence"]
