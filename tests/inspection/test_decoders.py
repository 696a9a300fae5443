"""`luna-mega verify` for decoders and encoder-decoders of all families."""

import pytest
import torch
from safetensors.torch import save_file

import luna_mega
from luna_mega.convert import ConversionError
from luna_mega.inspection.verify import compare
from luna_mega_cli import main
from tests.errors import command_error
from tests.inspection.test_verify import DECODER, LUNA, MEGA, SIZES, change

MEGALODON = SIZES | {"intermediate_size": 40, "shared_representation_size": 16, "value_size": 56, "chunk_size": 32}
MEGALODON |= {"num_attention_heads": 2, "ema_projection_size": 4, "norm_num_groups": 4}
MEGALODON |= {"swiglu": True, "rescale_nffn": True, "scale_embedding": True, "tie_word_embeddings": True}
BOTH, CROSS = {"is_encoder_decoder": True}, {"add_cross_attention": True}
CLASSES = {
    "luna lm": ("LunaForCausalLM", {"is_decoder": True, "tie_key_value": False, "pre_norm": True}),
    "luna cross": ("LunaModel", {"is_decoder": True} | CROSS),
    "luna seq2seq": ("LunaForConditionalGeneration", BOTH),
    "luna other decoder": (
        "LunaForConditionalGeneration",
        BOTH | {"decoder_vocab_size": 15, "num_decoder_layers": 1, "decoder_intermediate_size": 70},
    ),
    "mega body": ("MegaSeq2SeqModel", BOTH),
    "mega cross": ("MegaForCausalLM", DECODER | CROSS),
    "mega chunks": ("MegaForConditionalGeneration", BOTH | {"use_chunking": True, "chunk_size": 8}),
    "mega seq2seq": ("MegaForConditionalGeneration", BOTH),
    "megalodon tied": ("MegalodonForCausalLM", {}),
}
FAMILIES = {"Luna": LUNA, "Mega": MEGA, "Megalodon": MEGALODON}


def make(name):
    class_name, own = CLASSES[name]
    model_class = getattr(luna_mega, class_name)
    return model_class(model_class.config_class(**FAMILIES[name.partition(" ")[0].capitalize()] | own))


@pytest.mark.parametrize("name", sorted(CLASSES.keys() - {"luna other decoder", "mega seq2seq"}))
def test_model_equals_itself_and_no_other_model(name, tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        make(name).save_pretrained(folder)
    length = 70 if "lodon" in name else 9
    same = compare(folders[0], folders[0], tolerance=0.0, length=length)
    assert same.within and same.largest == 0
    result = "logits" if "For" in CLASSES[name][0] else "last_hidden_state"
    assert list(same.results) == [result]
    other = compare(*folders, length=length)
    assert not other.within and other.results[result] > 0 and all(row["hidden"] > 0 for row in other.layers)


@pytest.mark.parametrize("family", ["luna", "mega"])
def test_differences_start_at_their_layer(family, tmp_path):
    """Differences start at the layer that was changed.

    A change in the decoder does not affect the encoder; a change in the encoder affects the entire decoder.
    """
    make(f"{family} seq2seq").save_pretrained(folder := tmp_path / "a")
    inner = {"luna": "{0}.{0}.layers.1.fc2.bias", "mega": "{0}.layers.1.nffn.fc2.bias"}[family]
    found = {}
    for stack in ("encoder", "decoder"):
        name = f"{family}.{inner.format(stack)}"
        other = change(folder, tmp_path / stack, name, lambda bias: bias.add_(torch.linspace(-0.1, 0.1, 16)))
        found[stack] = compare(folder, other, length=9)
        assert "encoder embeddings" in str(found[stack]) and "decoder 2" in str(found[stack])
    changed = {stack: [row["hidden"] > 0 for row in comparison.layers] for stack, comparison in found.items()}
    assert changed == {
        "encoder": [False, False, True, False, True, True],
        "decoder": [False, False, False, False, False, True],
    }
    if family == "luna":
        assert [row["packed"] > 0 for row in found["encoder"].layers] == [False, False, False, False, True, True]


def test_inputs_of_a_source_and_a_target(tmp_path, capsys):
    folder, file = tmp_path / "a", tmp_path / "inputs.safetensors"
    make("luna other decoder").save_pretrained(folder)
    ids = torch.tensor([[5, 6, 2]])
    save_file({"input_ids": ids, "decoder_input_ids": ids[:, :2].clone()}, file)
    assert compare(folder, folder, inputs=file, tolerance=0.0).inputs["file"] == {
        "decoder_input_ids": [1, 2],
        "input_ids": [1, 3],
    }
    save_file({"input_ids": ids + 10, "decoder_input_ids": ids + 10}, file)
    for option, value, named in (("--inputs", file, "decoder_input_ids has ids"), ("--text", "x", "use --inputs")):
        assert named in command_error(capsys, "verify", folder, folder, option, value)


def test_decoders_of_different_sizes(tmp_path):
    make("luna seq2seq").save_pretrained(tmp_path / "a")
    make("luna other decoder").save_pretrained(tmp_path / "b")
    with pytest.raises(ConversionError, match="decoder vocab_size: 17 and 15; decoder num_hidden_layers: 2 and 1"):
        compare(tmp_path / "a", tmp_path / "b")


GENUINE = ["luna/s2s_untied_prenorm", "mega/10_mt_relu2_rotary_prenorm_chunk_unshared"]
GENUINE += ["mega/07_lm_enwik8_tied_rotary_chunk_notmultiple", "mega/08_lm_wt103_adaptive_tied"]


@pytest.mark.parametrize("name", GENUINE)
def test_checkpoints_of_the_original(parity_folder, tmp_path, name):
    file = parity_folder(*name.split("/")) / "checkpoint.pt"
    assert main(["convert", str(file), "--output", str(tmp_path / "model")]) == 0
    assert compare(tmp_path / "model", file, tolerance=0.0, length=50 if "_lm_" in name else 11).within
