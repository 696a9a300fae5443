"""The messages in docs/troubleshooting.md are the actual messages."""

import ast
import re

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForSeq2SeqLM

import luna_mega
import luna_mega_cli
from luna_mega.kernels.api import luna_pack, use_backend
from tests.docs import world
from tests.docs.blocks import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    config = luna_mega.LunaConfig(vocab_size=20, **world.LUNA)
    luna_mega.LunaForMaskedLM(config).save_pretrained(folder / "luna")
    torch.save({"weight": torch.zeros(2)}, folder / "bare.pt")
    (folder / "full").mkdir()
    (folder / "full" / "file").touch()
    return folder


@pytest.fixture
def said() -> str:
    """Return the text of the page; `...` in its error messages is a wildcard."""
    return (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


def assert_said(message: str, said: str, least: int = 12) -> None:
    """Check that the page quotes the message, except for numbers, in a quotation of at least `least` characters."""
    quoted = [part for part in re.findall(r"`+([^`]+(?:`\w+`[^`]+)?)`+", said) if len(part) >= least]
    patterns = [re.sub(r"\d+", r"\\d+", re.escape(part)).replace(re.escape("..."), ".*") for part in quoted]
    assert any(re.search(pattern, message) for pattern in patterns), message


def luna(folder, input_ids=None, **inputs):
    input_ids = torch.full((2, 10), 5) if input_ids is None else input_ids
    return luna_mega.LunaForMaskedLM.from_pretrained(folder / "luna")(input_ids=input_ids, **inputs)


def unknown_type(folder):
    (folder / "other").mkdir(exist_ok=True)
    (folder / "other" / "config.json").write_text('{"model_type": "lunar"}', encoding="utf-8")
    try:
        AutoConfig.from_pretrained(folder / "other")
    except ValueError as error:
        raise ValueError(str(error).replace("lunar", "luna")) from error


def simple_bias(folder):
    config = luna_mega.MegaConfig(vocab_size=20, relative_positional_bias="simple", max_positions=16, **world.MEGA)
    luna_mega.MegaModel(config)(torch.full((1, 20), 5))


def chosen_backend(folder):
    with use_backend("triton"):
        query = torch.randn(1, 4, 2, 8, dtype=torch.float64)
        luna_pack(query, query, query)


@pytest.mark.parametrize(
    "fault",
    [
        unknown_type,
        simple_bias,
        chosen_backend,
        lambda folder: AutoModelForSeq2SeqLM.from_pretrained(folder / "luna"),
        lambda folder: luna_mega.LunaForCausalLM.from_pretrained(folder / "luna"),
        lambda folder: luna_mega.LunaTokenizer.from_pretrained(folder / "luna"),
        lambda folder: luna_mega.LunaForMaskedLM.from_pretrained(
            folder / "luna", attn_implementation="flash_attention_2"
        ),
        lambda folder: luna(folder, torch.full((1, 10), 99)),
        lambda folder: luna(folder, torch.full((1, 70), 5)),
        lambda folder: luna(folder, token_type_ids=torch.ones(2, 10).long()),
        lambda folder: luna(folder, inputs_embeds=torch.zeros(2, 10, 16)),
        lambda folder: luna(folder, attention_mask=torch.ones(2, 12)),
        lambda folder: luna_mega.LunaConfig(hidden_size=16, num_attention_heads=3),
        lambda folder: luna_mega.LunaConfig(pooling="first"),
    ],
)
def test_exceptions(fault, folder, said):
    with pytest.raises((ValueError, IndexError, StrictDataclassError)) as error:
        fault(folder)
    assert_said(f"{error.type.__name__}: {' '.join(str(error.value).split())}", said)


@pytest.mark.parametrize(
    "command",
    [
        "convert luna --output out",
        "convert luna/model.safetensors --output out",
        "convert bare.pt --output out",
        "convert nowhere.pt --output out",
        "convert bare.pt --output full",
        "verify nowhere luna",
    ],
)
def test_commands(command, folder, said, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert luna_mega_cli.main(command.split()) == 1
    assert_said(capsys.readouterr().err, said)


# Messages of Python, pip, shells, PyTorch, transformers and earlier versions of this package.
OTHERS = (
    "requires a different Python",
    "[Errno 13] Permission denied",
    "cannot import name 'PreTrainedConfig'",
    "No module named",
    "sacrebleu",
    "scipy",
    "command not found",
    "does not recognize this architecture",
    "contains custom code",
    "got an unexpected keyword argument 'cache'",
    "Mega models take no cache",
    "Unrecognized configuration class",
    "Unknown task question-answering",
    "Specified `attn_implementation",
    "device-side assert triggered",
)
# Beginnings of messages about the most frequent mistakes, without their values.
FREQUENT = (
    "but the vocabulary of this model has",
    "learned positions",
    "but must be ids from 0 to",
    "must have the shape",
    "but the model has no type embeddings",
    "pass exactly one of",
    "must be one of",
    "must be divisible by",
    "unknown option",
    "nothing to do; pass --do_train, --do_eval or --do_predict",
    "has no split",
    "has no column",
    "is not one of",
    "rows have no label",
    "pass --ignore_mismatched_sizes to train a new head",
    "do not fit in the",
    "already exists; pass --resume_from_checkpoint last",
    "the training diverged: train_loss=",
    "an image cannot be read",
    "not a fairseq checkpoint",
    "the output folder is not empty",
)


@pytest.fixture(scope="module")
def source(sources) -> list[str]:
    """Return the text constants of the package and the scripts, with a line end for each value of an f-string."""
    texts = []
    for path, code in sources.items():
        if path.split("/")[0] in ("tests", "benchmarks"):
            continue
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(x.value if isinstance(x, ast.Constant) else "\n" for x in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return [text.replace("`", "") for text in texts]


def has_words(quotation: str, source: list[str]) -> bool:
    """Return whether a text of the source has three consecutive words of the quotation, or all of a shorter one."""
    words = quotation.replace("`", "").split()
    parts = {" ".join(words[start : start + 3]) for start in range(max(len(words) - 2, 1))}
    pieces = [piece.strip() for piece in re.split(r"\d+|\.\.\.|'[^']*'|\b(?:Luna|Mega)\w+", " ".join(words))]
    parts |= {piece for piece in pieces if len(piece.split()) > 1}
    return any(part in text for part in parts for text in source)


def test_every_quotation_is_a_message(said, source):
    """The first column of the tables contains messages of this package, or of `OTHERS`."""
    cells = [re.split(r" \| ", line[2:])[0] for line in said.splitlines() if line.startswith("| ")]
    quotations = [first or second for cell in cells for first, second in re.findall(r"`` ?(.+?) ?``|`([^`]+)`", cell)]
    assert len(quotations) > 50
    wrong = [text for text in quotations if not has_words(text, source) and not any(other in text for other in OTHERS)]
    assert not wrong


def test_frequent_messages_are_on_the_page(said, source):
    for message in FREQUENT:
        assert message in said, message
        assert any(message in text for text in source), message
