"""Fixtures that convert checkpoints through the command line, and the small checkpoints of `luna.py`."""

import json
from contextlib import nullcontext

import pytest

from luna_mega_cli import main
from tests.convert import files, luna
from tests.convert.fuzz import in_memory
from tests.errors import command_error
from tests.quick import compiled_templates as compiled_templates, with_code as with_code, without_code as without_code


class Convert:
    """Convert a checkpoint through the command line; its file is only written if `writes` is True."""

    writes = False

    def __init__(self, folder, capsys):
        self.source, self.output, self.capsys = folder / "source", folder / "converted", capsys
        self.source.mkdir()
        self.file = self.source / "model.pt"

    def save(self, state):
        files.write(state, self.file)
        return self.file

    def _opened(self, state):
        """Return a context in which the file has this content; None = the file that was saved before."""
        if state is None:
            return nullcontext()
        if self.writes:
            return nullcontext(self.save(state))
        self.file.touch()
        return in_memory(state, self.file)

    def __call__(self, state, *options):
        """Convert a checkpoint and return the output folder.

        If `state` is None, the file that was saved before is converted.
        """
        with self._opened(state):
            status = main(["convert", str(self.file), "--output", str(self.output), *map(str, options)])
        printed = self.capsys.readouterr()
        assert status == 0, printed.err
        self.screen = printed.out
        return self.output

    def report(self, state, *options):
        """Convert a checkpoint and return the report."""
        return json.loads((self(state, *options) / "conversion_report.json").read_text(encoding="utf-8"))

    def error(self, state=None, *options):
        """Return the one-line error of a conversion; check that it leaves no files."""
        with self._opened(state):
            before = sorted(self.output.parent.iterdir())
            message = command_error(self.capsys, "convert", self.file, "--output", self.output, *options)
        assert sorted(self.output.parent.iterdir()) == before
        return message


@pytest.fixture
def convert(tmp_path, capsys):
    return Convert(tmp_path, capsys)


@pytest.fixture
def make():
    """Return the module `luna.py`, which builds checkpoints."""
    return luna
