"""Damaged files, for the tests of the programs that read them."""

from pathlib import Path

# Contents that no reader of a JSON object accepts.
NOT_OBJECTS = {
    "empty": b"",
    "open": b"{",
    "array": b"[1]",
    "null": b"null",
    "deep array": b"[" * 100_000,
    "deep object": b'{"a": ' * 50_000,
    "not UTF-8": b"\0\xff",
    "backslash": b"\\",
    "long number": b'{"model_type": ' + b"9" * 5000 + b"}",
}
SHARES = (0.0, 0.3, 0.9)


def cut(file: Path, share: float) -> None:
    """Keep a share of the bytes of a file."""
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
