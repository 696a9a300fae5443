"""All that a GPU must show, in one call: checks, timings, and a Markdown table of them.

    python benchmarks/gpu_report.py --output DIR              on a GPU, at most 9 minutes
    python benchmarks/gpu_report.py --output DIR --minutes 4  the last sections are left out
    python benchmarks/gpu_report.py --output DIR --toy        interpreted, at toy sizes, as it is without a GPU

DIR gets results.jsonl (a line for each result, as they come), report.md and log.txt. A section runs in processes of its
own, and a case that fails, hangs or crashes takes no other with it. The exit status is 0 only if all ran and is right.
"""

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from gpu import table, worker


class Section(NamedTuple):
    """A section: its seconds at most, the seconds of one case, and whether several processes share its cases."""

    name: str
    seconds: int
    case_seconds: int
    shared: bool


SECTIONS = (
    Section("device", 90, 90, False),  # the first import on a new machine is slow
    Section("parity", 130, 60, True),
    Section("bits", 40, 40, True),
    Section("compiled", 60, 60, True),
    Section("graph", 30, 30, True),
    Section("candidates", 80, 60, True),
    Section("tune", 60, 30, False),
    Section("ops", 110, 45, False),
    Section("models", 75, 40, False),
    Section("decoding", 40, 30, False),
    Section("memory", 120, 120, False),
)
# Seconds that are kept for the table.
LAST = 5
# Factor of all times where nothing waits for a GPU: an interpreter on a busy machine takes as long as it takes.
PATIENCE = 60
# Seconds to wait for the end of a process that has been killed or has closed its pipe.
ENDING = 60


class Stop(Exception):
    """SIGTERM: the table is made of the results so far."""


class Process:
    """A process that works through some cases of a section, and is begun anew behind a case that ends it."""

    def __init__(self, context, section: Section, share: tuple[int, int], setting: tuple):
        self.context, self.section, self.share, self.setting = context, section, share, setting
        self.done, self.left, self.over = 0, None, False
        self.start()

    def start(self) -> None:
        self.pipe, theirs = self.context.Pipe()
        arguments = (theirs, self.section.name, self.share, self.done, *self.setting)
        self.process = self.context.Process(target=worker.work, args=arguments)
        self.process.start()
        theirs.close()
        self.running, self.since, self.begun_at = None, None, self.done

    def go(self) -> None:
        """Begin with the cases; until now the process has only imported its modules."""
        self.since = time.monotonic()
        try:
            self.pipe.send("go")
        except OSError:  # it has died: its end is told when it is awaited
            pass

    def receive(self) -> list[dict]:
        """Return the rows of a message."""
        try:
            kind, name, rows = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(ENDING)
            return self.fail(f"the process ended with exit status {self.process.exitcode}")
        if kind == "rows":
            self.finish()
            return [{"case": name} | row for row in rows]
        if kind == "cases":
            self.left = rows
        elif kind == "begin":
            self.running, self.since = name, time.monotonic()
        else:
            self.process.join(ENDING)
            self.over = True
        return []

    def finish(self) -> None:
        self.done, self.running, self.since = self.done + 1, None, time.monotonic()
        self.left = self.left[1:]

    def fail(self, reason: str) -> list[dict]:
        """Return the rows of the cases that a failure of the process costs, and begin another process behind them."""
        self.kill()
        lost = {"error": reason, "ok": False}
        if self.running is None and self.done == self.begun_at:  # it does not even start
            self.over = True
            return [{"case": name} | lost for name in self.left or ["start"]]
        # Between two cases none is lost: the case before has its row, and may have broken the process.
        rows = [] if self.running is None else [{"case": self.running} | lost]
        if rows:
            self.finish()
        self.over = not self.left
        if self.left:
            self.start()
            self.go()
        return rows

    def kill(self) -> None:
        """End the process and its children."""
        if self.process.is_alive():
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has no group of its own yet
                self.process.kill()
        self.process.join(ENDING)
        self.pipe.close()


