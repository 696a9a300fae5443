"""Fixtures that convert checkpoints through the command line, and the small checkpoints of `luna.py`."""

import pytest

from luna_mega_cli import main
from tests.convert import luna
from tests.convert.contract import saved_report
from tests.convert.files import write
from tests.errors import command_error
from tests.quick import compiled_templates as compiled_templates, with_code as with_code, without_code as without_code


class Convert:
    """Convert a checkpoint through the command line; without a `state`, the file that was saved before."""

    def __init__(self, folder, capsys):
        self.source, self.output, self.capsys = folder / "source", folder / "converted", capsys
        self.source.mkdir()
        self.file = self.source / "model.pt"

    def save(self, state):
        if state is not None:
            write(state, self.file)
        return self.file

    def __call__(self, state, *options):
        """Convert a checkpoint and return the output folder."""
        status = main(["convert", str(self.save(state)), "--output", str(self.output), *map(str, options)])
        printed = self.capsys.readouterr()
        assert status == 0, printed.err
        self.screen = printed.out
        return self.output

    def report(self, state, *options):
        """Convert a checkpoint and return the report."""
        return saved_report(self(state, *options))

    def error(self, state=None, *options):
        """Return the one-line error of a conversion; check that it leaves no files."""
        file, before = self.save(state), sorted(self.output.parent.iterdir())
        message = command_error(self.capsys, "convert", file, "--output", self.output, *options)
        assert sorted(self.output.parent.iterdir()) == before
        return message


@pytest.fixture
def convert(tmp_path, capsys):
    return Convert(tmp_path, capsys)


@pytest.fixture
def make():
    """Return the module `luna.py`, which builds checkpoints."""
    return luna
