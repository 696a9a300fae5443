"""Random encoders with a head have the results, losses and gradients of separate rows in every layout."""

import random

import pytest

from tests.modeling import luna, mega, random_models, test_losses_of_rows as layouts
from tests.random_cases import in_blocks, run_block

ENCODERS = {"unpad_inputs": (True, False), "embedding_size": (None, None, 8), "classifier_num_layers": (0, 1, 2)}
HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def random_luna(rng):
    fields = random_models.luna(
        rng, **ENCODERS, dynamic_projection_length=(True, False), contextual_projection=(True, False),
        type_vocab_size=(0, 3), pooling=luna.POOLINGS,
    )  # fmt: skip
    return luna, fields | {"projection_length": rng.choice((1, 3, 8, 40)), "pad_token_id": 1}


def random_mega(rng):
    fields = random_models.mega(
        rng, **ENCODERS, bidirectional=(True, False), add_token_type_embeddings=(True, False),
        pooling=("cls", "last", "mean"),
    )  # fmt: skip
    fields["ema_shift"] = fields["ema_projection_size"] > 0 and fields["bidirectional"] and rng.random() < 0.5
    return mega, fields


@pytest.fixture
def check(monkeypatch):
    def check(seed):
        rng = random.Random(seed)
        family, fields = rng.choice((random_luna, random_mega))(rng)
        fields["tie_word_embeddings"] = fields["embedding_size"] is None
        head, unpad = rng.choice(HEADS), fields.pop("unpad_inputs")
        case = family.__name__.rpartition(".")[2]
        monkeypatch.setitem(layouts.CASES, case, (family, head, fields))
        token_results = head not in ("ForSequenceClassification", "ForQuestionAnswering")
        if token_results and rng.random() < 0.3:
            found = layouts.run_packed(case, rng.choice(layouts.MARKERS))
        else:
            option = rng.choice([option for option in layouts.OPTIONS if option not in ("unpadded", "embeddings")])
            found = layouts.run_padded(case, rng.choice([*layouts.COLUMNS]), "unpadded" if unpad else option)
        layouts.check(case, found)

    return check


@in_blocks(fast=25, slow=200)
def test_one_result(first, check):
    run_block(check, first)
