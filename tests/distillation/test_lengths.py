"""The maximum length of a converted folder is the same for every reader, and equals the printed length.

`tests/ecosystem/test_lengths.py` has the readers of sentence-transformers.
"""

import bisect
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModel, AutoTokenizer, pipeline

import luna_mega
import luna_mega_cli
from luna_mega.distillation import from_teacher
from luna_mega.hub.folder import position_limit
from luna_mega.training.models import longest_input
from tests.distillation.models import bert_tokenizer, make_model, save_teacher, write
from tests.errors import check_error, command_error

TABLE, READS = 32, 16  # number of the teacher's learned positions, and the length in its files
KINDS = {  # name -> (head, fields)
    "encoder": ("Model", {}),
    "sentence-transformers": ("Model", {}),
    "cross-encoder": ("ForSequenceClassification", {"num_labels": 1}),
    "sparse encoder": ("ForMaskedLM", {}),
    "token classifier": ("ForTokenClassification", {"num_labels": 3}),
}
LENGTHS = (12, TABLE, 48)
CASES = [*(("encoder", length) for length in LENGTHS), ("cross-encoder", 12), ("token classifier", TABLE)]
CASES += [("sentence-transformers", 48), ("sparse encoder", 48)]
TEXT = " ".join(f"w{i % 25}" for i in range(100))  # 102 tokens


def save_kind(kind: str, folder: Path) -> Path:
    """Save a teacher whose files truncate and pad texts, as in all-MiniLM-L6-v2."""
    head, fields = KINDS[kind]
    tokenizer = bert_tokenizer(model_max_length=READS)
    tokenizer.backend_tokenizer.enable_truncation(READS)
    tokenizer.backend_tokenizer.enable_padding(length=READS)
    modules = ("Pooling",) if kind == "sentence-transformers" else ()
    save_teacher(folder, "bert", head, modules, tokenizer, max_position_embeddings=TABLE, **fields)
    if modules:
        options = {"text": {"max_length": READS, "padding": True}}
        write(
            folder / "sentence_bert_config.json",
            {"max_seq_length": READS, "document_length": READS, "query_length": 8, "processing_kwargs": options},
        )
    return folder


def convert(kind: str, length: int, tmp_path: Path, capsys) -> tuple[Path, int]:
    """Run the command; return its folder and the maximum length that it prints."""
    output = tmp_path / "out"
    argv = ["distill", str(save_kind(kind, tmp_path / "teacher")), "--output", str(output)]
    assert luna_mega_cli.main([*argv, "--max-length", str(length)]) == 0
    printed = int(re.search(r"reads ([\d,]+)", capsys.readouterr().out)[1].replace(",", ""))
    assert printed == length
    return output, printed


def longest_of_the_model(folder: Path) -> int:
    """Return the maximum length, from 8 to 101, for which the model raises no error."""
    name = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    model = (getattr(transformers, name, None) or getattr(luna_mega, name)).from_pretrained(folder)

    @torch.no_grad()
    def raises(length: int) -> bool:
        try:
            model(torch.full((1, length), 7))
        except ValueError as error:
            assert f"the sequence length {length} exceeds the" in str(error)
            return True
        return False

    return bisect.bisect(range(8, 102), False, key=raises) + 7


def read_by_pipeline(folder: Path) -> int:
    """Return the number of tokens that the head's pipeline passes to the model."""
    head = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    task, options = {
        "LunaForSequenceClassification": ("text-classification", {"truncation": True}),
        "LunaForTokenClassification": ("token-classification", {}),
        "LunaForMaskedLM": ("fill-mask", {"tokenizer_kwargs": {"truncation": True}}),
    }.get(head, ("feature-extraction", {"truncation": True}))
    call, sizes = pipeline(task, model=str(folder), device="cpu"), []
    call.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    call("[MASK] " + TEXT if task == "fill-mask" else TEXT, **options)
    return sizes[0]


def read_by_vllm(folder: Path) -> int:
    """Return the smallest limit among the fields that vLLM reads from the configurations of a folder."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length", "max_seq_length")
    files = [folder / name for name in ("config.json", "sentence_bert_config.json", "tokenizer_config.json")]
    contents = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    return min(content[name] for content in contents for name in names if name in content)


def read_by_tokenizers(folder: Path) -> int:
    """Return the maximum length of the tokenizer; check that tokenizer.json neither truncates nor pads."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.truncation is None and tokenizer.padding is None
    assert len(tokenizer.encode(TEXT).ids) == 102 and len(tokenizer.encode("w1").ids) == 3
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    return config.get("max_length") or config["model_max_length"]


READERS = {
    "AutoTokenizer": lambda folder: len(AutoTokenizer.from_pretrained(folder)(TEXT, truncation=True)["input_ids"]),
    "AutoConfig": lambda folder: AutoConfig.from_pretrained(folder).max_position_embeddings,
    "position_limit": lambda folder: position_limit(AutoConfig.from_pretrained(folder)),
    "training scripts": lambda folder: longest_input(AutoConfig.from_pretrained(folder)),
    "tokenizers": read_by_tokenizers,
    "model": longest_of_the_model,
    "pipeline": read_by_pipeline,
    "vLLM": read_by_vllm,
}


