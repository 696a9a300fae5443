"""Scores at several lengths: of the same tokens, in blocks evaluated separately."""

import random

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from luna_mega import LunaConfig, LunaForMaskedLM, MegaConfig, MegaForMaskedLM
from luna_mega.training.tokenizers import train_bpe
from tests.examples.runs import assert_error, sentence, write

SIZES = {
    "vocab_size": 300,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "intermediate_size": 16,
    "initializer_range": 0.3,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
MODELS = {
    "roberta": (RobertaForMaskedLM, RobertaConfig(**SIZES, num_attention_heads=2, max_position_embeddings=34)),
    "luna": (LunaForMaskedLM, LunaConfig(**SIZES, num_attention_heads=2, max_position_embeddings=64)),
    "mega": (MegaForMaskedLM, MegaConfig(**SIZES, use_chunking=True, chunk_size=16)),
}


@pytest.fixture
def save(script, tmp_path):
    """Save a random model with a tokenizer."""

    def models(name: str, model_class: type, config, seed: int = 1):
        torch.manual_seed(0)
        draw = random.Random(seed)
        texts = [sentence(True, draw) for _ in range(50)]
        texts = [text.upper() for text in texts] if seed > 1 else texts
        folder = tmp_path / "models" / name
        model_class(config).save_pretrained(folder)
        train_bpe(texts, vocab_size=300, model_max_length=32).save_pretrained(folder)
        return folder

    return models


@pytest.fixture
def data(tmp_path):
    draw = random.Random(3)
    return write([{"text": sentence(True, draw)} for _ in range(40)], tmp_path / "data" / "validation.jsonl")


def arguments(data, output, *models) -> list[str]:
    options = ["--models", *models, "--dataset_path", data, "--output_dir", output, "--device", "cpu"]
    return list(map(str, [*options, "--lengths", 16, 32, 100, "--batch_tokens", 70, "--mlm_probability", 0.3]))


def test_scores(script, save, data, tmp_path):
    study, folders = script("long_inputs"), {name: save(name, *parts) for name, parts in MODELS.items()}
    summary = study.main(arguments(data, tmp_path / "out", *folders.values()))
    rows = {(row["model"], row["length"]): row for row in summary["scores"]}
    assert list(rows) == [
        ("roberta", 16), ("roberta", 32), ("luna", 16), ("luna", 32), ("mega", 16), ("mega", 32), ("mega", 100),
    ]  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(folders["luna"])
    parsed = study.parse(arguments(data, tmp_path / "out", folders["luna"]))
    ids, labels = study.read_text(parsed, tokenizer)
    assert summary["masked"] == (labels != -100).sum() > 0.2 * len(ids)
    for (name, length), row in rows.items():
        model, total, right = MODELS[name][0].from_pretrained(folders[name]).eval(), 0.0, 0
        for start in range(0, len(ids), length - 1):
            block, targets = ids[start : start + length - 1], labels[start : start + length - 1]
            with torch.no_grad():
                logits = model(torch.cat([torch.tensor([0]), block])[None]).logits[0, 1:][targets != -100]
            total += cross_entropy(logits, targets[targets != -100], reduction="sum").item()
            right += (logits.argmax(-1) == targets[targets != -100]).sum().item()
        assert row["loss"] == pytest.approx(total / summary["masked"], rel=1e-5)
        assert row["accuracy"] == pytest.approx(right / summary["masked"])
        assert row["seconds"] > 0 and row["memory_mb"] > 0
    report = (tmp_path / "out" / "report.md").read_text().splitlines()
    assert len(report) == 2 + len(rows) + 2 and report[2].startswith("| roberta | 16 | ")
    assert (tmp_path / "out" / "report.png").read_bytes().startswith(b"\x89PNG")


def test_memory(script):
    def call():
        ones = torch.ones(1000, 1000)
        ones = ones @ torch.full((1000, 1000), 2.0)  # 12 MB at a time, then 4
        return ones + 1

    peak_memory = script("long_inputs").peak_memory
    assert [round(peak_memory(call, torch.device("cpu")), 1) for _ in range(2)] == [12.0, 12.0]


def test_the_tokens_of_bert(script, save, data, tmp_path):
    """The tokenizer of BERT has neither `<s>` nor `</s>`."""
    folder = save("bert", BertForMaskedLM, BertConfig(**SIZES, num_attention_heads=2))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"cls_token": "<s>", "sep_token": "</s>"})
    tokenizer.bos_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    study = script("long_inputs")
    parsed = study.parse(arguments(data, tmp_path / "out", folder))
    ids, labels = study.read_text(parsed, study.load(parsed)[1])
    ends = (ids == 2) & (labels == -100)
    assert ends.sum() == 40  # one after each text


def test_unsupported_inputs_raise(script, save, data, tmp_path):
    study, luna = script("long_inputs"), save("luna", *MODELS["luna"])

    def assert_message(message, *models, options=()):
        assert_error(lambda: study.main([*arguments(data, tmp_path / "out", *models), *options]), message)

    llama = LlamaConfig(**SIZES, num_attention_heads=2)
    assert_message("a LlamaForCausalLM predicts no masked tokens", save("llama", LlamaForCausalLM, llama))
    assert_message("another vocabulary than .*luna, so losses", luna, save("other", *MODELS["luna"], seed=2))
    assert_message("nowhere: ", luna, "nowhere")
    assert_message("too few for one block of 100000", luna, options=["--lengths", "100000"])
    assert_message("none of the models supports inputs of these --lengths", luna, options=["--lengths", "100"])
    assert_message("--lengths .1. must be at least 2", luna, options=["--lengths", "1"])
    assert_message("--mlm_probability 1.0 must be between 0 and 1", luna, options=["--mlm_probability", "1.0"])
