"""Labels of context-parallel shards: ignored labels, targets, and errors raised on all ranks."""

import pytest
import torch
import torch.distributed as dist
from transformers.loss.loss_utils import ForQuestionAnsweringLoss

import luna_mega
from luna_mega.kernels.context_parallel import ContextShard
from luna_mega.modeling_common.labels import count_kept, next_tokens, shift_right
from luna_mega.modeling_common.pooling import LOCAL
from luna_mega.modeling_common.sharding import ShardedReductions
from tests.modeling.luna import tiny_config

LENGTHS = {2: (5, 7), 4: (3, 1, 2, 6)}
# With gaps, one without tokens on one rank, padding on either side, and a fully masked one.
MASK = torch.tensor(
    [
        [1, 1, 0, 0, 0, 0, 1, 0, 1, 1, 0, 1],
        [1] * 12,
        [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0],
        [0] * 12,
    ]
).bool()


def compare_labels(seed):
    """Return whether the shards of targets, decoder inputs and losses match the complete sequences."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, 30, MASK.shape, generator=generator)
    scores = torch.randn(2, *MASK.shape, generator=generator).masked_fill(~MASK, torch.finfo(torch.float32).min)
    positions = torch.randint(-1, 15, (2, len(MASK)), generator=generator)
    positions[:, 1] = 4  # one that counts
    shard = ContextShard(dist.group.WORLD, LENGTHS[dist.get_world_size()])
    parts, here = ShardedReductions(shard), slice(shard.start, shard.start + shard.lengths[shard.rank])
    own, hidden = labels[:, here], count_kept(labels, MASK)
    expected = [
        next_tokens(labels, None),
        next_tokens(labels, None, MASK),
        next_tokens(labels, labels, MASK),
        *shift_right(hidden, 2, 1),
    ]
    actual = [
        next_tokens(own, None, reductions=parts),
        next_tokens(own, None, MASK[:, here], reductions=parts),
        next_tokens(own, own, MASK[:, here], reductions=parts),
        *shift_right(hidden[:, here], 2, 1, parts),
    ]
    same = [torch.equal(x[:, here], y) for x, y in zip(expected, actual, strict=True)]
    for options in ({}, {"num_items_in_batch": 3}):
        loss = LOCAL.position_loss(ForQuestionAnsweringLoss, scores, positions, MASK, **options)
        parted = parts.position_loss(ForQuestionAnsweringLoss, scores[..., here], positions, MASK[:, here], **options)
        same.append(torch.allclose(loss, parted))
    return same


@pytest.mark.parametrize("count", [2, 4])
def test_labels_of_shards(ranks, count):
    for seed in range(3):
        for rank, same in enumerate(ranks(count, compare_labels, seed)):
            assert all(same), (seed, rank, same)


CASES = {
    "ForMaskedLM": ({}, {"labels": (1, 3)}, {"labels": (1, 5)}),
    "ForTokenClassification": ({}, {"labels": (1, 3)}, {"labels": (1, 5)}),
    "ForSequenceClassification": ({}, {"labels": (2,)}, {"labels": (1,)}),
    "ForQuestionAnswering": (
        {},
        {"start_positions": (2,), "end_positions": (1,)},
        {"start_positions": (1,), "end_positions": (1,)},
    ),
    "ForCausalLM": ({"is_decoder": True}, {"labels": (1, 3)}, {"labels": (1, 5)}),
    "ForConditionalGeneration": ({"is_encoder_decoder": True}, {"labels": (3,)}, {"labels": (1, 5)}),
}


def wrong_labels():
    """The last rank has labels of a wrong shape."""
    errors, last = {}, dist.get_rank() == dist.get_world_size() - 1
    for head, (fields, wrong, right) in CASES.items():
        model = getattr(luna_mega, f"Luna{head}")(tiny_config(**fields)).eval()
        labels = {name: torch.ones(shape, dtype=torch.long) for name, shape in (wrong if last else right).items()}
        try:
            model(torch.full((1, 5), 7), **labels, cp_group=dist.group.WORLD)
        except ValueError as error:
            errors[head] = str(error)
    return errors


def test_labels_rejected_by_one_rank(ranks):
    """All ranks raise an error, so none waits for the others."""
    first, last = ranks(2, wrong_labels)
    assert first.keys() == last.keys() == CASES.keys()
    assert all("a rank has no positions, or its inputs were invalid" in text for text in first.values())
    assert all("must have the shape" in text for text in last.values())
