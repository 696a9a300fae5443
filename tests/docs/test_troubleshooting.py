"""The messages in docs/troubleshooting.md are the actual messages."""

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
        lambda folder: luna_mega.LunaConfig(vocab_size=1, pad_token_id=1),
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
