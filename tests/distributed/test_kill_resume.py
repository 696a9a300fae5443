"""Pretraining that is killed with `kill -9` at random points and resumed has the losses of an uninterrupted run.

No launcher is used, because it would stop the other processes if one of them is killed.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.ranks import PATIENCE, Ranks
from tests.distributed.test_scripts import call
from tests.examples.test_run_mlm import texts

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 16
# There is no dropout, because its masks depend on the number of processes.
MODEL = (
    "hidden_size=32,num_hidden_layers=2,intermediate_size=32,nffn_hidden_size=32,shared_representation_size=16,"
    "ema_projection_size=2,use_chunking=true,chunk_size=8,dropout_prob=0.0,hidden_dropout_prob=0.0,"
    "attention_probs_dropout_prob=0.0,nffn_activation_dropout_prob=0.0"
)


def arguments(processes: int, corpus: Path, output: Path, *options: str) -> list[str]:
    """Return the options of a run; it continues from the latest checkpoint in `output` if there is one."""
    resume = ["--resume_from_checkpoint", "last"] if any(output.glob("checkpoint-*")) else []
    return [
        *("--do_train", "--use_cpu", "--disable_tqdm", "true", "--ddp_timeout", str(PATIENCE)),
        *("--dataset_path", str(corpus), "--output_dir", str(output), "--model_type", "mega"),
        *("--config_overrides", MODEL, "--vocab_size", "300", "--max_seq_length", "32", "--learning_rate", "0.01"),
        *("--max_steps", str(STEPS), "--save_steps", "2", "--save_total_limit", "2", "--logging_steps", "1"),
        *("--per_device_train_batch_size", str(8 // processes), *resume, *options),
    ]


def start(processes: int, *options: object) -> list[subprocess.Popen]:
    """Start a run in new processes."""
    command = [sys.executable, str(EXAMPLES / "run_mlm.py"), *arguments(processes, *options)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(processes)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = []
    for rank in map(str, range(processes)):
        own = shared | {"RANK": rank, "LOCAL_RANK": rank} if processes > 1 else {}
        started.append(subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"} | own, **quiet))
    return started


def finish(ranks: Ranks, processes: int, corpus: Path, output: Path, *options: str) -> list[float]:
    """Run or resume to the end; return the losses of all steps."""
    for found in ranks(processes, call, "run_mlm", arguments(processes, corpus, output, *options)):
        assert "error" not in found, found
    rows = [
        row
        for row in json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
        if "loss" in row
    ]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "steps are missing or doubled"
    return [row["loss"] for row in rows]


def kill(processes: int, corpus: Path, output: Path, step: int, delay: float, *options: str) -> None:
    """Start a run, and kill its last process `delay` seconds after it started to write the checkpoint of a step.

    The other processes must exit with an error.
    """
    *others, last = started = start(processes, corpus, output, *options)
    while not any(int(path.name.partition("-")[2]) >= step for path in output.glob("checkpoint-*")):
        if any(process.poll() is not None for process in started):
            raise RuntimeError(f"the run in {output} ended before step {step}")
        time.sleep(0.001)
    time.sleep(delay)
    last.kill()
    assert last.wait() == -signal.SIGKILL, f"the run in {output} ended before it was killed"
    assert 0 not in {process.wait(PATIENCE) for process in others}, "a process continued without the killed one"


DROPOUT = ("--bf16", "auto", "--config_overrides", MODEL.replace("dropout_prob=0.0", "dropout_prob=0.1"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Write lines of consecutive numbers and return their folder."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.txt").write_text("\n".join(texts(200, seed=0)) + "\n", encoding="utf-8")
    return folder


def losses_of_a_killed_run(ranks, processes, corpus, folder, *options):
    """Return the losses of an uninterrupted run, and of a run that was killed at a random time and resumed."""
    complete = finish(ranks, processes, corpus, folder / "complete", *options)
    draw = random.Random(processes)
    step, delay = draw.randrange(4, STEPS - 8, 2), draw.uniform(0, 0.1)
    kill(processes, corpus, folder / "killed", step, delay, *options)
    return complete, finish(ranks, processes, corpus, folder / "killed", *options)


def test_a_run_is_killed(ranks, corpus, tmp_path):
    """Losses of a resumed run of one process, with dropout, are equal bit for bit, also in bfloat16."""
    complete, resumed = losses_of_a_killed_run(ranks, 1, corpus, tmp_path, *DROPOUT)
    assert resumed == complete


def test_one_of_two_processes_is_killed(ranks, corpus, tmp_path):
    """If one process is killed, the other one exits with an error, and both resume from the last complete checkpoint.

    `test_scripts.py` resumes on another number of processes.
    """
    complete, resumed = losses_of_a_killed_run(ranks, 2, corpus, tmp_path)
    assert resumed == complete
