"""Without a network, scripts load models and datasets that are in the cache without further attempts to connect."""

import time
from types import SimpleNamespace

import datasets
import pytest
from huggingface_hub import constants
from transformers import AutoConfig, TrainingArguments

from luna_mega import MegaConfig, MegaForCausalLM
from luna_mega.training.data import load_from_hub
from luna_mega.training.language_modeling import load_language_model
from luna_mega.training.models import ModelArguments, make_both_tokenizers
from luna_mega.training.runs import Run
from luna_mega.training.tokenizers import train_joint_bpe
from tests.examples.runs import write

NAME, COMMIT = "tester/cached", "0" * 40


@pytest.fixture(autouse=True)
def no_network(offline, monkeypatch, tmp_path):
    """Let connections fail, with the pauses of the libraries, and fill the caches with a model and a dataset."""
    cache = tmp_path / "hub" / "models--tester--cached"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    tokenizer = train_joint_bpe(["abcdefgh"], 300, 8)
    tokenizer.save_pretrained(cache / "snapshots" / COMMIT)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "shared_representation_size": 8}
    config = MegaConfig(vocab_size=len(tokenizer), is_decoder=True, bidirectional=False, **sizes)
    MegaForCausalLM(config).save_pretrained(cache / "snapshots" / COMMIT)
    folder = write([{"text": "a"}, {"text": "b"}], tmp_path / "data" / "train.jsonl")
    builder = datasets.load_dataset_builder("json", data_files=str(folder / "train.jsonl"))
    builder.dataset_name = builder.info.dataset_name = "cached"
    builder.download_and_prepare(tmp_path / "cache" / "tester___cached" / "default" / "0.0.0" / COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)


def load_dataset(_):
    assert load_from_hub(NAME)["train"]["text"] == ["a", "b"]


def load_model(_):
    model, tokenizer = load_language_model(NAME, "cpu")
    assert model.config.vocab_size == len(tokenizer)


def start_run(folder):
    """The name stays known for the model card."""
    training = TrainingArguments(output_dir=str(folder / "out"), do_eval=True, use_cpu=True)
    model = ModelArguments(model_name_or_path=NAME)
    run = Run(SimpleNamespace(), model, training)
    assert run.base_model == NAME
    assert AutoConfig.from_pretrained(model.model_name_or_path).model_type == "mega"


def load_tokenizers(_):
    both = make_both_tokenizers(ModelArguments(tokenizer_name=NAME), [], 8)
    assert both.source is both.target


@pytest.mark.parametrize("load", [load_dataset, load_model, start_run, load_tokenizers])
def test_no_further_attempts(load, tmp_path):
    start = time.monotonic()
    load(tmp_path)
    assert time.monotonic() - start < 10  # the libraries attempt each missing file for more than 20 s
