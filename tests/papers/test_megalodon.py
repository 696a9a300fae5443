"""Models of this package compute the equations of the paper of Megalodon."""

from functools import partial

import numpy as np
import pytest
import torch

from luna_mega import MegalodonConfig, MegalodonModel
from tests.papers import megalodon
from tests.papers.mutations import mutate, random_model

SIZES = {
    "vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "value_size": 12,
    "shared_representation_size": 8, "intermediate_size": 10, "ema_projection_size": 3, "norm_num_groups": 2,
}  # fmt: skip
CASES = [{"chunk_size": chunk, "swiglu": swiglu} for chunk in (4, 16) for swiglu in (True, False)]


def make(config: MegalodonConfig) -> MegalodonModel:
    """Return a random model with the rotary frequencies in float64; the rounding of float32 is visible."""
    model, width = random_model(MegalodonModel, config), config.shared_representation_size // config.num_attention_heads
    model.rope.freqs.copy_(config.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width))
    return model


def timestep_norm(equations, groups: int, w: dict[str, np.ndarray], prefix: str):
    # Scales are stored minus 1.
    scale, shift = w[f"{prefix}weight"] + 1, w[f"{prefix}bias"]
    return lambda X: equations.timestep_norm(X, groups, scale, shift)


def weights(config: MegalodonConfig, layer: torch.nn.Module, equations) -> dict:
    """Return the weights of a block with the names of the equations."""
    w = {name: tensor.numpy() for name, tensor in layer.state_dict().items()}
    named = {}
    for name in ("wz", "wv", "wr", "wh1", "wh2"):
        named[f"W_{name[1:]}"] = w[f"mega.{name}.weight"].T
        if name != "wh2":
            named[f"b_{name[1:]}"] = w[f"mega.{name}.bias"]
    for index in (1, 2, 3) if config.swiglu else (1, 2):
        named[f"W_{index}"] = w[f"nffn.fc{index}.weight"].T
    alpha, delta, theta = (megalodon.sigmoid(w[f"mega.cema.{name}"][..., 0]) for name in ("alpha", "delta", "theta"))
    gamma = w["mega.cema.gamma"]
    named["cema"] = alpha, delta, theta[:, 0], gamma[..., 0] + 1j * gamma[..., 1], w["mega.cema.omega"][:, 0]
    named["kappa_mu"] = list(zip(w["mega.gamma"] + 1, w["mega.beta"], strict=True))
    named["timestep_norm"] = timestep_norm(equations, config.norm_num_groups, w, "mega.timestep_norm.")
    rms, scale, shift = w["mega.rmsnorm.weight"] + 1, w["nffn.norm.weight"] + 1, w["nffn.norm.bias"]
    mean = partial(np.mean, axis=1, keepdims=True)
    named["rmsnorm"] = lambda X: X / np.sqrt(mean(X**2) + 1e-5) * rms
    named["layernorm"] = lambda X: (X - mean(X)) / np.sqrt(mean((X - mean(X)) ** 2) + 1e-5) * scale + shift
    return named


def difference(fields: dict, equations=megalodon) -> float:
    """Return the largest difference of two sequences, one of them padded, from the equations of each sequence."""
    config = MegalodonConfig(**SIZES | fields)
    model, X = make(config), torch.randn(2, 10, 8, dtype=torch.float64)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, :3] = 0
    found = model(inputs_embeds=X, attention_mask=mask).last_hidden_state.detach().numpy()
    final = {name: tensor.numpy() for name, tensor in model.final_norm.state_dict().items()}
    options = {"heads": 2, "chunk": config.chunk_size, "base": config.rope_theta}
    differences = []
    for row, length in enumerate((10, 7)):
        states = X[row, -length:].numpy()
        for layer in model.layers:
            states = equations.block(states, weights(config, layer, equations), **options)
        states = timestep_norm(equations, config.norm_num_groups, final, "")(states)
        differences.append(np.abs(found[row, -length:] - states).max())
    return max(differences)


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_model(fields):
    assert difference(fields) < 1e-12


MUTATIONS = {
    "(1 - alpha * delta)": "(1 + alpha * delta)",
    "alpha * x[:, None]": "alpha * phase * x[:, None]",
    "np.arange(1, states + 1)": "np.arange(states)",
    " / np.sqrt(states)": "",
    " + omega * x": "",
    "X[: t + 1].swap": "X.swap",
    "for f in (np.mean, np.var)": "for f in (np.mean, np.std)",
    "Z / np.sqrt(": "Z / (",
    "np.exp(1j * angle)": "1",
    "np.tri(len(Q))": "1",
    "silu(T @": "silu(S @",
    "(attended * R)": "(attended + R)",
    'ffn(w["layernorm"](Y), w) + X': 'ffn(w["layernorm"](Y), w) + Y',
    "base) + X": "base)",
}


@pytest.mark.slow
@pytest.mark.parametrize("correct", MUTATIONS)
def test_an_error_in_an_equation_is_found(correct):
    wrong = mutate(megalodon, (correct, MUTATIONS[correct]))
    assert any(difference(case, wrong) > 1e-2 for case in CASES)
