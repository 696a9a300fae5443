"""The relative RMS differences in docs/papers between printed formulas and the code, with initial weights."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from luna_mega import LunaConfig, LunaModel, MegaConfig, MegalodonConfig, MegalodonModel, MegaModel
from tests.papers import luna, mega, megalodon, test_luna, test_mega, test_megalodon
from tests.papers.mutations import mutate

PAGES = Path(__file__).resolve().parents[2] / "docs" / "papers"
LUNA = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "projection_length": 16}
LUNA |= {"position_embedding_type": "none", "embedding_norm": False, "initializer_range": 64**-0.5}
MEGALODON = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "value_size": 128}
MEGALODON |= {"shared_representation_size": 32, "intermediate_size": 64, "norm_num_groups": 8}
# Weight of the average and the skip connection in (6), which the paper does not have.
SUM, SCALE = 'silu(average + w["omega"] * X)', " / np.sqrt(h.shape[1])"


def average_of_mega(equations, X):
    config = MegaConfig(num_hidden_layers=1, normalization_type="layernorm")
    layer = MegaModel(config).double().layers[0]
    return equations.eq_6(X(256, 128), test_mega.weights(config, layer, equations))


def causal_attention_of_mega(equations, X, function):
    no_bias = lambda n: np.zeros((n, n))  # noqa: E731
    return equations.eq_11(X(256, 64), X(256, 64), X(256, 128), no_bias, getattr(equations, function), causal=True)


def attention_of_luna(equations, X):
    layer, P = LunaModel(LunaConfig(**LUNA)).double().encoder.layers[0], X(16, 64)
    states = X(128, 64)
    return equations.eq_5(states, P, states, test_luna.weights(layer), 4, 4)[0]


def causal_attention_of_luna(equations, X):
    layer = LunaModel(LunaConfig(is_decoder=True, **LUNA)).double().decoder.layers[0]
    w = test_luna.weights(layer)["causal"]
    return equations.causal_attention(X(128, 64), X(16, 64), w, 4, equations.softplus)


def average_of_megalodon(equations, X):
    config = MegalodonConfig(**MEGALODON)
    layer = MegalodonModel(config).double().layers[0]
    return equations.complex_average(X(128, 64), *test_megalodon.weights(config, layer, equations)["cema"])


# Module, computation, text of the code and of the printed formula, number on the page.
CASES = [
    (mega, average_of_mega, [(SCALE, "")], 2.5),
    (mega, average_of_mega, [(SUM, "average")], 0.95),
    (mega, average_of_mega, [(SCALE, ""), (SUM, "average")], 4.0),
    (mega, average_of_mega, [('"backward" in w', "False")], 0.52),
    (
        mega,
        partial(causal_attention_of_mega, function="eq_16"),
        [("visible.sum(axis=1, keepdims=True)", "len(Q)")],
        0.92,
    ),
    (
        mega,
        partial(causal_attention_of_mega, function="relu2"),
        [("visible.sum(axis=1, keepdims=True)", "len(Q)")],
        1.0,
    ),
    (luna, attention_of_luna, [("/ np.sqrt(q.shape[1])) @ v", "/ np.sqrt(len(X.T))) @ v")], 0.36),
    (luna, causal_attention_of_luna, [("np.log2(1 + 2**x)", "np.log(1 + np.exp(x))")], 0.24),
    (luna, causal_attention_of_luna, [("A_pack.T) / np.sqrt(q.shape[1]))", "A_pack.T))")], 0.21),
    (megalodon, average_of_megalodon, [("alpha * x[:, None]", "alpha * phase * x[:, None]")], 0.71),
    (megalodon, average_of_megalodon, [(" / np.sqrt(states)", "")], 2.8),
    (megalodon, average_of_megalodon, [(" + omega * x", "")], 0.36),
]


@pytest.mark.parametrize("module, compute, changes, number", CASES)
def test_difference_of_the_printed_formula(module, compute, changes, number):
    results = []
    for equations in (module, mutate(module, *changes)):
        torch.manual_seed(0)
        random = np.random.default_rng(0).standard_normal
        results.append(compute(equations, lambda *shape, random=random: random(shape)))
    here, printed = results
    assert np.sqrt(((printed - here) ** 2).mean() / (here**2).mean()) == pytest.approx(number, rel=0.05)
    page = (PAGES / f"{module.__name__.rpartition('.')[2]}.md").read_text(encoding="utf-8")
    assert f"**{number}**" in page
