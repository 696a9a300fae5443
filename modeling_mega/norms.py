"""The norms of Mega: `build_norm` makes the one that a configuration names."""

import torch
from torch import nn

from luna_mega.modeling_common.layout import TokenLayout
from luna_mega.modeling_common.processes import are_joined, sum_over_processes
from luna_mega.modeling_common.sequence_parts import WHOLE, Parts
from luna_mega.modeling_mega.configuration_mega import MegaConfig


class MegaLayerNorm(nn.LayerNorm):
    """Layer norm of `[B, T, D]`; every position by itself, so that the mask does not matter."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x)


class MegaScaleNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), times one learned number (`scalar`, `[1]`); the mask does not matter."""

    def __init__(self, width: int, eps: float, affine: bool):
        super().__init__()
        self.width, self.eps = width, eps
        self.scalar = nn.Parameter(torch.ones(1)) if affine else None

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        normed = nn.functional.rms_norm(x, (self.width,), eps=self.eps)
        return normed if self.scalar is None else (normed * self.scalar).to(x.dtype)


class MegaRMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) weight; the mask does not matter.

    `legacy`: x weight, which is all that the Mega of transformers v4 computes, and what its checkpoints expect.
    """

    def __init__(self, width: int, eps: float, affine: bool, legacy: bool):
        super().__init__(width, eps=eps, elementwise_affine=affine)
        self.legacy = legacy

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if not self.legacy:
            return super().forward(x)
        return x if self.weight is None else (x * self.weight).to(x.dtype)


def _widen(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class MegaBatchNorm(nn.BatchNorm1d):
    """Batch norm of the features of `[B, T, D]`, with statistics in float32 (float64 for float64 inputs).

    A training step takes its statistics from the positions that `mask` `[B, T]` (True = real) keeps, so that they do
    not depend on how much padding a batch has. `padded_statistics` counts all positions, as the original does. A
    batch without a real position leaves the running statistics as they are.
    """

    def __init__(self, width: int, eps: float, affine: bool, padded_statistics: bool):
        super().__init__(width, eps=eps, affine=affine)
        self.padded_statistics = padded_statistics
        self.running_mean, self.running_var = (_widen(x) for x in (self.running_mean, self.running_var))

    def _apply(self, fn, recurse=True):
        """Convert the module, but leave running statistics out of half precision, in which they would hardly move."""
        statistics = self.running_mean, self.running_var
        super()._apply(fn, recurse)
        if torch.finfo(self.running_mean.dtype).bits < 32:
            self.running_mean, self.running_var = (x.to(self.running_mean.device) for x in statistics)
        return self

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, parts: Parts = WHOLE) -> torch.Tensor:
        wide = _widen(x)
        mean, variance = self.running_mean, self.running_var
        if self.training:
            # Gradient checkpointing runs the step again inside the backward pass; it must not count twice.
            counts = torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1
            mask = None if self.padded_statistics else mask
            if mask is None and parts.is_whole() and not self._is_shared() and self._fits_pytorch(wide):
                return self._normalize_at_once(wide, counts).to(x.dtype)
            mean, variance, count = self._batch_statistics(wide, mask, parts)
            if counts:
                self._update(mean, variance, count)
        normed = (wide - mean) * torch.rsqrt(variance + self.eps)
        if self.affine:
            normed = normed * self.weight + self.bias
        return normed.to(x.dtype)

    def _fits_pytorch(self, x):
        """Return whether PyTorch's batch norm computes a training step of `x`, whose positions all count."""
        return not torch.compiler.is_compiling() and x.dtype == self.running_mean.dtype and x.shape[:2].numel() > 1

    def _normalize_at_once(self, x, counts):
        """Normalise by PyTorch's batch norm, one call in place of twenty."""
        affine = (_widen(self.weight), _widen(self.bias)) if self.affine else (None, None)
        flat, options = x.flatten(0, 1), (True, self.momentum, self.eps)
        # Without the running statistics, which the graph would save, so that nothing could change them before its end.
        output, mean, scale = torch.native_batch_norm(flat, *affine, None, None, *options)
        if counts:
            with torch.no_grad():
                unbiased = (scale.pow(-2) - self.eps).mul_(len(flat) / (len(flat) - 1))
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(unbiased, self.momentum)
                self.num_batches_tracked.add_(1)
        return output.view(x.shape)

    def _batch_statistics(self, x, mask, parts):
        x = x.flatten(0, 1)
        keep = x.new_ones(x.shape[0], 1) if mask is None else mask.reshape(-1, 1).to(x.dtype)
        sums, count = self._total(torch.cat(((x * keep).sum(dim=0), keep.sum(dim=0))), parts).split([x.shape[1], 1])
        some = count.clamp(min=1.0)
        mean = sums / some
        return mean, self._total(((x - mean).square() * keep).sum(dim=0), parts) / some, count

    @torch.no_grad()
    def _update(self, mean, variance, count):
        rate = self.momentum * (count > 0).to(mean.dtype)
        unbiased = variance * count / (count - 1.0).clamp(min=1.0)
        self.running_mean.add_(rate * (mean - self.running_mean))
        self.running_var.add_(rate * (unbiased - self.running_var))
        self.num_batches_tracked.add_(1)

    def _is_shared(self) -> bool:
        """Return whether all processes of the default group share the statistics."""
        return False

    def _total(self, sums: torch.Tensor, parts: Parts) -> torch.Tensor:
        """Return the sums over all processes that share the statistics."""
        return parts.total(sums)