@pytest.mark.parametrize(("kind", "length"), CASES)
def test_every_reader_has_the_printed_length(kind, length, tmp_path, capsys):
    folder, printed = convert(kind, length, tmp_path, capsys)
    assert {name: read(folder) for name, read in READERS.items()} == dict.fromkeys(READERS, printed)


@pytest.mark.parametrize("kind", ["encoder", "cross-encoder"])
def test_saved_again(kind, tmp_path, capsys):
    """`save_pretrained` writes the same length after `from_teacher` and after loading that folder."""
    teacher, texts = save_kind(kind, tmp_path / "teacher"), [TEXT, "w1 w2"]
    model, tokenizer, _ = from_teacher(str(teacher), projection_length=8, max_length=20, texts=texts)
    for folder in (tmp_path / "first", tmp_path / "second"):
        model.save_pretrained(folder), tokenizer.save_pretrained(folder)
        assert {name: read(folder) for name, read in READERS.items()} == dict.fromkeys(READERS, 20)
        model, tokenizer = type(model).from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_limits_of_the_modules(tmp_path, capsys):
    """A shorter limit for queries is copied; the other limits of the teacher are not."""
    folder, _ = convert("sentence-transformers", 48, tmp_path, capsys)
    settings = json.loads((folder / "sentence_bert_config.json").read_text(encoding="utf-8"))
    assert settings == {"max_seq_length": 48, "query_length": 8, "processing_kwargs": {"text": {"padding": True}}}


def test_the_tokenizer_of_the_caller_is_unchanged(tmp_path):
    teacher = save_kind("encoder", tmp_path / "teacher")
    own = AutoTokenizer.from_pretrained(teacher)
    student = from_teacher(AutoModel.from_pretrained(teacher), max_length=48, tokenizer=own)
    assert (own.model_max_length, student.tokenizer.model_max_length) == (READS, 48)


TOKEN_HEADS = ("ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering")


@pytest.mark.parametrize("head", ["Model", "ForMultipleChoice", *TOKEN_HEADS])
def test_default_lengths(head, tmp_path, capsys):
    """Default lengths are the same for the command, a loaded teacher and its name.

    Models with a head that reads single tokens equal the teacher at its full length.
    """
    configs = [from_teacher(make_model("bert", head, max_position_embeddings=TABLE)).model.config]
    if head in ("Model", "ForMaskedLM"):
        teacher = save_teacher(tmp_path / "teacher", head=head, max_position_embeddings=TABLE)
        assert luna_mega_cli.main(["distill", str(teacher), "--output", str(tmp_path / "out")]) == 0
        output = capsys.readouterr().out
        assert (
            f"equals the teacher for texts of up to {TABLE} tokens, reads {TABLE}\n" in output and "note" not in output
        )
        configs += [from_teacher(str(teacher)).model.config, AutoConfig.from_pretrained(tmp_path / "out")]
    for config in configs:
        assert config.projection_length == TABLE  # 128 if the table is longer, see test_default_rows
        assert (config.max_position_embeddings, config.position_extension) == (TABLE, None)
        assert config.position_table_size is None


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification", *TOKEN_HEADS])
def test_default_rows(head):
    config = from_teacher(make_model("bert", head, max_position_embeddings=200)).model.config
    assert config.projection_length == (200 if head in TOKEN_HEADS else 128)


NOTES = {
    "vectors": ("Model", {"max_length": 64}, 32, "texts of more than 32 tokens have squeezed positions"),
    "short vectors": ("Model", {"max_length": 16}, 16, "reads 16 tokens of a text, the teacher 32; omit"),
    "rows": ("Model", {"projection_length": 8}, 8, ""),
    "class": ("ForSequenceClassification", {"max_length": 64}, 32, "texts of more than 32 tokens have squeezed"),
    "rows of labels": ("ForTokenClassification", {"projection_length": 8}, 8, "differ from the teacher's beyond 8"),
    "short labels": ("ForTokenClassification", {"max_length": 16}, 16, "reads 16 tokens of a text, the teacher 32"),
    "answer": ("ForQuestionAnswering", {"max_length": 64}, 32, "texts of more than 32 tokens have squeezed"),
}


@pytest.mark.parametrize(("head", "options", "exact", "note"), NOTES.values(), ids=NOTES)
def test_one_line_about_other_lengths(head, options, exact, note):
    report = from_teacher(make_model("bert", head, max_position_embeddings=TABLE), **options).report
    assert report.lengths.exact == exact
    lines = [line for line in str(report).splitlines() if line.startswith("note: ")]
    assert len(lines) == bool(note) and note in "".join(lines)
    assert not note or "docs/distillation.md" in lines[0] or exact == 16


def test_labels_of_tokens_beyond_the_table(tmp_path, capsys):
    teacher = save_teacher(tmp_path / "teacher", head="ForTokenClassification", max_position_embeddings=TABLE)
    error = command_error(capsys, "distill", teacher, "--output", tmp_path / "out", "--max-length", 33)
    assert "max_length=33" in error and "stride=8" in error
    student = from_teacher(str(teacher)).model
    check_error(lambda: student(torch.full((1, 33), 7)), ValueError, "sequence length 33")
    check_error(lambda: from_teacher(str(teacher), max_length=33), ValueError, "max_length=33")
