"""Runs of pretraining that are killed by `kill -9`, and resumed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.distributed.ranks import PATIENCE
from tests.examples.test_run_mlm import texts

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 24
# No dropout: its masks depend on the number of processes.
MODEL = (
    "hidden_size=32,num_hidden_layers=2,intermediate_size=32,nffn_hidden_size=32,shared_representation_size=16,"
    "ema_projection_size=2,use_chunking=true,chunk_size=8,dropout_prob=0.0,hidden_dropout_prob=0.0,"
    "attention_probs_dropout_prob=0.0,nffn_activation_dropout_prob=0.0"
)


def write_corpus(folder: Path) -> Path:
    """Write lines of consecutive numbers, and return their folder."""
    folder.mkdir(parents=True)
    (folder / "train.txt").write_text("\n".join(texts(200, seed=0)) + "\n")
    return folder


def options(corpus: Path, output: Path, steps: int = STEPS) -> list[str]:
    """Return the command line of `run_mlm_accelerate.py`, which resumes from any state of `output`."""
    return [
        *("--dataset_path", str(corpus), "--output_dir", str(output), "--resume", "true", "--use_cpu", "true"),
        *("--fsdp", "true", "--timeout", str(PATIENCE), "--max_steps", str(steps), "--save_steps", "2"),
        *("--block_size", "32", "--vocab_size", "300", "--model_type", "mega", "--config_overrides", MODEL),
        *("--learning_rate", "0.01", "--gradient_accumulation_steps", "2", "--batch_size", "8"),
    ]


def launch(processes: int, arguments: list[str]) -> list[subprocess.Popen]:
    """Start the script as `processes` processes without a launcher, because a launcher stops the others if one dies."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    shared["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, str(EXAMPLES / "run_mlm_accelerate.py"), *arguments]
    return [
        subprocess.Popen(
            command,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(processes)
    ]


def kill_one(processes: list[subprocess.Popen], output: Path, step: int, delay: float) -> None:
    """Kill the last process `delay` seconds after `step`; the others must exit with an error."""
    losses = output / "losses.jsonl"
    while not losses.is_file() or len(losses.read_text().splitlines()) < step:
        if any(process.poll() is not None for process in processes):
            raise RuntimeError(f"a process ended before step {step}")
        time.sleep(0.001)
    time.sleep(delay)
    processes[-1].send_signal(signal.SIGKILL)
    for process in processes[:-1]:
        if process.wait(PATIENCE) == 0:
            raise RuntimeError("a process went on without the one that was killed")
    processes[-1].wait()


def read_losses(output: Path) -> list[float]:
    """Return the losses of all steps, which must be in order."""
    rows = [json.loads(line) for line in (output / "losses.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "steps are missing or doubled"
    return [row["loss"] for row in rows]


def finish(processes: int, corpus: Path, output: Path) -> list[float]:
    """Run, or resume, to the end; return the losses."""
    if any(process.wait(PATIENCE) for process in launch(processes, options(corpus, output))):
        raise RuntimeError(f"a run of {processes} in {output} failed")
    return read_losses(output)


def start_trainer(corpus: Path, output: Path) -> subprocess.Popen:
    """Start run_mlm.py on one process, from the latest checkpoint of `output` if there is one."""
    model = MODEL.replace("dropout_prob=0.0", "dropout_prob=0.1")
    resume = ["--resume_from_checkpoint", "last"] if any(output.glob("checkpoint-*")) else []
    command = [
        *(sys.executable, str(EXAMPLES / "run_mlm.py"), "--do_train", "--use_cpu", "--bf16", "true"),
        *("--dataset_path", str(corpus), "--output_dir", str(output), "--model_type", "mega"),
        *("--config_overrides", model, "--vocab_size", "300", "--block_size", "32", "--learning_rate", "0.01"),
        *("--max_steps", str(STEPS), "--save_steps", "2", "--save_total_limit", "2", "--logging_steps", "1", *resume),
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **quiet)


def finish_trainer(corpus: Path, output: Path) -> list[float]:
    """Run, or resume, to the end; return the losses."""
    if start_trainer(corpus, output).wait(PATIENCE):
        raise RuntimeError(f"the run in {output} failed")
    rows = [row for row in json.loads((output / "trainer_state.json").read_text())["log_history"] if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "steps are missing or doubled"
    return [row["loss"] for row in rows]


def kill_trainer(corpus: Path, output: Path, delay: float) -> bool:
    """Start a run and kill it `delay` seconds after its first checkpoint started; return whether it still ran."""
    process = start_trainer(corpus, output)
    while not any(output.glob("checkpoint-*")):
        if process.poll() is not None:
            raise RuntimeError(f"the run in {output} ended before its first checkpoint")
        time.sleep(0.001)
    time.sleep(delay)
    running = process.poll() is None
    process.kill()
    process.wait()
    return running
