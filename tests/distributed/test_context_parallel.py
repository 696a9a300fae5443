"""The exchanges between ranks that share sequences, and the cut of a batch."""

import re

import pytest
import torch
import torch.distributed as dist

from luna_mega import shard_sequence
from luna_mega.kernels.context_parallel import ContextShard
from luna_mega.modeling_common.sharding import ShardedLayout


def describe(lengths):
    shard = ContextShard.of(dist.group.WORLD, lengths[dist.get_rank()], torch.device("cpu"), batch=2)
    return shard.lengths, shard.rank, shard.size, shard.start, shard.total


def test_shards_know_the_lengths_of_all_ranks(ranks):
    expected = [((3, 1, 2), rank, 3, start, 6) for rank, start in enumerate((0, 3, 4))]
    assert ranks(3, describe, (3, 1, 2)) == expected


def error_of(lengths, batches):
    rank = dist.get_rank()
    with pytest.raises(ValueError) as error:
        ContextShard.of(dist.group.WORLD, lengths[rank], torch.device("cpu"), batch=batches[rank])
    return str(error.value)


@pytest.mark.parametrize(
    "lengths, batches, message",
    [((3, 0), (2, 2), r"no positions.*\[3, 0\]"), ((3, 3), (2, 1), r"batch must be equal .*, got \[2, 1\]")],
)
def test_every_rank_raises_if_one_fails(ranks, lengths, batches, message):
    for error in ranks(2, error_of, lengths, batches):
        assert re.search(message, error)


def exchange():
    shard = ContextShard.of(dist.group.WORLD, 1, torch.device("cpu"))
    x = torch.arange(6.0).view(2, 3).add(10.0 * shard.rank).T.requires_grad_()  # no contiguous tensor
    rows = shard.all_gather(x)
    (gathered,) = torch.autograd.grad((rows * torch.arange(1.0, 1.0 + shard.size)[:, None, None]).sum(), x)
    total = shard.all_reduce_sum(x)
    (summed,) = torch.autograd.grad(total.sum() * (1.0 + shard.rank), x)
    return [y.detach() for y in (x, rows, gathered, total, summed, shard.all_reduce_max(x), shard.broadcast_first(x))]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_gradients_equal_the_summed_losses(ranks, count):
    x = torch.arange(6.0).view(2, 3).T + 10.0 * torch.arange(count)[:, None, None]
    for rank, (mine, rows, gathered, total, summed, largest, first) in enumerate(ranks(count, exchange)):
        assert torch.equal(mine, x[rank]) and torch.equal(rows, x) and torch.equal(total, x.sum(dim=0))
        assert torch.equal(gathered, torch.full((3, 2), count * (rank + 1.0)))
        assert torch.equal(summed, torch.full((3, 2), count * (count + 1) / 2))
        assert torch.equal(largest, x[-1]) and torch.equal(first, x[0])


def lay_out(mask, lengths):
    rank = dist.get_rank()
    start = sum(lengths[:rank])
    part = mask[:, start : start + lengths[rank]]
    layout = ShardedLayout.of(dist.group.WORLD, None if part.all() else part, part)
    return layout.sizes(part), layout.counts(), layout.start()


def test_layouts_count_tokens_over_all_ranks(ranks):
    # unpadded, left padding across a shard boundary, right padding, fully masked
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1], [1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]]).bool()
    starts = (0, 3, 4)
    for start, (sizes, counts, position) in zip(starts, ranks(3, lay_out, mask, (3, 1, 2)), strict=True):
        assert sizes == (4, 6) and counts.tolist() == [[6], [2], [3], [0]]
        assert position.tolist() == mask[:, :start].sum(dim=1).tolist()
    for start, (_, counts, position) in zip(starts, ranks(3, lay_out, mask[:1], (3, 1, 2)), strict=True):
        assert counts is None and position.tolist() == [start]


def cut(length, multiple):
    ids = torch.arange(2 * length).view(2, length)
    kept = {"labels": torch.zeros(2, length), "packed_states": torch.zeros(2, length, 3), "return_dict": True}
    batch = kept | {"input_ids": ids, "inputs_embeds": ids[..., None] * torch.ones(5), "pair_input_ids": ids[:, None]}
    try:
        return shard_sequence(batch, dist.group.WORLD, multiple)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("length, multiple, lengths", [(10, 1, [3, 3, 4]), (3, 1, [1, 1, 1]), (21, 4, [8, 8, 5])])
def test_batches_are_split_into_shards_of_nearly_equal_length(ranks, length, multiple, lengths):
    parts = ranks(3, cut, length, multiple)
    assert [part["input_ids"].shape[1] for part in parts] == lengths
    assert torch.equal(torch.cat([part["input_ids"] for part in parts], 1), torch.arange(2 * length).view(2, length))
    for part in parts:
        assert torch.equal(part["inputs_embeds"][..., 0], part["input_ids"])
        assert torch.equal(part["pair_input_ids"][:, 0], part["input_ids"])
        assert part["labels"].shape == (2, length) and part["packed_states"].shape == (2, length, 3)


def test_too_short_batch_raises(ranks):
    assert all("length 8 has 2 parts of 4 positions, fewer than the 3 ranks" in text for text in ranks(3, cut, 8, 4))
