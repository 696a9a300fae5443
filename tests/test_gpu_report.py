"""The report of a GPU, at toy sizes on a CPU; it goes on behind cases that fail, hang or crash."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture(scope="module")
def report(import_benchmark):
    return import_benchmark("gpu_report")


@pytest.mark.slow
def test_toy_run(repo_root, tmp_path, report):
    environment = os.environ | {"PYTHONPATH": str(repo_root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "benchmarks/gpu_report.py", "--toy", "--output", str(tmp_path)]
    run = subprocess.run(command, env=environment, cwd=repo_root, capture_output=True, text=True)
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]
    assert {row["section"] for row in rows} == {section.name for section in report.SECTIONS}
    assert not any("dropped" in row or row.get("ok") is False for row in rows)
    files = [file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file()]
    assert {str(file) for file in files} == {"results.jsonl", "report.md", "log.txt"}
    text = (tmp_path / "report.md").read_text()
    for title in ("Triton interpreter", "against float64", "Configurations", "Ops", "Models", "Generation", "Peak MB"):
        assert title in text


def work(pipe, section, share, done, toy, output):
    """Stand in for a section's process: cases that are right, wrong, crash and hang."""
    cases = ["right", "wrong", "crash", "hang", "last"][share[0] :: share[1]][done:]
    os.setsid()
    pipe.recv()
    pipe.send(("cases", None, cases))
    for name in cases:
        pipe.send(("begin", name, None))
        if name == "crash":
            os._exit(70)
        if name == "hang":
            time.sleep(3600)
        pipe.send(("rows", name, [{"ok": name != "wrong"}]))
        if name == "wrong":
            os._exit(1)  # as where it has lost the CUDA context
    pipe.send(("end", None, None))


@pytest.fixture
def clock(report, monkeypatch):
    """Let time pass only where nothing but hanging cases is left, so that a busy machine changes nothing.

    The processes to watch are put into the list that is returned.
    """
    watched, seconds, end = [], [0.0], time.monotonic() + 1200
    wait, monotonic = multiprocessing.connection.wait, time.monotonic

    def wait_and_look(pipes, timeout):
        ready = wait(pipes, timeout)
        if not ready and all(process.over or process.running == "hang" for process in watched):
            seconds[0] += 2
        assert monotonic() < end, "a process is dead and nobody notices"
        return ready

    monkeypatch.setattr(report.multiprocessing.connection, "wait", wait_and_look)
    monkeypatch.setattr(report, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return watched


@pytest.mark.parametrize("shares", [1, 2])
def test_cases_that_crash_or_hang(report, monkeypatch, clock, shares):
    monkeypatch.setattr(report.worker, "work", work)
    section, rows = report.Section("parity", 60, 1, True), []
    context = multiprocessing.get_context("fork")
    processes = [report.Process(context, section, (part, shares), (True, "")) for part in range(shares)]
    everything = list(processes)
    clock += everything
    report.run_section(processes, section, 30, rows.append)
    by_case = {row["case"]: row for row in rows}
    assert len(rows) == 5 and [by_case[name]["ok"] for name in ("right", "wrong", "last")] == [True, False, True]
    assert by_case["crash"]["error"] == "the process ended with exit status 70"
    assert by_case["hang"]["error"] == "not done after 1 s"
    assert not any(process.process.is_alive() for process in everything)
    assert not report.table.right(rows)


def test_time_that_is_short(report, monkeypatch, clock):
    monkeypatch.setattr(report.worker, "work", work)
    section, rows = report.Section("parity", 60, 60, True), []
    process = report.Process(multiprocessing.get_context("fork"), section, (3, 4), (True, ""))
    clock.append(process)
    report.run_section([process], section, 1, rows.append)
    assert rows == [{"section": "parity", "case": "hang", "dropped": "no time was left"}]
    assert not process.process.is_alive()


def test_a_process_that_does_not_start(report, monkeypatch, clock):
    monkeypatch.setattr(report.worker, "work", lambda *_: os._exit(3))
    section, rows = report.Section("parity", 60, 60, True), []
    process = report.Process(multiprocessing.get_context("fork"), section, (0, 1), (True, ""))
    clock.append(process)
    report.run_section([process], section, 30, rows.append)
    reason = "the process ended with exit status 3"
    assert rows == [{"section": "parity", "case": "start", "error": reason, "ok": False}]


def test_a_report_that_is_stopped(report, monkeypatch, tmp_path, capsys):
    def run(sections, end, toy, output, write):
        write({"section": "device", "case": "versions", "device": "A GPU", "versions": {"torch": "2"}})
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr(report, "run", run)
    assert report.main(["--toy", "--output", str(tmp_path)]) == 1
    text = (tmp_path / "report.md").read_text()
    assert "## A GPU" in text and "The report was stopped before its end." in text
    assert "* memory: 1 cases, the report was stopped" in text and text in capsys.readouterr().out
    monkeypatch.setattr(report, "run", lambda *_: None)
    assert report.main(["--toy", "--output", str(tmp_path), "--sections", "tune"]) == 1
    assert "* tune: 1 cases, no time was left" in (tmp_path / "report.md").read_text()


def test_the_table(report):
    op = {"section": "ops", "op": "damped_ema", "size": "n=8", "forward_percent": 30.0, "backward_percent": 20.0}
    times = {"forward_ms": 1.0, "backward_ms": 2.0, "both_ms": 3.0, "both_mb": 4.0}
    rows = [
        {"section": "parity", "case": "damped_ema ragged, bfloat16", "error": 0.5, "at": "n = 1", "ok": False},
        op | times | {"case": "a", "variant": "luna_mega"},
        op | {name: 3.0 * value for name, value in times.items()} | {"case": "b", "variant": "fft"},
        {"section": "ops", "case": "c", "op": "damped_ema", "size": "n=8", "variant": "x", "error": "no memory"},
        {"section": "memory", "case": "all", "dropped": "no time was left"},
    ]
    text = report.table.markdown(rows, 9.0)
    assert "| damped_ema | n=8 | fft | 3.000 | 6.000 | 9.000 | 12.0 | 30 % | 20 % | 3.00x | 3.00x |" in text
    assert "* parity, damped_ema ragged, bfloat16: error 0.500, at n = 1" in text and "no memory" in text
    assert "| damped_ema | 5.0e-01 |" in text and "NOT all ran" in text
