"""Random cases for property tests: blocks of seeds, of which the first are fast, some slow, the others exhaustive."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

BLOCK = 25  # cases in a test


def in_blocks(fast: int, slow: int, total: int = 1000) -> pytest.MarkDecorator:
    """Return the parametrization of a test by `first`, the first seed of a block; from `slow` on, it is exhaustive."""
    marks = [pytest.mark.slow], [pytest.mark.slow, pytest.mark.exhaustive]
    others = (pytest.param(first, marks=marks[first >= slow]) for first in range(fast, total, BLOCK))
    return pytest.mark.parametrize("first", [*range(0, fast, BLOCK), *others])


def run_block(check: Callable[[int], None], first: int, count: int = BLOCK) -> None:
    """Run the cases of a block; an error has a note with the seed."""
    for seed in range(first, first + count):
        try:
            check(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def choose(rng: random.Random, **fields: Any) -> dict[str, Any]:
    """Return fields with one of their values each."""
    return {name: rng.choice(values) for name, values in fields.items()}


def cuts(rng: random.Random, length: int, most: int = 3) -> Iterator[tuple[int, int]]:
    """Yield the bounds of 1 to `most` + 1 parts of a sequence, none of them empty."""
    inner = {rng.randrange(1, length) for _ in range(rng.randint(0, most))} if length > 1 else set()
    bounds = sorted({0, length, *inner})
    yield from zip(bounds, bounds[1:], strict=False)
