"""Local initialization: before training, every head attends to a neighbor; other weights have their usual values."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from luna_mega import (
    LunaConfig,
    LunaForConditionalGeneration,
    LunaForMaskedLM,
    LunaForSequenceClassification,
    LunaModel,
    LunaSeq2SeqConfig,
    LunaSeq2SeqModel,
)
from luna_mega.kernels.luna_causal_attention.reference import pack_weights
from luna_mega.modeling_luna.initialization_luna import LocalStart

LENGTH = 32
FIELDS = {
    "vocab_size": 60,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "projection_length": LENGTH,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.05,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "initialization": "local",
}
ENCODERS = {
    "tied": {},
    "untied": {"tie_key_value": False},
    "other pack heads": {"num_pack_attention_heads": 2},
    "untied, other pack heads": {"tie_key_value": False, "num_attention_heads": 2, "num_pack_attention_heads": 8},
    "sinusoidal": {"position_embedding_type": "sinusoidal"},
    "sinusoidal, untied, no embedding norm": {
        "position_embedding_type": "sinusoidal",
        "tie_key_value": False,
        "embedding_norm": False,
    },
    "learned, scaled": {"scale_embedding": True},
    "pre-norm": {"pre_norm": True, "embedding_norm": False},
    "shared layers": {"share_layers": True},
    "P not contextual": {"contextual_projection": False},
    "real values": {"input_type": "values"},
    "width not a power of two": {"hidden_size": 120, "num_attention_heads": 3, "num_pack_attention_heads": 5},
    "offsets": {"initialization_options": {"offsets": [-4, 0, 5]}},
    "mask token": {"initialization_options": {"mask_token_id": 59}},
}


def config(**fields):
    return LunaConfig(**FIELDS | fields)


def alike(fields, batch=1, length=LENGTH):
    """Return sequences of one repeated token or value, so that attention depends only on positions."""
    if fields.input_type == "values":
        return {"input_values": torch.full((batch, length), 0.3)}
    return {"input_ids": torch.full((batch, length), 7)}


def nearest(weights):
    """Return the offset to which each head attends most, averaged over tokens and sequences.

    `weights` is `[B, H, T, M]`.
    """
    reach = range(-8, 9)
    means = torch.stack([weights.diagonal(offset, 2, 3).mean((0, 2)) for offset in reach])
    return [reach[index] for index in means.argmax(0)]


def cycle(offsets, heads):
    return [offsets[head % len(offsets)] for head in range(heads)]


@torch.no_grad()
@pytest.mark.parametrize("variant", ENCODERS.values(), ids=ENCODERS)
def test_encoder_heads_attend_to_neighbors(variant):
    model = LunaModel(config(**variant)).eval()
    output = model(**alike(model.config), output_attentions=True, output_packed_attentions=True)
    offsets = cycle(LocalStart.of(model.config).offsets, model.config.num_attention_heads)
    unpack, pack = output.attentions[0], output.packed_attentions[0]
    found = nearest(unpack @ (pack if unpack.shape[1] == pack.shape[1] else pack.mean(1, keepdim=True)))
    if model.config.position_embedding_type == "sinusoidal":  # few of its frequencies can distinguish neighbors
        assert [math.copysign(1, offset) for offset in found] == [math.copysign(1, offset) for offset in offsets]
    else:
        assert found == offsets


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_heads_attend_to_neighbors_among_different_tokens(tied):
    model = LunaModel(config(tie_key_value=tied)).eval()
    ids = torch.randint(4, 60, (16, LENGTH))
    output = model(ids, output_attentions=True, output_packed_attentions=True)
    for unpack, pack in zip(output.attentions, output.packed_attentions, strict=True):
        weights = unpack @ pack
        for head, offset in enumerate((-1, 1, -2, 2)):
            near, mirrored = (weights[:, head].diagonal(at, 1, 2).mean().item() for at in (offset, -offset))
            assert near > 3 / LENGTH and near > 1.2 * mirrored


@torch.no_grad()
def test_only_queries_ignore_the_token():
    def start(token):
        torch.manual_seed(3)
        model = LunaSeq2SeqModel(LunaSeq2SeqConfig(**FIELDS, initialization_options={"mask_token_id": token}))
        assert "mask_token_id" not in model.decoder.config.initialization_options
        return model

    plain, blind = start(None), start(59)
    mask = plain.encoder.embeddings.word_embeddings.weight[59]
    for (name, before), after in zip(plain.named_parameters(), blind.parameters(), strict=True):
        if name.startswith("encoder") and name.endswith("attention.query.weight"):
            across = before - torch.outer(before @ mask, mask) / mask.square().sum()
            torch.testing.assert_close(after, across)
        else:
            assert torch.equal(before, after), name


def causal_weights(model, ids):
    """Yield for each layer the weights `[B, H, T, T]` that tokens have in the causal attention of other tokens."""
    calls = []
    for layer in model.decoder.layers:
        layer.attention.register_forward_hook(lambda module, args, _: calls.append((module, *args[:2])))
    unpack = model(ids, output_attentions=True).attentions
    for (attention, states, packed), weights in zip(calls, unpack, strict=True):
        query, key = (
            linear(rows).unflatten(-1, (-1, attention.head_size))
            for linear, rows in ((attention.pack_query, packed), (attention.pack_key, states))
        )
        pack = pack_weights(key, query, None, None, attention.activation)
        yield (weights @ pack.transpose(2, 3)).tril()


@torch.no_grad()
@pytest.mark.parametrize("tied, activation", [(True, "softplus"), (False, "elu")])
def test_decoder_heads_attend_to_earlier_tokens(tied, activation):
    """With random tokens, the most attended position is, in the median, within 1 of the head's offset."""
    fields = {"is_decoder": True, "hidden_size": 256, "tie_key_value": tied, "causal_activation": activation}
    model = LunaModel(config(**fields)).eval()
    weights = next(causal_weights(model, torch.randint(4, 60, (16, LENGTH))))
    found = (weights.argmax(-1) - torch.arange(LENGTH))[..., 8:]
    medians = torch.stack([of_head.flatten().median() for of_head in found.unbind(1)])
    assert (medians - torch.tensor([-1, -2, -3, 0])).abs().max() <= 1


