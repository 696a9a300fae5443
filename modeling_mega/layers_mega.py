"""Layers that both attentions of a Mega block use: norms, dropout and relative position biases (section 3.2)."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from luna_mega.kernels.support import dropout, in_program, is_plain, upcast
from luna_mega.modeling_common.layout import DENSE, Layout
from luna_mega.modeling_mega.batch_norm_mega import MegaBatchNorm, MegaSyncBatchNorm
from luna_mega.modeling_mega.configuration_mega import MegaConfig
from luna_mega.modeling_mega.patches_mega import interpolate_raster_bias

# Elements of the largest table that is kept.
LARGEST_TABLE = 1 << 22
# Tables of `rotations` by positions, pairs, dtype and device. None is removed, because a CUDA graph may read it.
_rotation_tables: dict[tuple[Any, ...], torch.Tensor] = {}


class MegaScaleNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), times one learned number (`scalar`, `[1]`)."""

    def __init__(self, width: int, eps: float, affine: bool):
        super().__init__()
        self.width, self.eps = width, eps
        self.scalar = nn.Parameter(torch.ones(1)) if affine else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = nn.functional.rms_norm(x, (self.width,), eps=self.eps)
        return normed if self.scalar is None else (normed * self.scalar).to(x.dtype)


class MegaRMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) weight.

    `legacy`: x weight, as the Mega of transformers v4 computes it and its checkpoints require it.
    """

    def __init__(self, width: int, eps: float, affine: bool, legacy: bool):
        super().__init__(width, eps=eps, elementwise_affine=affine)
        self.legacy = legacy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.legacy:
            return super().forward(x)
        return x if self.weight is None else (x * self.weight).to(x.dtype)


def build_norm(
    norm_type: str,
    width: int,
    affine: bool = True,
    eps: float = 1e-5,
    *,
    padded_statistics: bool = False,
    legacy_rms_norm: bool = False,
) -> nn.Module:
    """Return a norm of `[B, T, width]` over the last dimension; `norm_type` is defined in `MegaConfig`.

    Batch norms accept a mask `[B, T]`, and with `padded_statistics` include padding. With `legacy_rms_norm`, the RMS
    norm does not normalize, see `MegaRMSNorm`.
    """
    if norm_type == "layernorm":
        return nn.LayerNorm(width, eps=eps, elementwise_affine=affine)
    if norm_type == "scalenorm":
        return MegaScaleNorm(width, eps, affine)
    if norm_type == "rmsnorm":
        return MegaRMSNorm(width, eps, affine, legacy_rms_norm)
    if norm_type == "batchnorm":
        return MegaBatchNorm(width, eps, affine, padded_statistics)
    if norm_type == "syncbatchnorm":
        return MegaSyncBatchNorm(width, eps, affine, padded_statistics)
    raise ValueError(f"`norm_type` is {norm_type!r}; choose layernorm, scalenorm, rmsnorm, batchnorm or syncbatchnorm")


class MegaSequenceNorm(nn.Module):
    """Norm `config.normalization_type` of `[B, T, d]`. Its statistics exclude padding."""

    def __init__(self, config: MegaConfig, affine: bool):
        super().__init__()
        self.norm = build_norm(
            config.normalization_type,
            config.hidden_size,
            affine=affine,
            padded_statistics=config.padded_batch_statistics,
            legacy_rms_norm=config.legacy_rms_norm,
        )

    def forward(self, hidden_states: torch.Tensor, layout: Layout) -> torch.Tensor:
        if isinstance(self.norm, MegaBatchNorm):
            return self.norm(hidden_states, layout.mask)
        return self.norm(hidden_states)


class MegaDropout(nn.Module):
    """Dropout of `[B, T, d]`: of entries, or with `features` of channels at all positions of a sequence."""

    def __init__(self, probability: float, features: bool):
        super().__init__()
        self.probability, self.features = probability, features

    def forward(self, states: torch.Tensor, layout: Layout = DENSE) -> torch.Tensor:
        if not self.training:
            return states
        if not self.features or self.probability == 0.0:
            return dropout(states, self.probability)
        return layout.drop_features(states, self.probability)


class MegaDropPath(nn.Module):
    """Stochastic depth: dropout of the output of a sub-layer for an entire sequence."""

    def __init__(self, probability: float):
        super().__init__()
        self.probability = probability

    def forward(self, states: torch.Tensor, layout: Layout) -> torch.Tensor:
        if not self.training or self.probability == 0.0:
            return states
        return states * layout.spread(self.draw(states, layout.sizes(states)[0]), states.shape[1])

    def draw(self, states: torch.Tensor, sequences: int) -> torch.Tensor:
        """Return a factor for each sequence, `[sequences, 1]`: 0, or the factor that preserves the mean."""
        return nn.functional.dropout(states.new_ones(sequences, 1), self.probability)


class MegaSimpleRelativeBias(nn.Module):
    """A table with one number per distance, `[2 max_positions - 1]`; entry `center` (None = the middle) is distance 0.

    `MegaPreTrainedModel._init_weights` initializes `rel_pos_bias`.
    """

    def __init__(self, max_positions: int, center: int | None = None):
        super().__init__()
        self.rel_pos_bias = nn.Parameter(torch.empty(2 * max_positions - 1))
        self.center = max_positions - 1 if center is None else center

    def forward(
        self, length: int, grid: tuple[int, int] | None = None, count: Callable[[], int] | None = None
    ) -> torch.Tensor:
        """Return the biases of the distances j - i from `1 - length` to `length - 1`, `[2 length - 1]` float32.

        Args:
            length: number of columns.
            grid: rows and columns of patches of images, for which the table is interpolated; None = no images.
            count: returns the greatest number of tokens of a sequence if other columns are padding, whose bias is 0.

        Raises:
            ValueError: The table has too few entries.
        """
        if grid is not None:
            return interpolate_raster_bias(upcast(self.rel_pos_bias), grid)
        entries, center = self.rel_pos_bias.shape[0], self.center
        longest = min(center + 1, entries - center)
        if length > longest:
            tokens = length if count is None or in_program() else count()
            if tokens <= longest:
                return nn.functional.pad(self(longest), [length - longest] * 2)
            raise ValueError(
                f"a simple relative bias with {entries} entries, distance 0 at entry {center}, supports at most "
                f"{longest} positions, got {tokens}; shorten the input or increase `max_positions` (with chunks "
                "`chunk_size`)"
            )
        return upcast(self.rel_pos_bias[center - length + 1 : center + length])


class MegaRotaryRelativeBias(nn.Module):
    """<R_i alpha, R_j b>, where R_t rotates the pairs (m, m + Z/2) of a vector by t 10000^(-2m/Z), for any length.

    The product depends only on j - i, so the vector over the distances costs `length` rotations.
    `MegaPreTrainedModel._init_weights` initializes `alpha` and `b_param` (the paper's beta).
    """

    def __init__(self, width: int):
        super().__init__()
        if width % 2:
            raise ValueError(f"a rotary relative bias requires an even width, got {width}")
        self.alpha = nn.Parameter(torch.empty(1, width))
        self.b_param = nn.Parameter(torch.empty(1, width))

    def forward(
        self, length: int, grid: tuple[int, int] | None = None, count: Callable[[], int] | None = None
    ) -> torch.Tensor:
        """Return the biases as `MegaSimpleRelativeBias` does; `grid` and `count` do not affect them."""
        alpha, beta = upcast(self.alpha), upcast(self.b_param)
        products = torch.cat((alpha, alpha.roll(alpha.shape[1] // 2, dims=1))) * beta
        # Not as a matrix product, whose sums may depend on the number of rows.
        return (rotations(length, alpha) * products.view(-1)).sum(dim=1)


def rotations(length: int, vector: torch.Tensor) -> torch.Tensor:
    """Return the factors of alpha_1 beta_1, alpha_2 beta_2, alpha_2 beta_1 and alpha_1 beta_2, `[2 length - 1, 2 Z]`.

    alpha_1 and alpha_2 are the halves of a vector like `vector` `[..., Z]`. The rows are the distances j - i from
    `1 - length` to `length - 1`.
    """
    pairs, dtype, device = vector.shape[-1] // 2, vector.dtype, vector.device
    positions = 1 << max(length - 1, 0).bit_length() if is_plain((vector,)) else 0
    if not positions or 8 * positions * pairs > LARGEST_TABLE:
        return compute_rotations(length, pairs, dtype, device)
    key = positions, pairs, dtype, device
    if (table := _rotation_tables.get(key)) is None:
        with torch.inference_mode(False), torch.no_grad():
            table = compute_rotations(positions, pairs, dtype, device)
        # A CUDA graph owns the memory that it allocates.
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _rotation_tables[key] = table
    return table[positions - length : positions + length - 1]


def compute_rotations(length: int, pairs: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    frequency = torch.exp(torch.arange(pairs, dtype=dtype, device=device) * -(math.log(10000.0) / pairs))
    angle = torch.arange(1 - length, length, dtype=dtype, device=device)[:, None] * frequency
    cosine, sine = angle.cos(), angle.sin()
    return torch.cat((cosine, cosine, sine, -sine), 1)


def build_relative_bias(config: MegaConfig, positions: int) -> MegaSimpleRelativeBias | MegaRotaryRelativeBias:
    """Return the relative bias of `config`; a simple one has entries for `positions`."""
    if config.relative_positional_bias == "simple":
        return MegaSimpleRelativeBias(positions, config.chunk_size - 1 if config.legacy_bias_table else None)
    return MegaRotaryRelativeBias(config.shared_representation_size)


def restore_columns(
    attended: torch.Tensor,
    weights: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    key_layout: Layout,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `attended` `[B, T, V]` and attention weights `[B, 1, T, S]` in the columns of the batch.

    If a layout moves columns, `attended` is computed from the returned weights, so that they have a gradient.
    """
    restored = key_layout.scatter_weights(layout.scatter_weights(weights, 2), 3)
    if restored is weights:
        return attended, weights
    dropped = torch.dropout(restored[:, 0].to(value.dtype), dropout, train=True)
    return layout.gather(dropped @ key_layout.scatter(value)), restored
