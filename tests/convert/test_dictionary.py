"""Dictionaries of words, bytes and labels, in every place where a conversion looks for them."""

import json

import pytest
import torch
from transformers import AutoModelForImageClassification, AutoTokenizer

from luna_mega.convert import ConversionError
from luna_mega.convert.dictionaries import read_dictionary
from tests.convert.folders import load
from tests.convert.mega import POSITIONS, SYMBOLS, VOCABULARY, mega, mega_image
from tests.convert.mega_lm import VOCABULARY as LM_VOCABULARY, mega_lm


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


@pytest.mark.parametrize(("pooling", "starts"), [("cls", True), ("mp", False)])
def test_dictionary_and_tokenizer(convert, make, pooling, starts):
    make.dictionary(convert.source / "dict.txt")
    make.dictionary(convert.source / "label-bin" / "dict.txt", symbols=3, prefix="class")
    model = load(convert(mega(sen_rep_type=pooling, classes=3)))
    assert model.config.pooling == ("cls" if starts else "mean")
    assert model.config.id2label == {0: "class0", 1: "class1", 2: "class2"}
    tokenizer = AutoTokenizer.from_pretrained(convert.output)
    assert tokenizer("w0 w3").input_ids == [VOCABULARY - 1] * starts + [4, 7, 2]
    assert tokenizer.model_max_length == POSITIONS
    assert ("every sequence starts with <CLS>, id 16" in convert.screen) is starts


def test_dictionary_with_cls_and_one_of_another_model(convert, make):
    dictionary = make.dictionary(convert.source / "dict.txt")
    dictionary.write_text(dictionary.read_text(encoding="utf-8") + "<CLS> 1\n", encoding="utf-8")
    assert (convert(mega()) / "dict.txt").is_file()
    convert.output = convert.output.with_name("other")
    make.dictionary(dictionary, symbols=SYMBOLS + 1)
    assert "symbols do not fit the model" in convert.error(mega())


def test_files(convert):
    convert.save(mega_image())
    folder = convert(None)
    assert "AutoImageProcessor" in (folder / "README.md").read_text(encoding="utf-8")
    assert '"crop_size": {\n    "height": 12' in (folder / "preprocessor_config.json").read_text(encoding="utf-8")


def test_names_of_classes(convert, tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("tench, Tinca tinca\ngoldfish\nshark\nhen\ncrane\n", encoding="utf-8")
    model = AutoModelForImageClassification.from_pretrained(convert(mega_image(), "--dict", names))
    assert model.config.id2label[0] == "tench, Tinca tinca" and model.config.label2id["crane"] == 4


@pytest.mark.parametrize(
    ("text", "named"),
    [("a\nb\n", "2 lines for 5 classes"), ("a\n\nb\nc\nd\n", "line 2 is empty"), (None, "no such file")],
)
def test_invalid_label_names(convert, tmp_path, text, named):
    names = tmp_path / "names.txt"
    if text is not None:
        names.write_text(text, encoding="utf-8")
    assert named in convert.error(mega_image(), "--dict", names)


def write_dictionary(convert, symbols):
    path = convert.source / "dict.txt"
    path.write_text("".join(f"{symbol} 1\n" for symbol in symbols), encoding="utf-8")


def test_words(convert):
    write_dictionary(convert, [*(f"w{index}" for index in range(26)), "madeupword0000", "madeupword0001"])
    model = load(convert(mega_lm(rotary=False, chunk=-1)))
    tokenizer = AutoTokenizer.from_pretrained(convert.output)
    assert tokenizer("w0 x  w2\nw3 </s> \n\nw4").input_ids == [2, 4, 3, 6, 2, 7, 2, 2, 2, 8]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2, 1)
    assert tokenizer.model_max_length == POSITIONS and len(tokenizer) == LM_VOCABULARY
    written = model.generate(**tokenizer("w0 w1", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(written[0], skip_special_tokens=True).startswith("w0 w1")
    assert model.generate(max_new_tokens=2, do_sample=False)[0, 0] == 2


def test_bytes(convert):
    symbols = [101, 32, 116, 97, 195, 169, 60, 47, 115, 62, *range(200, 217)]
    write_dictionary(convert, [*symbols, "madeupword0000"])
    load(convert(mega_lm()))
    tokenizer = AutoTokenizer.from_pretrained(convert.output)
    ids = {byte: 4 + index for index, byte in enumerate(symbols)} | {10: 2}
    text = "tea é\n\n</s>  ate\n"
    assert tokenizer(text).input_ids == [ids[byte] for byte in text.encode()]
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("b").input_ids == [3] and tokenizer.eos_token_id == tokenizer.bos_token_id == 2
    assert len(tokenizer) == LM_VOCABULARY and tokenizer.model_max_length > 1e9
    assert "bytes, 32 ids" in convert.screen


def test_bytes_with_a_separate_newline(convert):
    write_dictionary(convert, range(28))
    load(convert(mega_lm()))
    tokenizer = AutoTokenizer.from_pretrained(convert.output)
    assert tokenizer("\n").input_ids == [14] and tokenizer.eos_token == "</s>" and tokenizer.eos_token_id == 2


def test_dictionary_of_another_size(convert):
    write_dictionary(convert, range(300))
    assert "(4 specials + 300 symbols = 304)" in convert.error(mega_lm())


def test_bpe_of_a_dictionary_that_lacks_pieces(convert, shared_dir):
    write_dictionary(convert, range(28))
    message = convert.error(mega_lm(), "--bpe", shared_dir / "data" / "gpt2_bpe")
    assert "of GPT-2's pieces" in message and "omit --bpe" in message
    (convert.source / "dict.txt").unlink()
    assert "no dictionary next to" in convert.error(mega_lm(), "--bpe", shared_dir / "data" / "gpt2_bpe")


def test_bpe(convert, shared_dir):
    """A dictionary may contain all of GPT-2's pieces in a different order."""
    write_dictionary(convert, [*range(50256, -1, -1)])
    state = mega_lm()
    for name in ("decoder.embed_tokens.weight", "decoder.output_projection.weight"):
        state["model"][name] = torch.randn(50261, 16)
    load(convert(state, "--bpe", shared_dir / "data" / "gpt2_bpe"))
    tokenizer = AutoTokenizer.from_pretrained(convert.output)
    assert tokenizer("Hello world").input_ids == [2, *(4 + 50256 - piece for piece in (15496, 995))]
    assert tokenizer.decode(tokenizer("Hello world").input_ids, skip_special_tokens=True) == "Hello world"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2, 1)
    assert len(tokenizer) == 50261 and "GPT-2 byte-pair encoding" in convert.screen
