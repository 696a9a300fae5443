"""Damaged files for tests of programs that read them."""

from pathlib import Path

# Contents that are not a JSON object.
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
    """Truncate a file to a share of its bytes."""
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
