"""Patch embeddings of images, and interpolation of positions for images of another size."""

from collections.abc import Iterator

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig

from luna_mega.modeling_common.masks import clean


class PatchEmbeddings(nn.Module):
    """A linear layer from the patches of images `[B, C, H, W]`, in row-major order, to `[B, P, d]`."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        self.config = config
        size = config.patch_size
        self.projection = nn.Conv2d(config.num_channels, config.hidden_size, kernel_size=size, stride=size)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.projection(pixel_values.to(self.projection.weight.dtype)).flatten(2).transpose(1, 2)

    def clean(self, pixel_values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return images `[B, C, H, W]` without NaN and infinities in patches that the bool mask `[B, P]` drops."""
        size = self.config.patch_size
        rows, columns = (length // size for length in pixel_values.shape[2:])
        kept = mask.unflatten(1, (rows, columns)).repeat_interleave(size, dim=1).repeat_interleave(size, dim=2)
        return clean(pixel_values, kept[:, None])

    def find_grid(self, pixel_values: torch.Tensor, interpolate: bool) -> tuple[int, int]:
        """Return the numbers of rows and columns of patches.

        Raises:
            ValueError: The batch is empty, or the number of channels or the size differs from the configuration. With
                `interpolate`, every size that is a multiple of the patch size is valid.
        """
        channels, patch, size = self.config.num_channels, self.config.patch_size, self.config.image_size
        if pixel_values.dim() != 4 or pixel_values.shape[1] != channels:
            raise ValueError(
                f"`pixel_values` must have the shape [B, {channels}, H, W] with num_channels={channels}, got "
                f"{list(pixel_values.shape)}"
            )
        batch, _, height, width = pixel_values.shape
        if batch == 0:
            raise ValueError(f"the batch is empty: {batch} images of {height} x {width}; pass at least one image")
        if not interpolate and (height, width) != (size, size):
            raise ValueError(
                f"`pixel_values` are {height} x {width}, but `image_size` is {size}; resize them, or pass "
                "`interpolate_pos_encoding=True`"
            )
        if height < patch or width < patch or height % patch or width % patch:
            raise ValueError(
                f"`pixel_values` are {height} x {width}, which is not a multiple of `patch_size` {patch}; resize them"
            )
        return height // patch, width // patch


def interpolate_positions(embeddings: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Return position embeddings `[1, P, d]` of a square of patches, interpolated (bicubic) for `grid`."""
    side = round(embeddings.shape[1] ** 0.5)
    if grid == (side, side):
        return embeddings
    square = embeddings.float().unflatten(1, (side, side)).permute(0, 3, 1, 2)
    resized = nn.functional.interpolate(square, size=grid, mode="bicubic", align_corners=False)
    return resized.flatten(2).transpose(1, 2).to(embeddings.dtype)


def interpolate_raster_bias(table: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Return the bias table of a square of P patches, `[2 P - 1]`, for `grid` of R rows and C columns, `[2 R C - 1]`.

    An entry is the bias of a difference of row-major positions, `rows * C + columns`. Up to two steps on the grid have
    this difference: (rows, columns) and (rows + 1, columns - C). The bias of each step is interpolated bilinearly; the
    entry is their mean, weighted by the number of pairs of patches.
    """
    patches = (len(table) + 1) // 2
    side, (rows, columns) = round(patches**0.5), grid
    if grid == (side, side):
        return table
    lag = torch.arange(1 - rows * columns, rows * columns, device=table.device, dtype=table.dtype)
    down = lag.div(columns, rounding_mode="floor")
    total, pairs = torch.zeros_like(lag), torch.zeros_like(lag)
    for step in (down, down + 1):
        across = lag - step * columns
        count = ((rows - step.abs()) * (columns - across.abs())).clamp(min=0)
        total = total + count * _read(table, side, step * (side / rows), across * (side / columns))
        pairs = pairs + count
    return total / pairs


def _read(table: torch.Tensor, side: int, down: torch.Tensor, across: torch.Tensor) -> torch.Tensor:
    """Return the table entries of fractional steps, interpolated bilinearly."""
    center, value = side * side - 1, torch.zeros_like(down)
    for row, row_share in _neighbors(down, side):
        for column, column_share in _neighbors(across, side):
            value = value + row_share * column_share * table[center + row * side + column]
    return value


def _neighbors(steps: torch.Tensor, side: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the integer steps below and above (limited to a square of `side`) and their weights."""
    below = steps.floor()
    for step, share in ((below, below + 1 - steps), (below + 1, steps - below)):
        yield step.long().clamp(1 - side, side - 1), share
