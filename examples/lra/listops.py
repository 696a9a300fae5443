"""ListOps: nested lists of digits with minimum, maximum, median and sum modulo 10 (Nangia and Bowman 2018).

The trees follow Long Range Arena (Tay et al. 2021, section 2.2). Above the deepest level, a node is an operation on 2
to `max_args` arguments with probability 1/4, and otherwise a digit. Trees are accepted if `min_length < tokens <
max_length`. Tokens and brackets are separated by spaces: `[MAX 2 9 [MIN 4 7 ] 0 ]`.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from statistics import median

OPERATIONS = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(median(values)),
    "[SM": lambda values: sum(values) % 10,
}
CLOSE, DIGITS = "]", tuple("0123456789")
TOKENS = (*OPERATIONS, CLOSE, *DIGITS)
OPERATION_PROBABILITY = 0.25
BATCH = 32


@dataclass(frozen=True)
class Shape:
    """Maximum levels and arguments of the trees, and exclusive limits of the number of tokens."""

    max_depth: int = 10
    max_args: int = 10
    min_length: int = 500
    max_length: int = 2000

    def __post_init__(self):
        if self.max_depth < 2 or self.max_args < 2:
            raise ValueError(f"--max_depth {self.max_depth} and --max_args {self.max_args} must be at least 2")
        if not 0 < self.min_length < self.max_length - 1:
            limits = f"more than {self.min_length} and less than {self.max_length} tokens"
            raise ValueError(f"there are no trees of several nodes with {limits}; change --min_length or --max_length")


def evaluate(source: str) -> int:
    """Return the value of a tree, 0 to 9, from its tokens.

    Raises:
        ValueError: The tokens are not a tree.
    """
    open_lists: list[list] = [[]]
    for token in source.split():
        if token in OPERATIONS:
            open_lists.append([token])
        elif token in DIGITS:
            open_lists[-1].append(int(token))
        elif token == CLOSE and len(open_lists) > 1:
            operation, *values = open_lists.pop()
            if not values:
                raise ValueError(f"{operation} has no argument")
            open_lists[-1].append(OPERATIONS[operation](values))
        else:
            raise ValueError(f"{token!r} is not valid in a ListOps tree")
    if len(open_lists) != 1 or len(open_lists[0]) != 1:
        raise ValueError("the tokens are not one tree" if len(open_lists) == 1 else "a closing bracket is missing")
    return open_lists[0][0]


def make_batch(seed: int, shape: Shape, split: int, number: int) -> list[dict[str, str | int]]:
    """Return the rows of one batch."""
    return list(islice(trees(f"{seed} {split} {number}", shape), BATCH))


def trees(seed: int | str, shape: Shape) -> Iterator[dict[str, str | int]]:
    """Yield an infinite sequence of rows with `source` and `label`, possibly with duplicates."""
    draw = random.Random(seed)
    while True:
        tokens = _tree(draw, shape)
        if tokens is not None and len(tokens) > shape.min_length:
            source = " ".join(tokens)
            yield {"source": source, "label": evaluate(source)}


def _tree(draw: random.Random, shape: Shape) -> list[str] | None:
    """Return the tokens of a random tree, or None if it is too long."""
    tokens: list[str] = []
    open_nodes = [1]  # number of missing arguments of each open node
    while open_nodes:
        if len(tokens) + len(open_nodes) > shape.max_length:
            return None
        if open_nodes[-1] == 0:
            open_nodes.pop()
            if open_nodes:
                tokens.append(CLOSE)
            continue
        open_nodes[-1] -= 1
        if len(open_nodes) < shape.max_depth and draw.random() <= OPERATION_PROBABILITY:
            open_nodes.append(draw.randint(2, shape.max_args))
            tokens.append(draw.choice(tuple(OPERATIONS)))
        else:
            tokens.append(draw.choice(DIGITS))
    return tokens if len(tokens) < shape.max_length else None
