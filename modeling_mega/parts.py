"""The parts that the sub-layers of a Mega block share: norm, dropout and relative bias."""

import torch
from torch import nn

from luna_mega.kernels.context_parallel import first_ranks
from luna_mega.kernels.dropout import dropout
from luna_mega.modeling_common.layout import DENSE, TokenLayout
from luna_mega.modeling_common.patches import interpolate_raster_bias
from luna_mega.modeling_mega.configuration_mega import MegaConfig
from luna_mega.modeling_mega.norms import MegaBatchNorm, build_norm
from luna_mega.modeling_mega.position import MegaRotaryRelativeBias, MegaSimpleRelativeBias


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
        statistics = (layout.mask, layout.shard) if isinstance(self.norm, MegaBatchNorm) else ()
        return self.norm(hidden_states, *statistics)


class MegaDropout(nn.Module):
    """Dropout of `[B, T, d]`, of single entries or (feature dropout) of a channel at all positions of a sequence."""

    def __init__(self, probability: float, features: bool):
        super().__init__()
        self.probability, self.features = probability, features

    def forward(self, states: torch.Tensor, layout: TokenLayout = DENSE) -> torch.Tensor:
        if not self.training:
            return states
        if self.features and layout.is_ragged():
            _, length, width = states.shape
            factors = nn.functional.dropout(states.new_ones(layout.sizes(states)[0], width), self.probability)
            return states * factors[layout.locate(length)[0]]
        if self.features and layout.shard is not None and self.probability > 0.0:
            factors = nn.functional.dropout(states.new_ones(states.shape[0], 1, states.shape[2]), self.probability)
            return states * first_ranks(factors, layout.shard)  # every part of a sequence loses the same channels
        if self.features:
            return nn.functional.dropout1d(states.transpose(1, 2), self.probability).transpose(1, 2)
        return dropout(states, self.probability)


class MegaDropPath(nn.Module):
    """Stochastic depth: leaves out what a sub-layer has made of a whole sequence, with a probability."""

    def __init__(self, probability: float):
        super().__init__()
        self.probability = probability

    def forward(self, states: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
        if not self.training or self.probability == 0.0:
            return states
        factors = self.draw(states, layout.sizes(states)[0])
        if layout.is_ragged():
            return states * factors[layout.locate(states.shape[1])[0]]
        return states * factors[:, None]

    def draw(self, states: torch.Tensor, sequences: int) -> torch.Tensor:
        """Return a factor for each sequence, `[sequences, 1]`: 0, or what keeps the mean."""
        return nn.functional.dropout(states.new_ones(sequences, 1), self.probability)


def build_relative_bias(config: MegaConfig, positions: int) -> nn.Module:
    """Return the module of the relative bias that `config` names; a table serves `positions`."""
    if config.relative_positional_bias == "simple":
        return MegaSimpleRelativeBias(positions)
    return MegaRotaryRelativeBias(config.shared_representation_size)


def relative_bias(
    config: MegaConfig, module: nn.Module, positions: int, grid: tuple[int, int] | None = None
) -> torch.Tensor:
    """Return the bias of `positions` positions, a vector `[2 positions - 1]` over their differences.

    `grid`: rows and columns of patches for which a table of other pictures is interpolated.
    """
    if grid is not None and config.relative_positional_bias == "simple":
        return interpolate_raster_bias(module(config.max_positions), grid)
    if config.relative_positional_bias == "simple" and config.legacy_bias_table:
        return module(positions, centre=config.chunk_size - 1)
    return module(positions)


def check_tied_widths(config: MegaConfig):
    """Refuse an output layer that is tied to word vectors of another width."""
    if config.tie_word_embeddings and config.embedding_size != config.hidden_size:
        raise ValueError(
            f"tie_word_embeddings=True needs embedding_size={config.hidden_size}, the hidden_size, got "
            f"{config.embedding_size}; or pass tie_word_embeddings=False"
        )
