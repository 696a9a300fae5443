"""Dictionaries, labels and tokenizers of every kind of model, in every place where a conversion looks for them.

A row of `CONVERSIONS` is a checkpoint with files next to it and the tokenizer and labels of the converted folder; a row
of `FAULTS` is one with the error. `test_tokenizer.py` compares tokenizers with the steps of the original.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoTokenizer

from luna_mega.convert import ConversionError, convert_checkpoint
from luna_mega.convert.dictionaries import read_dictionary
from tests.convert import luna
from tests.convert.contract import State, changed, check_message, save, saved_report
from tests.convert.folders import lines, load, words
from tests.convert.luna import bert, lra21, lra23
from tests.convert.mega import POSITIONS, mega, mega_image
from tests.convert.mega_lm import mega_lm
from tests.convert.translation import MEGA_KINDS, checkpoint, mega_seq2seq

pytest.importorskip("regex")
from tests.convert.bpe import MERGES, Gpt2, write_bpe  # noqa: E402  # requires regex

NUMBER = Gpt2(MERGES).number
PIECES = ("Ġthe", "he", "a", "b", "c", "Ġ", "abc", "t", "Ġab")
NUMBERS = [*(NUMBER[piece] for piece in PIECES), *(f"madeupword000{index}" for index in range(3))]
BYTES = [101, 32, 116, 97, 195, 169, 60, 47, 115, 62, *range(200, 217)]
ID_OF_BYTE = {byte: 4 + index for index, byte in enumerate(BYTES)} | {10: 2}
TEXT = "tea é\n\n</s>  ate\n"
LAST = len(NUMBER) + 1  # GPT-2's pieces and <|endoftext|>
FILLERS = lines(["madeupword0000", "madeupword0001"])


def language_model(rows: int) -> State:
    """Return a language model with another number of words."""
    state = mega_lm()
    names = ("decoder.embed_tokens.weight", "decoder.output_projection.weight")
    return changed(state, state["model"] | {name: torch.randn(rows, 16) for name in names})


def translation(**fields: Any) -> State:
    return checkpoint(mega_seq2seq(**fields))


two_vocabularies = functools.partial(translation, **MEGA_KINDS["two vocabularies"])


class Row(NamedTuple):
    """A checkpoint with files, and a part of what its conversion gives.

    Args:
        build: Function that returns the checkpoint.
        files: Content of files in the folder of the checkpoint.
        options: Options of the conversion.
        ids: Ids of the text; None if there is no tokenizer.
        text: Text.
        length: Maximum length of the tokenizer; None for no maximum.
        labels: Names of the classes.
        copies: Names of files in the converted folder, and those next to the checkpoint.
        report: Parts of the report (after a !: not in it).
    """

    build: Callable[[], State]
    files: dict[str, str]
    options: dict[str, Any] = {}
    ids: list[int] | None = None
    text: str = "w0 w2 x"
    length: int | None = luna.POSITIONS
    labels: list[str] | None = None
    copies: dict[str, str] = {}
    report: tuple[str, ...] = ()


def symbols_of(build: Callable[..., State], starts: bool = True, length: int = luna.POSITIONS, **args: Any) -> Row:
    """Return a row of an LRA model; its sequences start with the last id if the model pools the first position."""
    found = ("whitespace-separated symbols, 17 ids", f"{'!' * (not starts)}every sequence starts with <CLS>, id 16")
    return Row(
        lambda: build(**args), {"src-bin/dict.txt": words(12)}, {}, [16] * starts + [4, 6, 3, 2],
        length=length, copies={"dict.txt": "src-bin/dict.txt"}, report=found,
    )  # fmt: skip


CONVERSIONS = {
    **{
        f"no byte pairs, {place}": Row(
            bert, {place: words(12)}, copies={"dict.txt": place}, report=("no tokenizer: --bpe DIR", "!no dictionary")
        )
        for place in ("dict.txt", "src-bin/dict.txt", "input0/dict.txt")
    },
    "byte pairs": Row(
        bert, {"dict.txt": lines(NUMBERS)}, {"bpe": "bpe"}, Gpt2(MERGES).encode(NUMBERS, ["abc the abx"])[0],
        "abc the abx", report=("259 pieces become <unk>", "needs trust_remote_code=True", "!no tokenizer"),
    ),
    "symbols, 2021": symbols_of(lra21),
    "symbols, 2023": symbols_of(lra23, sen_rep_type="cls"),
    "symbols, 2023, mean": symbols_of(lra23, starts=False, sen_rep_type="mp"),
    "symbols, Mega": symbols_of(mega, length=POSITIONS, sen_rep_type="cls"),
    "a dictionary with <CLS>": Row(
        lambda: mega(sen_rep_type="cls"), {"dict.txt": words(12) + "<CLS> 1\n"}, {}, [16, 4, 6, 3, 2], length=POSITIONS
    ),
    "words": Row(
        lambda: mega_lm(rotary=False, chunk=-1), {"dict.txt": words(26) + FILLERS}, {}, [2, 4, 3, 6, 2, 7, 2, 2, 2, 8],
        "w0 x  w2\nw3 </s> \n\nw4", POSITIONS,
    ),
    "bytes": Row(
        mega_lm, {"dict.txt": lines([*BYTES, "madeupword0000"])}, {}, [ID_OF_BYTE[byte] for byte in TEXT.encode()],
        TEXT, report=("bytes, 32 ids",), length=None,
    ),
    "bytes with a newline": Row(mega_lm, {"dict.txt": lines(range(28))}, {}, [14, 3], "\nb", None),
    "all byte pairs in another order": Row(
        lambda: language_model(4 + LAST), {"dict.txt": lines(range(LAST - 1, -1, -1))}, {"bpe": "bpe"},
        [2, *(3 + LAST - int(NUMBER[piece]) for piece in ("abc", "Ġthe"))], "abc the", None,
        report=("GPT-2 byte-pair encoding",),
    ),
    "two languages": Row(
        two_vocabularies, {"en": words(15), "de": words(10)}, {"dictionaries": ["de", "en"]}, [4, 6, 3, 2],
        copies={"dict.txt": "en", "dict.target.txt": "de"}, length=None,
    ),
    "the first language is the source": Row(
        lambda: translation(share_encoder_decoder_embeddings=False), {"a": words(15, "v"), "b": words(15)},
        {"dictionaries": ["b", "a"]}, [4, 6, 3, 2], copies={"dict.txt": "b", "dict.target.txt": "a"}, length=None,
    ),
    "labels in any order": Row(
        lambda: lra21(classes=2), {"a": "yes 7\nno 5\n" + FILLERS, "b": words(12), "dict.txt": words(3)},
        {"dictionaries": ["a", "b"]}, [16, 4, 6, 3, 2], labels=["yes", "no"],
        copies={"dict.txt": "b", "dict.label.txt": "a"},
    ),
    "labels of a head": Row(
        lambda: bert(heads=[("a", 3)], task="sentence_prediction"), {"label/dict.txt": words(3)},
        labels=["w0", "w1", "w2"],
    ),
    "other labels": Row(
        lambda: lra21(classes=2), {"label-bin/dict.txt": words(4)}, labels=["LABEL_0", "LABEL_1"],
        report=("4 labels for 2 classes: not used",),
    ),
    "pixels": Row(lambda: lra23(image=True, sen_rep_type="mp"), {"dict.txt": words(12)}, report=("!dictionary",)),
    "images": Row(
        mega_image, {"a": "tench, Tinca tinca\ngoldfish\nshark\nhen\ncrane\n"}, {"dictionaries": ["a"]},
        labels=["tench, Tinca tinca", "goldfish", "shark", "hen", "crane"],
    ),
}  # fmt: skip


def write_files(folder: Path, files: dict[str, str]) -> None:
    """Write the files of a row, and GPT-2's files of a few merges in the folder `bpe`."""
    write_bpe(folder / "bpe")
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode())


