"""Resource usage (limits: `aot_budgets.csv`) and machine code of kernels that are compiled for several targets.

The machine code of all configurations and dtypes is checked with the installed Triton, and with other versions that pip
installs in the folder `build`.
"""

import csv
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")

from tests.kernels import aot_calls, sass, tritons  # noqa: E402

HERE = Path(__file__).resolve().parent
MOST = ("registers", "stack", "spills", "shared")


# Compiles the kernel that `ptxas` 12.8 compiles incorrectly, and prints its faults.
KNOWN_FAULT = """
import aot, aot_calls, json, sass, torch
from luna_mega.kernels.common import triton_choice, triton_launch
from luna_mega.kernels.luna_causal_attention.triton_forward import FusedTiles

def instead(kernel, key, configurations, run):
    return run(FusedTiles(chunk=64, warps=4))

with triton_launch.recording(aot.TARGETS[90]) as launches, triton_choice.choosing(instead):
    aot_calls.causal(8, 32, torch.bfloat16, backward=False)
launch = next(launch for launch in launches if launch.kernel.fn.__name__ == "_sums_kernel")
print(json.dumps(sass.unwritten_reads(sass.disassemble(aot.compile_launch(launch, 90)[1]().asm["cubin"]))))
"""
# Part of the incorrect machine code, and the correct code of another version.
FAULTY = """
        /*0ac0*/                   ULDC.64 UR60, c[0x0][0x208] ;
        /*0ad0*/                   UMOV UR7, 0x400 ;
        /*0ae0*/                   UIADD3 UR22, UP0, UR22, 0x40, URZ ;
        /*0b70*/                   UIADD3.X UR7, UR7, -0x7fffffe0, URZ, UP0, !UPT ;
        /*0b90*/              @!P0 LDG.E.U8 R5, desc[UR60][R2.64+0x10] ;
"""
CORRECT = FAULTY.replace("UMOV UR7", "UMOV UR22").replace("UIADD3.X UR7, UR7", "UIADD3.X UR23, UR22")
WRITTEN = "/*0000*/ UIADD3.64 UR6, URZ, 0x4, URZ ;\n"


@pytest.mark.parametrize(
    "code, faults",
    [
        (FAULTY, ["0ae0"]),
        (CORRECT, []),
        ("/*0000*/ ULDC.64 UR4, c[0x0][0x208] ;\n/*0010*/ LDG.E R0, desc[UR4][R2.64] ;", []),
        ("/*0000*/ ULDC UR4, c[0x0][0x208] ;\n/*0010*/ LDG.E R0, desc[UR4][R2.64] ;", ["0010"]),
        ("/*0000*/ S2UR UR8, SR_CTAID.X ;\n/*0010*/ STS [R0+UR8+0x10], R3 ;", []),
        ("/*0000*/ S2UR UR9, SR_CTAID.X ;\n/*0010*/ @P1 STS [R0+UR8+0x10], R3 ;", ["0010"]),
        ("/*0000*/ ULEA UR4, UP0, UR6, UR7, 0x2 ;", ["0000"]),
        ("/*0000*/ UISETP.GE.AND UP0, UPT, UR6, URZ, UPT ;", ["0000"]),
        ("/*0000*/ VOTEU.ANY UR6, UPT, P0 ;\n/*0010*/ UIMAD.WIDE UR4, UR6, 0x4, URZ ;\n/*0020*/ UMOV UR8, UR5 ;", []),
        # A matrix in registers has no descriptor: then only the last two registers are read.
        (WRITTEN + "/*0010*/ HGMMA.64x32x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;", ["0010"]),
        (WRITTEN + "/*0010*/ HGMMA.64x32x16.F32.BF16 R24, R4, gdesc[UR4].tnspB, R24 ;", []),
    ],
)  # fmt: skip
def test_reads_of_unwritten_registers(code, faults):
    assert [fault.partition(":")[0] for fault in sass.unwritten_reads(code)] == faults


def run_script(*command, version: str | None = None) -> str:
    """Run Python with a version of Triton (default: the installed one) and return its standard output."""
    run = subprocess.run(
        [sys.executable, *command], env=tritons.environment(version), capture_output=True, encoding="utf-8"
    )
    print(run.stdout)
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


