"""Luna attention: `luna_pack`, `luna_unpack`, and `luna_attention`, which applies both with a projection in between."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._dispatch import Arguments, Op
from ..checks import check_dropout, check_mask
from ..sequences import Sequences, check_cu_seqlens, in_rows
from . import reference, torch_backend


def _triton(varlen_side: str, sequences: Sequences, **call: Any) -> Tensor:
    # Imported lazily because Triton decides at import time whether kernels are interpreted.
    from . import triton_ops

    if sequences.bounds is None:
        return torch_backend.sdpa(**call) if _sdpa_is_best(**call) else triton_ops.attend(**call)
    return triton_ops.attend(**call, cu_seqlens=sequences.bounds, varlen_side=varlen_side, max_seqlen=sequences.longest)


def _reference(**call: Any) -> Tensor:
    return reference.attend(**call)[0]


def _unsupported(query: Tensor, **_: object) -> str | None:
    if query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the kernels support float32, float16 and bfloat16, not {query.dtype}"
    if query.shape[-1] > 128:
        return f"the kernels support head sizes up to 128, not {query.shape[-1]}"
    return None


def _pack_in_rows(run: Callable[..., Any]) -> Callable[..., Any]:
    return in_rows(run, "key", "value", unpads=False)


def _unpack_in_rows(run: Callable[..., Any]) -> Callable[..., Any]:
    # The mask is that of P, and does not apply to queries.
    return in_rows(lambda mask, pack_mask, **call: run(mask=pack_mask, **call), "query")


PACK = Op(
    "luna_pack",
    {
        "reference": _pack_in_rows(_reference),
        "torch": _pack_in_rows(torch_backend.attend),
        "triton": lambda sequences, **call: _triton("key", sequences, mask=sequences.mask, **call),
    },
    _unsupported,
    with_weights=in_rows(reference.attend),
)
UNPACK = Op(
    "luna_unpack",
    {
        "reference": _unpack_in_rows(_reference),
        "torch": _unpack_in_rows(torch_backend.attend),
        "triton": lambda sequences, pack_mask, **call: _triton("query", sequences, mask=pack_mask, **call),
    },
    _unsupported,
    with_weights=_unpack_in_rows(reference.attend),
)
ATTENTION = replace(PACK, name="luna_attention")  # for `explain`


def luna_pack(
    pack_query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    return_weights: bool = False,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Pack a context of any length into L rows: softmax(P K^T / sqrt(K)) V per head (Luna eq. 3).

    Args:
        pack_query: projected P, `[B, L, H, K]`.
        key: projected context, `[B, M, H, K]`.
        value: projected context, `[B, M, H, K]`; the same tensor as `key` if keys and values are tied.
        mask: `[B, M]` bool, True = attend to this context position; None = all. Masked keys and values must be finite,
            as in `scaled_dot_product_attention`.
        dropout: dropout probability of the weights (pass 0 in evaluation).
        return_weights: also return the weights `[B, H, L, M]`. The reference computes them on every backend. Not
            supported with `cu_seqlens`.
        backend: one of `"auto"`, `"reference"`, `"torch"`, `"triton"`; None = the setting of
            `use_backend` or `LUNA_MEGA_BACKEND`. `"triton"` supports float32, float16 and
            bfloat16 and head sizes up to 128. It uses PyTorch's attention for calls for which that is the best kernel.
        cu_seqlens: `[B + 1]` int32 or int64, `[0, ..., total]`, for varlen contexts: `key` and `value` are `[1, total,
            H, K]` and `mask` is `[1, total]`. `pack_query` and the result have one row per context.
        max_seqlen: length of the longest context; None = computed from `cu_seqlens`, which synchronizes the device.
            Compiled programs need it.

    Returns:
        `[B, L, H, K]` in the dtype of `pack_query`, or (output, weights) if `return_weights` is set. The softmax is
        computed in float32. If all positions of a context are masked, the result is 0 with gradient 0. With dropout,
        call `backward()` outside of autocast, as for `gated_attention_step`.

    Raises:
        ValueError: if shapes or dtypes do not match, tensors are not floating-point, or the backend does not exist or
            does not support them.
    """
    return _attend(PACK, pack_query, key, value, mask, dropout, return_weights, backend, cu_seqlens, max_seqlen)