@pytest.mark.parametrize("name", CONVERSIONS)
def test_dictionaries_labels_and_tokenizer(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    row, output = CONVERSIONS[name], tmp_path / "model"
    write_files(tmp_path, row.files)
    report = convert_checkpoint(save(row.build(), tmp_path), output, **row.options)
    for copy, original in row.copies.items():
        assert (output / copy).read_bytes() == (tmp_path / original).read_bytes()
    assert {path.name for path in output.glob("*dict*")} <= row.copies.keys() or not row.copies
    for line in row.report:
        assert (line.removeprefix("!") in str(report)) is not line.startswith("!"), str(report)
    model, card = load(output), (output / "README.md").read_text(encoding="utf-8")
    if row.labels is not None:
        assert list(model.config.id2label.values()) == row.labels
        assert model.config.label2id == {label: index for index, label in enumerate(row.labels)}
    assert ("AutoTokenizer" in card) is (row.ids is not None) is (report.tokenizer is not None)
    assert saved_report(output)["tokenizer"] == report.tokenizer
    if row.ids is None:
        if "bpe" in "".join(row.report):
            with pytest.raises(ValueError, match="the folder has no tokenizer.*--bpe"):
                AutoTokenizer.from_pretrained(output)
        assert not (output / "tokenizer.json").exists()
        return
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert tokenizer(row.text).input_ids == row.ids
    assert len(tokenizer) == model.config.vocab_size == report.tokenizer["size"]
    assert tokenizer.model_max_length == row.length or row.length is None and tokenizer.model_max_length > 1e9
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 1)
    if report.model_class.endswith("CausalLM"):
        assert tokenizer.bos_token_id == model.generate(max_new_tokens=2, do_sample=False)[0, 0] == 2
        assert row.ids[0] != 2 or "w0" in row.text or tokenizer.decode(row.ids, skip_special_tokens=True) == row.text
    if (output / "target").exists():
        assert len(AutoTokenizer.from_pretrained(output, subfolder="target")) == model.config.decoder_config.vocab_size


