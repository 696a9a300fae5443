"""The code blocks of the pages.

A block that cannot be tested has a comment before it, `<!-- not run: the reason -->`. Python blocks of a page share one
session. A shell block is run by bash with stubs that record the command lines of the programs.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", "examples/README.md", "examples/lra/README.md", *DOCS]
LANGUAGES = {"text", "python", "bash", "bibtex"}
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+?) -->\n+)?(?P<fence> *```)(?P<language>\w*)\n(?P<code>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)

# Programs that stubs replace. The stubs emulate `python -m zipfile` and the directory of `git clone`.
PROGRAMS = ["accelerate", "curl", "git", "hf", "luna-mega", "make", "pip", "python", "torchrun"]
STUB = """#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" >> "$RECORD"; printf '\\n' >> "$RECORD"
case "${0##*/} $1 $2" in "python -m zipfile") exec "$PYTHON" "$@";; "git clone "*) mkdir -p "${2##*/}";; esac
"""


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the line number of its code, and the reason why it is not run (else None)."""

    page: str
    line: int
    language: str
    code: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def run(self, session: dict) -> None:
        """Execute a Python block; tracebacks have the line numbers of the page."""
        exec(compile("\n" * (self.line - 1) + self.code, ROOT / self.page, "exec"), session)


def commands(blocks: list[Block], folder: Path, python: str) -> list[list[str]]:
    """Run each shell block in `folder`; return the programs that it calls with their arguments.

    A block that calls no program raises an error.
    """
    stubs, record = folder / ".stubs", folder / ".record"
    if not stubs.exists():
        stubs.mkdir()
        for name in PROGRAMS:
            stubs.joinpath(name).write_text(STUB, encoding="utf-8")
            stubs.joinpath(name).chmod(0o755)
    environment = {"PATH": f"{stubs}:/usr/bin:/bin", "RECORD": str(record), "PYTHON": python}
    code = "".join(f": > .record\n(\n{block.code}\n)\ntest -s .record; cat .record >> .all\n" for block in blocks)
    code = f": > .all\n{code}"
    done = subprocess.run(
        ["bash", "-e"], cwd=folder, input=code, env=environment, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, f"{blocks[0].page}: {done.stderr or 'a block calls no program'}"
    return [call.split("\0")[:-1] for call in (folder / ".all").read_text(encoding="utf-8").split("\n")[:-1]]


def read(page: str) -> list[Block]:
    """Return the blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start("code")) + 1, found["language"], found["code"], found["reason"])
        for found in BLOCK.finditer(text)
    ]
