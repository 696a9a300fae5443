"""Mega translation models: conversion of fairseq's file to a folder, export, dictionaries of two languages, errors."""

import json

import pytest
import torch
from transformers import AutoTokenizer

from luna_mega import MegaForConditionalGeneration, MegaSeq2SeqConfig, MegaSeq2SeqModel
from luna_mega.convert.exporter import export_checkpoint
from luna_mega.convert.importer import convert_checkpoint
from luna_mega.errors import ConversionError
from luna_mega.inspection.info import describe
from luna_mega.inspection.verify import compare
from tests.convert.exports import TRANSLATION, dictionary, read, translation_comes_back, translation_goes_there_and_back

FIXTURES = [
    "09_mt_softmax_shared",
    "10_mt_laplace_shared",
    "10_mt_relu2_rotary_prenorm_chunk_unshared",
    "15_flash_mt_softmax_trunc0",
]
KINDS = {
    "joint": {},
    "tied": {"share_encoder_decoder_embeddings": False},
    "two vocabularies": {"decoder_vocab_size": 14, "decoder_chunk_size": -1, "use_chunking": True, "chunk_size": 4},
    "untied, other decoder, simple": {
        "tie_word_embeddings": False,
        "relative_positional_bias": "simple",
        "max_positions": 20,
        "decoder_max_positions": 30,
        "num_decoder_layers": 1,
        "decoder_intermediate_size": 9,
        "decoder_shared_representation_size": 5,
        "normalization_type": "scalenorm",
        "normalize_before_mega": True,
        "normalize_before_ffn": True,
        "final_norm": True,
        "ema_shift": True,
    },
    "no ffn": {"use_normalized_ffn": False, "embedding_norm": True, "scale_embedding": True},
}


@pytest.mark.parametrize("name", FIXTURES)
def test_a_file_of_the_original_comes_back(parity_folder, tmp_path, name):
    expected, actual = translation_comes_back(parity_folder("mega", name), tmp_path)
    assert list(actual["model"]) == list(expected["model"])


def model(**fields):
    torch.manual_seed(0)
    sizes = {
        "shared_representation_size": 6,
        "ema_projection_size": 3,
        "nffn_hidden_size": 10,
        "normalization_type": "layernorm",
        "normalize_before_mega": False,
        "normalize_before_ffn": False,
    }
    return MegaForConditionalGeneration(MegaSeq2SeqConfig(**TRANSLATION | sizes | fields)).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_goes_there_and_back(tmp_path, kind):
    ours = model(**KINDS[kind])
    report = translation_goes_there_and_back(ours, tmp_path)
    size = ours.config.decoder_config.vocab_size
    assert (tmp_path / "out" / "dict.target.txt").read_text().count("\n") == size - 4
    assert report.layout == f"Mega translation of branch {'flash' if ours.config.ema_shift else 'main'}"


@pytest.fixture
def checkpoint(tmp_path):
    """A file of two vocabularies, without dictionaries in its directory."""
    model(**KINDS["two vocabularies"]).save_pretrained(tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "out" / "model.pt")
    return tmp_path / "out" / "model.pt"


def test_dictionaries(tmp_path, checkpoint):
    report = convert_checkpoint(checkpoint, tmp_path / "none")
    assert report.tokenizer is None and any("dict.source.txt or dict.target.txt" in note for note in report.notes)
    source, target = dictionary(tmp_path / "dict.en.txt", 19), dictionary(tmp_path / "dict.de.txt", 14)
    convert_checkpoint(checkpoint, tmp_path / "both", dictionaries=[target, source])  # identified by their sizes
    tokenizers = [AutoTokenizer.from_pretrained(tmp_path / "both", subfolder=name) for name in ("", "target")]
    assert [len(tokenizer) for tokenizer in tokenizers] == [19, 14]
    for given, message in (
        ([source], "the dictionary of the other language, dict.target.txt, is missing"),
        ([target], "the dictionary of the other language, dict.source.txt, is missing"),
        ([source, source], "fits as source, and so does"),
        ([source, dictionary(tmp_path / "c.txt", 15)], "11 symbols and 4 specials do not fit the 19 embeddings"),
    ):
        with pytest.raises(ConversionError, match=message):
            convert_checkpoint(checkpoint, tmp_path / "bad", dictionaries=given)
    dictionary(checkpoint.parent / "dict.source.txt", 14)
    with pytest.raises(ConversionError, match=r"dict\.source\.txt: 10 symbols and 4 specials do not fit"):
        convert_checkpoint(checkpoint, tmp_path / "bad")
    with pytest.raises(ConversionError, match="there is no dictionary next to"):
        (checkpoint.parent / "dict.source.txt").unlink()
        convert_checkpoint(checkpoint, tmp_path / "bad", bpe=tmp_path / "codes")


