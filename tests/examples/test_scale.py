"""Files for `accelerate launch`, streamed data, and errors."""

import itertools
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

from luna_mega.training.streams import Stream
from tests.examples import test_run_mlm as mlm
from tests.examples.runs import QUIET, TINY, steps, write

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CONFIGS = sorted((EXAMPLES / "accelerate").glob("*.yaml"))


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Write a train split of three files and a validation split."""
    for shard in range(3):
        mlm.write(mlm.texts(30, seed=shard), tmp_path / "corpus" / f"train-{shard:05d}-of-00003.jsonl")
    return mlm.write(mlm.texts(20, seed=9), tmp_path / "corpus" / "validation.jsonl")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_reads_the_file(path):
    config = load_config_from_file(str(path))
    assert (
        config.num_processes == 2
        and config.distributed_type.value in yaml.safe_load(path.read_text(encoding="utf-8")).values()
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "deepspeed_zero3"])
def test_launch_on_gpus(name, corpus, tmp_path):
    if name == "deepspeed_zero3":
        pytest.importorskip("deepspeed")
    launch(name, corpus, tmp_path / "out")


@pytest.mark.slow
def test_launch_on_cpus(corpus, tmp_path):
    """The FSDP configuration runs on CPUs, where Accelerate uses DDP without sharding."""
    launch("fsdp2", corpus, tmp_path / "out", "--use_cpu", "true")


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
@pytest.mark.parametrize("options, processes", [(["--cpu"], 1), ([], 1), (["--config_file", CONFIGS[0]], 2)])
def test_processes_on_cpus(options, processes, tmp_path):
    """Options with which `accelerate launch --num_processes 2` starts one process, see docs/distributed.md."""
    script = tmp_path / "script.py"
    script.write_text('import os\nprint("started", os.environ.get("RANK"), flush=True)\n', encoding="utf-8")
    command = ["accelerate.commands.launch", *options, "--num_processes", "2", "--main_process_port", "0", script]
    done = subprocess.run([sys.executable, "-m", *map(str, command)], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.count("started") == processes


def launch(config: str, corpus: Path, output: Path, *more: str) -> None:
    options = ["--dataset_path", corpus, "--output_dir", output, "--do_train", "--do_eval", "--max_steps", 2]
    options += ["--config_overrides", TINY, "--vocab_size", 300, "--max_seq_length", 32, *QUIET[1:], *more]
    command = ["accelerate.commands.launch", "--config_file", EXAMPLES / "accelerate" / f"{config}.yaml"]
    command += ["--main_process_port", "0", EXAMPLES / "run_mlm.py", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)], env=environment, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    assert steps(output) == 2 and done.stdout.count("***** train metrics *****") == 1


def streamed(script, folder: Path, rank: int, count: int, files: int = 3) -> list[int]:
    """Return twelve rows that a process reads from a repeated stream of ten rows."""
    folder.mkdir(exist_ok=True)
    rows = [{"number": number} for number in range(10)]
    names = [write(rows[file::files], folder / f"{file}.jsonl") / f"{file}.jsonl" for file in range(files)]
    split = datasets.load_dataset("json", data_files=[str(name) for name in names], split="train", streaming=True)
    training = SimpleNamespace(process_index=rank, world_size=count, seed=3)
    stream = Stream(split, lambda row, _: row, training, 4, "block_size")
    return [row["number"] for row in itertools.islice(stream, 12)]


def test_stream_is_split_over_processes(script, tmp_path):
    """Processes share a stream.

    If the number of files is not a multiple of the number of processes, the batches equal those of one process, also
    after the end of the data. Otherwise each process reads separate files.
    """
    complete = streamed(script, tmp_path / "three", 0, 1)
    assert sorted(complete[:10]) == list(range(10)) and complete != sorted(complete)
    for count in (2, 4):
        shares = [streamed(script, tmp_path / "three", rank, count) for rank in range(count)]
        assert [shares[place % count][place // count] for place in range(12)] == complete
    shares = [streamed(script, tmp_path / "two", rank, 2, files=2) for rank in range(2)]
    assert sorted(sorted(set(share)) for share in shares) == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
