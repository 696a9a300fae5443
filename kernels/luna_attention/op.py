"""Luna attention: `luna_pack`, `luna_unpack`, and both with a projection between them, `luna_attention`."""

from collections.abc import Callable

import torch

from luna_mega.kernels import _dispatch
from luna_mega.kernels.luna_attention import reference, torch_backend

BACKENDS: dict[str, Callable[..., torch.Tensor]] = {
    "reference": lambda *args: reference.attend(*args)[0],
    "torch": torch_backend.attend,
}


def luna_pack(
    pack_query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    dropout: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Pack a context of any length into L rows: softmax(P K^T / sqrt(K)) V per head (Luna eq. 3).

    Args:
        pack_query: projected P, `[B, L, H, K]`.
        key, value: projected context, `[B, M, H, K]`; the same tensor twice where key and value are tied.
        mask: `[B, M]` bool, True = a context position that may be attended to; None = all.
        dropout: probability with which a weight is dropped (the caller passes 0 in evaluation).
        backend: one of `"auto"`, `"reference"`, `"torch"`; None = as `luna_mega.kernels.api.use_backend` and
            `LUNA_MEGA_BACKEND` say.

    Returns:
        `[B, L, H, K]` in the dtype of `pack_query`. The softmax is computed in float32. A row whose context is masked
        throughout is 0, with gradient 0.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or the backend does not exist.
    """
    return _attend("luna_pack", pack_query, key, value, mask, dropout, backend)


def luna_unpack(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    dropout: float = 0.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Unpack for every query: softmax(Q K^T / sqrt(K)) V over the L packed rows (Luna eq. 4).

    Arguments, result and errors as `luna_pack`, with `query` `[B, T, H, K]`, `key` and `value` `[B, L, H, K]`, `mask`
    `[B, L]`.
    """
    return _attend("luna_unpack", query, key, value, mask, dropout, backend)


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
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Linear unified nested attention (Luna section 3.1): pack the context, project what was packed, unpack.

    Args:
        query: `[B, T, H, K]`.
        pack_query: `[B, L, Hp, Kp]`; pack and unpack may have different numbers of heads.
        pack_key, pack_value: `[B, M, Hp, Kp]`, the context.
        project: maps the packed context `[B, L, Hp, Kp]` to unpack key and value, `[B, L, H, K]` each.
        context_mask, pack_mask: `[B, M]` and `[B, L]` bool, True = keep; None = all.
        dropout, backend: as in `luna_pack`.

    Returns:
        (output `[B, T, H, K]`, packed context `[B, L, Hp, Kp]`).

    Raises:
        ValueError: as `luna_pack`.

    Example:
        >>> import torch
        >>> x, p = torch.randn(2, 100, 4, 16), torch.randn(2, 8, 4, 16)
        >>> output, packed = luna_attention(x, p, x, x, lambda packed: (packed, packed))
        >>> output.shape, packed.shape
        (torch.Size([2, 100, 4, 16]), torch.Size([2, 8, 4, 16]))
    """
    packed = luna_pack(pack_query, pack_key, pack_value, context_mask, dropout=dropout, backend=backend)
    key, value = project(packed)
    return luna_unpack(query, key, value, pack_mask, dropout=dropout, backend=backend), packed


def _attend(op, query, key, value, mask, dropout, backend):
    _check(op, query, key, value, mask, dropout)
    return BACKENDS[_dispatch.select(op, BACKENDS, backend)](query, key, value, mask, query.shape[-1] ** -0.5, dropout)


def _check(op, query, key, value, mask, dropout):
    if query.dim() != 4 or key.dim() != 4:
        raise ValueError(
            f"{op} needs [batch, length, heads, head size] tensors, got {list(query.shape)} and {list(key.shape)}"
        )
    if key.shape != value.shape or query.shape[::2] != key.shape[::2] or query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"{op}: query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} must agree in all "
            "but the length, key and value in that as well"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"{op}: dtypes differ: query {query.dtype}, key {key.dtype}, value {value.dtype}")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != key.shape[:2]):
        raise ValueError(
            f"{op} needs a bool mask of shape {list(key.shape[:2])} (True = keep), got {mask.dtype} {list(mask.shape)}"
        )
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"{op}: dropout must be in [0, 1), got {dropout}")
