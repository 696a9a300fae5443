"""Documents of the lm-eval task `passkey`: a number hidden in filler sentences, followed by a question for it.

lm-eval calls `documents` with the `metadata` of the task manager, which includes the arguments of the model.
"""

import random
from collections.abc import Callable
from typing import Any

from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer

LENGTHS = (1024, 4096, 16384, 65536)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # relative position of the number in the text
ANSWER = 16  # tokens of the answer, `max_gen_toks` in passkey.yaml

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
    """Return the same `num_samples` documents per length and depth in each call.

    Args:
        pretrained: Folder of the model.
        tokenizer: Folder of the tokenizer, if it is not the model's folder.
        max_length: Maximum input length of lm-eval; None = the value in the configuration, or 2,048.
        max_seq_lengths: Tokens of a document with its answer, up to one sentence of `FILL`.
        num_samples: Number of documents per length and depth.

    Raises:
        ValueError: lm-eval would truncate a document, or a length is too short for the sentences.
    """
    limit = max_length or getattr(AutoConfig.from_pretrained(pretrained), "max_position_embeddings", 2048)
    if (longest := max(max_seq_lengths)) > limit:
        raise ValueError(
            f"passkey of {longest} tokens exceeds the maximum length {limit}: set max_length={longest} in "
            f"model_args and metadata if the model supports any length, or max_seq_lengths=[{limit}] in metadata"
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
    """Return the longest document of at most `room` tokens."""
    least, more = count(document(key, depth, 0)), count(document(key, depth, 8))
    if least > room:
        raise ValueError(f"passkey of {room + ANSWER} tokens: its sentences without filler have {least + ANSWER}")
    sentences = 8 * (room - least) // (more - least)
    while count(text := document(key, depth, sentences)) > room:
        sentences -= 1
    return text


def document(key: str, depth: float, sentences: int) -> str:
    before = round(depth * sentences)
    return HEAD + FILL * before + KEY.format(key=key) + FILL * (sentences - before) + QUESTION


def score(row: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return 1 or 0 for the length of the document, and -1, which `mean` ignores, for other lengths."""
    return {str(length): -1.0 for length in LENGTHS} | {str(row["length"]): float(row["key"] in results[0])}


def mean(scores: list[float]) -> float:
    """Return the mean of the scores that are not -1, or -1 if there are none."""
    scored = [score for score in scores if score >= 0]
    return sum(scored) / len(scored) if scored else -1.0
