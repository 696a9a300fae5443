"""Check machine code for reads of registers that were never written.

`ptxas` 12.8, which Triton 3.6 and 3.7 contain, compiled a correct kernel to code that computed an address in shared
memory from an unwritten register. Results were wrong, and long sequences read outside of the shared memory. The check
covers uniform registers, which the threads of a warp share. Reading other unwritten registers can be harmless, for
example if a mask discards the value.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import triton

LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)([\w.]*)\s*([^;]*);")
REGISTER = re.compile(r"(gdesc\[|desc\[|\b)UR(\d+)\b")


def disassemble(cubin: bytes, tool: str = "nvdisasm", option: str = "-c") -> str:
    """Return the instructions of a compiled kernel as text, or what another tool prints."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, option, file.name], capture_output=True, encoding="utf-8", check=True).stdout


def unwritten_reads(code: str) -> list[str]:
    """Return the instructions that read a uniform register which no earlier line of the code writes."""
    written: set[int] = set()
    found = []
    for address, name, modifiers, text in LINE.findall(code):
        operands = [operand.strip() for operand in text.split(",")]
        # A predicate may be the first of two results.
        place = 1 if re.fullmatch(r"U?P[0-6T]", operands[0]) and len(operands) > 1 else 0
        result = re.fullmatch(r"UR(\d+)", operands[place])
        sources = operands[place + 1 :] if result else operands
        wide = ".64" in modifiers
        reads = {register for source in sources for register in _registers(source, wide and name[0] == "U", operands)}
        if unwritten := sorted(reads - written):
            found.append(f"{address}: {name}{modifiers} {text.strip()} (UR{unwritten[0]})")
        written |= reads  # report each register once
        if result:
            count = 4 if ".128" in modifiers else 2 if wide or ".WIDE" in modifiers else 1
            written |= set(range(int(result[1]), int(result[1]) + count))
    return found


def _registers(source: str, wide: bool, operands: list[str]) -> set[int]:
    """Return the numbers of the uniform registers in an operand.

    `wide` is True if the instruction computes 64-bit numbers.
    """
    registers: set[int] = set()
    for kind, number in REGISTER.findall(source):
        first = int(number)
        # the operand describes both matrices; the first descriptor is unused if that matrix is in registers
        if kind == "gdesc[":
            count, first = (2, first + 2) if re.match(r"R\d", operands[1]) else (4, first)
        else:
            count = 2 if kind == "desc[" or wide else 1
        registers |= set(range(first, first + count))
    return registers
