"""The code blocks of the pages.

A block that cannot be tested has a comment before it, `<!-- not run: the reason -->`. Python blocks of a page share one
session. A shell block is run by bash with stubs that record the command lines of the programs.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))
PAGES = ["README.md", "examples/README.md", "examples/lra/README.md", *DOCS]
LANGUAGES = {"python", "bash", "bibtex"}
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+?) -->\n+)?(?P<fence> *```)(?P<language>\w*)\n(?P<code>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)

# Programs replaced by stubs. `python -m zipfile` and the directory of `git clone` are emulated.
PROGRAMS = ["accelerate", "curl", "git", "hf", "luna-mega", "make", "pip", "python", "torchrun", "vllm"]
STUB = """#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" >> "$RECORD"; printf '\\n' >> "$RECORD"
case "${0##*/} $1 $2" in "python -m zipfile") exec "$PYTHON" "$@";; "git clone "*) mkdir -p "${2##*/}";; esac
"""


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the line number of its code, and the reason if it is not run (else None)."""

    page: str
    line: int
    language: str
    code: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def run(self, session: dict) -> None:
        """Execute a Python block; an error shows the line of the page."""
        exec(compile("\n" * (self.line - 1) + self.code, ROOT / self.page, "exec"), session)

    def commands(self, folder: Path, python: str) -> list[list[str]]:
        """Run a shell block in `folder`, and return the programs that it called with their arguments."""
        stubs, record = folder / ".stubs", folder / ".record"
        if not stubs.exists():
            stubs.mkdir()
            for name in PROGRAMS:
                stubs.joinpath(name).write_text(STUB)
                stubs.joinpath(name).chmod(0o755)
        record.write_bytes(b"")
        environment = {"PATH": f"{stubs}:/usr/bin:/bin", "RECORD": str(record), "PYTHON": python}
        done = subprocess.run(
            ["bash", "-e"], cwd=folder, input=self.code, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{self}: {done.stderr}"
        return [call.split("\0")[:-1] for call in record.read_text().split("\n")[:-1]]


def read(page: str) -> list[Block]:
    """Return the blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start("code")) + 1, found["language"], found["code"], found["reason"])
        for found in BLOCK.finditer(text)
    ]
