"""The contract of all formats: what a conversion gives, and how it fails. `KINDS` has a row per kind of file.

`test_contract.py` converts every kind, `test_damage.py` damages every kind, and `test_values.py` has the fields of the
configuration that args and tensors determine.
"""

import argparse
import functools
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

import luna_mega
from luna_mega.convert import ConversionError, convert_checkpoint
from luna_mega.convert.formats._megalodon import CONFIG, CONSOLIDATED, SHARDS, TOKENIZER
from luna_mega.convert.report import Report
from tests.convert import luna, megalodon
from tests.convert.folders import load
from tests.convert.mega import mega, mega_image
from tests.convert.mega_lm import KINDS as LANGUAGE_MODELS, mega_lm
from tests.convert.translation import SINUSOIDAL, checkpoint, luna_seq2seq, mega_seq2seq

State = dict[str, Any]
TOKENS = torch.tensor([[4, 7, 5, 11, 2], [4, 6, 2, 1, 1]])


class Kind(NamedTuple):
    """A kind of checkpoint: its content, the class of the model, the inputs of the model, and a part of its sizes."""

    build: Callable[[], State]
    model: str
    inputs: dict[str, torch.Tensor]
    sizes: str = "hidden_size 16, "


def megalodon_folder() -> State:
    """Return the content of a Megalodon folder, structured like a fairseq file; `save` writes the folder."""
    args = argparse.Namespace(**megalodon.MODEL, **{TOKENIZER: {"path": None}, SHARDS: 1})
    return {"args": args, "model": megalodon.state()}


TOPIC = {"heads": [("topic", 3)], "task": "sentence_prediction", "num_classes": 3}
PIXELS = {"values": True, "sen_rep_type": "mp"}
TEXT, VALUES, PAIR = (
    {"input_ids": TOKENS},
    {"input_values": torch.linspace(-1, 1, 18).view(2, 9)},
    {"input_ids": TOKENS, "labels": TOKENS},
)
KINDS = {
    "luna_bert": Kind(lambda: luna.bert(**TOPIC), "LunaForSequenceClassification", TEXT),
    "luna_lra, 2021": Kind(luna.lra21, "LunaForSequenceClassification", TEXT),
    "luna_lra, 2023": Kind(lambda: luna.lra23(pre_logits=True), "LunaForSequenceClassification", TEXT),
    "luna_seq2seq": Kind(
        lambda: checkpoint(luna_seq2seq(**SINUSOIDAL)), "LunaForConditionalGeneration", PAIR, "vocab_size 19, "
    ),
    "mega_lra": Kind(lambda: mega(prenorm=True), "MegaForSequenceClassification", TEXT),
    "mega_lra, pixels": Kind(
        lambda: mega("mega_lra_cifar10", "flash", **PIXELS), "MegaForSequenceClassification", VALUES
    ),
    "mega_lm": Kind(mega_lm, "MegaForCausalLM", TEXT, "vocab_size 32, "),
    "mega_lm, adaptive": Kind(
        lambda: mega_lm(**LANGUAGE_MODELS["adaptive"]), "MegaForCausalLM", TEXT, "vocab_size 32, "
    ),
    "mega_seq2seq": Kind(lambda: checkpoint(mega_seq2seq()), "MegaForConditionalGeneration", PAIR, "vocab_size 19, "),
    "mega_image": Kind(
        lambda: mega_image(hidden=6),
        "MegaForImageClassification",
        {"pixel_values": torch.linspace(-1, 1, 864).view(2, 3, 12, 12)},
    ),
    "megalodon": Kind(megalodon_folder, "MegalodonForCausalLM", {"input_ids": TOKENS % 9}),
}


@functools.cache
def built(kind: str) -> State:
    """Return the content of a valid checkpoint; do not change it, `changed` returns another one."""
    torch.manual_seed(0)
    return KINDS[kind].build()


def changed(state: State, model: dict[str, Any] | None = None, **args: Any) -> State:
    """Return a checkpoint with another model or other args, which shares everything else."""
    model = state["model"] if model is None else model
    return state | {"model": model, "args": argparse.Namespace(**vars(state["args"]) | args)}


def save(state: State, folder: Path) -> Path:
    """Write the checkpoint in its original form (a file, or Megalodon's folder) and return the path."""
    args = vars(state["args"]) if "args" in state else {}
    if SHARDS not in args:
        torch.save(state, folder / "checkpoint.pt")
        return folder / "checkpoint.pt"
    place = folder / "checkpoint"
    place.mkdir(exist_ok=True)
    model = {name: value for name, value in args.items() if name not in (SHARDS, TOKENIZER)}
    torch.save(state["model"], place / "consolidated.pth")
    (place / CONFIG).write_text(_json({"model": model, TOKENIZER: args[TOKENIZER]}), encoding="utf-8")
    (place / CONSOLIDATED).write_text(_json({SHARDS: args[SHARDS], "dtype": "fp32"}), encoding="utf-8")
    return place


def _json(content: Any) -> str:
    """Return the content as JSON. Values that JSON does not support become descriptions; long numbers are kept."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(content, default=repr)
    finally:
        sys.set_int_max_str_digits(limit)


def check_arrived(source: dict[str, torch.Tensor], ours: dict[str, torch.Tensor], report: dict[str, Any]) -> None:
    """Check that a model has exactly the tensors of the file, with their values; `report` lists their places."""
    raised = report["decisions"].get("layer_norm") == "plus-one"
    counters = {name for name in ours if name.endswith("num_batches_tracked")}  # a file may lack these
    assert ours.keys() - counters <= {row["target"] for row in report["mapped"]}
    assert sorted(row["source"] for row in report["mapped"] + report["dropped"]) == sorted(source)
    for row in report["mapped"]:
        # the report also lists weights of the language model, which models with a head do not have
        if row["target"] in ours:
            key, found = row["source"], ours[row["target"]]
            expected = (source[key].float() + 1 if luna.is_norm(key) and raised else source[key]).to(found.dtype)
            assert torch.equal(found.view(expected.shape).nan_to_num(), expected.nan_to_num()), row
    assert all(row["reason"] for row in report["dropped"])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def saved_report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "conversion_report.json").read_text(encoding="utf-8"))


# Strings that messages must not contain: advice to execute a pickle, and control characters.
FORBIDDEN = ("weights_only", "add_safe_globals", "github", "Traceback")


def check_message(message: str, limit: int = 1000) -> None:
    """Check that an error is one line of limited length without advice that would execute the code in a file."""
    assert message.isprintable() and len(message) < limit, message
    assert not any(word in message for word in FORBIDDEN), message


def convert(state: State, folder: Path, **options: Any) -> Report | str:
    """Convert a checkpoint, perhaps damaged; return the report of a valid model, or the message of the error.

    An error is one line and leaves nothing. A model loads with all tensors, and its configuration has finite values of
    the declared types.
    """
    source, output = save(state, folder), folder / "output"
    try:
        report = convert_checkpoint(source, output, **options)
    except ConversionError as error:
        check_message(str(error), 1500)
        assert sorted(folder.iterdir()) == [source]
        return str(error)
    model = load(output, getattr(luna_mega, report.model_class))
    check_arrived(state["model"], weights(output), asdict(report))
    for config in (model.config, getattr(model.config, "decoder_config", model.config)):
        for name, value in config.to_dict().items():
            assert type(config).__annotations__.get(name) is not bool or isinstance(value, bool), (name, value)
            if isinstance(value, (int, float)):
                assert math.isfinite(value) and abs(value) < 2**31, (name, value)
    return report
