"""Fixtures of the original code: tensors, tolerances, and checkpoints, as stored and as converted."""

import argparse
import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import luna_mega
from luna_mega_cli import main
from tests.marks import slow_but

TOLERANCE = {"atol": 1e-5, "rtol": 1e-4}


def originals(family: str, cases: list[str], fast: int | None = None) -> pytest.MarkDecorator:
    """Parametrize the fixture `original` with folders of a family; all but the first `fast` are slow."""
    names = [f"{family}/{case}" for case in cases]
    return pytest.mark.parametrize("original", slow_but(names[:fast], names) if fast else names, indirect=True)


@functools.cache
def _load(folder: Path, auto: Any, **fields: Any) -> Any:
    name = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    loader = auto or getattr(luna_mega, name)
    model, report = loader.from_pretrained(folder, output_loading_info=True, **fields)
    keys = ["missing_keys", "mismatched_keys", *(["unexpected_keys"] if type(model).__name__ == name else [])]
    assert not any(report[key] for key in keys)
    return model.eval()


class Original:
    """A folder of fixtures. Its checkpoint is converted once per head."""

    def __init__(self, folder: Path, outputs: Path):
        self.folder, self.outputs = folder, outputs / folder.parent.name / folder.name
        self.io, self.meta = (
            load_file(folder / "io.safetensors"),
            json.loads((folder / "meta.json").read_text(encoding="utf-8")),
        )
        self.args, tolerance = self.meta.get("args", {}), self.meta.get("tolerance", {})
        self.flash = "branch flash" in self.meta.get("source", "")
        self.tight = {name: tolerance.get(name, value) for name, value in TOLERANCE.items()}
        self.loose = {name: tolerance.get(f"grad_{name}", value) for name, value in self.tight.items()}
        self.gradients: dict[str, Any] = {}
        self.parameters: dict[str, torch.nn.Parameter] = {}

    def time_major(self, name: str) -> torch.Tensor:
        """Return a tensor that the fixture stores time-major, with the batch first."""
        return self.io[name].transpose(0, 1).contiguous()

    def starting_with(self, prefix: str) -> dict[str, torch.Tensor]:
        """Return the tensors whose names start with `prefix`; the prefix is removed from the names."""
        return {name.removeprefix(prefix): x for name, x in self.io.items() if name.startswith(prefix)}

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights of the checkpoint under their original names."""
        with torch.serialization.safe_globals([argparse.Namespace]):
            weights = torch.load(self.folder / "checkpoint.pt", weights_only=True)["model"]
        return {name: x for name, x in weights.items() if "_float_tensor" not in name}

    def convert(self, head: str | None = None) -> Path:
        """Return the folder of the converted checkpoint; folders of transformers v4 are returned unchanged."""
        if self.folder.name.startswith("hf_"):
            return self.folder
        output = self.outputs / (head or "default")
        if not output.exists():
            options = ["--head", head] if head else []
            assert main(["convert", str(self.folder / "checkpoint.pt"), "--output", str(output), *options]) == 0
        return output

    def load(self, auto: Any = None, head: str | None = None, **fields: Any) -> Any:
        """Return a copy of the converted model, in the class of its `config.json` or of an Auto class."""
        return copy.deepcopy(_load(self.convert(head), auto, **fields))

    def report(self, head: str | None = None) -> dict[str, Any]:
        """Return the report of the conversion."""
        return json.loads((self.convert(head) / "conversion_report.json").read_text(encoding="utf-8"))

    def add_gradients(self, model: Any, head: str | None = None) -> None:
        """Add the gradients of `model` to the sums, under the original's parameter names."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for entry in self.report(head)["mapped"]:
            parameter, name = parameters.get(entry["target"]), entry["source"]
            if parameter is not None and parameter.grad is not None:
                self.gradients[name] = self.gradients.get(name, 0) + parameter.grad
                self.parameters[name] = parameter

    def check_gradients(self, parity: Any, prefix: str = "grad.", complete: bool = True) -> None:
        """Compare the summed gradients with the original's.

        If the fixture is complete, all other parameters must have no gradient.
        """
        expected = self.starting_with(prefix)
        assert expected
        for name, value in expected.items():
            # linear patches are stored as a convolution
            parity.check(prefix + name, self.gradients[name].reshape(value.shape), value, **self.loose)
        compared = {id(self.parameters[name]) for name in expected}  # a tied parameter has several names
        others = [name for name, parameter in self.parameters.items() if complete and id(parameter) not in compared]
        for name in self.meta.get("params_without_grad_in_objective", others):
            assert torch.count_nonzero(torch.as_tensor(self.gradients.get(name, 0.0))) == 0, name
