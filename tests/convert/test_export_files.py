"""The files of `luna-mega export`: inputs, files written next to the checkpoint, and files that are not modified."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from luna_mega import LunaConfig, LunaForMaskedLM, LunaForSequenceClassification
from luna_mega.convert import convert_checkpoint
from luna_mega.convert.export import exporter as export
from luna_mega.convert.export.exporter import export_checkpoint
from luna_mega_cli import main
from tests.convert.exports import LUNA, edit, fails
from tests.convert.mega import mega
from tests.convert.mega_lm import mega_lm


def save(folder, model_class, **fields):
    model_class(LunaConfig(**LUNA | fields)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{", encoding="utf-8"), "not JSON"),
        (lambda folder: edit(folder, model_type="bert"), "model_type 'bert'"),
        (lambda folder: edit(folder, architectures=None), "architectures None"),
        (lambda folder: edit(folder, hidden_size=15), "divisible"),
        (lambda folder: edit(folder, intermediate_size=25), "intermediate_size = 25 (it reads 24)"),
        (lambda folder: edit(folder, num_hidden_layers=3), "encoder_layers"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x08" + bytes(30)), "damaged or truncated"),
        (lambda folder: (folder / "conversion_report.json").write_text('{"format": 2}', encoding="utf-8"), "format 2"),
        (lambda folder: (folder / "dict.txt").write_text("a 1\n", encoding="utf-8"), "1 symbols do not fit"),
    ],
)
def test_bad_folders(tmp_path, capsys, damage, expected):
    folder = save(tmp_path / "model", LunaForMaskedLM)
    damage(folder)
    assert expected in fails(capsys, folder, tmp_path / "model.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_tied_weights_that_differ(tmp_path, capsys):
    folder = save(tmp_path / "model", LunaForMaskedLM, tie_word_embeddings=False)
    edit(folder, tie_word_embeddings=True)
    assert "ties lm_head.decoder.weight to luna.embeddings.word_embeddings.weight" in fails(
        capsys, folder, tmp_path / "model.pt"
    )
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.decoder.weight"] = weights["luna.embeddings.word_embeddings.weight"].clone()
    weights["luna.embeddings.position_embeddings.weight"][1] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert "NaN or Inf in 1 of" in export_checkpoint(folder, tmp_path / "model.pt").warnings[0]


def test_weights_that_overflow_in_the_dtype_of_the_file(tmp_path, capsys):
    folder = save(tmp_path / "model", LunaForMaskedLM)
    weights = load_file(folder / "model.safetensors")
    weights["luna.embeddings.position_embeddings.weight"][1] = 1e5
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    message = fails(capsys, folder, tmp_path / "model.pt", "--dtype", "float16")
    assert "embed_positions.weight in float16; choose a wider --dtype" in message
    assert not export_checkpoint(folder, tmp_path / "model.pt", dtype="bfloat16").warnings


def test_absent_folder(tmp_path, capsys):
    assert "no such folder" in fails(capsys, tmp_path / "model", tmp_path / "model.pt")
    (tmp_path / "model").touch()
    assert "is a file" in fails(capsys, tmp_path / "model", tmp_path / "model.pt")


def test_dictionaries(make, tmp_path):
    """Dictionaries are written to the paths at which the task of the original reads them."""
    dictionary = make.dictionary(tmp_path / "given.txt")
    fields = {"id2label": {0: "no", 1: "not at all", 2: "yes"}}
    folder = save(tmp_path / "model", LunaForSequenceClassification, **fields)
    report = export_checkpoint(folder, tmp_path / "a" / "model.pt", dictionaries=[dictionary])
    assert report.files == ["dict.txt", "input0/dict.txt", "label/dict.txt", "model.pt"]
    for name in ("dict.txt", "input0/dict.txt"):
        assert (tmp_path / "a" / name).read_text(encoding="utf-8") == dictionary.read_text(encoding="utf-8")
    assert (tmp_path / "a" / "label" / "dict.txt").read_text(encoding="utf-8") == "no 1\nnot at all 1\nyes 1\n"
    convert_checkpoint(tmp_path / "a" / "model.pt", tmp_path / "back")
    assert LunaConfig.from_pretrained(tmp_path / "back").id2label == fields["id2label"]
    assert not report.notes or not any("dict.txt" in note for note in report.notes)
    again = export_checkpoint(folder, tmp_path / "a" / "second.pt", dictionaries=[dictionary])
    assert again.files == ["second.pt"]
    folder = save(tmp_path / "lra", LunaForSequenceClassification, classifier_bias=False)
    report = export_checkpoint(folder, tmp_path / "b" / "model.pt", dictionaries=[dictionary])
    assert report.files == ["dict.txt", "label-bin/dict.txt", "src-bin/dict.txt", "model.pt"]


def test_dictionaries_of_a_converted_folder(convert, make, tmp_path):
    make.dictionary(convert.source / "dict.txt")
    make.dictionary(convert.source / "label-bin" / "dict.txt", symbols=3, prefix="label")
    folder = convert(make.bert(heads=[("a", 3)], task="sentence_ranking"))
    report = export_checkpoint(folder, tmp_path / "out" / "model.pt")
    assert report.files == ["dict.txt", "input0/dict.txt", "label-bin/dict.txt", "model.pt"]
    for name in ("dict.txt", "label-bin/dict.txt"):
        assert (tmp_path / "out" / name).read_bytes() == (convert.source / name).read_bytes()


@pytest.mark.parametrize(
    ("build", "symbols", "files"),
    [
        (mega_lm, 28, ["dict.txt", "model.pt"]),
        (mega, 12, ["dict.txt", "label-bin/dict.txt", "src-bin/dict.txt", "model.pt"]),
    ],
)
def test_dictionaries_of_mega(convert, make, tmp_path, build, symbols, files):
    make.dictionary(convert.source / "dict.txt", symbols=symbols)
    make.dictionary(convert.source / "label-bin" / "dict.txt", symbols=2, prefix="c")
    report = export_checkpoint(convert(build()), tmp_path / "out" / "model.pt")
    assert report.files == files
    for name in {"dict.txt", "label-bin/dict.txt"} & set(files):
        assert (tmp_path / "out" / name).read_bytes() == (convert.source / name).read_bytes()


def test_missing_dictionary_is_reported(tmp_path):
    report = export_checkpoint(save(tmp_path / "model", LunaForMaskedLM), tmp_path / "model.pt")
    assert report.files == ["model.pt"] and any("--dict adds it" in note for note in report.notes)


@pytest.mark.parametrize("label", ["a\nb", " a", "", "<pad>", "yes"])
def test_labels_that_a_dictionary_cannot_store(tmp_path, capsys, label):
    folder = save(tmp_path / "model", LunaForSequenceClassification, id2label={0: "yes", 1: label})
    assert "id2label" in fails(capsys, folder, tmp_path / "out" / "model.pt")
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(make, tmp_path, capsys):
    folder = save(tmp_path / "model", LunaForMaskedLM)
    make.dictionary(folder / "dict.txt")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "dict.txt").write_text("mine 1\n", encoding="utf-8")
    assert "belongs to another model; choose an --output in a new" in fails(
        capsys, folder, tmp_path / "out" / "model.pt"
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["dict.txt"]
    (tmp_path / "out" / "model.pt").write_text("mine", encoding="utf-8")
    assert "already exists" in fails(capsys, folder, tmp_path / "out" / "model.pt")
    assert (tmp_path / "out" / "model.pt").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(("error", "broken"), [(OSError("no space left"), "save"), (KeyboardInterrupt(), "publish")])
def test_failed_write_leaves_no_files(make, tmp_path, monkeypatch, error, broken):
    folder = save(tmp_path / "model", LunaForSequenceClassification)
    make.dictionary(folder / "dict.txt")
    before = sorted(tmp_path.rglob("*"))

    def fail(*args):
        if broken == "save" or args[0].name == "model.pt":
            raise error
        return rename(*args)

    rename = export.Path.rename
    monkeypatch.setattr(*((export.torch, "save") if broken == "save" else (export.Path, "rename")), fail)
    for output in (tmp_path / "model.pt", tmp_path / "new" / "deeper" / "model.pt"):
        with pytest.raises(type(error)):
            export_checkpoint(folder, output)
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["dict.txt", "input0", "label"])
def test_output_has_not_the_name_of_a_dictionary(make, tmp_path, capsys, name):
    folder = save(tmp_path / "model", LunaForSequenceClassification)
    make.dictionary(folder / "dict.txt")
    assert f"the export also writes {name}" in fails(capsys, folder, tmp_path / "out" / name)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "label").touch()
    assert "label: is a file" in fails(capsys, folder, tmp_path / "out" / "model.pt")


def test_full_disk(tmp_path, capsys):
    resource = pytest.importorskip("resource")
    folder = save(tmp_path / "model", LunaForMaskedLM)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        status = main(["export", str(folder), "--output", str(tmp_path / "model.pt")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 1 and "luna-mega export: error: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_wrong_options(tmp_path):
    with pytest.raises(ValueError, match="dtype"):
        export_checkpoint(tmp_path, tmp_path / "model.pt", dtype="int8")
    with pytest.raises(ValueError, match="layer_norm"):
        export_checkpoint(tmp_path, tmp_path / "model.pt", layer_norm="auto")
    with pytest.raises(SystemExit) as stop:
        main(["export", str(tmp_path)])
    assert stop.value.code == 2
