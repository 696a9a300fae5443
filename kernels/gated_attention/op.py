"""The attention of Mega's gated layer: one head, three attention functions, a relative bias, full or in chunks."""

from collections.abc import Callable

import torch

from luna_mega.kernels import _dispatch, varlen
from luna_mega.kernels.gated_attention import reference, torch_backend


def _reference(query, *arguments):
    with torch.autocast(query.device.type, enabled=False):
        return reference.attend(query, *arguments)


def _triton(query, key, value, *arguments):
    from luna_mega.kernels.gated_attention import triton_ops

    if torch.is_autocast_enabled(query.device.type):  # tensor cores want operands of 16 bits, as autocast does
        query, key = query.to(value.dtype), key.to(value.dtype)
    return triton_ops.attend(query, key, value, *arguments)


BACKENDS: dict[str, Callable[..., torch.Tensor]] = {
    "reference": _reference,
    "torch": torch_backend.attend,
    "triton": _triton,
}


def gated_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    function: str = "softmax",
    causal: bool = False,
    chunk_size: int | None = None,
    mask: torch.Tensor | None = None,
    offset: int = 0,
    dropout: float = 0.0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """f(Q K^T / divisor + bias) V with one head and a value of any width (Mega sections 3.2 to 3.5).

    Args:
        query, key, value: `[B, T, Z]`, `[B, S, Z]` and `[B, S, V]`; query and key of one dtype.
        bias: `[2M - 1]`, any floating dtype; entry `M - 1 + (j - i)` is added to the score of query i and key j, with
            positions counted inside the chunk. M must reach the largest position in use; more is allowed.
        function: `"softmax"`, with divisor sqrt(Z); or `"laplace"` or `"relu2"`, with the number of real keys in the
            chunk for divisor, or i + 1 (padding counts) where the attention is causal, and weights that are not
            normalised.
        causal: a query sees the keys up to its own position.
        chunk_size: positions attend to those of their own chunk of this length; needs T = S, and T may be any. None =
            full attention.
        mask: `[B, S]` bool, True = a key that may be attended to; None = all.
        offset: position of the first query among the keys, for a step of cached decoding (S = the keys so far) or of
            cross-attention. Without chunks only.
        dropout: probability with which a weight is dropped (the caller passes 0 in evaluation).
        cu_seqlens: `[sequences + 1]` int32 or int64: B is 1, T = S, and sequence b lies at `[cu_seqlens[b],
            cu_seqlens[b + 1])`; positions and chunks count from its beginning. Without an offset only.
        max_seqlen: length of the longest sequence, or more; None = looked up, which waits for the device.
        backend: one of `"auto"`, `"reference"`, `"torch"`, `"triton"`; None = as `luna_mega.kernels.api.use_backend`
            and `LUNA_MEGA_BACKEND` say.

    Returns:
        `[B, T, V]` in the dtype of `value`. Scores and weights are computed in float32, under autocast as well, where
        `"triton"` rounds query and key to the dtype of `value` before. A query without any key is 0, with gradient 0.

    Raises:
        ValueError: shapes, dtypes or options do not fit together, the function is unknown, the bias is too short, or
            the backend does not exist.

    Example:
        >>> import torch
        >>> x, value, bias = torch.randn(2, 100, 16), torch.randn(2, 100, 64), torch.zeros(2 * 32 - 1)
        >>> gated_attention(x, x, value, bias, function="laplace", chunk_size=32).shape
        torch.Size([2, 100, 64])
    """
    _check_tensors(query, key, value, mask)
    _check_options(query, key, function, causal, chunk_size, offset, dropout)
    length = query.shape[1]
    if cu_seqlens is not None:
        if query.shape[0] != 1 or length != key.shape[1] or offset != 0:
            raise ValueError(
                "gated_attention with cu_seqlens needs a batch of 1, as many queries as keys and offset 0, got query "
                f"{list(query.shape)}, key {list(key.shape)} and offset {offset}"
            )
        length = max_seqlen = varlen.check("gated_attention", cu_seqlens, max_seqlen, length)
    # In an exported program the length may vary, so there a chunk that is too long is filled up.
    if chunk_size is not None and not torch.compiler.is_exporting() and length <= chunk_size:
        chunk_size = None
    if bias is not None:
        keys = key.shape[1] if cu_seqlens is None else length
        _check_bias(bias, max(offset + length, keys) if chunk_size is None else chunk_size)
    chosen = _dispatch.select("gated_attention", BACKENDS, backend, query.device, _unsupported(query, value))
    options = function, causal, chunk_size, offset, dropout
    if chosen == "triton":
        return _triton(query, key, value, bias, mask, *options, cu_seqlens, max_seqlen)
    if cu_seqlens is None:
        return BACKENDS[chosen](query, key, value, bias, mask, *options)
    kept = varlen.keep(cu_seqlens, max_seqlen)
    mask = kept if mask is None else varlen.pad(mask, cu_seqlens, max_seqlen)
    padded = (varlen.pad(x, cu_seqlens, max_seqlen) for x in (query, key, value))
    return varlen.unpad(BACKENDS[chosen](*padded, bias, mask, *options), cu_seqlens, query.shape[1])


