import pytest

from luna_mega.training import load_tokenizer, tokenizers

TEXTS = ["the quick brown fox", "the lazy dog", "quick dogs and lazy foxes"] * 20


@pytest.fixture(scope="module")
def bpe(script):
    return tokenizers


@pytest.fixture(scope="module")
def tokenizer(bpe):
    return bpe.train_bpe(TEXTS, vocab_size=300, model_max_length=64)


def test_special_tokens_have_the_ids_of_roberta(tokenizer):
    assert tokenizer.convert_tokens_to_ids(["<s>", "<pad>", "</s>", "<unk>"]) == [0, 1, 2, 3]
    assert tokenizer.mask_token_id == len(tokenizer) - 1 < 300
    assert tokenizer.model_max_length == 64


def test_formats_of_sentence_and_pair(tokenizer):
    first, second = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("the fox", "dogs"))
    assert tokenizer("the fox")["input_ids"] == [0, *first, 2]
    assert tokenizer("the fox", "dogs")["input_ids"] == [0, *first, 2, 2, *second, 2]
    assert set(tokenizer("the fox", "dogs")) == {"input_ids", "attention_mask"}


def test_first_word_has_a_leading_space(tokenizer):
    first, _, third = tokenizer.tokenize("quick the quick")
    assert first == third


def test_mask_takes_the_space_before_it(tokenizer):
    assert tokenizer("the <mask>")["input_ids"] == tokenizer("the<mask>")["input_ids"]


def test_every_text_survives(tokenizer):
    text = "naïve 文字 🙂\tx"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == text


def test_bare_roberta_files_load(script, tokenizer, tmp_path):
    tokenizer.backend_tokenizer.model.save(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"vocab.json", "merges.txt"}
    again = load_tokenizer(str(tmp_path))
    assert again(" x the fox")["input_ids"] == tokenizer("x the fox")["input_ids"]


def test_vocabulary_too_small_for_all_bytes(bpe):
    with pytest.raises(ValueError, match=r"vocab_size \(260\) must be at least 261"):
        bpe.train_bpe(TEXTS, 260, 64)