@torch.no_grad()
@pytest.mark.parametrize("positions, ratio", [("learned", 2.0), ("sinusoidal", 1.0)])
def test_cross_attention_is_local_around_the_target_position(positions, ratio):
    fields = FIELDS | {"position_embedding_type": positions, "max_target_positions": LENGTH + 8}
    model = LunaForConditionalGeneration(LunaSeq2SeqConfig(**fields, num_decoder_attention_heads=2)).eval()
    source, target = torch.randint(4, 60, (2, 8, LENGTH))
    output = model(input_ids=source, decoder_input_ids=target, output_attentions=True, output_packed_attentions=True)
    distance = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    layers = zip(output.cross_attentions, output.cross_packed_attentions, strict=True)
    weights = torch.stack([(unpack @ pack).mean((0, 1)) for unpack, pack in layers])
    near, far = (weights[:, selected].mean(dim=1) for selected in (distance <= 3, distance >= 8))
    assert (near > far).all() and near.mean() > ratio * far.mean()


@pytest.mark.parametrize("fields", [{}, {"is_decoder": True}, {"tie_key_value": False}], ids=str)
def test_other_weights_have_the_default_initialization(fields):
    """Local initialization adds known terms, draws no random numbers, and leaves other weights bitwise equal."""

    def state(initialization):
        torch.manual_seed(3)
        return LunaModel(config(**fields, initialization=initialization)).state_dict()

    original, local = state("original"), state("local")
    changed = {name for name in original if not torch.equal(original[name], local[name])}
    projections = {"query", "pack_query", "key", "value", "pack_key", "pack_value", "key_value", "pack_key_value"}
    expected = {name for name in original if name.split(".")[-2] in projections and name.endswith("weight")}
    assert changed == expected | {"embeddings.position_embeddings.weight", "embeddings.packed_embeddings"}
    assert torch.equal(
        local["embeddings.position_embeddings.weight"][:2], original["embeddings.position_embeddings.weight"][:2]
    )
    stack = "decoder" if "is_decoder" in fields else "encoder"
    name = f"{stack}.layers.0.attention.pack_query.weight"
    added = local[name] - original[name]
    torch.testing.assert_close(added, 2 * 6 / 32**0.5 * torch.eye(128))


def test_folders(tmp_path):
    """Loading keeps saved weights, initializes missing ones locally, and restores the options."""
    options = {"length": 20, "base": 50, "strength": 4, "offsets": [1, -1], "mask_token_id": 59}
    model = LunaForMaskedLM(config(initialization_options=options))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["initialization_options"] == options
    state = load_file(tmp_path / "model.safetensors")
    loaded = LunaForMaskedLM.from_pretrained(tmp_path)
    assert loaded.config.initialization_options == options
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in state.items())

    gone = [name for name in state if name.endswith(("layers.1.attention.query.weight", "packed_embeddings"))]
    kept = {name: value for name, value in state.items() if name not in gone}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    part, report = LunaForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert set(gone) < set(report["missing_keys"])
    found = part.state_dict()
    assert all(torch.equal(found[name], value) for name, value in kept.items() if name in found)
    torch.testing.assert_close(found[gone[0]], state[gone[0]])  # P is initialized without random numbers
    difference = found[gone[1]] - state[gone[1]]
    assert 0 < difference.abs().max() < 0.5  # the random numbers differ, the rotation is the same


def test_devices_and_types():
    with torch.device("meta"):
        assert LunaModel(config()).device.type == "meta"
    model = LunaModel._from_config(config(), dtype=torch.bfloat16)
    torch.manual_seed(0)
    exact = LunaModel(config()).embeddings
    assert model.dtype == torch.bfloat16
    for name in ("packed_embeddings", "position_embeddings.weight"):
        value = exact.get_parameter(name)[2:].to(torch.bfloat16)
        torch.testing.assert_close(model.embeddings.get_parameter(name)[2:], value)
