"""Helpers of conversion and export tests: load and save models, edit folders, check that an export fails."""

import argparse
import json

import torch
import transformers

import luna_mega
from luna_mega.convert import convert_checkpoint, export_checkpoint
from luna_mega_cli import main


def load(folder, model_class=None):
    """Return the model of a folder, through its auto class if it has one; every weight must come from there."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model_class = model_class or getattr(transformers, f"AutoModel{name[4:]}", None) or getattr(luna_mega, name)
    model, info = model_class.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"] and not info["unexpected_keys"], info
    return model.eval()


def save(folder, model):
    """Save a model without conversion record, with weights that are distinct in all rows and columns."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    return folder


def identical(first, second):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name


def edit(folder, name="config.json", **changes):
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def fails(capsys, folder, output, *options):
    """Return the one-line error of an export that must fail without leaving new files."""
    capsys.readouterr()
    there = output.exists()
    assert main(["export", str(folder), "--output", str(output), *map(str, options)]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and printed.err.startswith("luna-mega export: error: ")
    assert output.exists() is there
    return printed.err


def cannot_express(capsys, folder, layout, field):
    """Assert that the export fails because the original's `layout` does not support `field`."""
    message = fails(capsys, folder, folder.with_name("model.pt"))
    assert field in message and f"{layout} cannot express" in message


def read(path):
    """Return the content of a checkpoint."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(path, weights_only=True)


def dictionary(path, size):
    path.write_text("".join(f"w{index} 1\n" for index in range(size - 4)))
    return path


# Of a translation model, in Luna and Mega.
TRANSLATION = {
    "vocab_size": 19,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 12,
}


def translation_comes_back(fixture, tmp_path):
    """Convert a translation model of the original, export it, and return the content of both files."""
    convert_checkpoint(fixture / "checkpoint.pt", tmp_path / "folder")
    export_checkpoint(tmp_path / "folder", tmp_path / "out" / "checkpoint.pt")
    expected, actual = read(fixture / "checkpoint.pt"), read(tmp_path / "out" / "checkpoint.pt")
    assert actual["model"].keys() == expected["model"].keys()
    for key, tensor in expected["model"].items():
        if "_float_tensor" not in key:  # without content, as fairseq allocated it
            assert actual["model"][key].dtype == tensor.dtype and torch.equal(actual["model"][key], tensor), key
    assert vars(actual["args"]) == vars(expected["args"])
    for file in ("dict.en.txt", "dict.de.txt"):
        assert (tmp_path / "out" / file).read_bytes() == (fixture / file).read_bytes()
    return expected, actual


def translation_goes_there_and_back(ours, tmp_path):
    """Export a new translation model, convert it again, compare, and return the report of the export."""
    ours.save_pretrained(tmp_path / "ours")
    sizes = (ours.config.vocab_size, ours.config.decoder_config.vocab_size)
    files = [dictionary(tmp_path / f"{name}.txt", rows) for name, rows in zip("ab", sizes, strict=True)]
    report = export_checkpoint(tmp_path / "ours", tmp_path / "out" / "model.pt", dictionaries=files)
    converted = convert_checkpoint(tmp_path / "out" / "model.pt", tmp_path / "back")
    assert converted.model_class == type(ours).__name__ and not report.warnings and not converted.warnings
    back = type(ours).from_pretrained(tmp_path / "back").eval()
    identical(ours.state_dict(), back.state_dict())
    ids = torch.randint(4, 14, (2, 9))
    torch.testing.assert_close(back(ids, labels=ids).logits, ours(ids, labels=ids).logits)
    assert export_checkpoint(tmp_path / "back", tmp_path / "again" / "model.pt").args == report.args
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "back")("w3 w1 zzz").input_ids == [7, 5, 3, 2]
    return report