class MegaSyncBatchNorm(MegaBatchNorm):
    """Batch norm over the batches of all processes of the default group; without a group `MegaBatchNorm`."""

    def _is_shared(self) -> bool:
        return are_joined()

    def _total(self, sums: torch.Tensor, parts: Parts) -> torch.Tensor:
        return sum_over_processes(sums) if self._is_shared() else sums


def build_norm(
    norm_type: str,
    width: int,
    affine: bool = True,
    eps: float = 1e-5,
    *,
    padded_statistics: bool = False,
    legacy_rms_norm: bool = False,
) -> nn.Module:
    """A norm over the last dimension, called with `[B, T, width]` and a mask `[B, T]` (True = real) or None.

    Args:
        norm_type: `"layernorm"`, `"scalenorm"`, `"rmsnorm"`, `"batchnorm"` or `"syncbatchnorm"`.
        width: number of features.
        affine: learned parameters.
        eps: added to the variance or the mean square.
        padded_statistics: the two batch norms count padding.
        legacy_rms_norm: `"rmsnorm"` does not normalise, see `MegaRMSNorm`.

    Raises:
        ValueError: unknown `norm_type`.
    """
    if norm_type == "layernorm":
        return MegaLayerNorm(width, eps=eps, elementwise_affine=affine)
    if norm_type == "scalenorm":
        return MegaScaleNorm(width, eps, affine)
    if norm_type == "rmsnorm":
        return MegaRMSNorm(width, eps, affine, legacy_rms_norm)
    if norm_type == "batchnorm":
        return MegaBatchNorm(width, eps, affine, padded_statistics)
    if norm_type == "syncbatchnorm":
        return MegaSyncBatchNorm(width, eps, affine, padded_statistics)
    raise ValueError(
        f"there is no norm {norm_type!r}; choose one of layernorm, scalenorm, rmsnorm, batchnorm, syncbatchnorm"
    )


class MegaSequenceNorm(nn.Module):
    """The norm that `config.normalization_type` names, for `[B, T, d]`; padding is not in its statistics."""

    def __init__(self, config: MegaConfig, affine: bool):
        super().__init__()
        self.norm = build_norm(
            config.normalization_type,
            config.hidden_size,
            affine=affine,
            padded_statistics=config.padded_batch_statistics,
            legacy_rms_norm=config.legacy_rms_norm,
        )

    def forward(self, hidden_states: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        statistics = (layout.mask, layout.parts) if isinstance(self.norm, MegaBatchNorm) else ()
        return self.norm(hidden_states, *statistics)
