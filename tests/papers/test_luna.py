"""Models of this package compute the equations of the paper of Luna."""

from collections.abc import Iterable
from functools import partial

import numpy as np
import pytest
import torch

from luna_mega import LunaConfig, LunaModel, LunaSeq2SeqConfig, LunaSeq2SeqModel
from tests.papers import luna
from tests.papers.mutations import mutate, random_model

SIZES = {
    "hidden_size": 8, "intermediate_size": 10, "num_attention_heads": 2, "num_pack_attention_heads": 4,
    "num_hidden_layers": 2, "projection_length": 5, "hidden_act": "relu", "position_embedding_type": "none",
    "embedding_norm": False,
}  # fmt: skip
LENGTHS = 9, 3  # the second is shorter than P
ACTIVATIONS, TIED = ("softplus", "elu"), (True, False)


def numpy_weights(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy() for name, tensor in module.state_dict().items()}


def layer_norm(X: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    return (X - X.mean(1, keepdims=True)) / np.sqrt(X.var(1, keepdims=True) + 1e-5) * weight + bias


def linears(w: dict[str, np.ndarray], **names: str) -> dict[str, np.ndarray]:
    """Return `W_name` and `b_name` of linear layers; keys and values may be one layer."""
    found = {}
    for name, path in names.items():
        if f"{path}.weight" not in w:
            path = path.replace("value", "key_value") if "value" in path else path.replace("key", "key_value")
        found |= {f"W_{name}": w[f"{path}.weight"].T, f"b_{name}": w[f"{path}.bias"]}
    return found


def luna_attention(attention: torch.nn.Module) -> dict:
    """Return the weights of pack and unpack attention."""
    w = numpy_weights(attention)
    pack = linears(w, Q="pack_query", K="pack_key", V="pack_value")
    return {"pack": pack, "unpack": linears(w, Q="query", K="key", V="value"), **linears(w, O="output")}


def weights(layer: torch.nn.Module) -> dict:
    """Return the weights of an encoder or decoder layer with the names of the paper."""
    w = numpy_weights(layer)
    named = {"W_1": w["fc1.weight"].T, "b_1": w["fc1.bias"], "W_2": w["fc2.weight"].T, "b_2": w["fc2.bias"]}
    norms = {"": "attention", "_P": "packed", "_ffn": "final", "_cross": "cross_attention"}
    for suffix, norm in norms.items():
        if f"{norm}_layer_norm.weight" in w:
            parameters = {name: w[f"{norm}_layer_norm.{name}"] for name in ("weight", "bias")}
            named[f"LayerNorm{suffix}"] = partial(layer_norm, **parameters)
    if type(layer).__name__ == "LunaLayer":
        return named | luna_attention(layer.attention)
    names = {"P": "pack_query", "pack": "pack_key", "Q": "query", "K": "key", "V": "value", "O": "output"}
    named["causal"] = linears(numpy_weights(layer.attention), **names)
    return named | ({} if layer.cross_attention is None else luna_attention(layer.cross_attention))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs of two sequences and their mask; the second sequence has padding on the left."""
    mask = torch.ones(2, LENGTHS[0], dtype=torch.long)
    mask[1, : -LENGTHS[1]] = 0
    return torch.randn(2, LENGTHS[0], 8, dtype=torch.float64), mask


def largest(found: Iterable[torch.Tensor], expected: list[np.ndarray]) -> float:
    """Return the largest difference at the last positions of every row."""
    pairs = zip(found, expected, strict=True)
    return max(np.abs(row[-len(states) :].detach().numpy() - states).max() for row, states in pairs)


def encode(X: torch.Tensor, P: np.ndarray, layers, equations) -> tuple[list, list]:
    tokens, packed = [], []
    for row, length in zip(X, LENGTHS, strict=True):
        states, rows = row[-length:].numpy(), P
        for layer in layers:
            states, rows = equations.eq_6(states, rows, weights(layer), count=2, pack_count=4)
        tokens.append(states)
        packed.append(rows)
    return tokens, packed


def encoder_difference(fields: dict, equations=luna) -> float:
    """Return the largest difference of tokens and P of an encoder from the equations."""
    model, (X, mask) = random_model(LunaModel, LunaConfig(**SIZES | fields)), batch()
    output = model(inputs_embeds=X, attention_mask=mask)
    P = model.embeddings.packed_embeddings.detach().numpy()
    tokens, packed = encode(X, P, model.encoder.layers, equations)
    found = [row[: len(P)] for row, P in zip(output.packed_last_hidden_state, packed, strict=True)]
    return max(largest(output.last_hidden_state, tokens), largest(found, packed))


def decoder_difference(fields: dict, equations=luna) -> float:
    """Return the largest difference of a decoder, whose layers have separate P, from the equations."""
    model, (X, mask) = random_model(LunaModel, LunaConfig(**SIZES | {"is_decoder": True} | fields)), batch()
    omega = {"softplus": equations.softplus, "elu": equations.elu_plus_1}[model.config.causal_activation]
    expected = []
    for row, length in zip(X, LENGTHS, strict=True):
        states = row[-length:].numpy()
        for layer, P in zip(model.decoder.layers, model.embeddings.packed_embeddings.detach().numpy(), strict=True):
            states, _ = equations.decoder_layer(states, P, None, weights(layer), 2, 4, omega)
        expected.append(states)
    return largest(model(inputs_embeds=X, attention_mask=mask).last_hidden_state, expected)


def translation_difference(fields: dict, equations=luna) -> float:
    """Return the largest difference of an encoder-decoder, whose decoder continues from P, from the equations."""
    model, (X, mask) = random_model(LunaSeq2SeqModel, LunaSeq2SeqConfig(**SIZES | fields)), batch()
    omega = {"softplus": equations.softplus, "elu": equations.elu_plus_1}[model.config.causal_activation]
    encoder, targets = model.encoder, torch.randn(2, 6, 8, dtype=torch.float64)
    initial = encoder.embeddings.packed_embeddings.detach().numpy()
    encoded = encode(X, initial, encoder.encoder.layers, equations)
    expected = []
    for states, C, P in zip(targets.numpy(), *encoded, strict=True):
        for layer in model.decoder.decoder.layers:
            states, P = equations.decoder_layer(states, P, C, weights(layer), 2, 4, omega)
        expected.append(states)
    output = model(inputs_embeds=X, attention_mask=mask, decoder_inputs_embeds=targets)
    return largest(output.last_hidden_state, expected)


@pytest.mark.parametrize("tied", TIED)
def test_encoder(tied):
    assert encoder_difference({"tie_key_value": tied}) < 1e-12


@pytest.mark.parametrize("difference", [decoder_difference, translation_difference])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tied", TIED)
def test_decoder(tied, activation, difference):
    assert difference({"tie_key_value": tied, "causal_activation": activation}) < 1e-12


MUTATIONS = {
    "/ np.sqrt(q.shape[1])) @ v": ") @ v",
    "eq_1(P, C,": "eq_1(P, P,",
    ' @ w["W_O"] + w["b_O"]\n\n\ndef eq_5': "\n\n\ndef eq_5",
    "return eq_4(X, Y_P, w, count), Y_P": "return eq_4(X, P, w, count), Y_P",
    "P[: len(X)]": "P",
    '"LayerNorm_P"](Y_P + P)\n    return w["LayerNorm_ffn"](ffn(X_A, w) + X_A), P_A': (
        '"LayerNorm_P"](Y_P - P)\n    return w["LayerNorm_ffn"](ffn(X_A, w) + X_A), P_A'
    ),
    " / (t + 1)": "",
    "x + 1, np.exp": "x, np.exp",
    "np.log2(1 + 2**x)": "np.log(1 + np.exp(x))",
    "p @ k_pack.T / np.sqrt(p.shape[1])": "p @ k_pack.T",
    "A_pack.T) / np.sqrt(q.shape[1]))": "A_pack.T))",
    "eq_7(q, k, A_pack.T)": "eq_7(k, q, A_pack.T)",
    "eq_7(A_unpack, A_pack.T, v)": "A_unpack @ A_pack @ v",
    'X, P = w["LayerNorm_cross"](Y_X + X), w["LayerNorm_P"](Y_P + P)': 'X = w["LayerNorm_cross"](Y_X + X)',
}


@pytest.mark.slow
@pytest.mark.parametrize("correct", MUTATIONS)
def test_an_error_in_an_equation_is_found(correct):
    wrong = mutate(luna, (correct, MUTATIONS[correct]))
    cases = [{"causal_activation": activation} for activation in ACTIVATIONS]
    comparisons = (encoder_difference, decoder_difference, translation_difference)
    assert any(compare(case, wrong) > 1e-2 for case in cases for compare in comparisons)


def test_sinusoidal_positions():
    """The positions of a float64 model are computed in float64."""
    config = LunaConfig(vocab_size=10, **SIZES | {"position_embedding_type": "sinusoidal"})
    model = LunaModel(config).double()
    positions = torch.arange(0, 5000, 7)
    found = model.embeddings.positions(positions, torch.float64)
    assert np.abs(found.numpy() - luna.sinusoids(positions.numpy() + model.embeddings.offset, 8)).max() < 1e-12
