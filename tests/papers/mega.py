"""The equations of Mega (Ma et al. 2022, arXiv 2209.10655) in NumPy, one function for each, with its number.

X is `[n, d]`. `w` has the weights by their names in the paper, and the norms as functions of `[n, d]`. Comments name
the differences of the authors' code, which this package follows, from the printed formula (docs/papers/mega.md).
"""

import math

import numpy as np

erf = np.vectorize(math.erf)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def eq_5(X, alpha, delta, beta, eta):
    h, Y = np.zeros_like(alpha), []
    for x in X:
        u = beta * x[:, None]  # (4)
        h = alpha * u + (1 - alpha * delta) * h
        Y.append((eta * h).sum(axis=1) / np.sqrt(h.shape[1]))  # not in the paper: 1 / sqrt(h)
    return np.array(Y)


def eq_6(X, w):
    average = eq_5(X, *w["forward"])
    if "backward" in w:  # not in the paper: the sum of two directions, both of which contain x_t
        average = average + eq_5(X[::-1], *w["backward"])[::-1]
    return silu(average + w["omega"] * X)  # not in the paper: silu and the skip connection


def eq_7(X1, w):
    return silu(X1 @ w["W_z"] + w["b_z"])


def eq_8_9(Z, kappa, mu):
    return kappa * Z + mu


def eq_10(X, w):
    return silu(X @ w["W_v"] + w["b_v"])


def eq_11(Q, K, V, b_rel, f, causal):
    visible = np.tri(len(Q)) if causal else np.ones((len(Q), len(Q)))
    # The paper has n for functions other than softmax; causal attention has i + 1 for query i.
    tau = np.sqrt(Q.shape[1]) if f is softmax else visible.sum(axis=1, keepdims=True)
    return f(Q @ K.T / tau + b_rel(len(Q)), visible) @ V


def eq_12(X1, w):
    return silu(X1 @ w["W_gamma"] + w["b_gamma"])


def eq_13(X1, w):
    return sigmoid(X1 @ w["W_phi"] + w["b_phi"])


def eq_14(X1, gamma, attended, w):
    return silu(X1 @ w["W_h"] + (gamma * attended) @ w["U_h"] + w["b_h"])


def eq_15(phi, H, X):
    return phi * H + (1 - phi) * X


def softmax(scores, visible):
    exponential = np.exp(scores) * visible
    return exponential / exponential.sum(axis=1, keepdims=True)


def relu2(scores, visible):
    return np.maximum(scores, 0) ** 2 * visible


def eq_16(scores, visible, mu=0.707107, sigma=0.282095):  # in the paper sqrt(1/2) and sqrt(1 / (4 pi))
    return 0.5 * (1 + erf((scores - mu) / (sigma * np.sqrt(2)))) * visible


def simple_bias(n, table):
    return table[len(table) // 2 + np.arange(n) - np.arange(n)[:, None]]


def rotary_bias(n, a, b):
    # Section 3.2 names RoPE, but rotates queries and keys nowhere: the bias is <R_i a, R_j b>, without content.
    half = len(a) // 2
    rotation = np.exp(1j * np.arange(n)[:, None] * 10000 ** (-np.arange(half) / half))
    a, b = (rotation * (x[:half] + 1j * x[half:]) for x in (a, b))
    return (a @ b.conj().T).real


def rope(x, positions):
    half = x.shape[1] // 2
    rotated = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * np.outer(positions, 10000 ** (-np.arange(half) / half)))
    return np.hstack([rotated.real, rotated.imag])


def t5_bias(n, table, causal):
    # T5: distances up to 16 (8 on each side) have a number each, those up to 128 share numbers, logarithmically.
    def number(distance):
        sides = 1 if causal else 2
        ranges, size = len(table) // sides, max(-distance, 0) if causal else abs(distance)
        exact = ranges // 2
        if size >= exact:
            size = min(exact + int(np.log(size / exact) / np.log(128 / exact) * (ranges - exact)), ranges - 1)
        return table[size + ranges * (sides == 2 and distance > 0)]

    return np.array([[number(key - query) for key in range(n)] for query in range(n)])


def alibi_bias(n, slope):
    return -slope * np.abs(np.arange(n) - np.arange(n)[:, None])


def mega(X, residual, w, f, causal, chunk):
    X1 = eq_6(X, w) if w["forward"] else X  # Figure 4: h = 0 is no average
    Z, V = eq_7(X1, w), eq_10(X, w)
    Q, K = (eq_8_9(Z, w[f"kappa_{name}"], w[f"mu_{name}"]) for name in "qk")
    starts = range(0, len(X), chunk)  # section 3.5
    if w["rotates"]:
        Q, K = (rope(x, np.arange(len(X)) % chunk) for x in (Q, K))
    attended = [eq_11(Q[i : i + chunk], K[i : i + chunk], V[i : i + chunk], w["b_rel"], f, causal) for i in starts]
    return eq_15(eq_13(X1, w), eq_14(X1, eq_12(X1, w), np.concatenate(attended), w), residual)


def ffn(Y, w):
    return silu(Y @ w["W_1"] + w["b_1"]) @ w["W_2"] + w["b_2"]


def eq_21(X, w, pre_norm, **options):
    # Not in the formula, but in Table 8: pre-norm, whose residuals are not normalized.
    Y = mega(w["Norm"](X), X, w, **options) if pre_norm else w["Norm"](mega(X, X, w, **options))
    return ffn(w["Norm_ffn"](Y), w) + Y if pre_norm else w["Norm_ffn"](ffn(Y, w) + Y)
