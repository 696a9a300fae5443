"""Models of this package compute the equations of the paper of Mega."""

from functools import partial

import numpy as np
import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from luna_mega import MegaConfig, MegaModel
from luna_mega.modeling_mega.modeling_mega import MegaT5RelativeBias
from tests.marks import slow_but
from tests.papers import mega
from tests.papers.mutations import mutate, random_model

SIZES = {
    "hidden_size": 6, "intermediate_size": 8, "nffn_hidden_size": 10, "shared_representation_size": 4,
    "ema_projection_size": 3, "num_hidden_layers": 2, "max_positions": 12,
}  # fmt: skip
PRE, POST = ({"normalize_before_mega": before, "normalize_before_ffn": before} for before in (True, False))
CAUSAL = {"is_decoder": True, "bidirectional": False}
FUNCTIONS, BIASES = ("softmax", "laplace", "relu2"), ("simple", "rotary")
NORMS = ("layernorm", "scalenorm", "rmsnorm", "batchnorm")
CASES = [
    {"attention_activation": function, "relative_positional_bias": bias, "normalization_type": NORMS[index % 4]}
    | (PRE if index % 3 else POST) | direction | chunks
    for index, (function, bias, direction, chunks) in enumerate(
        (function, bias, direction, chunks)
        for function in FUNCTIONS
        for bias in BIASES
        for direction in ({}, {"bidirectional": False}, CAUSAL)
        for chunks in ({}, {"use_chunking": True, "chunk_size": 4})
    )
]  # fmt: skip
CASES += [
    {"ema_projection_size": 0} | CAUSAL,
    {"relative_positional_bias": "none"},
    {"ema_projection_size": 0, "relative_positional_bias": "none", "use_chunking": True, "chunk_size": 4},
]


def norm(kind: str, w: dict[str, np.ndarray], prefix: str):
    """Return a norm of `[n, d]` as a function."""
    weight, bias = w.get(f"{prefix}weight", w.get(f"{prefix}scalar")), w.get(f"{prefix}bias", 0.0)
    if kind == "batchnorm":
        mean, variance = w[f"{prefix}running_mean"], w[f"{prefix}running_var"]
        return lambda X: (X - mean) / np.sqrt(variance + 1e-5) * weight + bias
    if kind == "layernorm":
        return lambda X: (X - X.mean(1, keepdims=True)) / np.sqrt(X.var(1, keepdims=True) + 1e-5) * weight + bias
    return lambda X: X / np.sqrt((X**2).mean(1, keepdims=True) + 1e-5) * weight


def average(config: MegaConfig, w: dict[str, np.ndarray]) -> dict:
    """Return the weights of the averages and of the skip connection."""
    # The names of transformers v4: the logits of alpha are `damping_factor`, those of delta `decay_factor`.
    names = ("damping_factor", "decay_factor", "ema_expansion_matrix", "kernel_projection_matrix")
    logits = (w[f"mega_layer.ema_gate.{name}"].reshape(-1, config.ema_projection_size) for name in names)
    alpha, delta, beta, eta = logits
    rows, width = (mega.sigmoid(alpha), mega.sigmoid(delta), beta, eta), config.hidden_size
    backward = {"backward": [row[width:] for row in rows]} if config.bidirectional else {}
    skip = w["mega_layer.ema_gate.residual_weight"]
    return {"forward": [row[:width] for row in rows], "omega": skip, **backward}


def weights(config: MegaConfig, layer: torch.nn.Module, equations) -> dict:
    """Return the weights of a block with the names of the paper."""
    w = {name: tensor.numpy() for name, tensor in layer.state_dict().items()}
    named = average(config, w) if config.ema_projection_size else {"forward": None}
    sizes = (config.hidden_size, config.shared_representation_size, config.intermediate_size, config.hidden_size)
    for key, letter in (("weight", "W"), ("bias", "b")):
        parts = np.split(w[f"mega_layer.mx_proj.{key}"], np.cumsum(sizes)[:3])
        named |= {f"{letter}_{name}": part.T for name, part in zip(("phi", "z", "gamma", "h"), parts, strict=True)}
        named |= {f"{letter}_v": w[f"mega_layer.v_proj.{key}"].T}
        named |= {f"{letter}_{index}": w[f"nffn.fc{index}.{key}"].T for index in (1, 2)}
    named["U_h"], named["b_h"] = w["mega_layer.h_proj.weight"].T, named["b_h"] + w["mega_layer.h_proj.bias"]
    for row, name in enumerate("qk"):
        named[f"kappa_{name}"], named[f"mu_{name}"] = w["mega_layer.qk_weight"][row], w["mega_layer.qk_bias"][row]
    prefix = "mega_layer.rel_pos_bias."
    named["rotates"] = config.relative_positional_bias == "rope"
    if config.relative_positional_bias in ("none", "rope"):
        named["b_rel"] = lambda n: 0.0
    elif config.relative_positional_bias == "t5":
        named["b_rel"] = partial(equations.t5_bias, table=w[f"{prefix}rel_pos_bias"], causal=config.is_decoder)
    elif config.relative_positional_bias == "alibi":
        named["b_rel"] = partial(equations.alibi_bias, slope=w[f"{prefix}slope"])
    elif config.relative_positional_bias == "simple":
        named["b_rel"] = partial(equations.simple_bias, table=w[f"{prefix}rel_pos_bias"])
    else:
        named["b_rel"] = partial(equations.rotary_bias, a=w[f"{prefix}alpha"][0], b=w[f"{prefix}b_param"][0])
    named["Norm"] = norm(config.normalization_type, w, "mega_layer.norm.norm.")
    named["Norm_ffn"] = norm(config.normalization_type, w, "nffn.norm.norm.")
    return named


