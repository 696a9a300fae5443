"""Solve Pathfinder from an image: find the discs and follow the snakes that start at them, paddle by paddle."""

import math

import numpy as np
from lra.drawing import Canvas, Drawing, draw_disc, moved
from lra.pathfinder import steps_on_circle
from scipy.ndimage import minimum_filter

_MISSING = 0.04  # rounding to 8 bits may hide this amount of light


def find_discs(pixels: np.ndarray, sizes: Drawing) -> list[np.ndarray]:
    """Return the centers of the two discs."""
    middle = np.array([sizes.size // 2] * 2)
    inside = draw_disc(sizes, middle) > 0.9
    rows, columns = np.argwhere(inside).T
    footprint = inside[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    shift = middle - [rows.min(), columns.min()] - np.array(footprint.shape) // 2
    darkest = minimum_filter(pixels.astype(float), footprint=footprint, mode="constant")
    found = []
    for index in np.argsort(-darkest, axis=None, kind="stable"):
        point = np.array(np.unravel_index(index, darkest.shape)) + shift
        if all((point != other).any() for other in found):  # discs may touch
            found.append(point)
        if len(found) == 2:
            return found
    raise AssertionError("no two discs")


def follow(pixels: np.ndarray, sizes: Drawing) -> int:
    """Return 1 if a snake of `contour_length` paddles connects the discs, else 0."""
    discs = find_discs(pixels, sizes)
    return int(
        any(_leads(pixels / 255, sizes, margin, *ends) for margin in sizes.margins for ends in (discs, discs[::-1]))
    )


def _leads(light: np.ndarray, sizes: Drawing, margin: int, begin: np.ndarray, end: np.ndarray) -> bool:
    canvas = Canvas(sizes, margin)
    canvas.inner(canvas.light)[:] = light
    length, seen = sizes.paddle_length, set()

    def drawn(point: np.ndarray, angle: float) -> bool:
        paddle = canvas.paddle(angle)[0] * sizes.contrast
        return canvas.contains(point) and (canvas.around(canvas.light, point) - paddle).min() > -_MISSING

    def reaches(head: np.ndarray, pivot: np.ndarray, angle: float, left: int) -> bool:
        if not left:
            return (head == end).all()
        if np.abs(head - end).max() > left * (length + 2 * margin + 2) or (state := (*pivot, angle, left)) in seen:
            return False
        seen.add(state)
        pivot = moved(pivot, angle, length + 2 * margin)
        steps, angles = steps_on_circle(length + margin)
        for step, turned in zip(steps, angles.tolist(), strict=True):
            turn = abs(turned - angle)
            if min(turn, 2 * math.pi - turn) * sizes.continuity < math.pi / 2 and drawn(pivot + step, turned + math.pi):
                if reaches(pivot + step, pivot, turned, left - 1):
                    return True
        return False

    for degree in range(-180, 180):
        angle = math.radians(degree)
        head = moved(begin, angle, length)
        pivot = moved(head, angle + math.pi, length + margin)
        if drawn(begin, angle) and reaches(head, pivot, angle, sizes.contour_length - 1):
            return True
    return False
