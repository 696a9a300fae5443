import json
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer, default_data_collator

from luna_mega.training.streams import Redrawn
from luna_mega.training.tokenizers import train_bpe
from luna_mega.training.trainer import OrderedTrainer
from tests.examples import runs
from tests.examples.contract import texts
from tests.examples.runs import steps

RUN = ["run_mlm"]
TINY = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=32,projection_length=4,dropout=0.0"
BOS, EOS = 0, 2


def write(lines: list[str], path: Path) -> Path:
    if path.suffix != ".txt":
        return runs.write([{"text": line} for line in lines], path)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path.parent


@pytest.fixture
def corpus(tmp_path):
    for split, size in (("train", 60), ("validation", 20)):
        write([*texts(size, seed=size), "", "  \n"], tmp_path / "corpus" / f"{split}-00000-of-00001.parquet")
    return tmp_path / "corpus"


def scratch(data: Path, output: Path) -> list:
    return [
        *("--dataset_path", data, "--output_dir", output, "--do_train", "--config_overrides", TINY),
        *("--vocab_size", 300, "--max_seq_length", 32, "--per_device_train_batch_size", 8),
    ]


@pytest.fixture
def tokenizer(script):
    return train_bpe(texts(50, seed=1), vocab_size=300, model_max_length=64)


def cut_blocks(script, tokenizer, lines: list[str], max_seq_length: int):
    module = script("run_mlm")
    data = module.DataArguments(max_seq_length=max_seq_length)
    return module.cut_blocks(Dataset.from_dict({"text": lines}), "train", tokenizer, data)


@pytest.mark.parametrize("max_seq_length", [2, 7, 33])
def test_blocks_are_complete_and_in_order(max_seq_length, script, tokenizer):
    lines = ["", *texts(40, seed=2), "   ", " = Title = \n"]
    stream = []
    for line in lines:
        if line.strip():
            stream += [*tokenizer.encode(line.strip(), add_special_tokens=False), EOS]
    blocks = cut_blocks(script, tokenizer, lines, max_seq_length)["input_ids"]
    assert all(len(block) == max_seq_length and block[0] == BOS for block in blocks)
    joined = [token for block in blocks for token in block[1:]]
    assert joined == stream[: len(joined)]
    assert len(stream) - len(joined) < max_seq_length - 1


def test_short_blocks_are_cut_from_the_same_stream(script, tokenizer):
    lines, module = texts(3000, seed=4), script("run_mlm")
    dataset, data = Dataset.from_dict({"text": lines}), module.DataArguments(max_seq_length=33)
    stream = [token for line in lines[:1000] for token in [*tokenizer.encode(line, add_special_tokens=False), EOS]]
    for share in (0.5, 1.0):
        blocks = module.cut_blocks(dataset, "train", tokenizer, data, share)["input_ids"]
        joined, seen = [], 0
        while len(joined) < len(stream) - 32:
            joined, seen = joined + blocks[seen][1:], seen + 1
        assert joined == stream[: len(joined)]
        assert all(block[0] == BOS for block in blocks)
        lengths = torch.tensor([len(block) for block in blocks]) - 1
        assert lengths.min() == 1 and lengths.max() == 32
        assert (lengths == 32).float().mean().item() == pytest.approx(1 - share + share / 32, abs=0.03)
        assert lengths[lengths < 32].float().mean().item() == pytest.approx(16, abs=1)
        assert module.cut_blocks(dataset, "train", tokenizer, data, share)["input_ids"] == blocks


@pytest.mark.slow
def test_pretraining_on_short_blocks(run, script, corpus, tmp_path, monkeypatch):
    """Batches contain inputs of similar length; padding is neither attended to nor predicted."""
    trainer, batches = OrderedTrainer, []
    step = trainer.training_step

    def spy(self, model, inputs, *args):
        batches.append({name: value.clone() for name, value in inputs.items()})
        return step(self, model, inputs, *args)

    monkeypatch.setattr(trainer, "training_step", spy)
    options = ["--short_seq_prob", 0.9, "--train_sampling_strategy", "group_by_length", "--num_train_epochs", 2]
    summary = run(*scratch(corpus, tmp_path / "out")[:-2], *options, "--per_device_train_batch_size", 2, "--do_eval")
    assert math.isfinite(summary["eval_perplexity"])
    assert len({batch["input_ids"].shape[1] for batch in batches}) > 1
    for batch in batches:
        padding = batch["attention_mask"] == 0
        assert torch.equal(padding, batch["input_ids"] == 1)
        assert (batch["labels"][padding] == -100).all()
    assert any((batch["attention_mask"] == 0).any() for batch in batches)
    padded = sum(int((batch["attention_mask"] == 0).sum()) for batch in batches)
    assert padded < 0.25 * sum(batch["input_ids"].numel() for batch in batches)


