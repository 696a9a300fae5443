"""Luna translation models: conversion of fairseq's file to a folder, export, and errors."""

import pytest
import torch

from luna_mega import LunaForConditionalGeneration, LunaSeq2SeqConfig
from luna_mega.convert.exporter import export_checkpoint
from luna_mega.convert.importer import convert_checkpoint
from luna_mega.errors import ConversionError
from luna_mega.inspection.info import describe
from luna_mega.inspection.verify import compare
from tests.convert.exports import TRANSLATION, edit, read, translation_comes_back, translation_goes_there_and_back

FIXTURES = ["s2s_lnemb_learned_fixlen", "s2s_tied", "s2s_untied_prenorm"]
SINUSOIDAL = {"position_embedding_type": "sinusoidal", "embedding_norm": False}
KINDS = {
    "joint, as WMT": SINUSOIDAL | {"hidden_act": "relu"},
    "tied, learned positions": {"share_encoder_decoder_embeddings": False, "max_target_positions": 11},
    "two vocabularies, pre-norm, fixed length": SINUSOIDAL
    | {"decoder_vocab_size": 14, "pre_norm": True, "tie_key_value": False, "dynamic_projection_length": False},
    "untied, other decoder": {
        "tie_word_embeddings": False,
        "decoder_position_embedding_type": "sinusoidal",
        "num_decoder_layers": 1,
        "decoder_intermediate_size": 9,
        "num_decoder_attention_heads": 4,
        "num_decoder_pack_attention_heads": 1,
        "decoder_pre_norm": True,
        "scale_embedding": True,
    },
    "no positions": {"position_embedding_type": "none", "scale_embedding": True, "num_pack_attention_heads": 4},
}


@pytest.mark.parametrize("name", FIXTURES)
def test_a_file_of_the_original_comes_back(parity_folder, tmp_path, name):
    translation_comes_back(parity_folder("luna", name), tmp_path)


def model(**fields):
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "projection_length": 5, "max_position_embeddings": 20}
    return LunaForConditionalGeneration(LunaSeq2SeqConfig(**TRANSLATION | sizes | fields)).eval()


def exported(tmp_path, **fields):
    model(**fields).save_pretrained(tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "out" / "model.pt")
    return tmp_path / "out" / "model.pt"


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_goes_there_and_back(tmp_path, kind):
    assert translation_goes_there_and_back(model(**KINDS[kind]), tmp_path).layout == "Luna translation"


def test_norms_stored_minus_one(tmp_path):
    """A file of the 2023 code: norm weights around 0, specified by the option."""
    path = exported(tmp_path)
    content = read(path)
    norms = [key for key in content["model"] if "norm" in key and key.endswith(".weight")]
    for key in norms:
        content["model"][key] -= 1
    torch.save(content, path)
    report = convert_checkpoint(path, tmp_path / "back", layer_norm="plus-one")
    assert len(norms) == 2 * 3 + 2 * 4 + 3 and report.decisions["layer_norm"] == "plus-one"
    back = LunaForConditionalGeneration.from_pretrained(tmp_path / "back").eval()
    ids = torch.randint(4, 14, (2, 9))
    torch.testing.assert_close(back(ids, labels=ids).logits, model()(ids, labels=ids).logits)


def change(path, edit):
    content = read(path)
    edit(content["model"], vars(content["args"]))
    torch.save(content, path)
    return path


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda model, args: model.update({"decoder.adaptive_softmax.head.weight": torch.ones(3)}), "adaptive softmax"),
        (lambda model, args: model.update({"decoder.project_in_dim.weight": torch.ones(8, 4)}), "of another width"),
        (lambda model, args: model.pop("decoder.layers.1.encoder_attn.q_proj.weight"), "missing: decoder.layers.1.enc"),
        (
            lambda model, args: model.pop("decoder.output_projection.weight"),
            "'decoder.output_projection.weight' is mis",
        ),
        (lambda model, args: args.update(decoder_layers=3), "args.decoder_layers = 3 but the file has 2"),
        (lambda model, args: args.update(encoder_attention_heads=3), "divisible by num_attention_heads"),
        (
            lambda model, args: model.update({"decoder.embed_tokens.weight": torch.ones(19, 9)}),
            "a width of 8, the deco",
        ),
    ],
)
def test_unsupported_options_raise(tmp_path, edit, message):
    with pytest.raises(ConversionError, match=message):
        convert_checkpoint(change(exported(tmp_path), edit), tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_other_sinusoids_raise(tmp_path):
    path = change(exported(tmp_path, **SINUSOIDAL), lambda model, args: model["encoder.projected_positions"].add_(0.1))
    with pytest.raises(ConversionError, match="is not the sinusoids of the original"):
        convert_checkpoint(path, tmp_path / "back")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"causal_activation": "elu"}, "causal_activation = 'elu'"),
        ({"contextual_projection": False}, "contextual_projection = False"),
        ({"share_layers": True}, "share_layers = True"),
        ({"decoder_position_embedding_type": "none"}, "decoder_position_embedding_type = 'none'"),
    ],
)
def test_not_to_be_exported(tmp_path, fields, message):
    with pytest.raises(ConversionError, match=message):
        exported(tmp_path, **fields)


def test_other_commands_support_the_format(tmp_path):
    path = exported(tmp_path)
    report = convert_checkpoint(path, tmp_path / "back")
    assert describe(path).parameters["total"] == report.parameters["model"]
    assert compare(path, tmp_path / "ours", tolerance=0.0, length=9).within


def test_an_edited_folder_keeps_its_languages(tmp_path):
    path = change(exported(tmp_path), lambda model, args: args.update(source_lang="en", target_lang="de"))
    convert_checkpoint(path, tmp_path / "back")
    edit(tmp_path / "back", dropout=0.25)
    report = export_checkpoint(tmp_path / "back", tmp_path / "again.pt")
    assert (report.args["source_lang"], report.args["target_lang"], report.args["dropout"]) == ("en", "de", 0.25)
    assert report.warnings == ["args of the converted file that no longer apply are replaced: dropout"]


@pytest.mark.parametrize("value", [1e9, -0.1, "some", {}])
def test_layerdrop_of_the_decoder(tmp_path, value):
    path = change(exported(tmp_path), lambda model, args: args.update(decoder_layerdrop=value))
    with pytest.raises(ConversionError, match=r"args\.decoder_layerdrop = .* is not a number( from 0 to below 1)?$"):
        convert_checkpoint(path, tmp_path / "back")
