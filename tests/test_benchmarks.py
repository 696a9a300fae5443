"""The benchmark runner: incorrect ops get no figures, every size has a lower bound, and output can be parsed."""

import csv
import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch


@pytest.fixture(scope="module")
def runner(import_benchmark):
    return import_benchmark("run")


def test_failing_parity_test_prevents_figures(runner, monkeypatch, tmp_path, capsys):
    case = runner.CASES["damped_ema"]
    ours = case.variants[case.ours]

    def wrong(*arguments, **size):
        work = ours(*arguments, **size)
        return type(work)(lambda: tuple(1.001 * output for output in work.forward()), work.leaves)

    monkeypatch.setitem(case.variants, case.ours, wrong)
    assert runner.main(["damped_ema", "--quick", "--device", "cpu", "--output", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "parity fails, so nothing is measured: damped_ema" in printed.err
    assert not printed.out and not list(tmp_path.iterdir())


def test_floors(runner):
    """Every size has a lower bound, on a CPU and on a GPU; its bytes grow with the size of an element."""
    for case in runner.CASES.values():
        for size in (*case.sizes, *case.long, *case.gpu):
            if case.floor is not None:
                for narrow, wide in zip(case.floor(2, **size), case.floor(4, **size), strict=True):
                    assert 0 < 2 * narrow.bytes == wide.bytes
                    assert narrow.flops + narrow.float32 > 0
        for _, variant in case.measurements("cuda", quick=False):
            assert variant in {**case.variants, **case.gpu_variants, **case.compiled}
    from floors import Floor, Rates

    assert Rates(10.0, 5.0, None, 2.0).milliseconds(Floor(20.0, 5.0, 9.0, 8.0)) == 4000.0


@pytest.mark.slow
def test_written_files(runner, tmp_path, capsys):
    arguments = ["gated_attention", "--quick", "--device", "cpu", "--threads", "1", "--output", str(tmp_path)]
    assert runner.main(arguments) == 0
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert result["about"]["device"].endswith("CPU") and result["about"]["rates"]["bytes"] > 1e8
    with open(tmp_path / "results.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["variant"] for row in rows] == ["luna_mega", "original"]
    for row, written in zip(rows, result["rows"], strict=True):
        for name in ("forward", "backward", "both"):
            assert float(row[f"{name}_ms"]) == written[f"{name}_ms"] > 0
        assert 0 < float(row["forward_percent_of_floor"]) < 150
    assert (tmp_path / "gated_attention.png").stat().st_size > 5000
    assert "luna_mega" in printed and "of the floor" in printed
    lines = [
        line for line in (tmp_path / "results.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")
    ]
    assert lines[0].startswith("| n | function | chunk | luna_mega: forward, backward, both (ms), peak (MB) |")
    assert lines[2].startswith("| 2048 | laplace | 128 |") and len({line.count("|") for line in lines}) == 1


TOY = {"hidden_size": 64, "num_hidden_layers": 1}
TOYS = [
    ("encoders", {"n": 768, **TOY}),
    ("text_efficiency", {"n": 768, **TOY}),
    ("decoders", {"n": 70, **TOY}),
    ("memory", {"n": 70, **TOY}),
    ("decoding", {"n": 70, "beams": 4, **TOY}),
    ("images", {"b": 2, "size": 32, **TOY, "hidden_size": 96}),
    ("ssm", {"b": 2, "n": 9, "states": 2}),
    ("ssm_real", {"b": 2, "n": 9, "states": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, size", TOYS)
def test_models(runner, monkeypatch, name, size):
    """Every variant runs; a row contains the memory, and the times of the passes in the case."""
    from measure import measure

    case = dataclasses.replace(runner.CASES[name], repeats=1)
    monkeypatch.setitem(runner.CASES, name, case)
    for variant in case.variants:
        row = measure(name, variant, size, "cpu", "float32", 0)
        assert "error" not in row, (variant, row)
        assert {name for name in row if name.endswith("_ms")} >= {f"{name}_ms" for name in case.passes}
        assert all(row[f"{name}_ms"] > 0 for name in case.passes) and "backward_ms" not in row


def test_models_of_unequal_size_are_not_measured(runner, monkeypatch, tmp_path, capsys):
    case = runner.CASES["decoders"]
    make = case.variants["gpt2_sdpa"]
    monkeypatch.setitem(case.variants, "gpt2_sdpa", lambda *size, **n: make(*size, **n, num_hidden_layers=7))
    assert runner.main(["decoders", "--quick", "--device", "cpu", "--output", str(tmp_path)]) == 1
    assert "models differ by more than 5 %, so nothing is measured: decoders" in capsys.readouterr().err


@pytest.mark.slow
def test_timeouts_are_reported(runner, tmp_path, capsys):
    arguments = ["images", "--quick", "--device", "cpu", "--time-limit", "0.01", "--output", str(tmp_path)]
    assert runner.main(arguments) == 0
    assert "more than 0.01 s" in capsys.readouterr().out
    text = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert text.count("more than 0.01 s") == 4 and "Inference (forward): images a second (peak MB)" in text


def test_speeds(runner):
    from tables import markdown

    row = {"case": "encoders", "n": 512, "b": 2, "variant": "luna_128", "parameters": 23e6, "forward_mb": 1234.0}
    text = markdown(runner.CASES["encoders"], [row | {"forward_ms": 100.0, "both_ms": 1e5, "both_mb": 2.0}])
    assert "| luna_128 | 23.0 | 10,240 (1,234) |" in text and "| luna_128 | 23.0 | 10.24 (2) |" in text
    text = markdown(runner.CASES["memory"], [row | {"both_ms": 1.0, "both_mb": 2.0}])
    assert "peak bytes per token (peak MB)" in text and "| luna_128 | 23.0 | 2,048 (2) |" in text
    text = markdown(runner.CASES["decoding"], [row | {"forward_ms": 12.34}])
    assert "Decoding step: milliseconds\n" in text and "| luna_128 | 23.0 | 12.3 |" in text


def test_relative_speed_and_memory(runner):
    from measure import parameters
    from tables import markdown

    counts = parameters("text_efficiency").values()
    assert max(counts) < 1.05 * min(counts)
    case = runner.CASES["text_efficiency"]
    rows = [
        {"n": n, "variant": variant, "parameters": 3.2e6, "both_ms": 100.0 * n, "both_mb": 500.0}
        for n in (1024, 2048)
        for variant in case.variants
    ]
    found = {(row["variant"], row["n"]): row for row in rows}
    found["luna_16", 1024] |= {"both_ms": 25.6e3, "both_mb": 125.0}
    found["transformer_eager", 2048]["error"] = "more than 90 s"
    eager, sdpa = markdown(case, rows).split("\n\nTraining step")
    assert "batch 1, relative to transformer_eager (1,024: 0.01 steps a second, 500 MB; 2,048: more than 90 s)" in eager
    assert "| luna_16 | 3.2 | 4.00x |  | 0.25x |  |" in eager
    assert "| transformer_eager | 3.2 | 1.00x | more than 90 s | 1.00x | more than 90 s |" in eager
    assert "| luna_16 | 3.2 | 4.00x | 1.00x | 0.25x | 1.00x |" in sdpa
    assert "| transformer_eager | 3.2 | 1.00x | more than 90 s |" in sdpa


def test_turns(runner, capsys):
    assert runner.main(["timestep_norm", "--quick", "--turns", "1", "--variants", "layer_norm", "luna_mega"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "| timestep_norm | pass (ms) | layer_norm | luna_mega |"
    for line, name in zip(lines[3:], ("forward", "both"), strict=True):
        size, kind, baseline, ours = line.strip("| ").split(" | ")
        assert size == "b = 1 n = 4,096" and kind == name and baseline.endswith("(1.00)") and "(" in ours
    for options, message in (
        (["--variants", "luna_mega"], "requires --turns"),
        (["--turns", "1", "--variants", "x"], "no variant x"),
    ):
        with pytest.raises(SystemExit):
            runner.main(["timestep_norm", *options])
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_every_parity_holds(runner):
    from measure import agree

    for case in runner.CASES.values():
        for size in case.parity:
            assert agree(case.name, size, "cpu", "float32") is None


def test_unsupported_variant_is_reported(runner, monkeypatch):
    from measure import measure

    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setitem(runner.CASES["damped_ema"].variants, "original", fail)
    assert measure("damped_ema", "original", {"n": 8}, "cpu", "float32", 0) == {"error": "CUDA out of memory."}


# Jobs that replace `gpu_jobs.py`: an incorrect operator, one that ends the process, and one that never ends.
FAKE_JOBS = """
import json, os, sys, time
def row(part, **fields):
    print(json.dumps({"part": part, **fields}), flush=True)
row("ready")
for line in sys.stdin:
    name, *arguments = json.loads(line)
    if name == "list":
        names = ["dead", "wrong", "right"]
        models = [["model", model] for model in ("luna", "peer", "stuck")]
        row("jobs", checks=[["operator", op] for op in names], times=[["ops", names], *models])
    elif arguments[0] == "dead":
        os.abort()
    elif name == "operator":
        result = "ok" if arguments[0] == "right" else "failed: off by 0.31"
        row(name, name=f"{arguments[0]} masked: outputs", result=result)
        if arguments[0] == "wrong":
            break
    elif name == "ops":
        for op in arguments[0]:
            row(name, name=op, size="n=8", **{"pass": "both"}, eager=9.0, host=8.0, graph=5.0, floor=1.0)
    elif arguments[0] == "stuck":
        row("about", waits=True)
        time.sleep(600)
    else:
        row(name, name=arguments[0], size="n=8", **{"pass": "both"}, peer="peer", eager=3.0 + (arguments[0] == "luna"))
    row("done")
"""


def test_gate_of_a_gpu(import_benchmark, monkeypatch, tmp_path, capsys):
    gate, limits = import_benchmark("gpu"), []

    class Timer:
        """Mock timer that stops the jobs once the endless job has started."""

        def __init__(self, seconds, stop):
            limits.append((seconds, stop))

        start = cancel = lambda self: None

    class Gate(gate.Gate):
        def add(self, part, **row):
            super().add(part, **row)
            if "waits" in row:
                limits[0][1]()

    (tmp_path / "gpu_jobs.py").write_text(FAKE_JOBS, encoding="utf-8")
    monkeypatch.setattr(gate, "FOLDER", tmp_path)
    monkeypatch.setenv("PATH", "")  # git is absent
    monkeypatch.setattr(gate, "Gate", Gate)
    monkeypatch.setattr(gate.threading, "Timer", Timer)
    monkeypatch.setattr(gate.os, "cpu_count", lambda: 1)
    assert gate.main(["--output", str(tmp_path)]) == 1 and limits[0][0] == 240
    result = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert result["about"]["commit"] == ""
    assert {row["name"] for row in result["rows"] if row["part"] == "ops"} == {"right"}
    printed = capsys.readouterr().out + (tmp_path / "gpu.md").read_text(encoding="utf-8")
    expected = (
        "model: luna n=8 both: 4.000 ms, peer 3.000 ms",
        "model: stuck: failed: not finished in time",
        "operator: dead: failed: exit status -6: ",
        "operator: wrong masked: outputs: failed: off by 0.31",
        "ops: right n=8 both: 5.000 ms, 5.0 times its floor",
        "ops: right n=8 both: 9.000 ms in eager mode, 5.000 ms as a CUDA graph",
    )
    for line, start in zip(sorted(result["short"]), expected, strict=True):
        assert line.startswith(start) and printed.count(line) == 2
    assert "| right | n=8 | both | 9.000 | 8.000 | 5.000 | 1.000 |" in (tmp_path / "gpu.md").read_text(encoding="utf-8")


# Prints the number of kernels that each job of `make gpu` compiles for an H100 in a check of outputs and gradients. No
# kernel runs: the launches are recorded on the CPU.
KERNELS_OF_JOBS = """
import json, sys, torch
available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
from tests.kernels import gpu
torch.cuda.is_available, gpu.DEVICE = available, torch.device("cpu")
import aot, gpu_jobs
from luna_mega.kernels import _dispatch
from luna_mega.kernels.common import triton_launch
_dispatch._unavailable_reason = lambda device: None
counts = []
for _, name, check, *options in gpu_jobs.check_jobs(gpu.NAMES):
    with triton_launch.recording(aot.TARGETS[90]) as launches:
        if options:
            gpu.run(name, *reversed(options))
    counts.append((name, check, *options, len({aot.compile_launch(launch, 90)[0] for launch in launches})))
print(json.dumps(counts))
"""


@pytest.mark.slow
@pytest.mark.triton
def test_a_job_of_the_gate_compiles_few_kernels(repo_root):
    """A process compiles its kernels one after the other, so one job with all kernels would take the entire time."""
    pytest.importorskip("triton", reason="Triton is not installed")
    folders = [repo_root / "benchmarks", repo_root, repo_root / "tests" / "kernels"]
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(map(str, folders))}
    done = subprocess.run(
        [sys.executable, "-c", KERNELS_OF_JOBS], env=environment, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    checked = [job for job in counts if job[1] == "outputs_and_gradients"]
    assert len(checked) == 4 * 8 * len({name for name, *_ in counts}) and len(checked) > 600
    assert all(1 <= job[-1] <= 20 for job in checked), [job for job in checked if not 1 <= job[-1] <= 20]


@pytest.mark.slow
def test_dry_run_of_the_gate(import_benchmark, tmp_path, capsys):
    """Every part runs on a CPU: checks of operators, steps instead of CUDA graphs, operators and models."""
    assert import_benchmark("gpu").main(["--dry", "--seconds", "600", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("Fell short:\n  nothing\n")
    rows = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["rows"]
    names = {
        part: {row["name"].split()[0].strip(":") for row in rows if row["part"] == part} for part in ("operator", "ops")
    }
    assert names["operator"] == names["ops"] and len(names["ops"]) == 7
    times = [row for row in rows if row["part"] in ("ops", "model")]
    assert len({row["name"] for row in times}) == 15
    assert all(row["eager"] > 0 and row["host"] > 0 and row["graph"] > 0 for row in times)
    assert sum(row["part"] == "step" for row in rows) > 8
