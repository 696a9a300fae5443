"""The norm weights of a plus-one checkpoint as they were: adding 1 rounds them, and export gives the old ones back."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from luna_mega.convert.evidence import same_bits

FILE_NAME = "source_norms.safetensors"


def save_source_norms(weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Writes the weights, under fairseq's names, beside the model."""
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / FILE_NAME)


def source_norms(folder: Path, ours: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of the saved weights that still give the model's, `ours`, when 1 is added."""
    file = folder / FILE_NAME
    saved = load_file(file) if file.is_file() else {}
    return {
        name: saved[name]
        for name, weight in ours.items()
        if name in saved and same_bits((saved[name].float() + 1).to(weight.dtype), weight)
    }
