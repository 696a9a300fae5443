"""The two ways in which a Mega block drops what a sub-layer has made: dropout and stochastic depth."""

import torch
from torch import nn

from luna_mega.kernels.dropout import dropout
from luna_mega.modeling_common.layout import DENSE, TokenLayout


class MegaDropout(nn.Module):
    """Dropout of `[B, T, d]`, of single entries or (feature dropout) of a channel at all positions of a sequence."""

    def __init__(self, probability: float, features: bool):
        super().__init__()
        self.probability, self.features = probability, features

    def forward(self, states: torch.Tensor, layout: TokenLayout = DENSE) -> torch.Tensor:
        if not self.training:
            return states
        if not self.features or self.probability == 0.0:
            return dropout(states, self.probability)
        if layout.is_ragged() or not layout.parts.is_whole():
            factors = states.new_ones(layout.sizes(states)[0], states.shape[2])
            return states * layout.spread(nn.functional.dropout(factors, self.probability), states.shape[1])
        return nn.functional.dropout1d(states.transpose(1, 2), self.probability).transpose(1, 2)


class MegaDropPath(nn.Module):
    """Stochastic depth: leaves out what a sub-layer has made of a whole sequence, with a probability."""

    def __init__(self, probability: float):
        super().__init__()
        self.probability = probability

    def forward(self, states: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        if not self.training or self.probability == 0.0:
            return states
        return states * layout.spread(self.draw(states, layout.sizes(states)[0]), states.shape[1])

    def draw(self, states: torch.Tensor, sequences: int) -> torch.Tensor:
        """Return a factor for each sequence, `[sequences, 1]`: 0, or what keeps the mean."""
        return nn.functional.dropout(states.new_ones(sequences, 1), self.probability)
