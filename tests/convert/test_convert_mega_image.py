"""Checkpoints of Mega for images: detected fields, class names, export, and invalid files."""

import argparse

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageClassification

from luna_mega import MegaConfig, MegaForImageClassification
from luna_mega.inspection.verify import compare
from luna_mega_cli import main
from tests.convert.mega import mega_image

HIDDEN = 6


@pytest.fixture
def convert(tmp_path):
    def run(state, *options):
        torch.save(state, tmp_path / "checkpoint.pth")
        return main(["convert", str(tmp_path / "checkpoint.pth"), "--output", str(tmp_path / "model"), *options])

    return run


def test_info(convert, tmp_path, capsys):
    assert convert(mega_image()) == 0
    for path in ("model", "checkpoint.pth"):
        capsys.readouterr()
        assert main(["info", str(tmp_path / path)]) == 0
        printed = capsys.readouterr().out
        assert "image_size 12, patch_size 4" in printed and "ImageClassification: 5 classes, pooling mean" in printed


def test_model_without_conversion_record(tmp_path, capsys):
    sizes = {"hidden_size": 192, "intermediate_size": 384, "shared_representation_size": 64}
    model = MegaForImageClassification(MegaConfig.image_base_patch16_224(**sizes, num_labels=3))
    model.save_pretrained(tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), "--output", str(tmp_path / "a.pth")]) == 0
    state = torch.load(tmp_path / "a.pth", weights_only=False)
    assert state["args"].model == "mega_tiny_patch16_224" and state["args"].patch_impl == "conv"
    assert state["args"].nb_classes == 3 and state["args"].drop_path == 0.3 and state["model_ema"] is None
    assert "register one" not in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "a.pth"), "--output", str(tmp_path / "again")]) == 0
    assert compare(tmp_path / "model", tmp_path / "again", tolerance=0.0).within


def test_state_dict_without_metadata(convert, tmp_path):
    state = mega_image(positions=False, hidden=HIDDEN)
    assert convert({"model": state["model"]}) == 0
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert not config.use_absolute_position_embeddings and config.classifier_hidden_size == HIDDEN


def test_names_of_classes(convert, tmp_path, capsys):
    names = tmp_path / "names.txt"
    names.write_text("tench, Tinca tinca\ngoldfish\nshark\nhen\ncrane\n")
    assert convert(mega_image(), "--dict", str(names)) == 0
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "model")
    assert model.config.id2label[0] == "tench, Tinca tinca" and model.config.label2id["crane"] == 4
    capsys.readouterr()
    command = ["export", str(tmp_path / "model"), "--output", str(tmp_path / "a.pth"), "--dict", str(names)]
    assert main(command) == 1
    assert "reads no dictionary" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, message",
    [("a\nb\n", "2 lines for 5 classes"), ("a\n\nb\nc\nd\n", "line 2 is empty"), (None, "no such file")],
)
def test_invalid_label_names(convert, tmp_path, capsys, text, message):
    names = tmp_path / "names.txt"
    if text is not None:
        names.write_text(text)
    assert convert(mega_image(), "--dict", str(names)) == 1
    assert message in capsys.readouterr().err and not (tmp_path / "model").exists()


def test_another_vision_model(convert, capsys):
    vit = {"cls_token": torch.zeros(1, 1, 8), "patch_embed.proj.weight": torch.zeros(8, 3, 4, 4)}
    vit |= {"blocks.0.attn.qkv.weight": torch.zeros(24, 8)}
    assert convert({"model": vit, "args": argparse.Namespace(model="deit_tiny")}) == 1
    assert "a vision model without a Mega layer" in capsys.readouterr().err


def test_differing_args_are_warned_of(convert, tmp_path, capsys):
    assert convert(mega_image(input_size=384, nb_classes=7)) == 0
    printed = capsys.readouterr().out
    assert "args.input_size = 384 but the tensors have 12" in printed and "args.nb_classes = 7" in printed
