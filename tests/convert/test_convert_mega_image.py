"""Mega checkpoints for images: class names, and files of other code."""

import pytest
from transformers import AutoModelForImageClassification

from tests.convert.mega import mega_image


def test_files(convert):
    convert.save(mega_image())
    folder = convert(None)
    assert "AutoImageProcessor" in (folder / "README.md").read_text(encoding="utf-8")
    assert '"crop_size": {\n    "height": 12' in (folder / "preprocessor_config.json").read_text(encoding="utf-8")


def test_state_dict_without_metadata(convert):
    state = mega_image(positions=False, hidden=6)
    config = AutoModelForImageClassification.from_pretrained(convert({"model": state["model"]})).config
    assert not config.use_absolute_position_embeddings and config.classifier_hidden_size == 6


def test_names_of_classes(convert, tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("tench, Tinca tinca\ngoldfish\nshark\nhen\ncrane\n", encoding="utf-8")
    model = AutoModelForImageClassification.from_pretrained(convert(mega_image(), "--dict", names))
    assert model.config.id2label[0] == "tench, Tinca tinca" and model.config.label2id["crane"] == 4


@pytest.mark.parametrize(
    ("text", "named"),
    [("a\nb\n", "2 lines for 5 classes"), ("a\n\nb\nc\nd\n", "line 2 is empty"), (None, "no such file")],
)
def test_invalid_label_names(convert, tmp_path, text, named):
    names = tmp_path / "names.txt"
    if text is not None:
        names.write_text(text, encoding="utf-8")
    assert named in convert.error(mega_image(), "--dict", names)
