"""Documents of the task `passkey`: a number among sentences that say nothing, and the question for it at the end.

lm-eval calls `documents` with the arguments of the model and the values of `--metadata`.
"""

import random
from collections.abc import Callable
from typing import Any

from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer

LENGTHS = (1024, 4096, 16384, 65536)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the number in the text, 1 = at its end
ANSWER = 16  # tokens that are left for the answer, `max_gen_toks` in passkey.yaml

HEAD = "There is a number hidden in the text below. Remember it, you will be asked for it.\n"
FILL = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
KEY = "The pass key is {key}. Remember it: {key} is the pass key. "
QUESTION = "\nWhat is the pass key? The pass key is"


def documents(
    pretrained: str | None = None,
    tokenizer: str | None = None,
    max_length: int | None = None,
    max_seq_lengths: tuple[int, ...] = LENGTHS,
    num_samples: int = 4,
    **_: Any,
) -> dict[str, Dataset]:
    """Make `num_samples` documents for each length and each of the five depths; they are the same every time.

    Args:
        pretrained, tokenizer: folder of the model, and of its tokenizer where that is another one.
        max_length: tokens that lm-eval gives the model at most; None = the limit of its configuration, or 2,048, which
            lm-eval takes where there is none.
        max_seq_lengths: tokens of a document and its answer, which is at most one sentence of `FILL` longer.

    Raises:
        ValueError: lm-eval would cut a document off, or a length has no room for the sentences around the fill.
    """
    limit = max_length or getattr(AutoConfig.from_pretrained(pretrained), "max_position_embeddings", 2048)
    if (longest := max(max_seq_lengths)) > limit:
        raise ValueError(
            f"passkey of {longest} tokens, and the model is given {limit}: add --model_args max_length={longest} for a "
            f"model that takes any length, or --metadata max_seq_lengths=[{limit}] for shorter texts"
        )
    encoder = AutoTokenizer.from_pretrained(tokenizer or pretrained)
    rows = []
    for length in max_seq_lengths:
        generator = random.Random(length)
        for depth in DEPTHS:
            for key in generator.sample(range(10000, 100000), num_samples):
                text = fill(str(key), depth, length - ANSWER, lambda text: len(encoder(text).input_ids))
                rows.append({"text": text, "key": str(key), "length": length, "depth": depth})
    return {"test": Dataset.from_list(rows)}


def fill(key: str, depth: float, room: int, count: Callable[[str], int]) -> str:
    """Return the document with as much fill as there is room for, counted in tokens."""
    least, more = count(document(key, depth, 0)), count(document(key, depth, 8))
    if least > room:
        raise ValueError(f"passkey of {room + ANSWER} tokens: its sentences alone are {least + ANSWER}")
    sentences = 8 * (room - least) // (more - least)
    while count(text := document(key, depth, sentences)) > room:
        sentences -= 1
    return text


def document(key: str, depth: float, sentences: int) -> str:
    before = round(depth * sentences)
    return HEAD + FILL * before + KEY.format(key=key) + FILL * (sentences - before) + QUESTION


def score(row: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return 1 or 0 under the document's length; -1 under the others, which `mean` leaves out."""
    return {str(length): -1.0 for length in LENGTHS} | {str(row["length"]): float(row["key"] in results[0])}


def mean(scores: list[float]) -> float:
    """Return the mean of the scores that count; -1 where there are none."""
    scored = [score for score in scores if score >= 0]
    return sum(scored) / len(scored) if scored else -1.0
