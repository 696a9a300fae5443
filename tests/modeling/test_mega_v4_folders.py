"""Small copies of published Mega folders of transformers v4: their options, names, files and peculiarities.

`tests/parity/test_mega_v4_fixtures.py` compares folders that v4 wrote.
"""

import json
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file

import luna_mega
from tests.modeling.decoders import padded
from tests.modeling.luna import tokens
from tests.modeling.mega import make, tiny_config

# Contents of v4's config.json. The folders below have 1/32 of its widths, 1/128 of its lengths, and two layers.
V4 = {
    "activation": "silu", "add_lm_hidden_dense_layer": False, "add_token_type_embeddings": False,
    "attention_activation": "softmax", "attention_probs_dropout_prob": 0.1, "bidirectional": True, "bos_token_id": 0,
    "chunk_size": -1, "classifier_dropout": None, "dropout_prob": 0.1, "ema_beta_range": 0.02,
    "ema_delta_alpha_range": 0.2, "ema_gamma_omega_range": 1.0, "ema_projection_size": 16, "eos_token_id": 2,
    "hidden_dropout_prob": 0.1, "hidden_size": 24, "initializer_range": 0.02, "intermediate_size": 48,
    "max_positions": 16, "model_type": "mega", "nffn_activation_dropout_prob": 0.1, "nffn_hidden_size": 48,
    "norm_affine": True, "normalization_type": "scalenorm", "normalize_before_ffn": True,
    "normalize_before_mega": True, "num_attention_heads": 1, "num_hidden_layers": 2, "pad_token_id": 1,
    "relative_positional_bias": "rotary", "shared_representation_size": 8, "torch_dtype": "float32",
    "transformers_version": "4.36.2", "truncation": None, "type_vocab_size": 2, "use_cache": True,
    "use_chunking": False, "use_feature_dropout": False, "use_normalized_ffn": True, "vocab_size": 96,
}  # fmt: skip
TIED = {"mlm_head.weight", "lm_head.weight"}
INTEGERS = ("dropout_prob", "hidden_dropout_prob", "attention_probs_dropout_prob", "nffn_activation_dropout_prob")
# The tiny models of transformers' tests, with fewer layers and a smaller vocabulary.
TINY = {
    "add_lm_hidden_dense_layer": True, "add_token_type_embeddings": True, "bidirectional": False, "chunk_size": 32,
    "hidden_size": 32, "intermediate_size": 37, "max_positions": 1024, "nffn_hidden_size": 24,
    "shared_representation_size": 64,
}  # fmt: skip
# Folder -> class, options, name of the weights file.
FOLDERS = {
    "mnaylor/mega-base-wikitext": (
        "MegaForMaskedLM", {"max_positions": 80, "layer_norm_eps": 1e-12, "nffn_activation_dropout_prob": 0.0},
        "pytorch_model.bin",
    ),
    "BEE-spoke-data/mega-small-embed-synthSTS-16384-v1": (
        "MegaModel",
        {"relative_positional_bias": "simple", "intermediate_size": 72, "ema_projection_size": 32,
         "use_chunking": True, "chunk_size": 8, "max_positions": 128},
        "model.safetensors",
    ),
    "BEE-spoke-data/mega-ar-126m-4k": (
        "MegaForCausalLM",
        {"is_decoder": True, "bidirectional": False, "eos_token_id": 0, "pad_token_id": None,
         "normalization_type": "layernorm", **dict.fromkeys(INTEGERS, 0)},
        "model.safetensors",
    ),
    "hf-internal-testing/tiny-random-MegaForMultipleChoice": ("MegaForMultipleChoice", TINY, "pytorch_model.bin"),
}  # fmt: skip


def v4_weights(config, model_class):
    """Return random weights under the names of v4; `tests/parity` has folders that v4 wrote.

    The output layer is tied to the embedding, and v4 saved a buffer of every bias.
    """
    model = getattr(luna_mega, model_class)(luna_mega.MegaConfig.from_dict(config))
    generator, weights = torch.Generator().manual_seed(0), OrderedDict()
    for name, tensor in model.state_dict().items():
        weights[name] = torch.randn(tensor.shape, generator=generator) * 0.3
        if name.endswith("qk_weight"):
            weights[name.replace("qk_weight", "rel_pos_bias._float_tensor")] = torch.zeros(1)
    for name in TIED & weights.keys():
        weights[name] = weights["mega.embedding_layer.word_embeddings.weight"]
    return weights


def write_folder(folder, name):
    """Write a folder as v4 did, and return its configuration and weights."""
    model_class, options, file = FOLDERS[name]
    config = V4 | options | {"architectures": [model_class], "_name_or_path": name}
    weights = v4_weights(config, model_class)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if file.endswith(".bin"):
        torch.save(weights, folder / file)
    else:  # v4 omitted the second name of a tied weight
        kept = {name: value for name, value in weights.items() if name not in TIED}
        save_file(kept, folder / file, metadata={"format": "pt"})
    if model_class == "MegaForCausalLM":
        tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
        generation = tokens | {"_from_model_config": True, "transformers_version": "4.36.2"}
        (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return config, weights


@pytest.mark.parametrize("name", FOLDERS)
@torch.no_grad()
def test_folder(tmp_path, name):
    """All weights are loaded, and the model is saved as safetensors."""
    config, weights = write_folder(tmp_path / "v4", name)
    model_class = getattr(luna_mega, config["architectures"][0])
    model, report = model_class.from_pretrained(tmp_path / "v4", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = model.state_dict()
    arrived = {key: value for key, value in weights.items() if "_float_tensor" not in key}
    assert state.keys() == arrived.keys()
    assert all(torch.equal(state[key], value) for key, value in arrived.items())
    ids, mask = padded([17, 5, 8], 17, "left" if "Causal" in model_class.__name__ else "right")
    inputs = {"input_ids": ids, "attention_mask": mask}
    if "MultipleChoice" in model_class.__name__:
        inputs = {key: value[None] for key, value in inputs.items()}
    output = model(**inputs)[0]
    assert output.isfinite().all()
    if model.can_generate():  # with v4's generation_config.json
        tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        assert torch.equal(tokens, model.generate(**inputs, max_new_tokens=6, do_sample=False, use_cache=False))
    model.save_pretrained(tmp_path / "new")
    assert (tmp_path / "new" / "model.safetensors").is_file()
    torch.testing.assert_close(model_class.from_pretrained(tmp_path / "new")(**inputs)[0], output)


@pytest.mark.parametrize("truncation", [0, -1])
def test_truncation_below_one_is_none(truncation):
    config, inputs = tiny_config(truncation=truncation), tokens([21])
    assert config.truncation is None
    expected = make("Model")(**inputs).last_hidden_state
    torch.testing.assert_close(make("Model", truncation=truncation)(**inputs).last_hidden_state, expected)