def run_section(processes: list[Process], section: Section, until: float, write) -> None:
    """Run the cases of a section until a time, and write their rows as they come."""
    for process in processes:
        process.go()
    while processes:
        now = time.monotonic()
        ready = multiprocessing.connection.wait([process.pipe for process in processes], timeout=0.5)
        for process in list(processes):
            rows = []
            if process.pipe in ready:
                rows = process.receive()
            elif now - process.since > section.case_seconds:
                rows = process.fail(f"not done after {section.case_seconds} s")
            for row in rows:
                write({"section": section.name} | row)
            if process.over:
                processes.remove(process)
        if now > until:
            break
    for process in processes:  # no time is left
        process.kill()
        for name in process.left or ["start"]:
            write({"section": section.name, "case": name, "dropped": "no time was left"})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--minutes", type=float, default=8.8, help="limit of the whole on a GPU; cases that do not fit are left out"
    )
    parser.add_argument("--toy", action="store_true", help="toy sizes, interpreted on a CPU, at leisure")
    parser.add_argument("--sections", nargs="+", choices=[s.name for s in SECTIONS], help="only these")
    arguments = parser.parse_args(argv)
    begin = time.monotonic()
    end = begin + 60 * arguments.minutes - LAST
    toy = arguments.toy or not torch.cuda.is_available()
    arguments.output.mkdir(parents=True, exist_ok=True)
    results, rows = arguments.output / "results.jsonl", []
    for old in (results, arguments.output / "log.txt", arguments.output / "report.md"):
        old.unlink(missing_ok=True)

    def write(row: dict) -> None:
        rows.append(row)
        with open(results, "a") as file:
            file.write(json.dumps(row) + "\n")
        if row.get("ok") is False or "dropped" in row:
            print(json.dumps(row), flush=True)

    def stop(*_) -> None:
        raise Stop

    before = signal.signal(signal.SIGTERM, stop)
    sections = [s for s in SECTIONS if arguments.sections is None or s.name in arguments.sections]
    if toy:
        end = begin + 60 * arguments.minutes * PATIENCE
        sections = [s._replace(seconds=s.seconds * PATIENCE, case_seconds=s.case_seconds * PATIENCE) for s in sections]
    left_out = "no time was left"
    try:
        run(sections, end, toy, arguments.output, write)
    except (Stop, KeyboardInterrupt):
        left_out = "the report was stopped"
    finally:
        signal.signal(signal.SIGTERM, before)
    seen = {row["section"] for row in rows}
    for section in sections:
        if section.name not in seen:
            write({"section": section.name, "case": "all", "dropped": left_out})
    stopped = left_out if left_out != "no time was left" else None
    text = table.markdown(rows, time.monotonic() - begin, stopped)
    (arguments.output / "report.md").write_text(text)
    print(text)
    return 0 if not stopped and table.right(rows) else 1


def run(sections: list[Section], end: float, toy: bool, output: Path, write) -> None:
    """Run the sections in order; the processes of one are started, and import, while the one before it runs."""
    # A process forked from one that has imported all starts at once, but CUDA may not be asked for in that one.
    context = multiprocessing.get_context("forkserver" if toy else "spawn")
    if toy:
        os.environ["TRITON_INTERPRET"] = "1"
        # The server finds the modules that it imports ahead there only.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parent), *sys.path])
        context.set_forkserver_preload(["gpu.checks", "gpu.timings"])
    jobs = 1 if toy else max(1, min((os.cpu_count() or 1) - 2, 14))
    started = []

    def start(section: Section) -> list[Process]:
        shares = [(part, jobs) for part in range(jobs)] if section.shared else [(0, 1)]
        started.append([])
        for share in shares:
            started[-1].append(Process(context, section, share, (toy, str(output.resolve()))))
        return started[-1]

    try:
        processes = start(sections[0])
        for number, section in enumerate(sections):
            following = sections[number + 1 : number + 2]
            waiting = start(following[0]) if following and time.monotonic() < end else []
            now = time.monotonic()
            if now < end and processes:
                print(f"{section.name} ...", flush=True)
                run_section(processes, section, min(end, now + section.seconds), write)
            processes = waiting
    finally:
        for process in (process for each in started for process in each):
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
