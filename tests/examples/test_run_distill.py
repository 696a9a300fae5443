import json

import pytest
import torch
from transformers import RobertaConfig, RobertaForMaskedLM

from tests.examples.test_run_mlm import texts, write

RUN = ["run_distill"]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}


@pytest.fixture
def corpus(tmp_path):
    for split, size in (("train", 60), ("validation", 20)):
        write(texts(size, seed=size), tmp_path / "corpus" / f"{split}-00000-of-00001.parquet")
    return tmp_path / "corpus"


@pytest.fixture
def teacher(script, tmp_path):
    torch.manual_seed(0)
    tokenizer = script("common.bpe").train_bpe(texts(50, seed=1), vocab_size=300, model_max_length=32)
    config = RobertaConfig(**SIZES, vocab_size=len(tokenizer), max_position_embeddings=34, initializer_range=0.3)
    RobertaForMaskedLM(config).save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    return tmp_path / "teacher"


def command(teacher, corpus, output) -> list:
    return [
        *("--teacher", teacher, "--dataset_path", corpus, "--output_dir", output, "--block_size", 32),
        *("--per_device_train_batch_size", 4, "--align_steps", 3, "--max_steps", 4, "--calibration_batches", 1),
    ]


@pytest.mark.parametrize("kind", ["luna", "mega"])
def test_masked(kind, run, teacher, corpus, tmp_path):
    summary = run(*command(teacher, corpus, tmp_path / "out"), "--student", kind)
    rows = json.loads((tmp_path / "out" / "stages.json").read_text())["rows"]
    assert list(dict.fromkeys(row["stage"] for row in rows))[-2:] == ["align", "distill"]
    assert summary["steps"] == 4 and summary["eval_loss"] == rows[-1]["loss"]