A, AB = {"dictionaries": ["a"]}, {"dictionaries": ["a", "b"]}
BPE = {"bpe": "bpe"}
# Checkpoint, files next to it, options, a part of the error.
FAULTS = [
    *((bert, {"dict.txt": words(x)}, {}, f"dict.txt: {x} symbols do not fit the model, which has 17 embeddings "
       f"(4 specials + {x} symbols + <mask> = {5 + x})") for x in (11, 13)),
    (bert, {"a": words(12), "b": words(12, "v")}, AB, "pass one of them"),
    (lambda: lra23(image=True, sen_rep_type="mp"), {"a": words(12)}, A, "do not fit"),
    (mega_lm, {"dict.txt": lines(range(28))}, BPE, "omit --bpe"),
    (bert, {"dict.txt": lines(NUMBERS)}, {"bpe": "."}, "has neither encoder.json and vocab.bpe nor"),
    (bert, {"dict.txt": words(12)}, BPE, "symbol 'w0' is not a number"),
    (bert, {"dict.txt": lines([*NUMBERS[:-1], "70000"])}, BPE, "symbol '70000' is no GPT-2 id; they end at 268"),
    (mega_image, {"a": "a\nb\n"}, A, "2 lines for 5 classes"),
    (mega_image, {"a": "a\n\nb\nc\nd\n"}, A, "line 2 is empty"),
    (mega_image, {}, A, "no such file"),
    (mega_image, {"a": "", "b": ""}, AB, "the names of the classes are in one file"),
    (two_vocabularies, {"a": words(15)}, A, "dict.target.txt, is missing"),
    (two_vocabularies, {"a": words(15)}, {"dictionaries": ["a", "a"]}, "fits as source, and so does"),
    (two_vocabularies, {"a": words(11)}, A, "11 symbols and 4 specials do not fit the 19 embeddings"),
    (two_vocabularies, {"dict.source.txt": words(10)}, {}, "dict.source.txt: 10 symbols and 4 specials do not fit"),
    (translation, {"a": words(15), "b": words(15, "v")}, AB, "but the model has one embedding"),
]  # fmt: skip


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case[-1][:60])
def test_dictionaries_that_do_not_fit(tmp_path, monkeypatch, case):
    build, files, options, named = case
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, files)
    with pytest.raises(ConversionError) as error:
        convert_checkpoint(save(build(), tmp_path), tmp_path / "model", **options)
    check_message(str(error.value))
    assert named in str(error.value) and not (tmp_path / "model").exists()


# Content of a dictionary, its symbols or a part of the error.
CONTENTS = [
    # lines are split at the last space, overwritten symbols keep both ids, and a byte order mark is no symbol
    (b"\xef\xbb\xbfthe 9\nnew york 8\n\xe2\x80\xa8x 7\r\n", ("the", "new york", "\u2028x")),
    (b"a 1\na 2 #fairseq:overwrite\n<s> 3 #fairseq:overwrite\n", ("a", "a", "<s>")),
    (b"a 1\nb 1\na 2\n", "line 3 repeats 'a'"),
    (b"a 1\n</s> 1\n", "line 2 repeats '</s>'"),
    (b"a 1\nb\n", "line 2 is not"),
    (b"a 1\n\nb 1\n", "line 2 is not"),
    (b"a one\n", "line 1 is not"),
    (b"a 1\n\xff\xfe 2\n", "not UTF-8"),
]


@pytest.mark.parametrize(("content", "expected"), CONTENTS)
def test_lines_of_a_dictionary(tmp_path, content, expected):
    (tmp_path / "dict.txt").write_bytes(content)
    if isinstance(expected, tuple):
        assert read_dictionary(tmp_path / "dict.txt").symbols == expected
        return
    with pytest.raises(ConversionError, match=expected):
        read_dictionary(tmp_path / "dict.txt")
