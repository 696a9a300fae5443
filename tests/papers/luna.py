"""The equations of Luna (Ma et al. 2021, arXiv 2106.01540) in NumPy, one function for each, with its number.

X and C are `[n, d]`, P is `[l, d]`. `w` has the weights by their names in the paper, and the norms as functions of
`[n, d]`. Comments name the differences of the authors' code, which this package follows, from the printed formula
(docs/papers/luna.md).
"""

import numpy as np


def softmax(scores):
    exponential = np.exp(scores)
    return exponential / exponential.sum(axis=1, keepdims=True)


def heads(count, *projected):
    return zip(*(np.split(x, count, axis=1) for x in projected), strict=True)


def eq_1(X, C, w, count):
    Q, K, V = (x @ w[f"W_{name}"] + w[f"b_{name}"] for x, name in ((X, "Q"), (C, "K"), (C, "V")))
    # In the paper d, the width of all heads.
    return np.hstack([softmax(q @ k.T / np.sqrt(q.shape[1])) @ v for q, k, v in heads(count, Q, K, V)])


def eq_3(P, C, w, count):
    return eq_1(P, C, w["pack"], count)


def eq_4(X, Y_P, w, count):
    # Not in the paper: an output projection, of this attention only.
    return eq_1(X, Y_P, w["unpack"], count) @ w["W_O"] + w["b_O"]


def eq_5(X, P, C, w, count, pack_count):
    Y_P = eq_3(P, C, w, pack_count)
    return eq_4(X, Y_P, w, count), Y_P


def ffn(X, w):
    return np.maximum(X @ w["W_1"] + w["b_1"], 0) @ w["W_2"] + w["b_2"]


def eq_6(X, P, w, **counts):
    P = P[: len(X)]  # not in the paper: at most n rows of P
    Y_X, Y_P = eq_5(X, P, X, w, **counts)
    X_A, P_A = w["LayerNorm"](Y_X + X), w["LayerNorm_P"](Y_P + P)
    return w["LayerNorm_ffn"](ffn(X_A, w) + X_A), P_A


def sinusoids(positions, width):
    # Not in the paper: positions as in fairseq's Transformer, sines before cosines.
    frequencies = np.exp(-np.log(10000) * np.arange(width // 2) / (width // 2 - 1))
    return np.hstack([np.sin(np.outer(positions, frequencies)), np.cos(np.outer(positions, frequencies))])


def eq_7(X, Y, Z):
    return np.array([X[t] @ (Y[: t + 1].T @ Z[: t + 1]) / (t + 1) for t in range(len(X))])


def elu_plus_1(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def softplus(x):
    return np.log2(1 + 2**x)  # in the paper to base e


def causal_attention(X, P, w, count, omega):
    # Section 3.3, which omits the projections. Not in the paper: K_pack, a projection of X for A_pack only.
    inputs = ((P, "P"), (X, "pack"), (X, "Q"), (X, "K"), (X, "V"))
    Y = []
    for p, k_pack, q, k, v in heads(count, *(x @ w[f"W_{name}"] + w[f"b_{name}"] for x, name in inputs)):
        A_pack = omega(p @ k_pack.T / np.sqrt(p.shape[1]))
        A_unpack = softmax(eq_7(q, k, A_pack.T) / np.sqrt(q.shape[1]))  # not in the paper: 1 / sqrt(d)
        Y.append(eq_7(A_unpack, A_pack.T, v))
    return np.hstack(Y) @ w["W_O"] + w["b_O"]


def decoder_layer(X, P, C, w, count, pack_count, omega):
    # Section 3.3 has no formula: causal attention, attention to the encoder (if any) through its P, feed-forward layer.
    X = w["LayerNorm"](causal_attention(X, P, w["causal"], count, omega) + X)
    if C is not None:
        Y_X, Y_P = eq_5(X, P, C, w, count, pack_count)
        X, P = w["LayerNorm_cross"](Y_X + X), w["LayerNorm_P"](Y_P + P)
    return w["LayerNorm_ffn"](ffn(X, w) + X), P
