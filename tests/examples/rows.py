"""Rows of tiny data sets for the scripts."""

import random


def texts(draw: random.Random) -> dict:
    words = " ".join(draw.choices(["a", "good", "bad", "film", "book"], k=draw.randrange(4, 12)))
    return {"text": words, "sentence": words, "label": draw.randrange(2)}


def questions(draw: random.Random) -> dict:
    options = draw.sample(["red", "blue", "green", "black", "white"], 4)
    row = {"example_id": "middle1", "article": "the door is red", "question": "what is _ ?", "options": options}
    return row | {"answer": draw.choice("ABCD")}


def pairs(draw: random.Random) -> dict:
    words = draw.choices(["one", "two", "three"], k=4)
    return {"translation": {"en": " ".join(words), "de": " ".join(words[::-1])}}


def images(draw: random.Random) -> dict:
    return {"image": draw.randbytes(64), "label": draw.choice(["left", "right"])}


def clips(draw: random.Random) -> dict:
    clip = [draw.uniform(-1, 1) for _ in range(draw.randrange(40, 60))]
    return {"audio": clip, "sampling_rate": 1000, "label": draw.choice("ab")}


MAKERS = {"text": texts, "race": questions, "pairs": pairs, "images": images, "clips": clips}
# Script of classification -> columns of a row without its label.
COLUMNS = {
    "run_glue": {"sentence1": "a b", "sentence2": "b"},
    "run_text_classification": {"text": "a b"},
    "run_audio": {"audio": [0.1, -0.1, 0.3] * 10, "sampling_rate": 1000},
    "run_image_classification": {"image": bytes(range(64))},
    "run_race": {"example_id": "high\t1", "article": "a", "question": "b", "options": list("wxyz")},
    "lra.run_lra": {"text": "a b"},
}
