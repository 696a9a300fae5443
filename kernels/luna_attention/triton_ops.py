"""Pack and unpack attention with Triton kernels, as custom operators."""

from typing import Any

import torch
from torch import Tensor

from .. import _dispatch
from .._custom_operator import no_second_derivative, register
from ..common.triton_launch import random_seed
from . import reference, torch_backend, triton_backward, triton_forward

INPUTS = (
    "Tensor query, Tensor key, Tensor? value, Tensor? mask, Tensor? cu_seqlens, Tensor? seed, str? varlen_side, "
    "SymInt max_seqlen, float scale, float dropout, str precision"
)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, dropout: float,
    cu_seqlens: Tensor | None = None, varlen_side: str | None = None, max_seqlen: int = 0,
) -> Tensor:  # fmt: skip
    """Return `reference.attend` without the weights, computed with the kernels for all sizes.

    Shapes are `[B, T, H, K]`, mask `[B, M]`. With `cu_seqlens`, `varlen_side` (`"query"` or `"key"`) is `[1, total, H,
    K]` (a mask of keys `[1, total]`), and the other side has one batch row per sequence.
    """
    precision = _dispatch.float32_precision() if query.dtype == torch.float32 else "tf32"
    seed = random_seed(dropout, query.device)
    return _operator(
        query, key, None if key is value else value, mask, cu_seqlens, seed, varlen_side, max_seqlen, scale, dropout,
        precision,
    )[0]  # fmt: skip


def _formula(
    query: Tensor, key: Tensor, value: Tensor | None, mask: Tensor | None, cu_seqlens: Tensor | None, *rest: Any
) -> tuple[Tensor, None]:
    scale, dropout = rest[3:5]
    if cu_seqlens is not None or dropout > 0.0:
        raise no_second_derivative("luna_attention", " of varlen calls or with dropout")
    return reference.attend(query, key, key if value is None else value, mask, scale)[0], None


_operator = register(
    "luna_attention_triton",
    INPUTS,
    "(Tensor, Tensor)",
    triton_forward.forward,
    torch_backend.empty,
    triton_backward.backward,
    flops=torch_backend.flops,
    differentiable=("query", "key", "value"),
    saved="Tensor output, Tensor log_sum_exp",
    save=lambda inputs, outputs: outputs,
    formula=_formula,
)
