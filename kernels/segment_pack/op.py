"""Position-aware pack: `assign_rows` assigns the tokens of a sequence to rows, and `segment_pack` packs each row."""

from typing import Any

import torch
from torch import Tensor

from luna_mega.kernels import varlen
from luna_mega.kernels._dispatch import Op
from luna_mega.kernels._export import in_program
from luna_mega.kernels.checks import check_mask, count_sequences
from luna_mega.kernels.segment_pack import reference, torch_backend


def _triton(**call: Any) -> tuple[Tensor, Tensor, Tensor]:
    # Imported lazily because Triton decides at import time whether kernels are interpreted.
    from luna_mega.kernels.segment_pack import triton_ops

    return torch_backend.segment_pack(**call, run=triton_ops.pack)


def _unsupported(states: Tensor, **_: Any) -> str | None:
    return "states are float64" if states.dtype == torch.float64 else None


PACK = Op(
    "segment_pack",
    {"reference": reference.segment_pack, "torch": torch_backend.segment_pack, "triton": _triton},
    _unsupported,
    tokens=("states", "score", "row"),
    tokens_out=False,
    native=("torch", "triton"),
)


@torch.no_grad()
def assign_rows(
    score: Tensor,
    mask: Tensor | None,
    rows: int,
    *,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Assign every token to one of L rows, so that rows have consecutive tokens and equal shares of the weight.

    The weight of a token is the softmax of its score. A token costs `min(1, lambda * weight)`, with lambda so that the
    costs of a sequence sum to L (water filling). A token belongs to the row that contains the middle of its cost. A
    sequence of at most L tokens has one row per token, in order. If all scores are equal, rows are even stretches.

    Args:
        score: `[B, T]`. There is no gradient.
        mask: `[B, T]` bool, True = keep; None = all. Only kept tokens count, so padding and gaps have no effect.
        rows: L, the number of rows.
        cu_seqlens: `[S + 1]` int32 or int64, for S varlen sequences: `score` and `mask` are `[1, total]`.
        max_seqlen: length of the longest sequence; None = computed from `cu_seqlens`, which synchronizes the device.

    Returns:
        `[B, T]` int64, the row within the sequence. It does not decrease along a sequence; the values at masked
        positions have no meaning.

    Raises:
        ValueError: if shapes do not match or `rows` is not positive.
    """
    _check_tokens("assign_rows", score, mask, rows)
    if cu_seqlens is None:
        mask = torch.ones_like(score, dtype=torch.bool) if mask is None else mask
        return torch_backend.assign_rows(score, mask, rows)
    total = score.shape[1]
    if score.shape[0] != 1:
        raise ValueError(f"assign_rows needs score [1, total] with cu_seqlens, got {list(score.shape)}")
    max_seqlen = varlen.check_cu_seqlens("assign_rows", cu_seqlens, max_seqlen, total)
    kept = varlen.keep(cu_seqlens, max_seqlen) if mask is None else varlen.pad(mask, cu_seqlens, max_seqlen)
    row = torch_backend.assign_rows(varlen.pad(score, cu_seqlens, max_seqlen), kept, rows)
    return varlen.unpad(row, cu_seqlens, total)


def segment_pack(
    states: Tensor,
    score: Tensor,
    row: Tensor,
    mask: Tensor | None,
    rows: int,
    *,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pack the tokens of each row: their mean, weighted by the softmax of their scores, and the entropy of the weights.

    Attention that adds the entropy to the logit of a row is exact if the logits of its tokens differ only by the score:
    `logsumexp(score) = entropy + sum(weight * score)`.

    Args:
        states: `[B, T, D]`.
        score: `[B, T]`; a constant added to all scores of a row has no effect.
        row: `[B, T]` int64 from 0 to L - 1, as returned by `assign_rows`: it must not decrease along a sequence.
        mask: `[B, T]` bool, True = keep; None = all.
        rows: L, the number of rows.
        backend: as in `luna_pack`. Triton does not support float64.
        cu_seqlens: `[S + 1]` int32 or int64, for S varlen sequences: `states` is `[1, total, D]`, and `score`, `row`
            and `mask` are `[1, total]`. The results have S batch rows.
        max_seqlen: length of the longest sequence; None = computed from `cu_seqlens`, which synchronizes the device.

    Returns:
        (packed `[B, L, D]` in the dtype of `states`, entropy `[B, L]`, filled `[B, L]` bool). Scores, sums and entropy
        are float32, or float64 if `states` are. A row without tokens is 0, with entropy 0, and not filled.

    Raises:
        ValueError: if shapes do not match, or the backend does not exist or does not support the call.

    Example:
        >>> import torch
        >>> states, score = torch.randn(2, 100, 16), torch.randn(2, 100)
        >>> row = assign_rows(score, None, 8)
        >>> packed, entropy, filled = segment_pack(states, score, row, None, 8)
        >>> packed.shape, entropy.shape, bool(filled.all())
        (torch.Size([2, 8, 16]), torch.Size([2, 8]), True)
    """
    if states.dim() != 3 or states.shape[:2] != score.shape or row.shape != score.shape or row.dtype != torch.int64:
        raise ValueError(
            "segment_pack needs states [batch, length, features], and score and int64 row [batch, length], got "
            f"{list(states.shape)}, {list(score.shape)} and {row.dtype} {list(row.shape)}"
        )
    _check_tokens("segment_pack", score, mask, rows)
    if row.device.type == "cpu" and not in_program() and row.numel():
        first, last = (int(x) for x in row.aminmax())
        if first < 0 or last >= rows:
            raise ValueError(f"segment_pack: row must be from 0 to {rows - 1}, got {first} to {last}")
    _, max_seqlen = count_sequences("segment_pack", states, cu_seqlens, max_seqlen, "features")
    call = {"states": states, "score": score, "row": row, "mask": mask, "rows": rows}
    packed, entropy, filled = PACK(backend, call, cu_seqlens, max_seqlen)
    return packed, entropy, filled


def _check_tokens(op: str, score: Tensor, mask: Tensor | None, rows: int) -> None:
    if score.dim() != 2:
        raise ValueError(f"{op} needs score [batch, length], got {list(score.shape)}")
    if rows < 1:
        raise ValueError(f"{op}: rows must be positive, got {rows}")
    check_mask(op, mask, score.shape)
