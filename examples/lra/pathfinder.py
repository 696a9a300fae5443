"""Pathfinder: two dashed snakes among shorter ones, and two discs; are the discs the ends of one snake?

The task of Linsley et al. (2018) and Houtkamp and Roelfsema (2010), with the parameters of Long Range Arena (Tay et al.
2021, section 2.2): 32 x 32 pixels are its Pathfinder, 128 x 128 its Path-X. A snake is a chain of paddles, straight
strokes of one length with gaps between them. It grows paddle by paddle, prefers to go straight on, and keeps its
distance from everything that is drawn already. An angle is in radians, a point is (row, column) in pixels.
"""

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from scipy.ndimage import grey_dilation


@dataclass(frozen=True)
class Drawing:
    """Sizes of a picture, in pixels where nothing else is said.

    Attributes:
        size: side of the picture.
        contour_length: paddles of each of the two long snakes; 6, 9 and 14 are the benchmark's grades.
        paddle_length, thickness: of a stroke.
        margins: half the gap between two paddles, of which every picture draws one.
        padding: border in which nothing of the long snakes lies.
        seed_distance: from the beginning of the first snake to that of the second.
        marker_radius: of the discs.
        continuity: how strongly a snake prefers to go straight on.
        distractors, distractor_length: shorter snakes, and the paddles of each.
        contrast: brightness of a paddle, where that of a disc is 1.
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


_BATCH = 16
_SCALE = 2  # pictures are drawn at this multiple of their size, then reduced
_PADDLE_TRIES, _SNAKE_TRIES = 3, 5
_TAKEN, _OVERLAP = 0.3, 1.8

# 32 and 128 are the benchmark's. It has 64 and 256 as well, but their parameters were not published: here they lie
# between and beyond the two.
_DRAWINGS = {
    32: Drawing(32, 14, 2, 0.5, (1,), 1, 7, 1.5, 1.0, 5, 4, 1.5),
    64: Drawing(64, 14, 3, 1.0, (1, 2), 1, 12, 2.0, 1.4, 6, 4, 1.0),
    128: Drawing(128, 14, 5, 1.5, (2, 3), 1, 20, 3.0, 1.8, 8, 4, 0.9),
    256: Drawing(256, 14, 10, 2.0, (4, 5), 1, 40, 5.0, 1.8, 12, 4, 0.9),
}
SIZES, CONTOUR_LENGTHS = tuple(_DRAWINGS), (6, 9, 14)


def drawing(size: int, contour_length: int = 14) -> Drawing:
    """Return the parameters of pictures of `size` x `size` pixels; `ValueError` where there are none."""
    if size not in _DRAWINGS or contour_length not in CONTOUR_LENGTHS:
        raise ValueError(
            f"no Pathfinder of {size} x {size} pixels with contours of {contour_length} paddles: sizes are "
            f"{', '.join(map(str, SIZES))}, contours {', '.join(map(str, CONTOUR_LENGTHS))}"
        )
    return replace(_DRAWINGS[size], contour_length=contour_length)


@dataclass
class Picture:
    """One picture and how it was made.

    Attributes:
        pixels: `[size, size]` uint8.
        label: 1 where the discs lie on the ends of one snake, 0 where they lie on two.
        snakes: the two long snakes: the tail of the first paddle and the heads of all, `[2, contour_length + 1, 2]`.
        discs: their middles, `[2, 2]`.
    """

    pixels: np.ndarray
    label: int
    snakes: np.ndarray
    discs: np.ndarray


def make_batch(seed: int, sizes: Drawing, split: int, number: int) -> list[dict[str, Any]]:
    """Return the rows of one batch: PNG files and labels."""
    rows = []
    for index in range(number * _BATCH, (number + 1) * _BATCH):
        picture = draw_picture(np.random.default_rng([seed, split, index]), sizes)
        file = BytesIO()
        Image.fromarray(picture.pixels).save(file, "PNG")
        rows.append({"image": {"bytes": file.getvalue(), "path": None}, "label": picture.label})
    return rows


def draw_picture(numbers: np.random.Generator, sizes: Drawing) -> Picture:
    """Draw a picture with the random numbers of `numbers`, which alone decide what it shows."""
    label, margin = int(numbers.integers(2)), int(numbers.choice(sizes.margins))
    while (drawn := _two_snakes(numbers, sizes, margin)) is None:
        pass
    canvas, snakes = drawn
    for _ in range(sizes.distractors):
        canvas = next(filter(None, (_with_distractor(numbers, canvas) for _ in range(_SNAKE_TRIES))), canvas)
    first = int(numbers.integers(2))
    discs = np.array([snakes[first].ends[0], snakes[first if label else 1 - first].ends[-1]])
    light = np.max([canvas.inner(canvas.light), *(_disc(sizes, disc) for disc in discs)], axis=0)
    low, high = light.min(), light.max()
    pixels = np.round((light - low) / (high - low) * 255).astype(np.uint8)
    return Picture(pixels, label, np.array([snake.ends for snake in snakes]), discs)


@dataclass
class _Snake:
    """A snake that grows.

    `pivot`: behind the last paddle by a margin; `angle`: its direction; `room`: `[P, P]`, what it takes, around `at`;
    `ends`: the points at which a paddle ends, from the first tail on, `[contour_length + 1, 2]`.
    """

    pivot: np.ndarray
    angle: float
    at: np.ndarray
    room: np.ndarray
    ends: list[np.ndarray]


class _Canvas:
    """`light` of what is drawn, and what it takes of the room, `mask`, with a border for paddles that end outside."""

    def __init__(self, sizes: Drawing, margin: int):
        self.sizes, self.margin = sizes, margin
        self.border = sizes.paddle_length + math.ceil(sizes.thickness) + margin
        self.light, self.mask = np.zeros((2, sizes.size + 2 * self.border, sizes.size + 2 * self.border))
        padding = np.pad(np.zeros((sizes.size - 2 * sizes.padding,) * 2), sizes.padding, constant_values=1.0)
        self.inner(self.mask)[:] = padding

    def copy(self) -> "_Canvas":
        other = copy(self)
        other.light, other.mask = self.light.copy(), self.mask.copy()
        return other

    def inner(self, wide: np.ndarray) -> np.ndarray:
        """Return the picture without the border, `[size, size]`."""
        return wide[self.border : -self.border, self.border : -self.border]

    def around(self, wide: np.ndarray, point: np.ndarray) -> np.ndarray:
        """Return the part that a paddle at `point` can reach, `[P, P]`."""
        row, column = point
        return wide[row : row + 2 * self.border + 1, column : column + 2 * self.border + 1]

    def paddle(self, angle: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the light and the room of a paddle from the middle of `[P, P]` on, in direction `angle`."""
        return _paddle(self.sizes.paddle_length, self.sizes.thickness, self.margin, angle)

    def add(self, wide: np.ndarray, point: np.ndarray, part: np.ndarray) -> None:
        where = self.around(wide, point)
        np.maximum(where, part, out=where)

    def contains(self, *points: np.ndarray) -> bool:
        return all((point >= 0).all() and (point < self.sizes.size).all() for point in points)