def test_masking_is_dynamic_in_training_and_fixed_in_evaluation(script, tokenizer):
    module = script("run_mlm")
    blocks = cut_blocks(script, tokenizer, texts(2000, seed=3), 64)
    masked = Redrawn(blocks, module.Masking(tokenizer, 0.15), seed=0)
    first, again = (default_data_collator(list(masked)) for _ in range(2))
    assert torch.equal(first["labels"], again["labels"])  # masks are the same in every process and after resuming
    masked.set_epoch(1)
    assert not torch.equal(first["labels"], default_data_collator(list(masked))["labels"])

    original = torch.tensor(blocks["input_ids"])
    chosen = first["labels"] != -100
    special = (original == BOS) | (original == EOS)
    assert not (chosen & special).any()
    torch.testing.assert_close(first["input_ids"][~chosen], original[~chosen])
    torch.testing.assert_close(first["labels"][chosen], original[chosen])
    assert (chosen.sum() / (~special).sum()).item() == pytest.approx(0.15, abs=0.02)
    shown = first["input_ids"][chosen]
    assert (shown == tokenizer.mask_token_id).float().mean().item() == pytest.approx(0.8, abs=0.03)
    # A tenth of the chosen tokens is unchanged, apart from random replacements that equal the original.
    assert (shown == original[chosen]).float().mean().item() == pytest.approx(0.1, abs=0.03)

    data = module.DataArguments()
    masked = [module.mask_once(blocks, tokenizer, data, seed=seed) for seed in (1, 1, 2)]
    assert masked[0]["labels"] == masked[1]["labels"] != masked[2]["labels"]
    # An inferred mask would also mask tokens that are replaced by the padding token.
    assert first["attention_mask"].all() and torch.tensor(masked[0]["attention_mask"]).all()


def test_perplexity_is_exact(run, script, corpus, tmp_path):
    output = tmp_path / "out"
    summary = run(*scratch(corpus, output), "--do_eval", "--max_steps", 4, "--learning_rate", 0.02, "--seed", 5)
    module = script("run_mlm")
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(output).eval(), AutoTokenizer.from_pretrained(output)
    data = module.DataArguments(max_seq_length=32)
    blocks = module.cut_blocks(Dataset.from_dict({"text": texts(20, seed=20)}), "validation", tokenizer, data)
    masked = module.mask_once(blocks, tokenizer, data, seed=5)
    labels = torch.tensor(masked["labels"])
    with torch.no_grad():
        logits = model(torch.tensor(masked["input_ids"])).logits[labels != -100]
    loss = torch.nn.functional.cross_entropy(logits, labels[labels != -100]).item()
    assert summary["eval_perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    accuracy = (logits.argmax(-1) == labels[labels != -100]).float().mean().item()
    assert summary["eval_accuracy"] == pytest.approx(accuracy)


def test_text_files_bf16_and_accumulation(run, tmp_path, monkeypatch):
    monkeypatch.setattr("luna_mega.training.runs.check_precision", lambda training: None)  # two steps fit any processor
    write(texts(30, seed=1), tmp_path / "a.txt")
    write(texts(30, seed=2), tmp_path / "b.txt")
    write(texts(10, seed=3), tmp_path / "c.txt")
    arguments = scratch("", tmp_path / "out")[2:]
    files = ["--train_files", tmp_path / "a.txt", tmp_path / "b.txt", "--validation_files", tmp_path / "c.txt"]
    options = ["--bf16", "true", "--gradient_accumulation_steps", 2, "--max_steps", 2, "--do_eval"]
    summary = run(*arguments, *files, *options, "--per_device_train_batch_size", 4)
    assert steps(tmp_path / "out") == 2 and math.isfinite(summary["eval_perplexity"])


@pytest.mark.slow
def test_finished_run_is_not_continued(run, corpus, tmp_path):
    """A run killed after its last checkpoint resumes with the same last or best weights, without more steps."""
    higher = ["--metric_for_best_model", "loss", "--greater_is_better", 1]  # selects the first step
    best = ["--load_best_model_at_end", "--eval_strategy", "steps", "--eval_steps", 1, *higher]
    for name, options in (("plain", []), ("best", best)):
        output = tmp_path / name
        command = [*scratch(corpus, output), "--save_steps", 1, "--max_steps", 2, *options]
        run(*command)
        before = load_file(output / "model.safetensors")
        (output / "model.safetensors").unlink()
        resumed = run(*command, "--resume_from_checkpoint", "last")
        assert steps(output) == 2 and resumed["epoch"] > 0
        after = load_file(output / "model.safetensors")
        assert all(torch.equal(before[name], after[name]) for name in before)
    state = json.loads((tmp_path / "best" / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["best_model_checkpoint"].endswith("checkpoint-1")


def test_wrong_files(run, tmp_path):
    arguments = scratch("", tmp_path / "out")[2:]
    write(texts(10, seed=1), tmp_path / "a.txt")
    (tmp_path / "a.md").write_text("text", encoding="utf-8")
    for files, message in (
        ([], "pass one of --dataset_name"),
        (["--validation_files", tmp_path / "a.txt"], "pass --train_files as well"),
        (["--train_files", tmp_path / "a.md"], "a.md cannot be read; use .parquet"),
        (["--dataset_name", "Salesforce/wikitext"], "cannot load Salesforce/wikitext"),
    ):
        with pytest.raises(SystemExit, match=message):
            run(*arguments, *files)


def test_tokenizer_without_a_mask(run, corpus, tokenizer, tmp_path):
    tokenizer.mask_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(SystemExit, match="the tokenizer has no mask_token"):
        run(*scratch(corpus, tmp_path / "out"), "--tokenizer_name", tmp_path / "tokenizer")
