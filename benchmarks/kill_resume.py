"""Kills a run of pretraining at random points by `kill -9`, resumes it, and compares the losses.

    python benchmarks/kill_resume.py --points 5 --folder /tmp/kill_resume
    python benchmarks/kill_resume.py --points 10 --folder /tmp/kill_resume_trainer --trainer

The first kills one of the two processes of a sharded run (run_mlm_accelerate.py); the other has to end with an error
within a minute. Then each number of processes resumes a copy of what is left. With `--trainer` it is one process of
run_mlm.py, with dropout and in bfloat16. The losses of all steps have to equal those of a run that nothing stopped.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = 24
# No dropout: its masks depend on the number of processes.
MODEL = (
    "hidden_size=32,num_hidden_layers=2,intermediate_size=32,nffn_hidden_size=32,shared_representation_size=16,"
    "ema_projection_size=2,use_chunking=true,chunk_size=8,dropout_prob=0.0,hidden_dropout_prob=0.0,"
    "attention_probs_dropout_prob=0.0,nffn_activation_dropout_prob=0.0"
)


def write_corpus(folder: Path) -> Path:
    """Write lines that count, and return their folder."""
    draw, words = random.Random(0), ["one", "two", "three", "four", "five", "six"]
    folder.mkdir(parents=True)
    starts = [draw.randrange(6) for _ in range(200)]
    lines = [" ".join(words[(start + step) % 6] for step in range(draw.randrange(8, 16))) for start in starts]
    (folder / "train.txt").write_text("\n".join(lines) + "\n")
    return folder


def options(corpus: Path, output: Path, steps: int = STEPS) -> list[str]:
    """Return the command line of `run_mlm_accelerate.py`, which resumes whatever is in `output`."""
    return [
        *("--dataset_path", str(corpus), "--output_dir", str(output), "--resume", "true", "--use_cpu", "true"),
        *("--fsdp", "true", "--timeout", "30", "--max_steps", str(steps), "--save_steps", "2", "--batch_size", "8"),
        *("--block_size", "32", "--vocab_size", "300", "--model_type", "mega", "--config_overrides", MODEL),
        *("--learning_rate", "0.01", "--gradient_accumulation_steps", "2"),
    ]


def launch(processes: int, arguments: list[str]) -> list[subprocess.Popen]:
    """Start the script as `processes` processes without a launcher, which would end the others when one dies."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    shared["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, str(ROOT / "examples" / "run_mlm_accelerate.py"), *arguments]
    return [
        subprocess.Popen(
            command,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(processes)
    ]


def kill_one(processes: list[subprocess.Popen], output: Path, step: int, delay: float) -> float:
    """Kill the last process `delay` seconds after `step`; return the seconds until the others have ended."""
    losses = output / "losses.jsonl"
    while not losses.is_file() or len(losses.read_text().splitlines()) < step:
        if any(process.poll() is not None for process in processes):
            raise RuntimeError(f"a process ended before step {step}")
        time.sleep(0.001)
    time.sleep(delay)
    processes[-1].send_signal(signal.SIGKILL)
    start = time.monotonic()
    for process in processes[:-1]:
        if process.wait(60) == 0:
            raise RuntimeError("a process went on without the one that was killed")
    processes[-1].wait()
    return time.monotonic() - start


def read_losses(output: Path) -> list[float]:
    """Return the losses of all steps, which have to be in order."""
    rows = [json.loads(line) for line in (output / "losses.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)), "steps are missing or doubled"
    return [row["loss"] for row in rows]


def finish(processes: int, corpus: Path, output: Path) -> list[float]:
    """Run, or resume, to the end; return the losses."""
    if any(process.wait(300) for process in launch(processes, options(corpus, output))):
        raise RuntimeError(f"a run of {processes} in {output} failed")
    return read_losses(output)


def start_trainer(corpus: Path, output: Path) -> subprocess.Popen:
    """Start run_mlm.py on one process, from the newest checkpoint of `output` if there is one."""
    model = MODEL.replace("dropout_prob=0.0", "dropout_prob=0.1")
    resume = ["--resume_from_checkpoint", "last"] if any(output.glob("checkpoint-*")) else []
    command = [
        *(sys.executable, str(ROOT / "examples" / "run_mlm.py"), "--do_train", "--use_cpu", "--bf16", "true"),
        *("--dataset_path", str(corpus), "--output_dir", str(output), "--model_type", "mega"),
        *("--config_overrides", model, "--vocab_size", "300", "--block_size", "32", "--learning_rate", "0.01"),
        *("--max_steps", str(STEPS), "--save_steps", "2", "--save_total_limit", "2", "--logging_steps", "1", *resume),
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **quiet)


def finish_trainer(corpus: Path, output: Path) -> list[float]:
    """Run, or resume, to the end; return the losses."""
    if start_trainer(corpus, output).wait(300):
        raise RuntimeError(f"the run in {output} failed")
    rows = [row for row in json.loads((output / "trainer_state.json").read_text())["log_history"] if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "steps are missing or doubled"
    return [row["loss"] for row in rows]


def kill_trainer(corpus: Path, output: Path, delay: float) -> bool:
    """Start a run and kill it `delay` seconds after its first checkpoint has begun; return whether it still ran."""
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


def check_trainer(points: int, draw: random.Random, corpus: Path, folder: Path) -> None:
    """Kill run_mlm.py at `points` places of its steps, and print what was left and how far the losses are off."""
    whole, times = finish_trainer(corpus, folder / "whole"), {}
    for path in (folder / "whole").glob("checkpoint-*/trainer_state.json"):
        times[path.parent.name] = path.stat().st_mtime
    length = (STEPS - 2) / 2 * (max(times.values()) - min(times.values()))  # from the first checkpoint to the last
    print("killed after s  left behind  largest difference of a loss", flush=True)
    while points:
        delay, output = draw.uniform(0, length), folder / f"killed-{points}"
        if kill_trainer(corpus, output, delay):
            points -= 1
            left = " ".join(sorted(path.name.removeprefix("checkpoint-") for path in output.glob("checkpoint-*")))
            losses = finish_trainer(corpus, output)
            print(
                f"{delay:>14.2f}  {left:>11}  {max(abs(a - b) for a, b in zip(losses, whole, strict=True)):.1e}",
                flush=True,
            )
        else:
            shutil.rmtree(output)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True, help="is made, and must not be there")
    parser.add_argument("--trainer", action="store_true", help="one process of run_mlm.py")
    arguments = parser.parse_args(argv)
    draw, folder = random.Random(arguments.seed), arguments.folder
    corpus = write_corpus(folder / "corpus")
    if arguments.trainer:
        check_trainer(arguments.points, draw, corpus, folder)
        return
    whole = finish(2, corpus, folder / "whole")
    print("kill after step  delay s  others ended after s  left behind  resumed on 1  resumed on 2", flush=True)
    for point in range(arguments.points):
        step, delay, output = draw.randrange(1, STEPS - 1), draw.uniform(0, 0.2), folder / f"killed-{point}"
        seconds = kill_one(launch(2, options(corpus, output)), output, step, delay)
        left = " ".join(sorted(path.name.removeprefix("checkpoint-") for path in output.glob("checkpoint-*")))
        row = [f"{step:>16}", f"{delay:>7.3f}", f"{seconds:>20.1f}", f"{left:>11}"]
        for processes in (1, 2):
            copy = shutil.copytree(output, folder / f"resumed-{point}-{processes}")
            losses = finish(processes, corpus, copy)
            row.append(f"{max(abs(a - b) for a, b in zip(losses, whole, strict=True)):>12.1e}")
        print("  ".join(row), flush=True)


if __name__ == "__main__":
    main()
