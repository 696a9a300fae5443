"""Check the kernels on a GPU, and measure operators and models, in at most four minutes.

    python3 benchmarks/gpu.py          # `make gpu`; needs only torch and Triton
    python3 benchmarks/gpu.py --dry    # all parts on a CPU, with tiny sizes and times that mean nothing

Prints each result when it is known, and at the end what fell short; gpu.json and gpu.md in --output are complete at any
time. The checks run in a pool of processes, one job for each call of an operator, dtype and length, because a process
compiles its kernels one after the other. A process ends after a failed check: an illegal access fails all later calls.
Parts that the installed transformers cannot run are skipped, with the reason. The exit status is 1 if a check failed.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from report import commit, join

FOLDER = Path(__file__).resolve().parent
Row = dict[str, object]
TIMES_GRAPH = 1.5  # eager mode falls short above this multiple of the time of the graph


class Gate:
    """Runs jobs in processes, and prints and writes their rows as they come."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.start = arguments, time.monotonic()
        self.about: Row = {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "dry": arguments.dry}
        self.jobs: dict[str, list[list]] = {"checks": [], "times": []}
        self.rows: dict[tuple, Row] = {}
        self.running: set[subprocess.Popen] = set()
        self.lock, self.over = threading.Lock(), False
        self.free: SimpleQueue[subprocess.Popen] = SimpleQueue()
        self.timer = threading.Timer(arguments.seconds, self.stop)
        self.timer.daemon = True
        self.timer.start()

    def stop(self) -> None:
        """End all jobs, because the time is over."""
        self.over = True
        for process in list(self.running):
            process.kill()

    def add(self, part: str, **row: object) -> None:
        """Keep, print and write a row."""
        if part in ("ready", "jobs"):
            self.jobs |= row
            return
        with self.lock:
            if part == "about":
                self.about |= row
            else:
                self.rows[part, row["name"], row.get("size"), row.get("pass")] = {"part": part, **row}
            words = (f"{key} {x:.3f}" if isinstance(x, float) else str(x) for key, x in row.items() if key != "peer")
            print(f"{time.monotonic() - self.start:5.0f} s  {part}: {', '.join(words)}", flush=True)
            self.write()

    def run(self, jobs: list[list], count: int) -> None:
        """Run jobs in `count` processes."""
        while self.free.qsize() < count:
            self.free.put(self.begin())
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(self.take, jobs))

    def take(self, job: list) -> None:
        """Run a job in a free process, or in a new one if that has ended."""
        process = self.free.get()
        if not self.over and process.poll() is not None:
            process = self.begin()
        self.follow(job, process)
        self.free.put(process)

    def run_in_turn(self, jobs: list[list]) -> None:
        """Run jobs one after the other, when all other processes have ended; each has its own process."""
        processes = [self.begin() for _ in jobs if not self.over]
        while not self.free.empty():
            self.end(self.free.get())
        for process in processes:
            while not (process.stdout.readline() or '"ready"').count('"ready"'):
                pass
        for job in jobs:
            process = processes.pop(0) if processes else None
            self.follow(job, process)
            self.end(process)

    def begin(self) -> subprocess.Popen:
        command = [sys.executable, str(FOLDER / "gpu_jobs.py")]
        dry = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if self.arguments.dry else {}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8",
            env=os.environ | dry,
        )  # fmt: skip
        self.running.add(process)
        return process

    def end(self, process: subprocess.Popen | None) -> None:
        """Let a process end."""
        if process is not None:
            process.communicate()
            self.running.discard(process)

    def follow(self, job: list, process: subprocess.Popen | None) -> None:
        """Run a job in a process, and keep its rows until it is done or the process has ended."""
        if self.over or process is None:
            self.add(job[0], name=_name(job), result="failed: not reached in time")
            return
        printed = []
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            printed = ["it ended before it began"]
        for line in process.stdout:
            if line.startswith('{"part": "done"'):
                return
            if line.startswith('{"part"'):
                self.add(**json.loads(line))
            else:
                printed = [*printed[-4:], line.strip()]
        if process.wait() != 0:
            reason = "not finished in time" if self.over else f"exit status {process.returncode}: {' '.join(printed)}"
            self.add(job[0], name=_name(job), result=f"failed: {reason[-300:]}")
        self.running.discard(process)

    def short(self) -> list[str]:
        """Return a line for each row that failed, was skipped, or is slower than it should be."""
        lines = []
        for (part, name, size, key), row in self.rows.items():
            about = " ".join(word for word in (f"{part}: {name}", size, key) if word)
            if row.get("result", "ok") != "ok":
                lines.append(f"{about}: {row['result']}")
            if self.arguments.dry or (best := row.get("graph", row.get("eager"))) is None:
                continue
            peer = self.rows.get((part, row.get("peer"), size, key), {})
            if best > (other := peer.get("graph", peer.get("eager", best))):
                lines.append(f"{about}: {best:.3f} ms, {row['peer']} {other:.3f} ms")
            if row.get("eager", 0) > TIMES_GRAPH * best and not name.endswith("_sdpa"):
                lines.append(f"{about}: {row['eager']:.3f} ms in eager mode, {best:.3f} ms as a CUDA graph")
        return lines

    def write(self) -> None:
        """Write gpu.json and gpu.md."""
        rows, short = list(self.rows.values()), self.short()
        results = [row["result"] for row in rows if row["part"] in ("operator", "step")]
        text = f"# Checks and measurements\n\n`{json.dumps(self.about)}`\n\n"
        text += f"{results.count('ok')} of {len(results)} checks passed.\n\n## Fell short\n\n"
        text += "".join(f"- {line}\n" for line in short) or "Nothing.\n"
        for part, title in (("ops", "Operators"), ("model", "Models")):
            columns = ["eager", "host", "graph"]
            lines = [["name", "size", "pass", *(f"{column} (ms)" for column in columns)]]
            for row in (row for row in rows if row["part"] == part and "eager" in row):
                figures = (f"{row[column]:.3f}" if column in row else "" for column in columns)
                lines.append([row["name"], row["size"], row["pass"], *figures])
            text += f"\n## {title}\n\n{join(lines)}"
        self.arguments.output.mkdir(parents=True, exist_ok=True)
        (self.arguments.output / "gpu.md").write_text(text, encoding="utf-8")
        result = {"about": self.about, "rows": rows, "short": short}
        (self.arguments.output / "gpu.json").write_text(json.dumps(result, indent=1), encoding="utf-8")


def _name(job: list) -> str:
    return " ".join(word for word in job[1:] if isinstance(word, str)) or job[0]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="run every part on a CPU, with tiny sizes")
    parser.add_argument("--seconds", type=float, default=240, help="end what is not finished after this time")
    parser.add_argument("--output", type=Path, default=Path("outputs/gpu"))
    arguments = parser.parse_args(argv)
    gate, count = Gate(arguments), 1 if arguments.dry else min(16, os.cpu_count())
    gate.run([["dry" if arguments.dry else "list"]], count)
    gate.run(gate.jobs["checks"], count)
    # An operator with wrong results is not measured.
    found = [row for row in gate.rows.values() if row["part"] == "operator" and row["result"] != "ok"]
    wrong = {row["name"].split(":")[0].split(" ")[0] for row in found if "cuda graph" not in row["name"]}
    for job in gate.jobs["times"][:1]:
        job[2] = [entry for entry in job[2] if entry[1] not in wrong]
    gate.run_in_turn(gate.jobs["times"])
    gate.timer.cancel()
    print("\nFell short:", *(gate.short() or ["nothing"]), sep="\n  ")
    return int(any(row.get("result", "").startswith("failed") for row in gate.rows.values()))


if __name__ == "__main__":
    sys.exit(main())
