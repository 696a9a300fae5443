"""The dropout of hidden states."""

import torch
from torch import nn

from luna_mega.kernels.dropout import dropout


class Dropout(nn.Dropout):
    """`torch.nn.Dropout`, faster on a CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dropout(x, self.p, self.training)
