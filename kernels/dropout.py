"""Dropout on a CPU from 16 random bits an entry, drawn 64 at a time: about five times as fast as PyTorch's there."""

import torch
from torch import nn

from luna_mega.kernels._export import in_program

# Below this number of entries PyTorch's one call is faster than these five.
FEW = 4096


def dropout_factors(like: torch.Tensor, probability: float, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return 0 with a probability, else the factor that keeps the mean, shaped like a floating tensor.

    On a CPU the probability is rounded to a multiple of 2^-16, which changes it by less than 1 in 1,000, or is not
    rounded where that would change it by more.
    """
    kept = round((1.0 - probability) * 2**16)
    few = like.numel() < FEW or min(kept, 2**16 - kept) < 2**9
    if few or like.device.type != "cpu" or type(like) not in (torch.Tensor, nn.Parameter) or in_program():
        return torch.empty_like(like).bernoulli_(1.0 - probability, generator=generator).div_(1.0 - probability)
    words = torch.empty(-(-like.numel() // 4), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    bits = words.view(torch.int16)[: like.numel()].view(like.shape)
    return torch.lt(bits, kept - 2**15, out=like.new_empty(like.shape)).mul_(2**16 / kept)


def dropout(x: torch.Tensor, probability: float, training: bool = True) -> torch.Tensor:
    """Return `torch.nn.functional.dropout`, on a CPU with `dropout_factors` of many entries."""
    if not training:
        return x
    if probability in (0.0, 1.0) or x.numel() < FEW or x.device.type != "cpu" or in_program():
        return nn.functional.dropout(x, probability)
    return x * dropout_factors(x, probability)


class Dropout(nn.Dropout):
    """`torch.nn.Dropout`, faster on a CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dropout(x, self.p, self.training)