def _unsupported(query, value):
    """Why the Triton kernels cannot take these arguments."""
    for name, dtype in (("query and key are", query.dtype), ("value is", value.dtype)):
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"{name} {dtype}; the kernels take float32, float16 and bfloat16"
    if query.shape[2] > 256:
        return f"query and key have size {query.shape[2]}; the kernels take up to 256"
    return None


def _check_tensors(query, key, value, mask):
    if not query.dim() == key.dim() == value.dim() == 3:
        raise ValueError(
            "gated_attention needs [batch, length, size] tensors, got query "
            f"{list(query.shape)}, key {list(key.shape)} and value {list(value.shape)}"
        )
    if query.shape[::2] != key.shape[::2] or key.shape[:2] != value.shape[:2]:
        raise ValueError(
            f"gated_attention: query {list(query.shape)} and key {list(key.shape)} must agree in batch and size, key "
            f"and value {list(value.shape)} in batch and length"
        )
    if query.dtype != key.dtype or not (query.is_floating_point() and value.is_floating_point()):
        raise ValueError(
            "gated_attention needs floating-point tensors, query and key of one dtype, got query "
            f"{query.dtype}, key {key.dtype} and value {value.dtype}"
        )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != key.shape[:2]):
        raise ValueError(
            f"gated_attention needs a bool mask of shape {list(key.shape[:2])} (True = keep), got {mask.dtype} "
            f"{list(mask.shape)}"
        )


def _check_options(query, key, function, causal, chunk_size, offset, dropout):
    queries, keys = query.shape[1], key.shape[1]
    if function not in reference.FUNCTIONS:
        raise ValueError(
            f"gated_attention has no function {function!r}; choose one of {', '.join(reference.FUNCTIONS)}"
        )
    if offset < 0 or (causal and offset + queries > keys):
        raise ValueError(
            f"gated_attention: {queries} queries from position {offset} on do not lie among {keys} keys, as causal "
            "attention needs; the keys must include the queries' own, and offset cannot be negative"
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(
            f"gated_attention: chunk_size must be at least 1, or None for full attention, got {chunk_size}"
        )
    if chunk_size is not None and (queries != keys or offset != 0):
        raise ValueError(
            f"gated_attention: attention in chunks of {chunk_size} needs as many queries as keys and offset 0, got "
            f"{queries} queries, {keys} keys and offset {offset}; pass the keys of the query's own chunk, without "
            "chunk_size"
        )
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"gated_attention: dropout must be in [0, 1), got {dropout}")


def _check_bias(bias, positions):
    if bias.dim() != 1 or bias.shape[0] % 2 == 0 or not bias.is_floating_point():
        raise ValueError(
            f"gated_attention needs a floating-point bias of shape [2 M - 1], got {bias.dtype} {list(bias.shape)}"
        )
    if (bias.shape[0] + 1) // 2 < positions:
        raise ValueError(
            f"gated_attention: a bias of length {bias.shape[0]} serves {(bias.shape[0] + 1) // 2} positions, but "
            f"{positions} are in use; it needs length {2 * positions - 1}"
        )