def difference(fields: dict, equations=mega, count: int = 9) -> float:
    """Return the largest difference of two sequences, one of them padded, from the equations of each sequence."""
    config = MegaConfig(**SIZES | fields)
    model, X = random_model(MegaModel, config, add_pooling_layer=False), torch.randn(2, count, 6, dtype=torch.float64)
    mask = torch.ones(2, count, dtype=torch.long)
    mask[1, count - 2 :] = 0
    found = model(inputs_embeds=X, attention_mask=mask).last_hidden_state.detach().numpy()
    function = {"softmax": equations.softmax, "relu2": equations.relu2, "laplace": equations.eq_16}
    options = {"f": function[config.attention_activation], "causal": config.is_decoder}
    options |= {"chunk": config.attention_chunk or count, "pre_norm": config.normalize_before_mega}
    differences = []
    for row, length in enumerate((count, count - 2)):
        states = X[row, :length].numpy()
        for layer in model.layers:
            states = equations.eq_21(states, weights(config, layer, equations), **options)
        differences.append(np.abs(found[row, :length] - states).max())
    return max(differences)


# Every fifth case, which covers all values, and the models without a part are fast.
@pytest.mark.parametrize("number", slow_but([*range(0, 36, 5), 36, 37, 38], range(len(CASES))))
def test_model(number):
    assert difference(CASES[number]) < 1e-12


@pytest.mark.parametrize("direction", [{}, CAUSAL, {"use_chunking": True, "chunk_size": 100}])
@pytest.mark.parametrize("bias", ["t5", "alibi", "rope"])
def test_biases_of_any_length(bias, direction):
    fields = {"relative_positional_bias": bias, "normalization_type": "layernorm"} | direction
    assert difference(fields, count=300) < 1e-12


@pytest.mark.parametrize("bidirectional", [True, False])
def test_ranges_of_distances_are_those_of_t5(bidirectional):
    """The numbers of distances in transformers' T5, whose logarithm is in float32."""
    bias = MegaT5RelativeBias(causal=not bidirectional)
    bias.rel_pos_bias.data = torch.arange(32.0)
    distance = torch.arange(-399, 400)
    expected = T5Attention._relative_position_bucket(distance, bidirectional)
    assert bias(400).equal(expected.float())


MUTATIONS = {
    "alpha * u": "u",
    "(1 - alpha * delta)": "(1 + alpha * delta)",
    " / np.sqrt(h.shape[1])": "",
    'silu(average + w["omega"] * X)': "average",
    '*w["backward"])[::-1]': '*w["backward"])',
    'silu(X1 @ w["W_z"] + w["b_z"])': 'X1 @ w["W_z"] + w["b_z"]',
    "np.sqrt(Q.shape[1]) if": "1 if",
    "visible.sum(axis=1, keepdims=True)": "len(Q)",
    "sigmoid(X1 @": "silu(X1 @",
    "(gamma * attended)": "(attended + gamma)",
    "phi * H + (1 - phi) * X": "phi * X + (1 - phi) * H",
    "2 + np.arange(n) - np.arange(n)[:, None]": "2 - np.arange(n) + np.arange(n)[:, None]",
    "(a @ b.conj().T)": "(b @ a.conj().T)",
    "(scores - mu)": "(scores + mu)",
    "np.maximum(scores, 0) ** 2": "np.maximum(scores, 0)",
    'mega(w["Norm"](X), X, w': 'mega(w["Norm"](X), w["Norm"](X), w',
    "ffn(Y, w) + Y)": "ffn(Y, w) + X)",
}


@pytest.mark.slow
@pytest.mark.parametrize("correct", MUTATIONS)
def test_an_error_in_an_equation_is_found(correct):
    wrong = mutate(mega, (correct, MUTATIONS[correct]))
    cases = ({"attention_activation": f, "relative_positional_bias": b} for f in FUNCTIONS for b in BIASES)
    cases = (case | {"normalization_type": "layernorm"} | more for case in cases for more in (PRE | CAUSAL, POST))
    assert any(difference(case, wrong) > 1e-2 for case in cases)


def test_constants_of_laplace_are_rounded():
    """(16): sqrt(1/2) and sqrt(1 / (4 pi)), which the authors round to six digits, change weights by 4e-7 at most."""
    scores = np.linspace(-2, 3, 5001)[None]
    exact = mega.eq_16(scores, 1, np.sqrt(1 / 2), np.sqrt(1 / (4 * np.pi)))
    change = np.abs(exact - mega.eq_16(scores, 1)).max()
    assert 1e-7 < change < 4.1e-7


def test_laplace_touches_relu2_at_the_root_of_a_half():
    """(27), (28): the printed root of 2, at which relu2 is 2 and laplace 1, is a misprint."""
    x = np.array([[0.5**0.5]]) + np.array([[0.0], [1e-5]])
    relu2, laplace = mega.relu2(x, 1), mega.eq_16(x, 1)
    np.testing.assert_allclose(laplace, relu2, atol=1e-6)
    assert mega.relu2(np.sqrt(2), 1) > 1.9 and mega.eq_16(np.sqrt(2), 1) < 1.0
