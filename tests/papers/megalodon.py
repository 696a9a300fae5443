"""The equations of Megalodon (Ma et al. 2024, arXiv 2404.08801) in NumPy, one function for each, with its section.

X is `[n, d]`. `w` has the weights of a block by their names in the authors' code, and the norms as functions of
`[n, d]`. Comments name the differences of that code, which this package follows, from the formulas of the paper
(docs/papers/megalodon.md).
"""

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softmax(scores, visible):
    exponential = np.exp(scores) * visible
    return exponential / exponential.sum(axis=1, keepdims=True)


def complex_average(X, alpha, delta, theta, eta, omega):  # section 3.1, (2)
    states = alpha.shape[1]
    phase = np.exp(1j * theta[:, None] * 2 * np.pi / states * np.arange(1, states + 1))
    h, Y = np.zeros(alpha.shape, dtype=complex), []
    for x in X:
        # The paper also turns the input by the phase, and expands it by beta.
        h = alpha * x[:, None] + (1 - alpha * delta) * phase * h
        # Not in the paper: 1 / sqrt(states) and the skip connection.
        Y.append((eta * h).sum(axis=1).real / np.sqrt(states) + omega * x)
    return np.array(Y)


def timestep_norm(X, groups, scale, shift):  # section 3.2
    X = X.reshape(len(X), groups, -1)
    past = [X[: t + 1].swapaxes(0, 1).reshape(groups, -1) for t in range(len(X))]
    mean, variance = (np.array([f(x, axis=1, keepdims=True) for x in past]) for f in (np.mean, np.var))
    return ((X - mean) / np.sqrt(variance + 1e-5)).reshape(len(X), -1) * scale + shift


def unit(Z):  # section 3.3
    return Z / np.sqrt((Z**2).sum(axis=-1, keepdims=True) + 1e-5 * Z.shape[-1])  # the paper has no epsilon


def rotate(x, base):
    angle = np.arange(len(x))[:, None] / base ** (np.arange(0, x.shape[1], 2) / x.shape[1])
    turned = np.exp(1j * angle) * (x[:, 0::2] + 1j * x[:, 1::2])
    return np.stack((turned.real, turned.imag), axis=-1).reshape(x.shape)


def attention(Q, K, V, base):
    return softmax(rotate(Q, base) @ rotate(K, base).T, np.tri(len(Q))) @ V  # scores are not divided by sqrt(z)


def attention_layer(X, w, heads, chunk, base):  # section 3.3; in chunks as in section 3.5 of Mega
    T = w["timestep_norm"](X)
    S = w["rmsnorm"](complex_average(T, *w["cema"]))
    Z = np.hstack([unit(z) for z in np.split(S @ w["W_z"] + w["b_z"], heads, axis=1)])
    projected = *(Z * kappa + mu for kappa, mu in w["kappa_mu"]), silu(T @ w["W_v"] + w["b_v"])
    cut = [[x[i : i + chunk] for x in projected] for i in range(0, len(X), chunk)]
    split = [zip(*(np.split(x, heads, axis=1) for x in parts), strict=True) for parts in cut]
    attended = np.concatenate([np.hstack([attention(*head, base) for head in part]) for part in split])
    R = silu(S @ w["W_r"] + w["b_r"])
    return S @ w["W_h1"] + w["b_h1"] + (attended * R) @ w["W_h2"]


def block(X, w, heads, chunk, base):  # section 3.4
    Y = attention_layer(X, w, heads, chunk, base) + X
    return ffn(w["layernorm"](Y), w) + X  # the residual is X, not Y


def ffn(X, w):
    inner = silu(X @ w["W_1"])
    return (inner * (X @ w["W_3"]) if "W_3" in w else inner) @ w["W_2"]
