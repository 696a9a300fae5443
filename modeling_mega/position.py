"""Mega's relative position biases (section 3.2): a vector over the distance from the query to the key."""

import math

import torch
from torch import nn

from luna_mega.modeling_common.patches import interpolate_raster_bias
from luna_mega.modeling_mega.configuration_mega import MegaConfig


class MegaSimpleRelativeBias(nn.Module):
    """A table with one number per distance, `[2 max_positions - 1]`, distance 0 in its middle.

    The model's `_init_weights` fills `rel_pos_bias`.
    """

    def __init__(self, max_positions: int):
        super().__init__()
        self.rel_pos_bias = nn.Parameter(torch.empty(2 * max_positions - 1))

    def forward(self, length: int, centre: int | None = None) -> torch.Tensor:
        """Return the biases of the distances j - i from `1 - length` to `length - 1`, `[2 length - 1]` float32.

        `centre`: the entry of distance 0, where it is not the middle one. Raises `ValueError` where the table ends
        before the distances do.
        """
        entries = self.rel_pos_bias.shape[0]
        if centre is None:
            centre = entries // 2
        longest = min(centre + 1, entries - centre)
        if length > longest:
            raise ValueError(
                f"a simple relative bias with {entries} entries, distance 0 at entry {centre}, serves at most "
                f"{longest} positions, got {length}; shorten the input or raise max_positions (chunk_size with chunks)"
            )
        bias = self.rel_pos_bias[centre - length + 1 : centre + length]
        return bias.to(torch.promote_types(bias.dtype, torch.float32))


class MegaRotaryRelativeBias(nn.Module):
    """<R_i alpha, R_j b>, where R_t rotates the pairs (m, m + Z/2) of a vector by t 10000^(-2m/Z), for any length.

    The product depends on j - i alone, so that the vector over the distances costs `length` rotations. The model's
    `_init_weights` fills `alpha` and `b_param` (the paper's beta).
    """

    def __init__(self, width: int):
        super().__init__()
        if width % 2:
            raise ValueError(f"a rotary relative bias rotates pairs and needs an even width, got {width}")
        self.alpha = nn.Parameter(torch.empty(1, width))
        self.b_param = nn.Parameter(torch.empty(1, width))

    def forward(self, length: int) -> torch.Tensor:
        """Return the biases of the distances j - i from `1 - length` to `length - 1`, `[2 length - 1]` float32."""
        dtype = torch.promote_types(self.alpha.dtype, torch.float32)
        (alpha_1, alpha_2), (beta_1, beta_2) = (x[0].to(dtype).chunk(2) for x in (self.alpha, self.b_param))
        pairs, device = alpha_1.shape[0], alpha_1.device
        frequency = torch.exp(torch.arange(pairs, dtype=dtype, device=device) * -(math.log(10000.0) / pairs))
        angle = torch.arange(length, dtype=dtype, device=device)[:, None] * frequency
        even = (angle.cos() * (alpha_1 * beta_1 + alpha_2 * beta_2)).sum(dim=-1)
        odd = (angle.sin() * (alpha_2 * beta_1 - alpha_1 * beta_2)).sum(dim=-1)
        # Not in two halves: one of length - 1 positions would bar sequences of 1 and 2 from an exported program.
        lag = torch.arange(1 - length, length, device=device)
        return even[lag.abs()] + lag.sign() * odd[lag.abs()]


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
