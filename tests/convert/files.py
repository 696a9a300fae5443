"""Checkpoint files in every serialization, and hostile pickles."""

import argparse
import contextlib
import pickle
import zipfile

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


def pickled(*instructions):
    """Return a pickle that consists of these instructions."""
    return b"\x80\x02" + b"".join(instructions) + b"."


def write_pickle(file, content, legacy=False):
    """Write a pickle in a file with the structure of a checkpoint."""
    if legacy:
        file.write_bytes(content)
        return
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("model/data.pkl", content)
        archive.writestr("model/version", "3")


def flip(content, place, bit=0):
    """Return the bytes with one flipped bit."""
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


NOTHING = "nothing was executed"
TWICE = b"".join(b"q" + bytes([index]) + b"h" + bytes([index]) + b"\x86" for index in range(60))
# Pickle, and a part of the error.
HOSTILE = {
    "a function": (pickled(b"cposix\nsystem\n", b"X\x02\x00\x00\x00ls", b"\x85R"), NOTHING),
    "a class": (pickled(b"csubprocess\nPopen\n", b")R"), NOTHING),
    "an instruction": (pickled(b"\x8c\x01a"), NOTHING),
    "a call of a value": (pickled(b"N)R"), NOTHING),
    "an object of a value": (pickled(b"N)\x81"), NOTHING),
    "a list that is none": (pickled(b"}Na"), NOTHING),
    "a state of a value": (pickled(b"N}b"), NOTHING),
    "a dict that is none": (pickled(b"]NNs"), NOTHING),
    "a jagged tensor": (pickled(b"ctorch.nested._internal.nested_tensor\nOther\n)R"), NOTHING),
    "a name of 10,000 letters": (pickled(b"cos\n" + b"x\x1b" * 5000 + b"\n)R"), NOTHING),
    "omegaconf": (pickled(b"comegaconf.dictconfig\nDictConfig\n", b")R"), "omegaconf.dictconfig"),
    "a key with an expensive hash": (pickled(b"}", b"K\x01", TWICE, b"N", b"s"), "a tuple is nested more than 50 deep"),
}
