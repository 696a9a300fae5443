"""run_mlm.py: blocks, masks and perplexity, streamed data, and files for `accelerate launch`."""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from datasets import Dataset
from transformers import AutoModelForMaskedLM, AutoTokenizer, default_data_collator

from luna_mega.training.streams import Redrawn, Stream
from luna_mega.training.tokenizers import train_bpe
from tests.examples.conftest import EXAMPLES
from tests.examples.contract import SCRIPTS, texts
from tests.examples.runs import QUIET, TINY, assert_error, log_history, steps, write

CONFIGS = sorted((EXAMPLES / "accelerate").glob("*.yaml"))
BOS, EOS = 0, 2
BATCH_OF_ONE = ["--per_device_train_batch_size", 1, "--gradient_accumulation_steps", 4]


@pytest.fixture
def tokenizer():
    return train_bpe(texts(50, seed=1), vocab_size=300, model_max_length=64)


def cut_blocks(script, tokenizer, lines: list[str], length: int, share: float = 0.0) -> Dataset:
    data = script("run_mlm").DataArguments(max_seq_length=length)
    return script("run_mlm").cut_blocks(Dataset.from_dict({"text": lines}), "train", tokenizer, data, share)


@pytest.mark.parametrize("length", [2, 7, 33])
def test_blocks_are_complete_and_in_order(length, script, tokenizer):
    lines = ["", *texts(40, seed=2), "   ", " = Title = \n"]
    stream = []
    for line in lines:
        if line.strip():
            stream += [*tokenizer.encode(line.strip(), add_special_tokens=False), EOS]
    blocks = cut_blocks(script, tokenizer, lines, length)["input_ids"]
    assert all(len(block) == length and block[0] == BOS for block in blocks)
    joined = [token for block in blocks for token in block[1:]]
    assert joined == stream[: len(joined)]
    assert len(stream) - len(joined) < length - 1


def test_short_blocks_are_cut_from_the_same_stream(script, tokenizer, train):
    lines = texts(3000, seed=4)
    stream = [token for line in lines[:1000] for token in [*tokenizer.encode(line, add_special_tokens=False), EOS]]
    for share in (0.5, 1.0):
        blocks = cut_blocks(script, tokenizer, lines, 33, share)["input_ids"]
        joined, seen = [], 0
        while len(joined) < len(stream) - 32:
            joined, seen = joined + blocks[seen][1:], seen + 1
        assert joined == stream[: len(joined)] and all(block[0] == BOS for block in blocks)
        lengths = torch.tensor([len(block) for block in blocks]) - 1
        assert lengths.min() == 1 and lengths.max() == 32
        assert (lengths == 32).float().mean().item() == pytest.approx(1 - share + share / 32, abs=0.03)
        assert lengths[lengths < 32].float().mean().item() == pytest.approx(16, abs=1)
        assert cut_blocks(script, tokenizer, lines, 33, share)["input_ids"] == blocks
    # labels at padding are ignored: the losses do not depend on the batches
    options = ["run_mlm", "--short_seq_prob", 0.9, "--max_steps", 2, "--learning_rate", 0]
    options += ["--config_overrides", f"{TINY},dropout=0.0,attention_dropout=0.0"]
    outputs = train("4", *options), train("1", *options, *BATCH_OF_ONE)
    padded, rows = ([entry["loss"] for entry in log_history(output) if "loss" in entry] for output in outputs)
    assert padded == pytest.approx(rows, rel=1e-5)


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


