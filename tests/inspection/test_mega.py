"""`luna-mega verify` for Mega."""

import pytest
import torch
from huggingface_hub import ModelCard

from luna_mega.inspection.verify import compare
from luna_mega_cli import main
from tests.convert.mega import mega
from tests.convert.mega_lm import KINDS, mega_lm


@pytest.mark.parametrize("kind", ["untied", "adaptive"])
def test_language_models(convert, tmp_path, kind):
    state = mega_lm(**KINDS[kind])
    folder = convert(state)
    comparison = compare(folder, convert.file, tolerance=0.0, length=9)
    assert comparison.within and list(comparison.results) == ["logits"]
    assert ModelCard.load(folder / "README.md").data.pipeline_tag == "text-generation"
    state["model"]["decoder.layers.1.mega_layer.h_proj.weight"] *= 1.5
    torch.save(state, tmp_path / "other.pt")
    assert [row["hidden"] > 0 for row in compare(folder, tmp_path / "other.pt", length=9).layers] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("name", ["07_lm_enwik8_tied_rotary_chunk_notmultiple", "08_lm_wt103_adaptive_tied"])
def test_genuine_language_models(parity_folder, tmp_path, capsys, name):
    checkpoint, folder = parity_folder("mega", name) / "checkpoint.pt", tmp_path / "model"
    assert main(["convert", str(checkpoint), "--output", str(folder)]) == 0
    assert ModelCard.load(folder / "README.md").data.pipeline_tag == "text-generation"
    assert main(["verify", str(folder), str(checkpoint), "--length", "50", "--tolerance", "0"]) == 0
    assert "MegaForCausalLM" in capsys.readouterr().out


def test_checkpoints_of_the_two_branches(convert, tmp_path):
    """A file that is loaded with the convention of the other branch gives different results."""
    state = mega(rotary=True)
    folder = convert(state)
    assert compare(folder, convert.file, length=9).largest == 0
    other = compare(folder, convert.file, ema_convention="flash", length=9)
    assert other.layers[0]["hidden"] == 0 and other.layers[1]["hidden"] > 1e-3
    assert main(["verify", str(folder), str(folder), "--ema-convention", "flash"]) == 1


def test_v4_folders(parity_folder):
    """Folders of transformers v4 are supported without conversion."""
    folder = parity_folder("mega", "hf_mlm_softmax_rotary_scalenorm")
    assert compare(folder, folder, tolerance=0.0).within
