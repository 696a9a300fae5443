"""Luna attention: `luna_pack`, `luna_unpack`, and both with a projection between them, `luna_attention`."""

from collections.abc import Callable
from functools import partial

import torch

from luna_mega.kernels import ragged
from luna_mega.kernels._op import Op
from luna_mega.kernels.checks import check_dropout, check_mask
from luna_mega.kernels.context_parallel import ContextShard
from luna_mega.kernels.luna_attention import reference, sharded, torch_backend


def _triton(ragged, query, key, value, mask, scale, dropout, cu_seqlens=None, max_seqlen=0):
    # Imported where it is needed: the import decides whether kernels are interpreted.
    from luna_mega.kernels.luna_attention import triton_ops

    if cu_seqlens is None:
        ragged = None
        if _sdpa_is_best(query, key, value, mask):
            return torch_backend.sdpa(query, key, value, mask, scale, dropout)
    return triton_ops.attend(query, key, value, mask, scale, dropout, cu_seqlens, ragged, max_seqlen)


def _reference(**call):
    return reference.attend(**call)[0]


def _unsupported(query, **_):
    if query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the kernels take float32, float16 and bfloat16, not {query.dtype}"
    if query.shape[-1] > 128:
        return f"the kernels take head sizes up to 128, not {query.shape[-1]}"
    return None


def _op(name, ragged, **options):
    backends = {"reference": _reference, "torch": torch_backend.attend, "triton": partial(_triton, ragged)}
    return Op(name, backends, _unsupported, with_weights=reference.attend, **options)


PACK = _op("luna_pack", "key", tokens=("key", "value"), tokens_out=False, on_ranks=sharded.BACKENDS)
UNPACK = _op("luna_unpack", "query", tokens=("query",), mask=None)


