"""The choice of a kernel's configuration: the default, the measured one of the device, or by timing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from luna_mega.kernels.common import configurations
from luna_mega.kernels.common.configurations import Kind, content, file_of

pytest.importorskip("triton", reason="Triton is not installed")
CASES = ("pack l=16 fp16", "l=32 bf16, segments", "LRA text bf16")
CPU, GPU, DEVICE = torch.device("cpu"), torch.device("cuda"), "NVIDIA H100 80GB HBM3"


class Tiles(NamedTuple):
    rows: int
    warps: int


A, B, C = Tiles(64, 4), Tiles(64, 8), Tiles(128, 8)


@pytest.fixture
def choice(monkeypatch, tmp_path):
    """Return the module, as in a new process on a GPU, with no files of configurations."""
    from luna_mega.kernels.common import triton_choice

    monkeypatch.setenv("LUNA_MEGA_CONFIGS", str(tmp_path))
    monkeypatch.setattr(triton_choice, "_chosen", {})
    monkeypatch.setattr(triton_choice, "_timed", {})
    monkeypatch.setattr(triton_choice, "device_name", lambda device: DEVICE)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    configurations._read.cache_clear()
    yield triton_choice
    configurations._read.cache_clear()


def write(folder: Path, text: str, op="damped_ema") -> Path:
    path = folder / file_of(op, DEVICE)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def pick(choice, kind="bfloat16", length=500, tiles=(A, B, C), run=lambda c: c, device=GPU):
    return choice.choose("damped_ema", "forward", [kind], {"length": length}, tiles, run, device)


def test_names_of_devices():
    assert str(file_of("damped_ema", DEVICE)) == "damped_ema/configs/nvidia-h100-80gb-hbm3.json"


def test_the_nearest_measured_configuration(choice, tmp_path):
    assert pick(choice) == A
    choice._chosen.clear()
    entries = [(512, B), (65536, C), (4096, Tiles(1, 1))]  # the last is of another version
    found = [(Kind("damped_ema", "forward", "bfloat16", {"length": n}), tiles._asdict()) for n, tiles in entries]
    found.append((Kind("luna_attention", "forward", "bfloat16", {"length": 512}), C._asdict()))
    write(tmp_path, content("damped_ema", DEVICE, {"torch": "2"}, found))
    configurations._read.cache_clear()
    assert [pick(choice, length=n) for n in (1, 500, 2000, 9000, 2**20)] == [B, B, B, C, C]
    assert pick(choice, "float32") == A
    with pytest.raises(ValueError, match=r"forward has no configuration \{'rows': 1, 'warps': 1\} in this version"):
        pick(choice, length=4000)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "not a file of configurations"),
        ("[]", "not a file of configurations"),
        ('{"op": "damped_ema", "device": "x"}', "not a file of configurations"),
        ('{"op": "damped_ema", "device": "x", "kernels": {"forward": [{"kind": 1}]}}', "not a file of configurations"),
        ('{"op": "damped_ema", "device": "x", "kernels": {}}', f"is of damped_ema on x, not of damped_ema on {DEVICE}"),
    ],
)
def test_files_that_are_wrong(choice, tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=f"{path}: {message}"):
        pick(choice)


def test_a_size_that_is_no_integer(choice, tmp_path):
    found = [(Kind("damped_ema", "forward", "bfloat16", {"length": 512}), {"rows": 1.5})]
    write(tmp_path, content("damped_ema", DEVICE, {}, found))
    with pytest.raises(ValueError, match="a size is no integer"):
        pick(choice)


def test_tuning(choice, monkeypatch):
    """All are timed once for what `kind` and `sizes` say; the fastest is taken that is right and fits the device."""
    from triton.runtime.errors import OutOfResources

    seconds, last = {A: 3.0, B: 2.0, C: 1.0, Tiles(1, 1): 0.1, Tiles(2, 2): 0.2}, []

    def run(tiles):
        last.append(tiles)
        if tiles.rows == 1:
            raise OutOfResources(200_000, 100_000, "shared memory")
        return [torch.full((4,), 5.0 if tiles.rows == 2 else 1.0), None]

    monkeypatch.setattr(choice, "_milliseconds", lambda function, device: function() and seconds[last[-1]])
    tiles = tuple(seconds)
    with choice.tuning() as timings:
        for length in (500, 512, 300):
            pick(choice, tiles=tiles, run=run, length=length)
            assert last[-1] == C
        pick(choice, "float32", tiles=(A, B), run=run, device=CPU)
    assert len(timings) == 2 and timings[0].fastest == C and timings[1].fastest == B
    assert "Required: 200000" in timings[0].times[Tiles(1, 1)]
    assert timings[0].times[Tiles(2, 2)] == "result 0 differs by 4.0e+00 from that of the default configuration"
    assert choice.Timing(timings[0].kind, {A: 1.0, B: 0.99}).fastest == A
    pick(choice, tiles=tiles, run=run)
    assert last[-1] == A, "tuning ends with the block"


def test_tuning_is_opt_in(choice, monkeypatch):
    ran = []
    monkeypatch.setattr(choice, "_milliseconds", lambda function, device: {A: 2.0, B: 1.0}[function()])
    monkeypatch.setattr(choice, "_tensors", lambda result: [])

    def run(tiles):
        ran.append(tiles)
        return tiles

    assert pick(choice, tiles=(A, B), run=run) == A and ran == [A]
    monkeypatch.setenv("LUNA_MEGA_AUTOTUNE", "1")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert pick(choice, tiles=(A, B), run=run) == A, "a graph is captured"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ran.clear()
    assert pick(choice, tiles=(A, B), run=run) == B and ran == [A, A, B, B, B]
    assert pick(choice, tiles=(A, B), run=run) == B and len(ran) == 6
    assert pick(choice, tiles=(A, B), run=run, device=CPU) == A, "interpreted kernels are not tuned"


def test_shipped_files(repo_root):
    """They are of the op and the device that their place says."""
    for path in (repo_root / "kernels").glob("*/configs/*"):
        written = json.loads(path.read_text())
        assert path.relative_to(repo_root / "kernels") == file_of(written["op"], written["device"])
        assert written["versions"] and configurations._read(path, written["op"], written["device"])


def test_they_fit_an_h100(repo_root):
    """Of a case of every op that needs shared memory; `aot_candidates.py` without arguments compiles all."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(repo_root)}
    command = [sys.executable, Path(__file__).with_name("aot_candidates.py"), *CASES]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
