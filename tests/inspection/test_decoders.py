"""`luna-mega info` and `luna-mega verify` for decoders and encoder-decoders of all families."""

import json

import pytest
import torch
from safetensors.torch import save_file

import luna_mega
from luna_mega.convert import ConversionError
from luna_mega.hub.folder import stacks
from luna_mega.inspection.info import describe
from luna_mega.inspection.verify import compare
from luna_mega_cli import main
from tests.errors import command_error
from tests.inspection.test_verify import change
from tests.marks import diagonal

LUNA = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "projection_length": 6,
    "max_position_embeddings": 400,
    "attention_dropout": 0.0,
}
MEGA = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 56,
    "shared_representation_size": 16,
    "ema_projection_size": 4,
    "nffn_hidden_size": 40,
    "max_positions": 400,
    "normalization_type": "layernorm",
}
MEGALODON = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "shared_representation_size": 16,
    "value_size": 56,
    "intermediate_size": 40,
    "ema_projection_size": 4,
    "norm_num_groups": 4,
    "chunk_size": 32,
}
DECODER_ONLY = {"is_decoder": True}
MEGA_DECODER_ONLY = DECODER_ONLY | {"bidirectional": False, "add_lm_hidden_dense_layer": False}
BOTH = {"is_encoder_decoder": True}
CROSS = {"add_cross_attention": True}
CLASSES = {
    "luna decoder": ("LunaModel", DECODER_ONLY),
    "luna lm": ("LunaForCausalLM", DECODER_ONLY),
    "luna lm untied": ("LunaForCausalLM", DECODER_ONLY | {"tie_key_value": False, "pre_norm": True}),
    "luna cross": ("LunaModel", DECODER_ONLY | CROSS),
    "luna body": ("LunaSeq2SeqModel", BOTH),
    "luna seq2seq": ("LunaForConditionalGeneration", BOTH),
    "luna untied": ("LunaForConditionalGeneration", BOTH | {"tie_key_value": False, "pre_norm": True}),
    "luna other decoder": (
        "LunaForConditionalGeneration",
        BOTH | {"decoder_vocab_size": 35, "num_decoder_layers": 1, "decoder_intermediate_size": 70},
    ),
    "luna many rows": ("LunaForConditionalGeneration", BOTH | {"projection_length": 300}),
    "mega decoder": ("MegaModel", MEGA_DECODER_ONLY),
    "mega cross": ("MegaForCausalLM", MEGA_DECODER_ONLY | CROSS),
    "mega body": ("MegaSeq2SeqModel", BOTH),
    "mega seq2seq": ("MegaForConditionalGeneration", BOTH),
    "mega other decoder": (
        "MegaForConditionalGeneration",
        BOTH | {"decoder_vocab_size": 35, "num_decoder_layers": 1, "decoder_intermediate_size": 70},
    ),
    "mega chunks": ("MegaForConditionalGeneration", BOTH | {"use_chunking": True, "chunk_size": 8}),
    "mega truncated": ("MegaForCausalLM", MEGA_DECODER_ONLY | {"truncation": 40}),
    "mega truncated chunks": (
        "MegaForCausalLM",
        MEGA_DECODER_ONLY | {"truncation": 400, "use_chunking": True, "chunk_size": 8},
    ),
    "megalodon": ("MegalodonForCausalLM", {}),
    "megalodon tied": (
        "MegalodonForCausalLM",
        {"swiglu": True, "rescale_nffn": True, "scale_embedding": True, "tie_word_embeddings": True},
    ),
}
SIZES = {"Luna": LUNA, "Mega": MEGA, "Megalodon": MEGALODON}
# Caches that grow: P has one row per token up to its length, and Mega's cross-attention caches all keys.
GROWING = {"luna many rows"} | {name for name in CLASSES if name.startswith("mega ")} - {"mega truncated chunks"}


def make(name, **fields):
    class_name, own = CLASSES[name]
    model_class = getattr(luna_mega, class_name)
    return model_class(model_class.config_class(**SIZES[name.partition(" ")[0].capitalize()] | own | fields))


def inputs_of(model, length):
    """Return inputs of one sequence, or of a source and a target."""
    inputs = {"input_ids": torch.randint(4, 30, (1, length))}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    if model.config.add_cross_attention:
        inputs["encoder_hidden_states"] = torch.randn(1, length, 32, dtype=model.dtype)
        if model.config.model_type == "luna":
            inputs["packed_states"] = torch.randn(1, 6, 32, dtype=model.dtype)
    return inputs


