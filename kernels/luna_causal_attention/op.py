"""Luna's causal attention for a sequence or segment, and for one token (`luna_causal_attention_step`)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._dispatch import Arguments, Op
from ..checks import check_dropout, check_mask
from ..sequences import Sequences, check_cu_seqlens, in_rows
from . import reference, torch_backend
from .reference import LunaCausalState


def _triton(name: str, **call: Any) -> tuple[Tensor, LunaCausalState]:
    # Imported lazily because Triton decides at import time whether kernels are interpreted.
    from . import triton_ops

    return getattr(triton_ops, name)(**call)


def _unsupported(query: Tensor, pack_query: Tensor, value: Tensor, **_: object) -> str | None:
    if query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the kernels support float32, float16 and bfloat16, not {query.dtype}"
    if max(query.shape[-1], value.shape[-1]) > 128:
        return f"the kernels support head sizes up to 128, not {query.shape[-1]} (query) and {value.shape[-1]} (value)"
    most = 128 if query.dtype == torch.float32 else 256  # more rows do not fit the registers
    if pack_query.shape[1] > most:
        return f"the kernels support up to {most} rows of pack_query in {query.dtype}, not {pack_query.shape[1]}"
    return None


def _in_rows(run: Callable[..., Any]) -> Callable[..., Any]:
    return in_rows(run, "query", "pack_key", "key", "value")


ATTEND = Op(
    "luna_causal_attention",
    {
        "reference": _in_rows(reference.attend),
        "torch": _in_rows(torch_backend.attend),
        "triton": _in_rows(partial(_triton, "attend")),
    },
    _unsupported,
    with_weights=in_rows(reference.attend_with_weights),
)
STEP = Op(
    "luna_causal_attention_step",
    {
        "reference": lambda inplace, **call: reference.step(**call),
        "torch": torch_backend.step,
        "triton": partial(_triton, "step"),
    },
    _unsupported,
)


def luna_causal_attention(
    query: Tensor,
    pack_query: Tensor,
    pack_key: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    pack_mask: Tensor | None = None,
    activation: str = "softplus",
    state: LunaCausalState | None = None,
    return_state: bool = False,
    return_weights: bool = False,
    dropout: float = 0.0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Any, ...]:
    """Compute causal linear unified nested attention (Luna section 3.3), with time and memory linear in T.

    With z = K^-1/2 and the pack weights a_t = act(z pack_query pack_key_t), every token t attends to the L rows of P,
    into which the tokens up to t have been packed:

        w_t = softmax(z query_t (1/t) sum_{j<=t} key_j^T a_j)        y_t = w_t (1/t) sum_{j<=t} a_j^T value_j

    t counts the unmasked tokens of a row, so padding on either side does not affect the results.

    Args:
        query: `[B, T, H, K]`, T at least 1, not scaled yet.
        pack_query: projected P, `[B, L, H, K]`, the same for every token.
        pack_key: `[B, T, H, K]`.
        key: `[B, T, H, K]`; may be the same tensor as value.
        value: `[B, T, H, V]`.
        mask: `[B, T]` bool, True = keep; None = all. Masked tokens do not affect the results of others, even if
            they are NaN; gradients require finite tokens. The output at a masked position is the attention of its query
            to the tokens before it.
        pack_mask: `[B, L]` bool, True = a row of P that is in use; None = all.
        activation: `"softplus"`: log2(1 + 2^s), or `"elu"`: elu(s) + 1.
        state: state returned by an earlier call, from which this call continues; None = start of the sequence.
        return_state: also return the state after the last token.
        return_weights: also return the unpack weights w `[B, H, T, L]`. The reference computes them on every backend,
            with T times the memory of the state. Not supported with `cu_seqlens`.
        dropout: dropout probability of pack and unpack weights (pass 0 in evaluation); both sums use the same pack
            weights.
        cu_seqlens: `[S + 1]` int32 or int64, ascending from 0 to T, for S varlen sequences with B = 1. Sequences do not
            attend to each other. pack_query, pack_mask and state have one row per sequence, `[S, ...]`.
        max_seqlen: upper bound of the sequence lengths; None = computed, which synchronizes the device.
        backend: as in `luna_pack`.

    Returns:
        `[B, T, H, V]` in the dtype of the inputs, or a tuple with the weights and the state, if requested. The state
        and intermediate values are float32 (float64 for float64 inputs), also under autocast. Gradients flow through
        both states. The output is 0, with gradient 0, for tokens without any kept token so far and for rows with all of
        P masked. Without a state, call `backward()` of a few tokens outside of autocast, as for `gated_attention_step`.

    Raises:
        ValueError: if shapes, dtypes or options do not match, or the backend does not exist or does not support them.
            The Triton kernels support float32, float16 and bfloat16, K and V up to 128, and L up to 256 (128 in
            float32).

    Example:
        >>> import torch
        >>> x, p = torch.randn(2, 100, 4, 16), torch.randn(2, 8, 4, 16)
        >>> first, state = luna_causal_attention(x[:, :60], p, *[x[:, :60]] * 3, return_state=True)
        >>> second = luna_causal_attention(x[:, 60:], p, *[x[:, 60:]] * 3, state=state)
        >>> torch.allclose(torch.cat([first, second], 1), luna_causal_attention(x, p, x, x, x), atol=1e-5)
        True
    """
    if query.dim() != 4 or query.shape[1] == 0:
        raise ValueError(
            f"{ATTEND.name} needs query [batch, length, heads, size] of length 1 or more, got {list(query.shape)}"
        )
    batch = query.shape[0]
    if cu_seqlens is not None:
        shapes = [list(x.shape[:2]) for x in (query, pack_key, key, value, mask) if x is not None]
        if any(shape != [1, query.shape[1]] for shape in shapes):
            raise ValueError(
                f"{ATTEND.name} with cu_seqlens needs tokens and mask [1, {query.shape[1]}, ...], got "
                f"{', '.join(map(str, shapes))}"
            )
        max_seqlen = check_cu_seqlens(ATTEND.name, cu_seqlens, max_seqlen, query.shape[1])
        batch = cu_seqlens.numel() - 1
    call: Arguments = {"query": query, "pack_query": pack_query, "pack_key": pack_key, "key": key, "value": value}
    call |= {"pack_mask": pack_mask, "activation": activation, "state": state, "dropout": dropout}
    _check(ATTEND.name, batch, mask=mask, **call)
    *result, state = ATTEND(backend, call | {"sequences": Sequences(mask, cu_seqlens, max_seqlen)}, return_weights)
    result = (*result, state) if return_state else tuple(result)
    return result if len(result) > 1 else result[0]


def luna_causal_attention_step(
    query: Tensor,
    pack_query: Tensor,
    pack_key: Tensor,
    key: Tensor,
    value: Tensor,
    state: LunaCausalState | None,
    *,
    mask: Tensor | None = None,
    pack_mask: Tensor | None = None,
    activation: str = "softplus",
    dropout: float = 0.0,
    inplace: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, LunaCausalState]:
    """Apply `luna_causal_attention` to one further token; return y `[B, H, V]` and the next state.

    Arguments and errors match `luna_causal_attention` without the dimension T: query, pack_key and key are `[B,
    H, K]`, value is `[B, H, V]`, mask is `[B]`. The given state is not modified unless `inplace` is set. `inplace`
    overwrites it with the next state, which avoids an allocation. It requires that no gradient is computed and that
    nothing else uses the tensors of the state. Call `backward()` outside of autocast, as for `gated_attention_step`.
    """
    if query.dim() != 3:
        raise ValueError(f"{STEP.name} needs query [batch, heads, size], got {list(query.shape)}")
    call: Arguments = {"query": query, "pack_query": pack_query, "pack_key": pack_key, "key": key, "value": value}
    call |= {"mask": mask, "pack_mask": pack_mask, "activation": activation, "state": state, "dropout": dropout}
    _check(STEP.name, query.shape[0], **call)
    if inplace and (state is None or torch.is_grad_enabled()):
        raise ValueError(f"{STEP.name} with inplace needs a state, and torch.no_grad()")
    output, following = STEP(backend, call | {"inplace": inplace})
    if state is not None and inplace:
        for before, after in zip(state, following, strict=True):
            if before is not after:
                before.copy_(after)
        following = state
    return output, following


def _check(
    op: str, batch: int, query: Tensor, pack_query: Tensor, pack_key: Tensor, key: Tensor, value: Tensor,
    mask: Tensor | None, pack_mask: Tensor | None, activation: str, state: LunaCausalState | None, dropout: float,
) -> None:  # fmt: skip
    heads, size = query.shape[-2:]
    if pack_key.shape != query.shape or key.shape != query.shape or value.shape[:-1] != query.shape[:-1]:
        raise ValueError(
            f"{op}: query {list(query.shape)}, pack_key {list(pack_key.shape)} and key {list(key.shape)} must have the "
            f"same shape, and value {list(value.shape)} must match it except in the last dimension"
        )
    packed_rows = pack_query.shape[1] if pack_query.dim() == 4 else 0
    if packed_rows == 0 or list(pack_query.shape) != [batch, packed_rows, heads, size]:
        raise ValueError(
            f"{op} needs pack_query [{batch}, rows, {heads}, {size}] with 1 row or more, got {list(pack_query.shape)}"
        )
    same = query.dtype == pack_query.dtype == pack_key.dtype == key.dtype == value.dtype
    if not same or not query.is_floating_point():
        dtypes = ", ".join(str(x.dtype) for x in (query, pack_query, pack_key, key, value))
        raise ValueError(f"{op} needs floating-point tensors of the same dtype, got {dtypes}")
    check_mask(op, mask, key.shape[:-2])
    check_mask(op, pack_mask, pack_query.shape[:2], "pack_mask")
    if activation not in reference.ACTIVATIONS:
        raise ValueError(f"{op} has no activation {activation!r}; choose one of {', '.join(reference.ACTIVATIONS)}")
    check_dropout(op, dropout)
    if state is None:
        return
    key_mean, value_mean, count = state
    shapes = ((batch, heads, size, packed_rows), (batch, heads, packed_rows, value.shape[-1]), (batch,))
    if (key_mean.shape, value_mean.shape, count.shape) != shapes:
        got, needed = (dict(zip(state._fields, map(list, x), strict=True)) for x in ([x.shape for x in state], shapes))
        raise ValueError(f"{op}: a state of shapes {got} does not fit these inputs, which need {needed}")
    if count.dtype != torch.int64 or not {key_mean.dtype, value_mean.dtype} <= {torch.float32, torch.float64}:
        raise ValueError(
            f"{op} needs means of float32 or float64 and an int64 count in the state, got "
            f"{', '.join(str(x.dtype) for x in state)}"
        )