def _two_snakes(numbers: np.random.Generator, sizes: Drawing, margin: int) -> tuple[_Canvas, list[_Snake]] | None:
    """Draw the long snakes, which grow in turn; None where one of them has no way to go."""
    canvas = _Canvas(sizes, margin)
    first = _seed(numbers, canvas, lambda angle: _free_point(numbers, canvas, angle, 2 * sizes.seed_distance))
    if first is None:
        return None

    def on_circle(_: float) -> np.ndarray:
        angle = math.radians(numbers.integers(360))
        return np.round(first.ends[0] + sizes.seed_distance * _direction(angle)).astype(int)

    second = _seed(numbers, canvas, on_circle)
    if second is None:
        return None
    for _ in range(sizes.contour_length - 1):
        for snake, other in ((first, second), (second, first)):
            if not _extend(numbers, canvas, snake, other):
                return None
    for snake in (first, second):
        canvas.add(canvas.mask, snake.at, snake.room)
    return canvas, [first, second]


def _with_distractor(numbers: np.random.Generator, canvas: _Canvas) -> _Canvas | None:
    """Return the canvas with one more short snake; None where it does not fit."""
    canvas = canvas.copy()
    snake = _seed(numbers, canvas, lambda angle: _free_point(numbers, canvas, angle, 1))
    if snake is None or not all(_extend(numbers, canvas, snake) for _ in range(canvas.sizes.distractor_length - 1)):
        return None
    canvas.add(canvas.mask, snake.at, snake.room)
    return canvas


def _seed(numbers: np.random.Generator, canvas: _Canvas, find: Callable) -> _Snake | None:
    """Draw the first paddle of a snake at the point that `find` gives for its angle, which is a whole degree."""
    length = canvas.sizes.paddle_length
    for _ in range(_PADDLE_TRIES):
        angle = math.radians(numbers.integers(-180, 180))
        tail = find(angle)
        if tail is None:
            return None
        head = _moved(tail, angle, length)
        pivot = _moved(head, angle + math.pi, length + canvas.margin)
        if canvas.contains(tail, head, pivot):
            light, room = canvas.paddle(angle)
            canvas.add(canvas.light, tail, light * canvas.sizes.contrast)
            return _Snake(pivot, angle, tail, room, [tail, head])
    return None


def _free_point(numbers: np.random.Generator, canvas: _Canvas, angle: float, edge: int) -> np.ndarray | None:
    """Draw a point where a paddle touches nothing, nor the `edge` pixels at the border; None where there is none."""
    size, border = canvas.sizes.size, canvas.border
    reached = np.argwhere(canvas.paddle(angle)[1] >= 1.0) - border
    low, high = np.maximum(edge - reached.min(axis=0), 0), np.minimum(size - edge - reached.max(axis=0), size)
    if (high <= low).any():
        return None

    def free(points: np.ndarray) -> np.ndarray:
        rows, columns = (points[:, None] + (reached + border)).transpose(2, 0, 1)
        return points[canvas.mask[rows, columns].max(axis=1) <= _TAKEN]

    # A few points at random find one sooner than the list of all that are free.
    if len(found := free(numbers.integers(low, high, (32, 2)))):
        return found[0]
    found = free(low + np.argwhere(np.ones(high - low)))
    return found[numbers.integers(len(found))] if len(found) else None


