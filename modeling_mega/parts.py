"""What the sub-layers of a Mega block share: norm, dropout, relative bias, and where sequences begin."""

import torch
from torch import nn

from luna_mega.kernels.varlen import Sequences, locate
from luna_mega.modeling_mega.configuration_mega import MegaConfig
from luna_mega.modeling_mega.norms import build_norm
from luna_mega.modeling_mega.position import MegaRotaryRelativeBias, MegaSimpleRelativeBias


class MegaSequenceNorm(nn.Module):
    """The norm that `config.normalization_type` names, for `[B, T, d]`; `mask` keeps padding out of its statistics."""

    def __init__(self, config: MegaConfig, affine: bool):
        super().__init__()
        self.norm = build_norm(
            config.normalization_type,
            config.hidden_size,
            affine=affine,
            padded_statistics=config.padded_batch_statistics,
            legacy_rms_norm=config.legacy_rms_norm,
        )

    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor | Sequences | None) -> torch.Tensor:
        return self.norm(hidden_states, None if isinstance(mask, Sequences) else mask)


class MegaDropout(nn.Module):
    """Dropout of `[B, T, d]`, of single entries or (feature dropout) of a channel at all positions of a sequence."""

    def __init__(self, probability: float, features: bool):
        super().__init__()
        self.probability, self.features = probability, features

    def forward(self, states: torch.Tensor, mask: torch.Tensor | Sequences | None = None) -> torch.Tensor:
        if self.features and self.training and isinstance(mask, Sequences):
            _, length, width = states.shape
            factors = nn.functional.dropout(states.new_ones(len(mask.cu_seqlens) - 1, width), self.probability)
            return states * factors[locate(mask.cu_seqlens, length)[0]]
        if self.features:
            return nn.functional.dropout1d(states.transpose(1, 2), self.probability, self.training).transpose(1, 2)
        return nn.functional.dropout(states, self.probability, self.training)


def build_relative_bias(config: MegaConfig, positions: int) -> nn.Module:
    """The relative bias that `config` names; a table of it serves `positions`."""
    if config.relative_positional_bias == "simple":
        return MegaSimpleRelativeBias(positions)
    return MegaRotaryRelativeBias(config.shared_representation_size)


def relative_bias(config: MegaConfig, module: nn.Module, positions: int) -> torch.Tensor:
    """The bias of `positions` positions, a vector `[2 positions - 1]` over their differences."""
    if config.relative_positional_bias == "simple" and config.legacy_bias_table:
        return module(positions, centre=config.chunk_size - 1)
    return module(positions)


def first_position(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return the position of the first column of `[B, T]` in its sequence, `[B]`: below 0 where padding comes first."""
    return None if mask is None else -mask.int().argmax(dim=1)