def test_perplexity_is_exact(call, script, tmp_path):
    """The training data are two text files."""
    for name, size in (("a", 30), ("b", 30), ("validation", 20)):
        (tmp_path / f"{name}.txt").write_text("\n".join(texts(size, seed=size)) + "\n", encoding="utf-8")
    files = ["--train_files", tmp_path / "a.txt", tmp_path / "b.txt", "--validation_files", tmp_path / "validation.txt"]
    options = [*SCRIPTS["run_mlm"].model, *SCRIPTS["run_mlm"].short, "--do_train", "--do_eval", "--max_steps", 4]
    output = tmp_path / "out"
    summary = call("run_mlm", *files, *options, "--learning_rate", 0.02, "--seed", 5, "--output_dir", output)
    module = script("run_mlm")
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(output).eval(), AutoTokenizer.from_pretrained(output)
    blocks = cut_blocks(script, tokenizer, texts(20, seed=20), 32)
    masked = module.mask_once(blocks, tokenizer, module.DataArguments(max_seq_length=32), seed=5)
    labels = torch.tensor(masked["labels"])
    with torch.no_grad():
        logits = model(torch.tensor(masked["input_ids"])).logits[labels != -100]
    loss = torch.nn.functional.cross_entropy(logits, labels[labels != -100]).item()
    assert summary["eval_perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    accuracy = (logits.argmax(-1) == labels[labels != -100]).float().mean().item()
    assert summary["eval_accuracy"] == pytest.approx(accuracy)


def test_tokenizer_without_a_mask(train, tokenizer, tmp_path):
    tokenizer.mask_token = None
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    options = ["out", "run_mlm", "--tokenizer_name", tmp_path / "tokenizer"]
    assert_error(train, "the tokenizer has no mask_token", *options)


def streamed(folder: Path, rank: int, count: int, files: int = 3) -> list[int]:
    """Return twelve rows that a process reads from a repeated stream of ten rows."""
    folder.mkdir(exist_ok=True)
    rows = [{"number": number} for number in range(10)]
    names = [write(rows[file::files], folder / f"{file}.jsonl") / f"{file}.jsonl" for file in range(files)]
    split = datasets.load_dataset("json", data_files=[str(name) for name in names], split="train", streaming=True)
    training = SimpleNamespace(process_index=rank, world_size=count, seed=3, data_seed=None)
    stream = Stream(split, lambda row, _: row, training, 4, "block_size")
    return [row["number"] for row in itertools.islice(stream, 12)]


def test_stream_is_split_over_processes(tmp_path):
    """Processes share a stream.

    If the number of files is not a multiple of the number of processes, the batches equal those of one process, also
    after the end of the data. Otherwise each process reads separate files.
    """
    complete = streamed(tmp_path / "three", 0, 1)
    assert sorted(complete[:10]) == list(range(10)) and complete != sorted(complete)
    for count in (2, 4):
        shares = [streamed(tmp_path / "three", rank, count) for rank in range(count)]
        assert [shares[place % count][place // count] for place in range(12)] == complete
    shares = [streamed(tmp_path / "two", rank, 2, files=2) for rank in range(2)]
    assert sorted(sorted(set(share)) for share in shares) == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_reads_the_file(path):
    config, values = load_config_from_file(str(path)), yaml.safe_load(path.read_text(encoding="utf-8")).values()
    assert config.num_processes == 2 and config.distributed_type.value in values


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cpu", "ddp", "fsdp2", "deepspeed_zero3"])
def test_launch(name, tmp_path):
    """The files run on two GPUs. That of FSDP also runs on CPUs, where Accelerate uses DDP without sharding."""
    if name != "cpu" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if name == "deepspeed_zero3":
        pytest.importorskip("deepspeed")
    data, output = SCRIPTS["run_mlm"].write(tmp_path / "corpus", train=30, validation=6), tmp_path / "out"
    options = ["--dataset_path", data, "--output_dir", output, "--do_train", "--do_eval", "--max_steps", 2]
    options += ["--config_overrides", TINY, "--vocab_size", 300, "--max_seq_length", 32, *QUIET[name != "cpu" :]]
    config = EXAMPLES / "accelerate" / f"{'fsdp2' if name == 'cpu' else name}.yaml"
    command = ["-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", "0"]
    done = subprocess.run(
        [sys.executable, *map(str, [*command, EXAMPLES / "run_mlm.py", *options])],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert steps(output) == 2 and done.stdout.count("***** train metrics *****") == 1
