"""Damage small checkpoints of every format; check that a conversion fails in one line or returns a valid model."""

import argparse
import json
import math
import shutil
from pathlib import Path
from unittest import mock

import torch

import luna_mega
from luna_mega.convert import ConversionError, convert_checkpoint
from luna_mega.convert.formats._megalodon import CONFIG, CONSOLIDATED, SHARDS, TOKENIZER
from luna_mega.convert.safe_load import Checkpoint, reader
from tests.convert import luna, megalodon
from tests.convert.mega import mega, mega_image
from tests.convert.mega_lm import KINDS, mega_lm
from tests.convert.translation import checkpoint, luna_seq2seq, mega_seq2seq


def megalodon_folder():
    """Return the content of a Megalodon folder, structured like a fairseq file; `save` writes the folder."""
    args = argparse.Namespace(**megalodon.MODEL, **{TOKENIZER: {"path": None}, SHARDS: 1})
    return {"args": args, "model": megalodon.state()}


BUILDERS = {
    "luna_bert": lambda: luna.bert(heads=[("topic", 3)], task="sentence_prediction", num_classes=3),
    "luna_lra, 2021": luna.lra21,
    "luna_lra, 2023": lambda: luna.lra23(pre_logits=True),
    "luna_seq2seq": lambda: checkpoint(luna_seq2seq()),
    "mega_lra": mega,
    "mega_lra, pixels": lambda: mega("mega_lra_cifar10", "flash", values=True, sen_rep_type="mp"),
    "mega_lm": lambda: mega_lm(**KINDS["tied"]),
    "mega_lm, adaptive": lambda: mega_lm(**KINDS["adaptive"]),
    "mega_seq2seq": lambda: checkpoint(mega_seq2seq()),
    "mega_image": lambda: mega_image(hidden=6),
    "megalodon": megalodon_folder,
}
_LARGEST, _DIGITS = 2**31 - 1, "5,000 digits"


def build(builder):
    """Return the content of a valid checkpoint."""
    torch.manual_seed(0)
    return builder()


def save(state, folder):
    """Write the checkpoint in its original form (a file, or Megalodon's folder) and return the path."""
    args = vars(state["args"])
    if SHARDS not in args:
        torch.save(state, folder / "damaged.pt")
        return folder / "damaged.pt"
    place = folder / "damaged"
    place.mkdir(exist_ok=True)
    model = {name: value for name, value in args.items() if name not in (SHARDS, TOKENIZER)}
    torch.save(state["model"], place / "consolidated.pth")
    (place / CONFIG).write_text(_json({"model": model, TOKENIZER: args[TOKENIZER]}), encoding="utf-8")
    (place / CONSOLIDATED).write_text(_json({SHARDS: args[SHARDS], "dtype": "fp32"}), encoding="utf-8")
    return place


def in_memory(state, file="checkpoint.pt"):
    """Return a context in which a file has this content, which saves the time to write and to read it."""
    opened = state, Checkpoint(Path(file), "0" * 64, "zip", {}, {})
    return mock.patch.object(reader, "_open", lambda *_: opened)


def _json(content):
    """Return the content as JSON. Values that JSON does not support become descriptions; long numbers are kept."""

    def plain(value):
        if isinstance(value, dict):
            return {str(name): plain(inner) for name, inner in value.items()}
        return _DIGITS if isinstance(value, int) and value > 10**4000 else value

    return json.dumps(plain(content), default=repr).replace(json.dumps(_DIGITS), "1" + "0" * 5000)


def survives(state, folder, description):
    """Convert the checkpoint; return whether a model was written. Assertion messages include `description`."""
    place, output = save(state, folder), folder / "output"
    try:
        report = convert_checkpoint(place, output)
    except ConversionError as error:
        message = str(error)
        assert message.isprintable() and len(message) < 1500, (description, message)
        assert not output.exists(), description
        return False
    model_class = getattr(luna_mega, report.model_class)
    model, info = model_class.from_pretrained(output, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"] and not info["unexpected_keys"], (description, info)
    for config in (model.config, getattr(model.config, "decoder_config", model.config)):
        _check_fields(config, description)
    shutil.rmtree(output)
    return True


def _check_fields(config, description):
    for name, value in config.to_dict().items():
        declared = type(config).__annotations__.get(name)
        assert declared is not bool or isinstance(value, bool), (description, name, value)
        if isinstance(value, (int, float)):
            assert math.isfinite(value) and abs(value) <= _LARGEST, (description, name, value)


def changed(state, **args):
    """Return a checkpoint with other args, which shares the tensors."""
    return state | {"args": argparse.Namespace(**vars(state["args"]) | args)}
