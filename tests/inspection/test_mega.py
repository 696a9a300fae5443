"""`luna-mega verify` and `luna-mega info` for Mega."""

import json

import pytest
import torch
from huggingface_hub import ModelCard

from luna_mega import MegaConfig, MegaForMaskedLM, MegaForSequenceClassification
from luna_mega.convert import ConversionError
from luna_mega.inspection import info
from luna_mega.inspection.verify import compare
from luna_mega_cli import main
from tests.convert.mega import BODY, POSITIONS, mega
from tests.convert.mega_lm import KINDS, mega_lm

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 56,
    "shared_representation_size": 16,
    "ema_projection_size": 4,
    "nffn_hidden_size": 40,
    "max_positions": 64,
}
CHUNKS = {"use_chunking": True, "chunk_size": 8}


def save(folder, model_class=MegaForMaskedLM, **fields):
    model_class(MegaConfig(**SIZES | fields)).save_pretrained(folder)
    return folder


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


def test_info_of_a_folder(tmp_path, capsys):
    folder = save(tmp_path / "a", MegaForSequenceClassification, normalization_type="batchnorm")
    assert main(["info", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    model = MegaForSequenceClassification.from_pretrained(folder)
    assert found["parameters"]["total"] == model.num_parameters() and found["length"] == 64
    assert found["parameters"]["embeddings"] == 40 * 32
    assert found["parameters"]["head"] == model.classifier.dense.weight.numel() + 32 + 2 * 33
    assert found["weights"] == {"dtype": "float32", "bytes": 4 * model.num_parameters()}
    assert found["heads"] == ["SequenceClassification: 2 classes, pooling cls"]
    assert found["config"]["ema_projection_size"] == 4 and found["cache_bytes"] is None


@pytest.mark.parametrize(("branch", "sort"), [("main", False), ("flash", False), ("main", True)])
def test_info_of_a_checkpoint(convert, branch, sort):
    state = mega("mega_sc_raw_big", branch, values=True, norm_type="batchnorm", prenorm=True, classes=10)
    if sort:
        state["model"] = dict(sorted(state["model"].items()))
    convert.save(state)
    found = info.describe(convert.file)
    expected = "branch main or flash (not determined by the order of its tensors)" if sort else f"branch {branch}"
    assert found.written_by == f"fairseq: a mega_lra checkpoint (arch mega_sc_raw_big) of the Mega code, {expected}"
    assert found.heads == ["SequenceClassification: 10 classes, pooling mean"] and found.length == POSITIONS
    running = ("running_mean", "running_var", "num_batches_tracked")
    parameters = sum(tensor.numel() for key, tensor in state["model"].items() if not key.endswith(running))
    assert found.parameters["total"] == parameters
    assert found.parameters["embeddings"] == sum(
        state["model"][f"{BODY}.embed_tokens.{p}"].numel() for p in ("weight", "bias")
    )


def test_length_beyond_the_bias_table(tmp_path):
    folder = save(tmp_path / "a", relative_positional_bias="simple")
    with pytest.raises(ConversionError, match="the model has 64 learned positions"):
        info.describe(folder, 65)
    assert info.describe(save(tmp_path / "b", relative_positional_bias="simple", **CHUNKS), 65).length == 65


def test_v4_folders(parity_folder):
    """Folders of transformers v4 are supported without conversion."""
    folder = parity_folder("mega", "hf_mlm_softmax_rotary_scalenorm")
    found = info.describe(folder)
    assert found.heads == ["masked LM"] and "transformers 4." in found.written_by
    assert compare(folder, folder, tolerance=0.0).within
