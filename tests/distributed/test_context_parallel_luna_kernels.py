"""Luna's ops on context-parallel shards against the same ops on complete sequences."""

import pytest
import torch
import torch.distributed as dist

from luna_mega.kernels.api import luna_attention, luna_causal_attention
from luna_mega.kernels.context_parallel import ContextShard

LENGTHS = {2: (5, 8), 4: (1, 6, 3, 3)}
TOTAL = 13


def mask_of_all_kinds():
    """Sequences without padding, with padding on the left or right of a border between ranks, and without tokens."""
    column = torch.arange(TOTAL)
    return torch.stack([column >= 0, column >= 6, column < 2, column < 0])


def seeded(*shape, dtype):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def part_of(shard, x):
    return x[:, shard.start : shard.start + shard.lengths[shard.rank]]


def compare(shard, function, complete, parts, same):
    """Return the maximum differences of outputs and gradients between a rank's sharded call and the complete call.

    Args:
        shard: shard of this rank.
        function: called with the tensors of `parts`, those of `same` and keyword arguments; returns sharded tensors
            `[B, T, ...]` and tensors that are equal on all ranks.
        complete: keyword arguments of the complete call and of the sharded call.
        parts: tensors that are sharded.
        same: tensors that are equal on all ranks.
    """
    leaves = [x.clone().requires_grad_() for x in (*parts, *same)]
    cut = [part_of(shard, x).clone().requires_grad_() for x in parts] + [x.clone().requires_grad_() for x in same]
    expected, shared = function(*leaves, **complete[0])
    mine, mine_shared = function(*cut, **complete[1])
    weights = [seeded(*x.shape, dtype=x.dtype) for x in (expected, shared)]
    gradients = torch.autograd.grad([expected, shared], leaves, weights)
    # The loss is the sum over the ranks. A result that all ranks have counts once.
    loss = (mine * part_of(shard, weights[0])).sum() + (mine_shared * weights[1]).sum() / shard.size
    mine_gradients = list(torch.autograd.grad(loss, cut))
    for gradient in mine_gradients[len(parts) :]:
        dist.all_reduce(gradient)
    pairs = [(part_of(shard, expected), mine), (shared, mine_shared)]
    pairs += [(part_of(shard, x), y) for x, y in zip(gradients, mine_gradients, strict=False)][: len(parts)]
    pairs += list(zip(gradients[len(parts) :], mine_gradients[len(parts) :], strict=True))
    return [(x - y).abs().max().item() for x, y in pairs]


def attend(dtype, backend, kind, masked):
    lengths = LENGTHS[dist.get_world_size()]
    shard = ContextShard.of(dist.group.WORLD, lengths[dist.get_rank()], torch.device("cpu"))
    query, key, value = seeded(4, TOTAL, 2, 8, dtype=dtype), *seeded(2, 4, TOTAL, 2, 8, dtype=dtype)
    pack_query = seeded(4, 3, 2, 8, dtype=dtype)
    mask = mask_of_all_kinds() if masked else None

    def function(query, key, *rest, **options):
        value = key if kind == "tied" else rest[0]
        return luna_attention(query, rest[-1], key, value, lambda packed: (packed, packed), backend=backend, **options)

    complete = {"context_mask": mask}, {"context_mask": None if mask is None else part_of(shard, mask), "shard": shard}
    return compare(shard, function, complete, [query, key] + ([] if kind == "tied" else [value]), [pack_query])


def attend_causally(dtype, backend, activation, masked):
    lengths = LENGTHS[dist.get_world_size()]
    shard = ContextShard.of(dist.group.WORLD, lengths[dist.get_rank()], torch.device("cpu"))
    tokens, pack_query = list(seeded(4, 4, TOTAL, 2, 8, dtype=dtype)), seeded(4, 3, 2, 8, dtype=dtype)
    mask = mask_of_all_kinds() if masked else None
    pack_mask = torch.tensor([[True, True, masked]] * 3 + [[True, False, False]])

    def function(query, pack_key, key, value, pack_query, **options):
        options |= {"activation": activation, "pack_mask": pack_mask, "backend": backend}
        output = luna_causal_attention(query, pack_query, pack_key, key, value, **options)
        return output, pack_query[:1] * 0.0

    complete = {"mask": mask}, {"mask": None if mask is None else part_of(shard, mask), "shard": shard}
    return compare(shard, function, complete, tokens, [pack_query])


@pytest.mark.parametrize("function, count, backend, dtype, tolerance, kind, masked", [
    (attend, 2, "torch", torch.float64, 1e-13, "untied", True),
    (attend, 4, "torch", torch.float32, 2e-6, "tied", True),
    (attend, 2, "torch", torch.float32, 2e-6, "untied", False),
    (attend, 4, "reference", torch.float64, 1e-13, "tied", True),
    (attend, 2, "triton", torch.float32, 2e-6, "tied", True),
    pytest.param(attend, 2, "triton", torch.float32, 2e-6, "untied", False, marks=pytest.mark.slow),
    (attend_causally, 2, "torch", torch.float64, 1e-13, "softplus", True),
    (attend_causally, 4, "torch", torch.float32, 2e-6, "elu", True),
    (attend_causally, 2, "torch", torch.float32, 2e-6, "softplus", False),
    (attend_causally, 4, "reference", torch.float64, 1e-13, "elu", True),
    pytest.param(attend_causally, 2, "triton", torch.float32, 2e-6, "softplus", True, marks=pytest.mark.slow),
])  # fmt: skip
def test_shards_attend_like_complete_sequences(ranks, function, count, backend, dtype, tolerance, kind, masked):
    if backend == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
    for differences in ranks(count, function, dtype, backend, kind, masked):
        assert max(differences) < tolerance, differences
