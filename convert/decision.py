"""The convention by which a file is read, where its names and shapes fit several."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """The convention to use, the one that the tensors suggest (None: neither), and the warning if they differ."""

    convention: str
    suggested: str | None
    conflict: str

    @property
    def warning(self) -> str | None:
        """Return the words on the conflict where the tensors suggest another convention."""
        return None if self.suggested in (None, self.convention) else self.conflict
