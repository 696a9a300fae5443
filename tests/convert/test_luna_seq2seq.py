"""Luna translation models: from fairseq's file to a folder and back, and what is refused."""

import argparse

import pytest
import torch
from transformers import AutoTokenizer

from luna_mega import LunaConfig, LunaForConditionalGeneration
from luna_mega.convert.exporter import export_checkpoint
from luna_mega.convert.importer import convert_checkpoint
from luna_mega.errors import ConversionError
from luna_mega.inspection.info import describe
from luna_mega.inspection.verify import compare

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


def read(path):
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(path, weights_only=True)


@pytest.mark.parametrize("name", FIXTURES)
def test_a_file_of_the_original_comes_back(shared_dir, tmp_path, name):
    source = shared_dir / "fixtures" / "luna" / name
    convert_checkpoint(source / "checkpoint.pt", tmp_path / "folder")
    export_checkpoint(tmp_path / "folder", tmp_path / "out" / "checkpoint.pt")
    expected, actual = read(source / "checkpoint.pt"), read(tmp_path / "out" / "checkpoint.pt")
    assert actual["model"].keys() == expected["model"].keys()
    for key, tensor in expected["model"].items():
        if "_float_tensor" not in key:  # without content, as fairseq allocated it
            assert actual["model"][key].dtype == tensor.dtype and torch.equal(actual["model"][key], tensor), key
    assert vars(actual["args"]) == vars(expected["args"])
    for language in ("en", "de"):
        file = f"dict.{language}.txt"
        assert (tmp_path / "out" / file).read_bytes() == (source / file).read_bytes()


def model(**fields):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 19,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 12,
        "projection_length": 5,
        "max_position_embeddings": 20,
        "is_encoder_decoder": True,
    }
    return LunaForConditionalGeneration(LunaConfig(**sizes | fields)).eval()


def dictionary(path, size):
    path.write_text("".join(f"w{index} 1\n" for index in range(size - 4)))
    return path


def exported(tmp_path, **fields):
    model(**fields).save_pretrained(tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "out" / "model.pt")
    return tmp_path / "out" / "model.pt"


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_goes_there_and_back(tmp_path, kind):
    ours = model(**KINDS[kind])
    ours.save_pretrained(tmp_path / "ours")
    size = ours.config.decoder_config.vocab_size
    files = [dictionary(tmp_path / f"{name}.txt", rows) for name, rows in (("a", 19), ("b", size))]
    report = export_checkpoint(tmp_path / "ours", tmp_path / "out" / "model.pt", dictionaries=files)
    assert not report.warnings and report.layout == "Luna translation"
    converted = convert_checkpoint(tmp_path / "out" / "model.pt", tmp_path / "back")
    assert converted.model_class == "LunaForConditionalGeneration" and not converted.warnings
    back = LunaForConditionalGeneration.from_pretrained(tmp_path / "back").eval()
    expected, actual = ours.state_dict(), back.state_dict()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    ids = torch.randint(4, 14, (2, 9))
    torch.testing.assert_close(back(ids, labels=ids).logits, ours(ids, labels=ids).logits)
    assert export_checkpoint(tmp_path / "back", tmp_path / "again" / "model.pt").args == report.args
    assert AutoTokenizer.from_pretrained(tmp_path / "back")("w3 w1 zzz").input_ids == [7, 5, 3, 2]


def test_norms_stored_minus_one(tmp_path):
    """A file of the 2023 code: norm weights around 0, told by the option."""
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
        (lambda model, args: args.update(decoder_layers=3), "args.decoder_layers = 3 but the file holds 2"),
        (lambda model, args: args.update(encoder_attention_heads=3), "divisible by num_attention_heads"),
        (
            lambda model, args: model.update({"decoder.embed_tokens.weight": torch.ones(19, 9)}),
            "a width of 8, the deco",
        ),
    ],
)
def test_refused(tmp_path, edit, message):
    with pytest.raises(ConversionError, match=message):
        convert_checkpoint(change(exported(tmp_path), edit), tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_other_sinusoids_are_refused(tmp_path):
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


def test_other_commands_know_it(tmp_path):
    path = exported(tmp_path)
    report = convert_checkpoint(path, tmp_path / "back")
    assert describe(path).parameters["total"] == report.parameters["model"]
    assert compare(path, tmp_path / "ours", tolerance=0.0, length=9).within
