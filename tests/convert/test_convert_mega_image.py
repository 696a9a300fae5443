"""Checkpoints of Mega for images: detected fields, class names, export, and invalid files."""

import argparse
import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageClassification

from luna_mega import MegaConfig, MegaForImageClassification
from luna_mega.inspection.verify import compare
from luna_mega_cli import main
from tests.convert.mega import FFN, LAYERS, WIDTH, layer, linear, norm

PATCH, SIDE, CLASSES, HIDDEN = 4, 3, 5, 6


def mega_image(norm_type="layernorm", *, linear_patches=False, positions=True, hidden=None, **args):
    """A checkpoint in the format of the training script. Arguments that are None are omitted."""
    patches = SIDE * SIDE
    model = {"pos_embed": torch.randn(1, patches, WIDTH)} if positions else {}
    weight = torch.randn(WIDTH, 3, PATCH, PATCH)
    model["patch_embed.pemb.proj.weight"] = weight.flatten(1) if linear_patches else weight
    model["patch_embed.pemb.proj.bias"] = torch.randn(WIDTH)
    for index in range(LAYERS):
        bias = {"rel_pos_bias": torch.randn(2 * patches - 1)}
        model |= layer(f"blocks.{index}", "flash", norm_type, bias, ffn=True)
    model |= norm("final_norm", norm_type) | linear("out_proj.fc", WIDTH, WIDTH)
    model |= linear("pre_logits.fc", hidden, WIDTH) if hidden else {}
    model |= linear("head", CLASSES, hidden or WIDTH)
    args = {
        "model": "mega_mini",
        "input_size": SIDE * PATCH,
        "nb_classes": CLASSES,
        "norm_type": norm_type,
        "patch_impl": "linear" if linear_patches else "conv",
        "no_pos_emb": not positions,
        "representation_size": hidden,
        "drop": 0.0,
        "drop_path": 0.1,
        "data_path": "/home/somebody/imagenet",
    } | args
    args = {name: value for name, value in args.items() if value is not None}
    state = {"model": model, "model_ema": None, "epoch": 3, "steps": 120, "scaler": {}}
    return state | {"args": argparse.Namespace(**args)}


@pytest.fixture
def convert(tmp_path):
    def run(state, *options):
        torch.save(state, tmp_path / "checkpoint.pth")
        return main(["convert", str(tmp_path / "checkpoint.pth"), "--output", str(tmp_path / "model"), *options])

    return run


VARIANTS = [
    {},
    {"linear_patches": True, "hidden": HIDDEN},
    {"norm_type": "batchnorm", "positions": False},
    {"norm_type": "scalenorm", "drop_path": 0.4},
]


@pytest.mark.parametrize("fields", VARIANTS)
def test_there_and_back(convert, tmp_path, fields):
    state = mega_image(**fields)
    assert convert(state) == 0
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert (config.image_size, config.patch_size, config.num_hidden_layers) == (SIDE * PATCH, PATCH, LAYERS)
    assert (config.hidden_size, config.nffn_hidden_size, config.num_labels) == (WIDTH, FFN, CLASSES)
    assert config.use_absolute_position_embeddings is fields.get("positions", True)
    assert config.classifier_num_layers == int("hidden" in fields)
    assert config.drop_path_rate == fields.get("drop_path", 0.1)
    report = json.loads((tmp_path / "model" / "conversion_report.json").read_text())
    assert report["source"]["layout"] == "mega_image" and report["source"]["num_updates"] == 120
    processor = json.loads((tmp_path / "model" / "preprocessor_config.json").read_text())
    assert processor["crop_size"] == {"height": 12, "width": 12}
    assert "AutoImageProcessor" in (tmp_path / "model" / "README.md").read_text()
    assert main(["export", str(tmp_path / "model"), "--output", str(tmp_path / "back.pth")]) == 0
    back = torch.load(tmp_path / "back.pth", weights_only=False)
    assert list(back["model"]) == list(state["model"])
    assert all(torch.equal(back["model"][name], tensor) for name, tensor in state["model"].items())
    assert vars(back["args"]) == vars(state["args"]) | {"data_path": "imagenet"}
    assert compare(tmp_path / "model", tmp_path / "back.pth", tolerance=0.0).within


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


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_channels": 1}, "num_channels = 1 (it has 3)"),
        ({"normalization_type": "rmsnorm"}, "normalization_type = 'rmsnorm'"),
        ({"pooling": "cls"}, "pooling = 'cls'"),
        ({"output_projection": False}, "output_projection = False"),
        ({"relative_positional_bias": "rotary"}, "relative_positional_bias = 'rotary'"),
    ],
)
def test_model_unsupported_by_the_original(tmp_path, capsys, fields, message):
    sizes = {"hidden_size": 16, "shared_representation_size": 4, "num_hidden_layers": 1, "num_labels": 3}
    config = MegaConfig.image_base_patch16_224(**sizes | fields)
    MegaForImageClassification(config).save_pretrained(tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), "--output", str(tmp_path / "a.pth")]) == 1
    assert message in capsys.readouterr().err and not (tmp_path / "a.pth").exists()


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


def faulty(change):
    state = mega_image()
    change(state["model"], vars(state["args"]))
    return state


TABLE = "blocks.0.mega_layer.rel_pos_bias.rel_pos_bias"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda model, args: model.pop("pos_embed"), "missing: pos_embed"),
        (lambda model, args: model.pop("head.weight"), "'head.weight' is missing"),
        (lambda model, args: model.update({TABLE: torch.zeros(19)}), "19 entries, which belong to no square"),
        (lambda model, args: model.update({"patch_embed.pemb.proj.weight": torch.zeros(WIDTH, 50)}), "no square patch"),
        (lambda model, args: model.update({"cls_token": torch.zeros(1, 1, WIDTH)}), "cls_token"),
        (lambda model, args: model.update({"pos_embed": torch.zeros(1, 3, WIDTH)}), "pos_embed"),
        (lambda model, args: args.update(drop="much"), "drop"),
    ],
)
def test_invalid_files(convert, tmp_path, capsys, change, message):
    assert convert(faulty(change)) == 1
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1 and not (tmp_path / "model").exists()


def test_another_vision_model(convert, capsys):
    vit = {"cls_token": torch.zeros(1, 1, 8), "patch_embed.proj.weight": torch.zeros(8, 3, 4, 4)}
    vit |= {"blocks.0.attn.qkv.weight": torch.zeros(24, 8)}
    assert convert({"model": vit, "args": argparse.Namespace(model="deit_tiny")}) == 1
    assert "a vision model without a Mega layer" in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--ema-convention", "main"), ("--layer-norm", "standard"), ("--head", "a")])
def test_options_for_other_formats(convert, capsys, option):
    assert convert(mega_image(), *option) == 1
    assert f"{option[0]} {option[1]}" in capsys.readouterr().err


def test_differing_args_are_warned_of(convert, tmp_path, capsys):
    assert convert(mega_image(input_size=384, nb_classes=7)) == 0
    printed = capsys.readouterr().out
    assert "args.input_size = 384 but the tensors have 12" in printed and "args.nb_classes = 7" in printed
