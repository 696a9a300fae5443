"""Context-parallel pack attention.

Every rank packs its own shard and computes the log-sum-exp of its scores. The ranks exchange the maximum of these
values, then the sums of exponentials and of packed rows relative to that maximum. The communication volume is the size
of P for any length. A backward kernel that receives the result and the log-sum-exp of the complete context computes
exact gradients of a shard.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from luna_mega.kernels import _op
from luna_mega.kernels.context_parallel import ContextShard
from luna_mega.kernels.dropout import dropout_factors
from luna_mega.kernels.luna_attention import torch_backend
from luna_mega.kernels.upcast import upcast


class Kernels(NamedTuple):
    """The functions with which a backend packs a shard.

    Args:
        forward: returns the output and the log-sum-exp `[B, H, L]` for query, key, value, mask, scale, dropout, seed.
            If all positions of a sequence are masked, the log-sum-exp may be any value.
        backward: returns the gradients of query, key and value for the gradient of the output, the output, the
            log-sum-exp and the arguments of `forward`.
        exp: exponential in the base of the log-sum-exp.
        log: logarithm in the base of the log-sum-exp.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Sequence[Tensor | None]]
    exp: Callable[[Tensor], Tensor] = torch.exp
    log: Callable[[Tensor], Tensor] = torch.log


def attend(
    kernels: Callable[..., Kernels], shard: ContextShard, query: Tensor, key: Tensor, value: Tensor,
    mask: Tensor | None, scale: float, dropout: float,
) -> Tensor:  # fmt: skip
    """Return `reference.attend` for a sharded context, without the weights."""
    return _Pack.apply(query, key, value, mask, scale, dropout, shard, kernels(query, dropout))  # type: ignore[no-untyped-call]


class _Pack(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, dropout: float,
        shard: ContextShard, kernels: Kernels,
    ) -> Tensor:  # fmt: skip
        # The backward pass drops the same weights. Each rank uses its own seed because its positions differ.
        seed = torch.randint(2**63 - 1, (1,), device=query.device) if dropout > 0.0 else None
        output, log_sum_exp = kernels.forward(query, key, value, mask, scale, dropout, seed)
        if mask is not None:
            log_sum_exp = log_sum_exp.masked_fill(~mask.any(dim=1)[:, None, None], float("-inf"))
        largest = shard.all_reduce_max(log_sum_exp)
        largest = largest.masked_fill(largest == float("-inf"), 0.0)
        weight = kernels.exp(log_sum_exp - largest)[..., None].transpose(1, 2)
        total = shard.all_reduce_sum(torch.cat([output.to(weight.dtype) * weight, weight], dim=-1))
        output, weight = total[..., :-1], total[..., -1:]
        # If all positions on all ranks are masked, the sum and the output are 0.
        weight = weight.masked_fill(weight == 0.0, 1.0)
        output = (output / weight).to(query.dtype)
        log_sum_exp = largest + kernels.log(weight)[..., 0].transpose(1, 2)
        ctx.options = scale, dropout, shard, kernels
        ctx.save_for_backward(output, log_sum_exp, query, key, None if key is value else value, mask, seed)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        output, log_sum_exp, query, key, value, mask, seed = ctx.saved_tensors
        scale, dropout, shard, kernels = ctx.options
        value = key if value is None else value
        with torch.no_grad(), _op.without_autocast(grad_output.device.type):
            grad_output = shard.all_reduce_sum(grad_output)
            gradients = kernels.backward(
                grad_output, output, log_sum_exp, query, key, value, mask, scale, dropout, seed
            )
        return *gradients, None, None, None, None, None


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = upcast(torch.einsum("blhk,bmhk->bhlm", query * scale, key))
    return scores if mask is None else scores.masked_fill(~mask[:, None, None], float("-inf"))


def _kept(weights: Tensor, dropout: float, seed: Tensor | None) -> float | Tensor:
    """Return the factor of each weight: 0 or 1 / (1 - dropout)."""
    if dropout == 0.0:
        return 1.0
    assert seed is not None
    generator = torch.Generator(weights.device).manual_seed(int(seed))
    return dropout_factors(weights, dropout, generator)


def _step_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, dropout: float, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, mask, scale)
    log_sum_exp = scores.logsumexp(dim=-1)
    weights = (scores - log_sum_exp.masked_fill(log_sum_exp == float("-inf"), 0.0)[..., None]).exp()
    weights = (weights * _kept(weights, dropout, seed)).to(value.dtype)
    return torch.einsum("bhlm,bmhk->blhk", weights, value), log_sum_exp


def _step_backward(
    grad_output: Tensor, output: Tensor, log_sum_exp: Tensor, query: Tensor, key: Tensor, value: Tensor,
    mask: Tensor | None, scale: float, dropout: float, seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    weights = (_scores(query, key, mask, scale) - log_sum_exp[..., None]).exp()
    kept, dtype = _kept(weights, dropout, seed), weights.dtype
    grad_output = grad_output.to(dtype)
    grad_value = torch.einsum("bhlm,blhk->bmhk", weights * kept, grad_output)
    grad_weights = torch.einsum("blhk,bmhk->bhlm", grad_output, value.to(dtype)) * kept
    mean = (grad_output * output.to(dtype)).sum(dim=-1).transpose(1, 2)[..., None]
    grad_scores = weights * (grad_weights - mean) * scale
    grad_query = torch.einsum("bhlm,bmhk->blhk", grad_scores, key.to(dtype))
    grad_key = torch.einsum("bhlm,blhk->bmhk", grad_scores, query.to(dtype))
    return grad_query.to(query.dtype), grad_key.to(query.dtype), grad_value.to(query.dtype)


def _triton(query: Tensor, dropout: float) -> Kernels:
    # Imported lazily because Triton decides at import time whether kernels are interpreted.
    from luna_mega.kernels.luna_attention import triton_ops

    return Kernels(triton_ops.pack, triton_ops.pack_backward, torch.exp2, torch.log2)


def _step(query: Tensor, dropout: float) -> Kernels:
    return Kernels(_step_forward, _step_backward)


def _torch(query: Tensor, dropout: float) -> Kernels:
    if query.device.type != "cpu" or dropout > 0.0:
        return _step(query, dropout)
    # Without the last two arguments, `dropout` and `seed`.
    return Kernels(lambda *x: torch_backend.flash(*x[:-2]), lambda *x: torch_backend.flash_backward(*x[:-2]))


_KERNELS = {"reference": _step, "torch": _torch, "triton": _triton}
BACKENDS = {name: partial(attend, kernels) for name, kernels in _KERNELS.items()}
