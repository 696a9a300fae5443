"""Batch norms of Mega, whose statistics exclude padding."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from luna_mega.kernels.for_models import upcast
from luna_mega.modeling_common.processes import all_reduce_sum, are_joined


class MegaBatchNorm(nn.BatchNorm1d):
    """Batch norm of the features of `[B, T, D]`, with statistics in float32 (float64 for float64 inputs).

    The statistics of a training step include only the positions that `mask` `[B, T]` (True = keep) keeps. With
    `padded_statistics` they include all positions, as in the original, and with `synchronized` the batches of all
    processes of the default group, if there is one. A batch without a kept position does not change the running
    statistics.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor
    num_batches_tracked: torch.Tensor
    momentum: float | None  # None = the mean over all batches

    def __init__(self, width: int, eps: float, affine: bool, padded_statistics: bool, synchronized: bool = False):
        super().__init__(width, eps=eps, affine=affine)
        self.padded_statistics, self.synchronized = padded_statistics, synchronized
        self.running_mean, self.running_var = (upcast(x) for x in (self.running_mean, self.running_var))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Convert the module, but keep running statistics in float32: half precision would round small updates away."""
        statistics = self.running_mean, self.running_var
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if torch.finfo(self.running_mean.dtype).bits < 32:
            self.running_mean, self.running_var = (x.to(self.running_mean.device) for x in statistics)
        return self

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        values = upcast(x)
        mean, variance = self.running_mean, self.running_var
        if self.training:
            # Gradient checkpointing repeats the step in the backward pass, which must not update the statistics again.
            counts = torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1
            mask = None if self.padded_statistics else mask
            fits_pytorch = values.dtype == mean.dtype and x.shape[:2].numel() > 1 and not torch.compiler.is_compiling()
            if mask is None and fits_pytorch and not self._is_shared():
                return self._normalize_at_once(values, counts).to(x.dtype)
            mean, variance, count = self._batch_statistics(values, mask)
            if counts:
                self._update(mean, variance, count)
        normed = (values - mean) * torch.rsqrt(variance + self.eps)
        if self.affine:
            normed = normed * self.weight + self.bias
        return normed.to(x.dtype)

    def _normalize_at_once(self, x: torch.Tensor, counts: bool) -> torch.Tensor:
        """Normalize with PyTorch's batch norm, which is one call instead of twenty."""
        weight, bias = (upcast(self.weight), upcast(self.bias)) if self.affine else (None, None)
        flat = x.flatten(0, 1)
        # Without the running statistics: autograd would save them, and a later update would be an error.
        output, mean, scale = torch.native_batch_norm(flat, weight, bias, None, None, True, 0.0, self.eps)
        if counts:
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                unbiased = (scale.pow(-2) - self.eps).mul_(len(flat) / (len(flat) - 1))
                self.running_mean.lerp_(mean, self._rate())
                self.running_var.lerp_(unbiased, self._rate())
        return output.view(x.shape)

    def _batch_statistics(
        self, x: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = x.flatten(0, 1)
        keep = x.new_ones(x.shape[0], 1) if mask is None else mask.reshape(-1, 1).to(x.dtype)
        totals = self._total(torch.cat(((x * keep).sum(dim=0), keep.sum(dim=0))))
        sums, count = totals[:-1], totals[-1:]
        some = count.clamp(min=1.0)
        mean = sums / some
        return mean, self._total(((x - mean).square() * keep).sum(dim=0)) / some, count

    @torch.no_grad()
    def _update(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        self.num_batches_tracked.add_((count[0] > 0).long())
        rate = (self._rate() * (count > 0).to(mean.dtype)).nan_to_num(0.0)
        unbiased = variance * count / (count - 1.0).clamp(min=1.0)
        self.running_mean.add_(rate * (mean - self.running_mean))
        self.running_var.add_(rate * (unbiased - self.running_var))

    def _rate(self) -> Any:
        """Return the weight of the last batch in the running statistics."""
        return 1.0 / self.num_batches_tracked.to(self.running_mean.dtype) if self.momentum is None else self.momentum

    def _is_shared(self) -> bool:
        return self.synchronized and are_joined()

    def _total(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the sums over all processes that share the statistics."""
        return all_reduce_sum(sums) if self._is_shared() else sums
