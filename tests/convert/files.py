"""Checkpoint files in every serialization."""

import argparse
import contextlib
import pickle

import torch


def write(state, file, form="zip"):
    """Save a checkpoint in the form "zip", "legacy" (serialization), "no crc" (zip without checksums) or "pickle"."""
    if form == "pickle":
        file.write_bytes(pickle.dumps({"args": argparse.Namespace()} | state, protocol=2))
        return
    torch.serialization.set_crc32_options(form != "no crc")
    try:
        with contextlib.chdir(file.parent):  # torch stores no name of a file whose path has non-ASCII characters
            torch.save(state, file.name, _use_new_zipfile_serialization=form != "legacy")
    finally:
        torch.serialization.set_crc32_options(True)
