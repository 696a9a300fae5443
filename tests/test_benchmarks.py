"""The benchmarks: variants that disagree get no figures, results are kept per processor, and a GPU is checked."""

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def runner(import_benchmark):
    return import_benchmark("run")


def test_variants_that_differ_get_no_figures(runner, monkeypatch, tmp_path, capsys):
    case = runner.CASES["damped_ema"]
    monkeypatch.setitem(case.variants, "original", lambda *leaves: 1.001 * case.variants["luna_mega"](*leaves))
    assert runner.main(["damped_ema", "--quick", "--device", "cpu", "--output", str(tmp_path / "found.json")]) == 1
    printed = capsys.readouterr()
    assert "variants disagree, so nothing is measured: damped_ema" in printed.err
    assert "| " not in printed.out and not list(tmp_path.iterdir())


def test_results_are_added_to_a_file(runner, import_benchmark, tmp_path, capsys):
    """A later run replaces rows with the same case, size, variant and settings, and keeps the others."""
    path = tmp_path / "results" / "found.json"
    options = ["--device", "cpu", "--rounds", "1", "--output", str(path)]
    size = ["--size", "b=1", "d=24", "states=2", "directions=1"]
    variants = ["--variants", "torch", "copy", "luna_mega@nowhere", "absent"]
    assert runner.main(["damped_ema", *size, "n=50", *variants, *options, "--threads", "1", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].startswith("| size | variant | threads | forward (ms) | both (ms) | both (ns per element) |")
    assert "| b=1 n=50 d=24 directions=1 states=2 | torch | 1 |" in lines[5] and "x) |" in lines[6]
    for length in ("n=50", "n=60"):
        assert runner.main(["damped_ema", *size, length, "--variants", "copy", *options]) == 0
    runs, rows = json.loads(path.read_text(encoding="utf-8")), import_benchmark("report").read(path)
    assert [len(run["rows"]) for run in runs] == [7, 1, 1] and len(rows) == 9
    for row in rows:
        if row["variant"] in ("torch", "copy"):
            assert 0 < row["forward_ms"] and 0 < row["both_ms"] and row["elements"] == 24 * row["size"]["n"]
        else:
            assert "nowhere" in row["error"] or "no variant absent" in row["error"]


PASSES = {"decoding": {"forward"}, "trainer": {"both"}}
TOY = {"hidden_size": 64, "num_hidden_layers": 1}
TOYS = [
    ("encoders", {"n": 768, **TOY}),
    ("decoders", {"n": 70, **TOY}),
    ("memory", {"n": 70, **TOY}),
    ("decoding", {"n": 70, "b": 4, **TOY}),
    ("images", {"b": 2, "size": 32, **TOY, "hidden_size": 96}),
    ("trainer", {"n": 9, "steps": 1, **TOY}),
    ("diagonal_ssm", {"b": 2, "n": 9, "states": 2, "real": 1}),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, size", TOYS)
def test_cases(runner, name, size):
    """Every variant runs; a row contains the times and the memory of its passes."""
    case = runner.CASES[name]
    for row in runner.measure(case, size, list(case.variants), runner.parse(["--rounds", "0", "--device", "cpu"]), {}):
        assert "error" not in row and row["elements"] > 0, row
        assert {key.removesuffix("_ms") for key in row if key.endswith("_ms")} == PASSES.get(name, {"forward", "both"})


@pytest.mark.slow
def test_all_variants_agree(runner):
    for case in runner.CASES.values():
        for size in case.check:
            assert runner.agree(case, size, "cpu", "float32") is None


def test_targets(runner, import_benchmark, tmp_path):
    """Commands of the acceptance table measure what its rows read, and each row has both ratios."""
    acceptance, rows = import_benchmark("acceptance"), []
    for target in acceptance.TARGETS:
        options = runner.parse(acceptance.command(target))
        (name,) = options.cases
        case = runner.CASES[name]
        (size,) = runner.sizes(case, options)
        row = {"case": name, "size": size, "products": options.products, "instructions": options.instructions}
        for threads in options.threads:
            for variant in options.variants:
                case.variants[variant.partition("@")[0]]
                time = 1.0 if variant == target.under else 3.0
                times = {f"{key}_ms": time / threads for key in PASSES.get(name, ("forward", "both"))}
                rows.append(row | {"variant": variant, "threads": threads} | times)
    lines = acceptance.lines(rows)[1:]
    assert len(lines) == len(acceptance.TARGETS) == 13
    assert lines[0][2:] == ["1, 1", ">= 50 25", "3, 3", "missed"] and lines[5][2:] == ["2", ">= 1.5", "2", ""]
    assert [line[4] for line in acceptance.lines(rows[1:])].count("not measured") == 1


# Jobs that replace `gpu_jobs.py`: operators that end the process, are wrong and are right, and a model without an end.
FAKE_JOBS = """
import json, os, sys, time
def row(part, **fields):
    print(json.dumps({"part": part, **fields}), flush=True)
row("ready")
for name, *arguments in map(json.loads, sys.stdin):
    if name == "list":
        names = ["dead", "wrong", "right"]
        times = [["ops", "all", [[op, op] for op in names]], *(["model", name] for name in ("luna", "peer", "stuck"))]
        row("jobs", checks=[["operator", op] for op in names], times=times)
    elif arguments[0] == "dead":
        os.abort()
    elif name == "operator":
        row(name, name=f"{arguments[0]}: outputs", result="ok" if arguments[0] == "right" else "failed: off by 0.31")
    elif name == "ops":
        for _, op in arguments[1]:
            row(name, name=op, size="n=8", **{"pass": "both"}, eager=9.0, host=8.0, graph=5.0)
    elif arguments[0] == "stuck":
        row("about", waits=True)
        time.sleep(600)
    else:
        row(name, name=arguments[0], size="n=8", **{"pass": "both"}, peer="peer", eager=3.0 + (arguments[0] == "luna"))
    row("done")
"""


def test_gate_of_a_gpu(import_benchmark, monkeypatch, tmp_path, capsys):
    """Failed checks, slow kernels and jobs without an end are listed; operators with failed checks are not measured."""
    gate = import_benchmark("gpu")
    add = gate.Gate.add

    def add_and_time_out(self, part, **row):
        """Let the time be over when the endless job has started."""
        add(self, part, **row)
        if "waits" in row:
            assert self.timer.interval == 240
            self.timer.function()

    monkeypatch.setattr(gate.Gate, "add", add_and_time_out)
    (tmp_path / "gpu_jobs.py").write_text(FAKE_JOBS, encoding="utf-8")
    monkeypatch.setattr(gate, "FOLDER", tmp_path)
    monkeypatch.setenv("PATH", "")  # git is absent
    assert gate.main(["--output", str(tmp_path)]) == 1
    result = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert result["about"]["commit"] == ""
    assert {row["name"] for row in result["rows"] if row["part"] == "ops"} == {"right"}
    printed = capsys.readouterr().out + (tmp_path / "gpu.md").read_text(encoding="utf-8")
    expected = (
        "model: luna n=8 both: 4.000 ms, peer 3.000 ms",
        "model: stuck: failed: not finished in time",
        "operator: dead: failed: exit status -6: ",
        "operator: wrong: outputs: failed: off by 0.31",
        "ops: right n=8 both: 9.000 ms in eager mode, 5.000 ms as a CUDA graph",
    )
    for line, start in zip(sorted(result["short"]), expected, strict=True):
        assert line.startswith(start) and printed.count(line) == 2
    assert "| right | n=8 | both | 9.000 | 8.000 | 5.000 |" in printed


# Prints the jobs of `make gpu` that compare outputs and gradients, with the number of kernels that each compiles for an
# H100. No kernel runs: the launches are recorded on the CPU.
KERNELS_OF_JOBS = """
import json, torch
available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
from tests.kernels import gpu
torch.cuda.is_available, gpu.DEVICE = available, torch.device("cpu")
import aot, gpu_jobs
from luna_mega.kernels import _dispatch
from luna_mega.kernels.common import triton_launch
_dispatch._unavailable_reason = lambda device: None
for _, name, check, *options in gpu_jobs.check_jobs(gpu.NAMES):
    if check == "outputs_and_gradients":
        with triton_launch.recording(aot.TARGETS[90]) as launches:
            gpu.run(name, *reversed(options))
        count = len({aot.compile_launch(launch, 90)[0] for launch in launches})
        print("JOB", json.dumps([name, *options, count]))
"""


@pytest.mark.slow
@pytest.mark.triton
def test_a_job_of_the_gate_compiles_few_kernels(repo_root):
    """A process compiles its kernels one after the other, so one job with all kernels would take the entire time."""
    pytest.importorskip("triton", reason="Triton is not installed")
    path = os.pathsep.join(str(repo_root / folder) for folder in ("benchmarks", "", "tests/kernels"))
    variables = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": path}
    printed = subprocess.check_output([sys.executable, "-c", KERNELS_OF_JOBS], env=variables, encoding="utf-8")
    jobs = [json.loads(line[4:]) for line in printed.splitlines() if line.startswith("JOB ")]
    assert len(jobs) == 4 * 8 * len({name for name, *_ in jobs}) > 600
    assert [job for job in jobs if not 1 <= job[-1] <= 20] == []


@pytest.mark.slow
def test_dry_run_of_the_gate(import_benchmark, tmp_path, capsys):
    """Every part runs on a CPU: checks of operators, steps instead of CUDA graphs, operators and models."""
    assert import_benchmark("gpu").main(["--dry", "--seconds", "600", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("Fell short:\n  nothing\n")
    rows = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["rows"]
    names = [{row["name"].split()[0].strip(":") for row in rows if row["part"] == x} for x in ("operator", "ops")]
    assert names[0] == names[1] and len(names[0]) == 7
    times = [row for row in rows if row["part"] in ("ops", "model")]
    assert len({row["name"] for row in times}) == 19  # 7 ops, copies for 4 of them, 8 models
    assert all(row["eager"] > 0 and row["host"] > 0 and row["graph"] > 0 for row in times)
    assert sum(row["part"] == "step" for row in rows) > 8
