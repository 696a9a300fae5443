"""Invalid fields and inputs raise a one-sentence error that names the field and how to fix it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMaskedLM

import luna_mega
from luna_mega import MegaConfig

from .luna import tokens
from .mega import make, tiny_config


def test_a_decoder_has_one_direction(tmp_path):
    """`bidirectional` follows from `is_decoder`; a saved encoder that sets both inconsistently raises."""
    assert tiny_config().bidirectional and not tiny_config(is_decoder=True).bidirectional
    tiny_config(is_decoder=True).save_pretrained(tmp_path / "decoder")
    assert json.loads((tmp_path / "decoder" / "config.json").read_text())["bidirectional"] is False
    assert not MegaConfig.from_pretrained(tmp_path / "decoder").bidirectional
    tiny_config().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["bidirectional"] is True
    with pytest.raises(Exception, match="is_decoder=True requires bidirectional=False"):
        MegaConfig.from_pretrained(tmp_path, is_decoder=True)
    assert MegaConfig.from_pretrained(tmp_path, is_decoder=True, bidirectional=False).is_decoder


def test_odd_widths_require_the_simple_bias():
    model = make("Model", shared_representation_size=13, relative_positional_bias="simple")
    assert torch.isfinite(model(**tokens([9, 4])).last_hidden_state).all()


@pytest.mark.parametrize("truncation", [0, -1])
def test_no_truncation(truncation):
    """A value below 1 disables truncation, as in v4."""
    config, inputs = tiny_config(truncation=truncation), tokens([21])
    assert config.truncation is None
    expected = make("Model")(**inputs).last_hidden_state
    assert torch.equal(make("Model", truncation=truncation)(**inputs).last_hidden_state, expected)


def test_narrow_word_vectors():
    """`inputs_embeds` are the outputs of the token embedding, before the projection to the model width."""
    model, inputs = make("Model", embedding_size=16), tokens([9, 4])
    embedded = model.get_input_embeddings()(inputs.pop("input_ids"))
    assert embedded.shape[2] == 16
    expected = model(**tokens([9, 4])).last_hidden_state
    torch.testing.assert_close(model(inputs_embeds=embedded, **inputs).last_hidden_state, expected)
    with pytest.raises(ValueError, match=r"inputs_embeds \[B, T, 16\], got \[2, 9, 24\]"):
        model(inputs_embeds=torch.zeros(2, 9, 24))


@pytest.mark.parametrize("name", ["ForMaskedLM", "ForCausalLM"])
def test_narrow_word_vectors_of_a_language_model(name):
    decoder = {"is_decoder": True, "bidirectional": False} if name == "ForCausalLM" else {}
    model_class, fields = getattr(luna_mega, f"Mega{name}"), {"embedding_size": 16, **decoder}
    with pytest.raises(ValueError, match="needs embedding_size=24, .* got 16; or pass tie_word_embeddings=False"):
        model_class(tiny_config(**fields))
    model = model_class(tiny_config(tie_word_embeddings=False, **fields))
    assert torch.isfinite(model(**tokens([9, 4])).logits).all()


@pytest.mark.parametrize("legacy", [False, True])
def test_sequence_longer_than_the_bias_table(legacy):
    model = make("Model", relative_positional_bias="simple", legacy_bias_table=legacy, chunk_size=24)
    length = 24 if legacy else 48
    assert torch.isfinite(model(**tokens([length])).last_hidden_state).all()
    with pytest.raises(ValueError, match=f"supports at most {length} positions, got {length + 1}; shorten the input"):
        model(**tokens([length + 1]))
    make("Model")(**tokens([49]))
    make("Model", relative_positional_bias="simple", use_chunking=True, chunk_size=24)(**tokens([49]))


@pytest.fixture
def v4_folder(tmp_path):
    """A folder saved by transformers v4, with an unknown field."""
    make("ForMaskedLM").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"transformers_version": "4.40.0", "house_style": "gothic"}
    path.write_text(json.dumps(config))
    return tmp_path


def test_v4_folder_with_an_unknown_field(v4_folder, tmp_path):
    """An unknown field is kept and saved again, as transformers does with every configuration."""
    config = AutoConfig.from_pretrained(v4_folder)
    assert isinstance(config, MegaConfig) and config.house_style == "gothic"
    config.save_pretrained(tmp_path / "again")
    assert AutoConfig.from_pretrained(tmp_path / "again").house_style == "gothic"
    inputs = tokens([9, 4])
    torch.testing.assert_close(
        AutoModelForMaskedLM.from_pretrained(v4_folder)(**inputs).logits, make("ForMaskedLM")(**inputs).logits
    )


def test_v4_folder_with_a_wrong_field(v4_folder):
    path = v4_folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_activation": "swish"}))
    with pytest.raises(Exception, match="attention_activation must be one of softmax, laplace, relu2, got 'swish'"):
        AutoModelForMaskedLM.from_pretrained(v4_folder)


def test_v4_folder_without_a_tensor(v4_folder):
    """The loading report lists the missing weight, which is initialized as in a new model."""
    missing = "mega.layers.1.mega_layer.ema_gate.ema_expansion_matrix"
    tensors = load_file(v4_folder / "model.safetensors")
    kept = tensors.pop(missing)
    save_file(tensors, v4_folder / "model.safetensors", {"format": "pt"})
    model, report = AutoModelForMaskedLM.from_pretrained(v4_folder, output_loading_info=True)
    assert report["missing_keys"] == {missing} and not report["unexpected_keys"]
    new = model.get_parameter(missing)
    assert torch.isfinite(new).all() and not torch.equal(new, kept)