def test_a_joint_vocabulary_has_one_dictionary(tmp_path):
    model().save_pretrained(tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "out" / "model.pt")
    one, other = dictionary(tmp_path / "a.txt", 19), dictionary(tmp_path / "b.txt", 19)
    convert_checkpoint(tmp_path / "out" / "model.pt", tmp_path / "one", dictionaries=[one])
    assert not (tmp_path / "one" / "target").exists()
    other.write_text(other.read_text().replace("w3", "x"))
    with pytest.raises(ConversionError, match="but the model has one embedding"):
        convert_checkpoint(tmp_path / "out" / "model.pt", tmp_path / "two", dictionaries=[one, other])


def change(checkpoint, **args):
    state = read(checkpoint)
    vars(state["args"]).update(args)
    return state


def test_args_and_tensors(tmp_path, checkpoint):
    """Tensors take precedence over args; features that this encoder-decoder does not support raise."""
    state = change(checkpoint, share_all_embeddings=True, decoder_z_dim=99)
    torch.save(state, tmp_path / "a.pt")
    warnings = "\n".join(convert_checkpoint(tmp_path / "a.pt", tmp_path / "a").warnings)
    assert "args.share_all_embeddings = True but the tensors have False" in warnings
    assert "args.decoder_z_dim = 99 but the tensors have 6" in warnings
    cases = {
        "has 2 layers under 'decoder.layers'": change(checkpoint, decoder_layers=3),
        "adaptive softmax": change(checkpoint),
        "tensor 'decoder.output_projection.weight' is missing": change(checkpoint),
        "missing: encoder.layers.1.mega_layer.gamma": change(checkpoint),
    }
    cases["adaptive softmax"]["model"]["decoder.adaptive_softmax.head.weight"] = torch.zeros(2, 2)
    del cases["tensor 'decoder.output_projection.weight' is missing"]["model"]["decoder.output_projection.weight"]
    del cases["missing: encoder.layers.1.mega_layer.gamma"]["model"]["encoder.layers.1.mega_layer.gamma"]
    for message, state in cases.items():
        torch.save(state, tmp_path / "b.pt")
        with pytest.raises(ConversionError, match=message):
            convert_checkpoint(tmp_path / "b.pt", tmp_path / "b")


@pytest.mark.parametrize("language", ["../../x", "/etc/x", "a\nb", "..\\x", ["en"], 3, "\x1b"])
def test_language_name_is_not_a_path(tmp_path, checkpoint, language):
    """The language name becomes part of a file name that conversions read and exports write."""
    torch.save(change(checkpoint, source_lang=language), tmp_path / "a.pt")
    with pytest.raises(ConversionError, match="args.source_lang = .* is not (a name|the name of a language)"):
        convert_checkpoint(tmp_path / "a.pt", tmp_path / "a")
    torch.save(change(checkpoint, source_lang="en"), tmp_path / "b.pt")
    convert_checkpoint(tmp_path / "b.pt", tmp_path / "b")
    report = json.loads((tmp_path / "b" / "conversion_report.json").read_text())
    report["args"]["source_lang"] = language
    (tmp_path / "b" / "conversion_report.json").write_text(json.dumps(report))
    with pytest.raises(ConversionError, match="args.source_lang = .* is not (a name|the name of a language)"):
        export_checkpoint(tmp_path / "b", tmp_path / "out" / "b.pt")
    assert not (tmp_path / "out" / "b.pt").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decoder_start_token_id": 0}, "decoder_start_token_id = 0"),
        ({"norm_affine": False}, "norm_affine = False"),
        ({"relative_positional_bias": "simple", "cross_attention_positions": 9}, "cross_attention_positions = 9"),
        ({"final_norm": True}, "final_norm = True"),
    ],
    ids=str,
)
def test_models_unsupported_by_the_original(tmp_path, fields, message):
    model(**fields).save_pretrained(tmp_path / "ours")
    with pytest.raises(ConversionError, match=message):
        export_checkpoint(tmp_path / "ours", tmp_path / "model.pt")


def test_model_without_head_is_not_exported(tmp_path):
    MegaSeq2SeqModel(model().config).save_pretrained(tmp_path / "body")
    with pytest.raises(ConversionError, match="MegaForConditionalGeneration"):
        export_checkpoint(tmp_path / "body", tmp_path / "model.pt")


def test_other_commands_support_the_format(tmp_path, checkpoint):
    report = convert_checkpoint(checkpoint, tmp_path / "folder")
    assert describe(checkpoint).parameters["total"] == report.parameters["model"]
    assert compare(checkpoint, tmp_path / "folder", tolerance=0.0, length=9).within


def test_folder(tmp_path, checkpoint):
    report = convert_checkpoint(checkpoint, tmp_path / "folder")
    generation = json.loads((tmp_path / "folder" / "generation_config.json").read_text())
    assert (generation["num_beams"], generation["max_length"], generation["decoder_start_token_id"]) == (5, 202, 2)
    assert "AutoModelForSeq2SeqLM" in (tmp_path / "folder" / "README.md").read_text()
    assert report.decisions["share_encoder_decoder_embeddings"] is False
