"""Fixtures that convert checkpoints through the command line, and the small checkpoints of `luna.py`."""

import json

import pytest
import torch

from luna_mega_cli import main
from tests.convert import luna
from tests.errors import command_error


class Convert:
    """Save a checkpoint and convert it through the command line."""

    def __init__(self, folder, capsys):
        self.source, self.output, self.capsys = folder / "source", folder / "converted", capsys
        self.source.mkdir()
        self.file = self.source / "model.pt"

    def save(self, state, legacy=False):
        torch.save(state, self.file, _use_new_zipfile_serialization=not legacy)
        return self.file

    def __call__(self, state, *options, legacy=False):
        """Convert a checkpoint and return the output folder.

        If `state` is None, the file that was saved before is converted.
        """
        if state is not None:
            self.save(state, legacy)
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
        if state is not None:
            self.save(state)
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
