"""Dropout on the CPU with 16 random bits per entry, drawn 64 at a time: about five times as fast as PyTorch's."""

import torch
from torch import Tensor, nn

from ._mode import COMPILED, forbid_capture, mode

# For fewer entries, PyTorch's single call is faster than these five.
FEW = 4096


def host_seed(x: Tensor, probability: float) -> Tensor | None:
    """Return a seed on the host, from which the backward pass in PyTorch draws again; None without dropout."""
    if probability == 0.0:
        return None
    forbid_capture(
        x, "dropout of attention weights in PyTorch, whose seed is on the host", "choose the backend 'triton'"
    )
    return torch.randint(2**63 - 1, (), device="cpu")


def dropout_factors(like: Tensor, probability: float, generator: torch.Generator | None = None) -> Tensor:
    """Return factors shaped like a floating-point tensor: 0 with this probability, else 1 / (1 - probability).

    On CPU the probability is rounded to a multiple of 2^-16, unless this would change it by 1 part in 1,000 or more.
    """
    kept = round((1.0 - probability) * 2**16)
    few = like.numel() < FEW or min(kept, 2**16 - kept) < 2**9
    if few or like.device.type != "cpu" or type(like) not in (Tensor, nn.Parameter) or mode() >= COMPILED:
        return torch.empty_like(like).bernoulli_(1.0 - probability, generator=generator).div_(1.0 - probability)
    words = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    words.random_(-(2**63), None, generator=generator)
    bits = words.view(torch.int16)[: like.numel()].view(like.shape)
    return torch.lt(bits, kept - 2**15, out=like.new_empty(like.shape)).mul_(2**16 / kept)


def dropout(x: Tensor, probability: float) -> Tensor:
    """Return `torch.nn.functional.dropout`, computed with `dropout_factors` for large tensors on CPU."""
    if probability in (0.0, 1.0) or x.numel() < FEW or x.device.type != "cpu" or mode() >= COMPILED:
        return nn.functional.dropout(x, probability)
    return x * dropout_factors(x, probability)


class Dropout(nn.Dropout):
    """`torch.nn.Dropout`, faster on CPU; also the dropout that an operator draws, with the probability `rate`."""

    @property
    def rate(self) -> float:
        """The probability that applies now: 0 in evaluation."""
        return self.p if self.training else 0.0

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p) if self.training else x