@torch.no_grad()
def cached_bytes(model, length):
    """Return the bytes of a model's cache after a forward pass."""
    cache = model(**inputs_of(model, length), use_cache=True).cache
    caches = [cache.self_attention_cache, cache.cross_attention_cache] if "Seq2Seq" in type(cache).__name__ else [cache]
    layers = [vars(layer) | getattr(layer, "tensors", {}) for cache in caches for layer in cache.layers]
    tensors = [value for layer in layers for value in layer.values() if isinstance(value, torch.Tensor)]
    return sum({tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.mark.parametrize(("name", "dtype"), diagonal(CLASSES, [torch.float32, torch.bfloat16]))
def test_info_of_a_folder(name, dtype, tmp_path, capsys):
    """Counts of parameters, weights and cache equal those of the loaded model and its cache."""
    make(name).to(dtype).save_pretrained(tmp_path)
    model = getattr(luna_mega, CLASSES[name][0]).from_pretrained(tmp_path).eval()
    capsys.readouterr()
    assert main(["info", str(tmp_path), "--length", "53", "--json"]) == 0
    found, sizes = json.loads(capsys.readouterr().out), [cached_bytes(model, length) for length in (52, 53)]
    assert found["cache_bytes"] == {"sequence": sizes[1], "token": sizes[1] - sizes[0]}
    assert (found["cache_bytes"]["token"] > 0) == (name in GROWING)
    assert found["weights"]["bytes"] == sum(weight.nbytes for weight in model.parameters())
    parameters = found["parameters"]
    assert parameters["total"] == model.num_parameters()
    assert parameters.keys() == {"embeddings", "head", "total", *stacks(model.config)}
    body = model.base_model
    sides = {"encoder": body.encoder, "decoder": body.decoder} if model.config.is_encoder_decoder else {"decoder": body}
    names = ("embeddings.", "embedding_layer.", "embedding_norm.", "embed_tokens.")
    for stack, module in sides.items():
        own = {key: parameter.numel() for key, parameter in module.named_parameters() if not key.startswith(names)}
        assert parameters[stack] == sum(size for key, size in own.items() if not key.startswith("pooler."))
    kind = type(model).__name__.partition("For")[2]
    heads = {"CausalLM": ["causal LM"], "ConditionalGeneration": ["sequence-to-sequence LM"], "": []}
    assert found["heads"] == heads[kind]
    assert found["config"].get("decoder_num_hidden_layers") == (1 if "other" in name else None)


CLASSIFIERS = {
    "LunaForTokenClassification": LUNA | DECODER_ONLY,
    "LunaForSequenceClassification": LUNA | DECODER_ONLY | {"pooling": "last"},
    "MegaForMultipleChoice": MEGA | MEGA_DECODER_ONLY | {"pooling": "mean"},
    "MegaForSequenceClassification": MEGA | MEGA_DECODER_ONLY | {"pooling": "last"},
    "MegalodonForSequenceClassification": MEGALODON,
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_info_of_a_classifier_with_a_causal_body(name, tmp_path):
    """A classifier does not return the cache of its body, whose size is printed."""
    model_class = getattr(luna_mega, name)
    model = model_class(model_class.config_class(**CLASSIFIERS[name])).eval()
    model.save_pretrained(tmp_path)
    assert describe(tmp_path, 20).cache_bytes["sequence"] == cached_bytes(model.base_model, 20) > 0


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("luna lm", "sequence of length 400, 0 B"),
        ("mega seq2seq", "source and one target of length 400, 962 B"),
        ("megalodon", "sequence of length 32, 0 B"),
    ],
)
def test_cache_on_the_screen(name, printed, tmp_path):
    make(name).save_pretrained(tmp_path)
    assert f" for one {printed} for one more token" in str(describe(tmp_path))


def test_length_beyond_a_position_table(tmp_path):
    make("luna seq2seq", max_target_positions=30).save_pretrained(tmp_path / "luna")
    assert describe(tmp_path / "luna").length == 30
    make("mega seq2seq", relative_positional_bias="simple", decoder_max_positions=60).save_pretrained(tmp_path / "mega")
    assert describe(tmp_path / "mega", 60).length == 60
    for name, length in (("luna", 31), ("mega", 61)):
        with pytest.raises(ConversionError, match=f"--length {length}: the model has {length - 1} learned positions"):
            describe(tmp_path / name, length)


@pytest.mark.parametrize(
    "name", ["luna lm", "luna cross", "luna seq2seq", "mega body", "mega cross", "mega chunks", "megalodon tied"]
)
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
        other = change(folder, tmp_path / stack, name, lambda bias: bias.add_(torch.linspace(-0.1, 0.1, 32)))
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
    save_file({"input_ids": ids + 33, "decoder_input_ids": ids + 33}, file)
    for option, value, named in (("--inputs", file, "decoder_input_ids has ids"), ("--text", "x", "use --inputs")):
        assert named in command_error(capsys, "verify", folder, folder, option, value)


def test_decoders_of_different_sizes(tmp_path):
    make("luna seq2seq").save_pretrained(tmp_path / "a")
    make("luna other decoder").save_pretrained(tmp_path / "b")
    with pytest.raises(ConversionError, match="decoder vocab_size: 40 and 35; decoder num_hidden_layers: 2 and 1"):
        compare(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("name", ["luna/s2s_untied_prenorm", "mega/10_mt_relu2_rotary_prenorm_chunk_unshared"])
def test_checkpoints_of_the_original(parity_folder, tmp_path, name):
    file = parity_folder(*name.split("/")) / "checkpoint.pt"
    assert main(["convert", str(file), "--output", str(tmp_path / "model")]) == 0
    assert compare(tmp_path / "model", file, tolerance=0.0, length=11).within
    of_file, of_folder = describe(file, 11), describe(tmp_path / "model", 11)
    assert of_file.heads == of_folder.heads == ["sequence-to-sequence LM"]
    assert of_file.parameters == of_folder.parameters
    assert "seq2seq checkpoint" in of_file.written_by
