"""Pathfinder: two dashed snakes among shorter ones, and two discs; are the discs the ends of one snake?

This is the task of Linsley et al. (2018) and Houtkamp and Roelfsema (2010), with the parameters of Long Range Arena
(Tay et al. 2021, section 2.2): Pathfinder has 32 x 32 pixels, Path-X 128 x 128. A snake is a chain of paddles: straight
strokes of equal length with gaps. It grows paddle by paddle, prefers to continue straight, and keeps a distance from
everything that is already drawn. Angles are in radians; points are (row, column) in pixels.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from lra.drawing import Canvas, Drawing, direction, draw_disc, moved, offsets

BATCH = 16
_PADDLE_TRIES, _SNAKE_TRIES = 3, 5
_TAKEN, _OVERLAP = 0.3, 1.8


@dataclass
class Sample:
    """Image with its geometry.

    Attributes:
        pixels: `[size, size]` uint8.
        label: 1 if the discs are the ends of one snake, 0 if they are the ends of two.
        snakes: Tail of the first paddle and heads of all paddles of the two long snakes, `[2, contour_length + 1, 2]`.
        discs: Centers of the discs, `[2, 2]`.
    """

    pixels: np.ndarray
    label: int
    snakes: np.ndarray
    discs: np.ndarray


def make_batch(seed: int, sizes: Drawing, split: int, number: int) -> list[dict[str, Any]]:
    """Return the rows of one batch: images and labels."""
    rows = []
    for index in range(number * BATCH, (number + 1) * BATCH):
        image = draw_image(np.random.default_rng([seed, split, index]), sizes)
        rows.append({"image": Image.fromarray(image.pixels), "label": image.label})
    return rows


def draw_image(numbers: np.random.Generator, sizes: Drawing) -> Sample:
    """Return a random image."""
    label, margin = int(numbers.integers(2)), int(numbers.choice(sizes.margins))
    while (drawn := _two_snakes(numbers, sizes, margin)) is None:
        pass
    canvas, snakes = drawn
    for _ in range(sizes.distractors):
        canvas = next(filter(None, (_with_distractor(numbers, canvas) for _ in range(_SNAKE_TRIES))), canvas)
    first = int(numbers.integers(2))
    discs = np.array([snakes[first].ends[0], snakes[first if label else 1 - first].ends[-1]])
    light = np.max([canvas.inner(canvas.light), *(draw_disc(sizes, disc) for disc in discs)], axis=0)
    low, high = light.min(), light.max()
    pixels = np.round((light - low) / (high - low) * 255).astype(np.uint8)
    return Sample(pixels, label, np.array([snake.ends for snake in snakes]), discs)


@dataclass
class _Snake:
    """A snake that grows paddle by paddle.

    Attributes:
        pivot: Point a margin before the tail of the last paddle.
        angle: Direction of the last paddle.
        at: Position of the mask of the last paddle.
        room: Mask of the last paddle, `[P, P]`.
        ends: First tail and the heads of all paddles.
    """

    pivot: np.ndarray
    angle: float
    at: np.ndarray
    room: np.ndarray
    ends: list[np.ndarray]


def _two_snakes(numbers: np.random.Generator, sizes: Drawing, margin: int) -> tuple[Canvas, list[_Snake]] | None:
    """Draw the two long snakes, which grow alternately; return None if one of them cannot grow."""
    canvas = Canvas(sizes, margin)
    first = _seed(numbers, canvas, lambda angle: _free_point(numbers, canvas, angle, 2 * sizes.seed_distance))
    if first is None:
        return None

    def on_circle(_: float) -> np.ndarray:
        angle = math.radians(numbers.integers(360))
        return np.round(first.ends[0] + sizes.seed_distance * direction(angle)).astype(int)

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


def _with_distractor(numbers: np.random.Generator, canvas: Canvas) -> Canvas | None:
    """Return the canvas with another short snake, or None if there is no space."""
    canvas = deepcopy(canvas)
    snake = _seed(numbers, canvas, lambda angle: _free_point(numbers, canvas, angle, 1))
    if snake is None or not all(_extend(numbers, canvas, snake) for _ in range(canvas.sizes.distractor_length - 1)):
        return None
    canvas.add(canvas.mask, snake.at, snake.room)
    return canvas


def _seed(numbers: np.random.Generator, canvas: Canvas, find: Callable) -> _Snake | None:
    """Draw the first paddle of a snake at the point that `find` returns for its random angle, an integer degree."""
    length = canvas.sizes.paddle_length
    for _ in range(_PADDLE_TRIES):
        angle = math.radians(numbers.integers(-180, 180))
        tail = find(angle)
        if tail is None:
            return None
        head = moved(tail, angle, length)
        pivot = moved(head, angle + math.pi, length + canvas.margin)
        if canvas.contains(tail, head, pivot):
            light, room = canvas.paddle(angle)
            canvas.add(canvas.light, tail, light * canvas.sizes.contrast)
            return _Snake(pivot, angle, tail, room, [tail, head])
    return None


def _free_point(numbers: np.random.Generator, canvas: Canvas, angle: float, edge: int) -> np.ndarray | None:
    """Return a random point at which a paddle neither overlaps nor touches the border of `edge` pixels, or None."""
    size, border = canvas.sizes.size, canvas.border
    reached = np.argwhere(canvas.paddle(angle)[1] >= 1.0) - border
    low, high = np.maximum(edge - reached.min(axis=0), 0), np.minimum(size - edge - reached.max(axis=0), size)
    if (high <= low).any():
        return None

    def free(points: np.ndarray) -> np.ndarray:
        rows, columns = (points[:, None] + (reached + border)).transpose(2, 0, 1)
        return points[canvas.mask[rows, columns].max(axis=1) <= _TAKEN]

    # Testing a few random points first is faster than testing all points.
    if len(found := free(numbers.integers(low, high, (32, 2)))):
        return found[0]
    found = free(low + np.argwhere(np.ones(high - low)))
    return found[numbers.integers(len(found))] if len(found) else None


def _extend(numbers: np.random.Generator, canvas: Canvas, snake: _Snake, other: _Snake | None = None) -> bool:
    """Draw the next paddle of `snake` and return whether this was possible.

    It keeps a distance from all paddles except the last one. The code of Linsley et al. also ignores the last paddle of
    the `other` snake, so that the two snakes can cross there.
    """
    length, margin, border = canvas.sizes.paddle_length, canvas.margin, canvas.border
    mask = canvas.mask
    if other is not None:
        mask = mask.copy()
        canvas.add(mask, other.at, other.room)
    pivot = moved(snake.pivot, snake.angle, length + 2 * margin)
    steps, angles = steps_on_circle(length + margin)
    heads = pivot + steps
    inside = ((heads >= 0) & (heads < canvas.sizes.size)).all(axis=1)
    heads, angles = heads[inside], angles[inside]
    if not len(heads):
        return False
    turn = np.abs(angles - snake.angle)
    turn = np.minimum(np.minimum(turn, 2 * math.pi - turn) * canvas.sizes.continuity, math.pi / 2)
    near = heads[:, None] + offsets(margin) + border
    weights = np.cos(turn) ** 2 * (1.0 - mask[near[..., 0], near[..., 1]].max(axis=1))
    if weights.sum() < 1e-4:
        return False
    chances = np.cumsum(weights / weights.sum())
    for _ in range(_PADDLE_TRIES):
        chosen = min(int(np.searchsorted(chances, numbers.random(), side="right")), len(heads) - 1)
        head, angle = heads[chosen], float(angles[chosen])
        light, room = canvas.paddle(angle + math.pi)  # from its head backward
        if (canvas.around(mask, head) + room).max() < _OVERLAP:
            canvas.add(canvas.light, head, light * canvas.sizes.contrast)
            canvas.add(canvas.mask, snake.at, snake.room)
            snake.pivot, snake.angle, snake.at, snake.room = pivot, angle, head, room
            snake.ends.append(head)
            return True
    return False


@cache
def steps_on_circle(radius: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels on a circle relative to its center, and their angles."""
    angles = np.radians(np.arange(0.0, 360.0, 360.0 / (2.0 * math.pi * radius)))
    steps = np.unique(np.floor(radius * np.stack([np.sin(angles), np.cos(angles)], axis=1)).astype(int), axis=0)
    return steps, np.arctan2(*steps.T)