@pytest.fixture
def report(tmp_path):
    """Return a function that returns a report, and checks all kernels for unwritten registers and 16-bit sums."""

    def compile_all(*options: str, version: str | None = None) -> dict:
        path = tmp_path / "report.json"
        run_script(HERE / "aot.py", *options, "--json", path, version=version)
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = content["kernels"]
        assert content["triton"] == (version or triton.__version__) and rows
        assert not [row for row in rows if row["unwritten"]], "these kernels read registers that were never written"
        assert not [row for row in rows if row["narrow"]], "these kernels accumulate in 16 bits"
        return content

    return compile_all


VERSIONS = pytest.mark.parametrize("version", [*tritons.OLDER, tritons.NEWEST])
EACH = pytest.mark.parametrize("op", aot_calls.CALLS)


@pytest.mark.slow
@VERSIONS
def test_the_known_fault_with_each_compiler(version):
    faults = json.loads(run_script("-c", KNOWN_FAULT, version=version))
    assert "UR22" in faults[0] if version in tritons.OLDER else not faults


@pytest.mark.slow
@EACH
def test_machine_code_of_the_newest_triton(op, report):
    """The default configurations for sm_90 are compiled correctly; `test_budgets` checks the installed version."""
    report(op, "--arch=90", version=tritons.NEWEST)


@pytest.mark.slow
@pytest.mark.exhaustive
@EACH
@VERSIONS
def test_machine_code_of_every_configuration(version, op, report):
    """Other dtypes and all configurations that tuning may select are compiled correctly, and fit an H100."""
    rows = report(op, "--arch=80", "--arch=90", "--every", version=version)["kernels"]
    assert not all(row["default"] for row in rows)
    too_large = [row for row in rows if row["arch"] == 90 and row["shared"] > row["available"]]
    assert not too_large, "remove these configurations"


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("op", ["gated_attention", "luna_attention", "luna_causal_attention"])
def test_default_configurations_fit_small_devices(op, report):
    """All sizes and dtypes fit the 99 KB of shared memory of the RTX 30, 40 and 50; other ops need less than 8 KB."""
    rows = report(op, "--arch=89", "--every")["kernels"]
    assert not all(row["default"] for row in rows) and {row["available"] for row in rows} == {99 * 1024}
    assert not [row for row in rows if row["shared"] > row["available"]]


@pytest.mark.slow
@pytest.mark.parametrize("archs", [(80, 90), pytest.param((89, 120), marks=pytest.mark.exhaustive)], ids=str)
@EACH
def test_budgets(op, archs, report):
    content = report(op, *(f"--arch={arch}" for arch in archs))
    rows, (keys, *of_other_lengths) = content["kernels"], content["lengths"][op]
    assert all(other == keys for other in of_other_lengths), "another length of sequences compiles other kernels"
    with open(HERE / "aot_budgets.csv", encoding="utf-8", newline="") as file:
        of_op = (row for row in csv.DictReader(file) if row["op"] == op and int(row["arch"]) in archs)
        budgets = {(row["kernel"], row["case"], row["arch"]): row for row in of_op}
    used = {(row["kernel"], row["case"], str(row["arch"])): row for row in rows}
    assert used.keys() == budgets.keys(), "run tests/kernels/aot.py --budgets and check the differences"
    for key, row in used.items():
        allowed = budgets[key]
        for column in MOST:
            assert row[column] <= int(allowed[column]), f"{key}: {row[column]} {column}, {allowed[column]} allowed"
        for column in ("wgmma", "mma"):
            assert (row[column] > 0) >= (int(allowed[column]) > 0), f"{key}: no {column} instruction is left"
        assert row["shared"] <= row["available"], f"{key}: {row['shared']} bytes of shared memory do not exist"
        assert not row["cut_off"], f"{key}: float32 is cut off to TF32, not rounded"


def test_the_limits_of_a_device_are_its_own(monkeypatch):
    """An RTX 5090 has a higher compute capability than an H100, but less than half of its shared memory."""
    import torch

    from luna_mega.kernels.common import triton_launch

    card = types.SimpleNamespace(major=12, minor=0, multi_processor_count=170, shared_memory_per_block_optin=101376)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    target = triton_launch._properties.__wrapped__(torch.device("cuda"))
    assert target == ((12, 0), 170, 101376) and not target.large and triton_launch.Target().large
