"""Parts of a Pathfinder image: sizes, canvas, paddles and discs.

Angles are in radians; points are (row, column) in pixels.
"""

import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np
from PIL import Image, ImageDraw
from scipy.ndimage import grey_dilation

_SCALE = 2  # images are drawn at this multiple of their size


@dataclass(frozen=True)
class Drawing:
    """Sizes of an image in pixels.

    Attributes:
        size: Side of the image.
        contour_length: Number of paddles of the two long snakes; 6, 9 and 14 are the grades of the benchmark.
        paddle_length: Length of a paddle.
        thickness: Thickness of a paddle.
        margins: Possible values of half the gap between two paddles; each image draws one.
        padding: Border without long snakes.
        seed_distance: Distance between the starts of the two long snakes.
        marker_radius: Radius of the discs.
        continuity: Preference of a snake to continue straight.
        distractors: Number of shorter snakes.
        distractor_length: Number of paddles of a shorter snake.
        contrast: Brightness of a paddle relative to a disc.
    """

    size: int
    contour_length: int
    paddle_length: int
    thickness: float
    margins: tuple[int, ...]
    padding: int
    seed_distance: int
    marker_radius: float
    continuity: float
    distractors: int
    distractor_length: int
    contrast: float


# The benchmark has 32 and 128. The parameters of 64 and 256 are not published; these are estimates.
_DRAWINGS = {
    32: Drawing(32, 14, 2, 0.5, (1,), 1, 7, 1.5, 1.0, 5, 4, 1.5),
    64: Drawing(64, 14, 3, 1.0, (1, 2), 1, 12, 2.0, 1.4, 6, 4, 1.0),
    128: Drawing(128, 14, 5, 1.5, (2, 3), 1, 20, 3.0, 1.8, 8, 4, 0.9),
    256: Drawing(256, 14, 10, 2.0, (4, 5), 1, 40, 5.0, 1.8, 12, 4, 0.9),
}
SIZES, CONTOUR_LENGTHS = tuple(_DRAWINGS), (6, 9, 14)


def find_drawing(size: int, contour_length: int = 14) -> Drawing:
    """Return the parameters of images of `size` x `size` pixels.

    Raises:
        ValueError: There are no such images.
    """
    if size not in _DRAWINGS or contour_length not in CONTOUR_LENGTHS:
        raise ValueError(
            f"no Pathfinder of {size} x {size} pixels with contours of {contour_length} paddles: sizes are "
            f"{', '.join(map(str, SIZES))}, contours {', '.join(map(str, CONTOUR_LENGTHS))}"
        )
    return replace(_DRAWINGS[size], contour_length=contour_length)


class Canvas:
    """Drawn `light` and occupied `mask` of an image, with a border for paddles that end outside."""

    def __init__(self, sizes: Drawing, margin: int):
        self.sizes, self.margin = sizes, margin
        self.border = sizes.paddle_length + math.ceil(sizes.thickness) + margin
        self.light, self.mask = np.zeros((2, sizes.size + 2 * self.border, sizes.size + 2 * self.border))
        padding = np.pad(np.zeros((sizes.size - 2 * sizes.padding,) * 2), sizes.padding, constant_values=1.0)
        self.inner(self.mask)[:] = padding

    def inner(self, wide: np.ndarray) -> np.ndarray:
        """Return the image without the border, `[size, size]`."""
        return wide[self.border : -self.border, self.border : -self.border]

    def around(self, wide: np.ndarray, point: np.ndarray) -> np.ndarray:
        """Return the surroundings of `point` that a paddle can cover, `[P, P]`."""
        row, column = point
        return wide[row : row + 2 * self.border + 1, column : column + 2 * self.border + 1]

    def paddle(self, angle: float) -> tuple[np.ndarray, np.ndarray]:
        """Return light and mask `[P, P]` of a paddle from the center in direction `angle`."""
        return draw_paddle(self.sizes.paddle_length, self.sizes.thickness, self.margin, angle)

    def add(self, wide: np.ndarray, point: np.ndarray, part: np.ndarray) -> None:
        area = self.around(wide, point)
        np.maximum(area, part, out=area)

    def contains(self, *points: np.ndarray) -> bool:
        return all((point >= 0).all() and (point < self.sizes.size).all() for point in points)


def direction(angle: float) -> np.ndarray:
    return np.array([math.sin(angle), math.cos(angle)])


def moved(point: np.ndarray, angle: float, distance: float) -> np.ndarray:
    return np.ceil(point + distance * direction(angle)).astype(int)


@cache
def offsets(radius: int) -> np.ndarray:
    """Return the pixels of a disc relative to its center."""
    grid = np.mgrid[-radius : radius + 1, -radius : radius + 1].reshape(2, -1).T
    return grid[(grid**2).sum(axis=1) <= radius**2]


def _reduced(drawn: Image.Image | np.ndarray) -> np.ndarray:
    """Return the drawing in the final size, with values from 0 to 1."""
    drawn = drawn if isinstance(drawn, Image.Image) else Image.fromarray(drawn)
    side = drawn.width // _SCALE
    return np.asarray(drawn.resize((side, side), Image.Resampling.LANCZOS)) / 255.0


@lru_cache(4096)
def draw_paddle(length: int, thickness: float, margin: int, angle: float) -> tuple[np.ndarray, np.ndarray]:
    middle = (length + math.ceil(thickness) + margin) * _SCALE
    drawn = Image.new("L", (2 * middle + _SCALE, 2 * middle + _SCALE))
    row, column = np.ceil(middle + length * _SCALE * direction(angle)).astype(int).tolist()
    ImageDraw.Draw(drawn).line([(middle, middle), (column, row)], fill=255, width=round(thickness * _SCALE))
    room = grey_dilation(np.asarray(drawn), footprint=_footprint(margin * _SCALE))
    return _reduced(drawn), _reduced(room)


@cache
def _footprint(radius: int) -> np.ndarray:
    full = np.zeros((2 * radius + 1, 2 * radius + 1), bool)
    full[tuple((offsets(radius) + radius).T)] = True
    return full


def draw_disc(sizes: Drawing, middle: np.ndarray) -> np.ndarray:
    grid = np.mgrid[: sizes.size * _SCALE, : sizes.size * _SCALE] - _SCALE * middle[:, None, None]
    inside = (grid**2).sum(axis=0) <= (sizes.marker_radius * _SCALE) ** 2
    return _reduced(np.where(inside, 255, 0).astype(np.uint8))