def luna_pack(
    pack_query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    dropout: float = 0.0,
    return_weights: bool = False,
    backend: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    shard: ContextShard | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Pack a context of any length into L rows: softmax(P K^T / sqrt(K)) V per head (Luna eq. 3).

    Args:
        pack_query: projected P, `[B, L, H, K]`.
        key, value: projected context, `[B, M, H, K]`; the same tensor twice where key and value are tied.
        mask: `[B, M]` bool, True = a context position that may be attended to; None = all.
        dropout: probability with which a weight is dropped (the caller passes 0 in evaluation).
        return_weights: return (output, weights `[B, H, L, M]`), computed step by step by the reference, whatever the
            backend. Not with `cu_seqlens`.
        backend: one of `"auto"`, `"reference"`, `"torch"`, `"triton"`; None = as `luna_mega.kernels.api.use_backend`
            and `LUNA_MEGA_BACKEND` say. `"triton"` takes float32, float16 and bfloat16 and head sizes up to 128, and
            leaves the calls at which PyTorch's attention is best to it.
        cu_seqlens: `[B + 1]` int32 or int64, `[0, ..., total]`: the contexts lie end to end, `key` and `value` are `[1,
            total, H, K]` and `mask` `[1, total]`. `pack_query` and the result have a row for every context.
        max_seqlen: length of the longest context; None = read from `cu_seqlens`, which waits for the device.
        shard: of the context each rank of a group has the part `key`, `value` and `mask`; `pack_query` and the result
            are the same on all. They exchange tensors of the size of the result. Not with `cu_seqlens` nor weights.

    Returns:
        `[B, L, H, K]` in the dtype of `pack_query`. The softmax is computed in float32. A row whose context is masked
        throughout is 0, with gradient 0.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or the backend does not exist or cannot take them.
    """
    options = (dropout, return_weights, backend, cu_seqlens, max_seqlen, shard)
    return _attend(PACK, pack_query, key, value, mask, *options)


def luna_unpack(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    dropout: float = 0.0,
    return_weights: bool = False,
    backend: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Unpack for every query: softmax(Q K^T / sqrt(K)) V over the L packed rows (Luna eq. 4).

    Arguments, result and errors as in `luna_pack`, with `query` `[B, T, H, K]`, `key` and `value` `[B, L, H, K]`,
    `mask` `[B, L]` and weights `[B, H, T, L]`. With `cu_seqlens` the queries lie end to end: they and the result are
    `[1, total, H, K]`.
    """
    options = (dropout, return_weights, backend, cu_seqlens, max_seqlen)
    return _attend(UNPACK, query, key, value, mask, *options)


def luna_attention(
    query: torch.Tensor,
    pack_query: torch.Tensor,
    pack_key: torch.Tensor,
    pack_value: torch.Tensor,
    project: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    *,
    context_mask: torch.Tensor | None = None,
    pack_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    return_weights: bool = False,
    backend: str | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    shard: ContextShard | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compute linear unified nested attention (Luna section 3.1): pack the context, project the result, unpack it.

    Args:
        query: `[B, T, H, K]`.
        pack_query: `[B, L, Hp, Kp]`; pack and unpack may have different numbers of heads.
        pack_key, pack_value: `[B, M, Hp, Kp]`, the context.
        project: maps the packed context `[B, L, Hp, Kp]` to unpack key and value, `[B, L, H, K]` each.
        context_mask, pack_mask: `[B, M]` and `[B, L]` bool, True = keep; None = all.
        dropout, return_weights, backend: as in `luna_pack`.
        cu_seqlens, max_seqlen: as in `luna_pack`; then queries and context are the same B sequences
            end to end: `query` `[1, total, H, K]`, context `[1, total, Hp, Kp]` and `context_mask` `[1, total]`.
        shard: as in `luna_pack`; each rank has a part of the queries too, and gets the output for it.

    Returns:
        (output `[B, T, H, K]`, packed context `[B, L, Hp, Kp]`); with `return_weights` (these, unpack weights `[B, H,
        T, L]`, pack weights `[B, Hp, L, M]`).

    Raises:
        ValueError: as in `luna_pack`.

    Example:
        >>> import torch
        >>> x, p = torch.randn(2, 100, 4, 16), torch.randn(2, 8, 4, 16)
        >>> output, packed = luna_attention(x, p, x, x, lambda packed: (packed, packed))
        >>> output.shape, packed.shape
        (torch.Size([2, 100, 4, 16]), torch.Size([2, 8, 4, 16]))
    """
    options = {"dropout": dropout, "return_weights": return_weights, "backend": backend}
    if cu_seqlens is not None:
        if query.shape[:2] != pack_key.shape[:2]:
            raise ValueError(
                "luna_attention with cu_seqlens needs queries and context of one total length, got "
                f"{list(query.shape)} and {list(pack_key.shape)}"
            )
        if max_seqlen is None:
            max_seqlen = ragged.check("luna_attention", cu_seqlens, None, query.shape[1])
        options |= {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
    packed = luna_pack(pack_query, pack_key, pack_value, context_mask, **options, shard=shard)
    if return_weights:
        packed, pack_weights = packed
    output = luna_unpack(query, *project(packed), pack_mask, **options)
    return (output[0], packed, output[1], pack_weights) if return_weights else (output, packed)


def _attend(op, query, key, value, mask, dropout, return_weights, backend, cu_seqlens, max_seqlen, shard=None):
    op.refuse_beside(shard, return_weights=return_weights, cu_seqlens=cu_seqlens)
    _check(op, query, key, value, mask, dropout, cu_seqlens)
    if cu_seqlens is not None:
        total = (query if op is UNPACK else key).shape[1]
        max_seqlen = ragged.check(op.name, cu_seqlens, max_seqlen, total)
    scale = query.shape[-1] ** -0.5
    call = {"query": query, "key": key, "value": value, "mask": mask, "scale": scale, "dropout": dropout}
    return op(backend, call, cu_seqlens, max_seqlen, return_weights, shard)


def _sdpa_is_best(query, key, value, mask) -> bool:
    """Return whether PyTorch's flash kernels on a GPU read and write no more than they must, with and without dropout.

    They take no mask, fill their tiles from 128 queries on, and load keys and values apart. This costs time where keys
    and values are one tensor and most of the bytes; few keys (unpack) stay on the chip. Their backward pass adds
    atomically, so they are not chosen where deterministic algorithms are asked for.
    """
    if torch.are_deterministic_algorithms_enabled():
        return False
    if query.device.type != "cuda" or mask is not None or query.dtype == torch.float32 or query.shape[-1] % 8:
        return False
    queries, keys = query.shape[1], key.shape[1]
    return keys <= max(queries, 256) or (key is not value and queries >= 128)


def _check(op, query, key, value, mask, dropout, cu_seqlens):
    op, ragged = op.name, op.tokens[0]
    if query.dim() != 4 or key.dim() != 4:
        raise ValueError(
            f"{op} needs [batch, length, heads, head size] tensors, got {list(query.shape)} and {list(key.shape)}"
        )
    if key.shape != value.shape or query.shape[2:] != key.shape[2:]:
        raise ValueError(
            f"{op}: query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} must agree in heads "
            "and head size, key and value in all"
        )
    if cu_seqlens is None:
        if query.shape[0] != key.shape[0]:  # len() would fix the batch size of an exported program
            raise ValueError(f"{op}: query {list(query.shape)} and key {list(key.shape)} differ in batch size")
    else:
        flat, other = (query, key) if ragged == "query" else (key, query)
        if len(flat) != 1 or len(other) != cu_seqlens.numel() - 1:
            raise ValueError(
                f"{op} with cu_seqlens {list(cu_seqlens.shape)} needs {ragged} [1, total, heads, head size] and "
                f"{cu_seqlens.numel() - 1} rows in the other batch, got {list(flat.shape)} and {list(other.shape)}"
            )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"{op}: dtypes differ: query {query.dtype}, key {key.dtype}, value {value.dtype}")
    check_mask(op, mask, key.shape[:2])
    check_dropout(op, dropout)
