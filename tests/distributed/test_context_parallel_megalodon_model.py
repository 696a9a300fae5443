"""Megalodon on context-parallel shards against the same model on complete sequences in one process."""

import copy

import pytest
import torch
import torch.distributed as dist

from luna_mega.kernels.context_parallel import ContextShard
from tests.distributed.test_context_parallel_mega import SEQUENCES, TOTAL, cut, distance, drop_some, measure
from tests.modeling import luna
from tests.modeling.megalodon_decoders import DECODER_ONLY, make, tiny_config

LENGTHS = {2: (8, 15), 4: (4, 8, 4, 7)}
SHAPES = {
    "chunks": ("ForCausalLM", {}),
    "gated, tied": ("ForCausalLM", DECODER_ONLY["one head, gated, tied"] | {"chunk_size": 4}),
    "last token": ("ForSequenceClassification", {"num_labels": 3}),
    "mean": ("ForSequenceClassification", {"num_labels": 3, "pooling": "mean", "chunk_size": 2}),
}


def compare(name, side, checkpointing):
    """Return the differences of outputs and mean gradients from the complete sequence on this rank, by name."""
    (head, fields), lengths, group = SHAPES[name], LENGTHS[dist.get_world_size()], dist.group.WORLD
    model = make(head, vocab_size=40, **fields).train()
    shared = copy.deepcopy(model)
    batch = drop_some(luna.tokens([TOTAL] * 3)) if side == "gaps" else luna.tokens(SEQUENCES, side)
    if checkpointing:
        shared.gradient_checkpointing_enable()
    if head == "ForCausalLM":
        # With left padding the first token would be predicted at padding, whose states are undefined.
        predicted = (batch["attention_mask"].cumsum(dim=1) > 1) & batch["attention_mask"].bool()
        batch["labels"] = batch["input_ids"].masked_fill(~predicted, -100)
    else:
        batch["labels"] = torch.tensor([2, 0, 1])
    part = cut(batch, lengths)
    expected, actual = model(**batch), shared(**part, cp_group=group)
    assert distance(expected.loss, actual.loss) < 1e-6  # transformers rounds the loss to float32
    logits = expected.logits, actual.logits
    if head == "ForCausalLM":
        kept = part["attention_mask"].bool()
        logits = cut({"x": expected.logits.mT}, lengths)["x"].mT[kept], actual.logits[kept]
        complete = expected.logits[batch["attention_mask"].bool()].sin().sum()
        total = ContextShard(group, lengths).all_reduce_sum(logits[1].sin().sum())
    else:
        complete, total = (x.sin().sum() for x in logits)
    complete.backward()
    total.backward()
    found = {"logits": distance(*logits)}
    for (key, parameter), other in zip(model.named_parameters(), shared.parameters(), strict=True):
        dist.all_reduce(other.grad)
        found[key] = distance(parameter.grad, other.grad / len(lengths))
    return found


def compare_all(names, side, checkpointing):
    return [compare(name, side, checkpointing) for name in names]


@pytest.mark.parametrize(
    "count, side, checkpointing",
    [(2, "right", True), (2, "gaps", False), pytest.param(4, "left", False, marks=pytest.mark.slow)],
)
def test_shards_match_the_complete_sequence(ranks, count, side, checkpointing):
    for found in ranks(count, compare_all, list(SHAPES), side, checkpointing):
        for name, differences in zip(SHAPES, found, strict=True):
            worst = max(differences, key=differences.get)
            assert differences[worst] <= 1e-10, (name, worst, differences[worst])


def of_layers(layers):
    return make("Model", dtype=torch.float32, num_hidden_layers=layers)


def test_communication_does_not_grow_with_the_length(ranks):
    config = tiny_config()
    average = 2 * config.hidden_size * config.ema_projection_size * 2  # [B, d, N, 2]
    norm = 3 * 2 * config.norm_num_groups  # weights, means and variances [B, G]
    for length in (8, 64):  # two of each arrive in the forward, their sum in the backward
        assert ranks(2, measure, of_layers, length) == [3 * (average + norm)] * 2