def _extend(numbers: np.random.Generator, canvas: _Canvas, snake: _Snake, other: _Snake | None = None) -> bool:
    """Draw the next paddle of `snake`, which keeps away from all but its last one; False where it cannot.

    The code of Linsley et al. forgets the last paddle of the `other` snake, so that the two may cross there.
    """
    length, margin, border = canvas.sizes.paddle_length, canvas.margin, canvas.border
    mask = canvas.mask
    if other is not None:
        mask = mask.copy()
        canvas.add(mask, other.at, other.room)
    pivot = _moved(snake.pivot, snake.angle, length + 2 * margin)
    steps, angles = _steps(length + margin)
    heads = pivot + steps
    inside = ((heads >= 0) & (heads < canvas.sizes.size)).all(axis=1)
    heads, angles = heads[inside], angles[inside]
    if not len(heads):
        return False
    turn = np.abs(angles - snake.angle)
    turn = np.minimum(np.minimum(turn, 2 * math.pi - turn) * canvas.sizes.continuity, math.pi / 2)
    near = heads[:, None] + _offsets(margin) + border
    weights = np.cos(turn) ** 2 * (1.0 - mask[near[..., 0], near[..., 1]].max(axis=1))
    if weights.sum() < 1e-4:
        return False
    chances = np.cumsum(weights / weights.sum())
    for _ in range(_PADDLE_TRIES):
        chosen = min(int(np.searchsorted(chances, numbers.random(), side="right")), len(heads) - 1)
        head, angle = heads[chosen], float(angles[chosen])
        light, room = canvas.paddle(angle + math.pi)  # from its head back
        if (canvas.around(mask, head) + room).max() < _OVERLAP:
            canvas.add(canvas.light, head, light * canvas.sizes.contrast)
            canvas.add(canvas.mask, snake.at, snake.room)
            snake.pivot, snake.angle, snake.at, snake.room = pivot, angle, head, room
            snake.ends.append(head)
            return True
    return False


def _direction(angle: float) -> np.ndarray:
    return np.array([math.sin(angle), math.cos(angle)])


def _moved(point: np.ndarray, angle: float, distance: float) -> np.ndarray:
    return np.ceil(point + distance * _direction(angle)).astype(int)


@cache
def _steps(radius: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels on a circle, relative to its middle, and their angles."""
    angles = np.radians(np.arange(0.0, 360.0, 360.0 / (2.0 * math.pi * radius)))
    steps = np.unique(np.floor(radius * np.stack([np.sin(angles), np.cos(angles)], axis=1)).astype(int), axis=0)
    return steps, np.arctan2(*steps.T)


@cache
def _offsets(radius: int) -> np.ndarray:
    """Return the pixels of a disc, relative to its middle."""
    grid = np.mgrid[-radius : radius + 1, -radius : radius + 1].reshape(2, -1).T
    return grid[(grid**2).sum(axis=1) <= radius**2]


def _reduced(drawn: Image.Image | np.ndarray) -> np.ndarray:
    """Reduce black (0) and white (255) at the scale of drawing to numbers from 0 to 1."""
    drawn = drawn if isinstance(drawn, Image.Image) else Image.fromarray(drawn)
    side = drawn.width // _SCALE
    return np.asarray(drawn.resize((side, side), Image.Resampling.LANCZOS)) / 255.0


@lru_cache(4096)
def _paddle(length: int, thickness: float, margin: int, angle: float) -> tuple[np.ndarray, np.ndarray]:
    middle = (length + math.ceil(thickness) + margin) * _SCALE
    drawn = Image.new("L", (2 * middle + _SCALE, 2 * middle + _SCALE))
    row, column = np.ceil(middle + length * _SCALE * _direction(angle)).astype(int).tolist()
    ImageDraw.Draw(drawn).line([(middle, middle), (column, row)], fill=255, width=round(thickness * _SCALE))
    room = grey_dilation(np.asarray(drawn), footprint=_footprint(margin * _SCALE))
    return _reduced(drawn), _reduced(room)


@cache
def _footprint(radius: int) -> np.ndarray:
    full = np.zeros((2 * radius + 1, 2 * radius + 1), bool)
    full[tuple((_offsets(radius) + radius).T)] = True
    return full


def _disc(sizes: Drawing, middle: np.ndarray) -> np.ndarray:
    grid = np.mgrid[: sizes.size * _SCALE, : sizes.size * _SCALE] - _SCALE * middle[:, None, None]
    inside = (grid**2).sum(axis=0) <= (sizes.marker_radius * _SCALE) ** 2
    return _reduced(np.where(inside, 255, 0).astype(np.uint8))