def luna_unpack(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    return_weights: bool = False,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Unpack for every query: softmax(Q K^T / sqrt(K)) V over the L packed rows (Luna eq. 4).

    For arguments, result and errors, see `luna_pack`; here, `query` is `[B, T, H, K]`, `key` and `value` `[B, L, H,
    K]`, `mask` `[B, L]` and weights `[B, H, T, L]`. With `cu_seqlens`, queries and result are varlen, `[1, total, H,
    K]`.
    """
    return _attend(UNPACK, query, key, value, mask, dropout, return_weights, backend, cu_seqlens, max_seqlen)


def luna_attention(
    query: Tensor,
    pack_query: Tensor,
    pack_key: Tensor,
    pack_value: Tensor,
    project: Callable[[Tensor], tuple[Tensor, Tensor]],
    *,
    context_mask: Tensor | None = None,
    pack_mask: Tensor | None = None,
    dropout: float = 0.0,
    return_weights: bool = False,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[Tensor, ...]:
    """Compute linear unified nested attention (Luna section 3.1): pack the context, project the result, unpack it.

    Args:
        query: `[B, T, H, K]`.
        pack_query: `[B, L, Hp, Kp]`; pack and unpack may use different numbers of heads.
        pack_key: keys of the context, `[B, M, Hp, Kp]`.
        pack_value: values of the context, `[B, M, Hp, Kp]`.
        project: maps the packed context `[B, L, Hp, Kp]` to unpack key and value, `[B, L, H, K]` each.
        context_mask: `[B, M]` bool, True = keep; None = all. Masked tokens must be finite, as in `luna_pack`.
        pack_mask: `[B, L]` bool, True = keep; None = all.
        dropout: dropout probability of the pack and unpack weights.
        return_weights: also return the unpack and pack weights, as in `luna_pack`.
        backend: as in `luna_pack`.
        cu_seqlens: as in `luna_pack`. Queries and context are then the same B varlen sequences: `query` is `[1, total,
            H, K]`, the context `[1, total, Hp, Kp]` and `context_mask` `[1, total]`.
        max_seqlen: length of the longest sequence, as in `luna_pack`.

    Returns:
        (output `[B, T, H, K]`, packed context `[B, L, Hp, Kp]`). If `return_weights` is set, unpack weights `[B, H, T,
        L]` and pack weights `[B, Hp, L, M]` follow.

    Raises:
        ValueError: as in `luna_pack`.

    Example:
        >>> import torch
        >>> x, p = torch.randn(2, 100, 4, 16), torch.randn(2, 8, 4, 16)
        >>> output, packed = luna_attention(x, p, x, x, lambda packed: (packed, packed))
        >>> output.shape, packed.shape
        (torch.Size([2, 100, 4, 16]), torch.Size([2, 8, 4, 16]))
    """
    options: dict[str, Any] = {"dropout": dropout, "return_weights": return_weights, "backend": backend}
    if cu_seqlens is not None:
        if query.shape[:2] != pack_key.shape[:2]:
            raise ValueError(
                "luna_attention with cu_seqlens needs queries and context with the same total length, got "
                f"{list(query.shape)} and {list(pack_key.shape)}"
            )
        if max_seqlen is None:
            max_seqlen = check_cu_seqlens("luna_attention", cu_seqlens, None, query.shape[1], compares_length=True)
        options |= {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
    packed: Any = luna_pack(pack_query, pack_key, pack_value, context_mask, **options)
    packed, *pack_weights = packed if return_weights else (packed,)
    output: Any = luna_unpack(query, *project(packed), pack_mask, **options)
    return (output[0], packed, output[1], *pack_weights) if return_weights else (output, packed)


def _attend(
    op: Op, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, return_weights: bool,
    backend: str | None, cu_seqlens: Tensor | None, max_seqlen: int | None,
) -> Any:  # fmt: skip
    name, varlen_side = op.name, "key" if op is PACK else "query"
    if query.dim() != 4 or key.dim() != 4:
        raise ValueError(
            f"{name} needs [batch, length, heads, head size] tensors, got {list(query.shape)} and {list(key.shape)}"
        )
    if key.shape != value.shape or query.shape[2:] != key.shape[2:]:
        raise ValueError(
            f"{name}: query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} must agree in "
            "heads and head size, and key and value in all dimensions"
        )
    if cu_seqlens is None:
        if query.shape[0] != key.shape[0]:  # len() would fix the batch size of an exported program
            raise ValueError(f"{name}: query {list(query.shape)} and key {list(key.shape)} differ in batch size")
    else:
        flat, other = (query, key) if varlen_side == "query" else (key, query)
        if len(flat) != 1 or len(other) != cu_seqlens.numel() - 1:
            raise ValueError(
                f"{name} with cu_seqlens {list(cu_seqlens.shape)} needs {varlen_side} [1, total, heads, head size] and "
                f"{cu_seqlens.numel() - 1} rows in the other batch, got {list(flat.shape)} and {list(other.shape)}"
            )
        max_seqlen = check_cu_seqlens(name, cu_seqlens, max_seqlen, flat.shape[1], compares_length=True)
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"{name}: dtypes differ: query {query.dtype}, key {key.dtype}, value {value.dtype}")
    if not query.is_floating_point():
        raise ValueError(f"{name} needs floating-point tensors, got {query.dtype}")
    check_mask(name, mask, key.shape[:2])
    check_dropout(name, dropout)
    call: Arguments = {"query": query, "key": key, "value": value, "dropout": dropout, "scale": query.shape[-1] ** -0.5}
    if op is PACK:
        call["sequences"] = Sequences(mask, cu_seqlens, max_seqlen)
    else:
        call |= {"pack_mask": mask, "sequences": Sequences(None, cu_seqlens, max_seqlen)}
    return op(backend, call, return_weights)


def _sdpa_is_best(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: object) -> bool:
    """Return whether PyTorch's flash kernels on a GPU have minimal memory traffic, with and without dropout.

    They do not support masks, need 128 queries to fill their tiles, and load keys and values separately. Separate loads
    are slow if keys and values are one tensor and most of the bytes. If there are few keys (unpack), they stay in
    on-chip memory. The backward pass of these kernels uses atomics, so they are not used if deterministic algorithms
    are enabled.
    """
    if torch.are_deterministic_algorithms_enabled():
        return False
    if query.device.type != "cuda" or mask is not None or query.dtype == torch.float32 or query.shape[-1] % 8:
        return False
    queries, keys = query.shape[1], key.shape[1]
    return keys <= max(queries, 256) or (key is not value and queries >= 128)
