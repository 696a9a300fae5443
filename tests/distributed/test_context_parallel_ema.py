"""`damped_ema` on context-parallel shards against one process, in float64."""

import pytest
import torch
import torch.distributed as dist

from luna_mega.kernels.api import damped_ema
from luna_mega.kernels.context_parallel import ContextShard
from tests.kernels.test_damped_ema import Inputs, assert_same

KINDS = ["causal", "bidirectional", "shifted"]
CASES = [(kind, masking) for kind in KINDS for masking in ("none", "some")]


def projected(output):
    """Return the loss of an output at all positions: a fixed random projection."""
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def complete(lengths, kind, masking):
    inputs = Inputs(sum(lengths), kind, masking)
    output = inputs.call(*inputs.leaves)
    return [output.detach(), *torch.autograd.grad(output, inputs.leaves, projected(output))]


def part(lengths, kind, masking, backend):
    """Return this rank's positions of the output, and the gradients that this rank has of all leaves."""
    inputs = Inputs(sum(lengths), kind, masking)
    x, *rest = inputs.leaves
    shard = ContextShard.of(dist.group.WORLD, lengths[dist.get_rank()], x.device)
    here = slice(shard.start, shard.start + lengths[shard.rank])
    mask = None if inputs.mask is None else inputs.mask[:, here]
    output = damped_ema(x[:, here], *rest, mask=mask, shift=inputs.shift, shard=shard, backend=backend)
    return [output.detach(), *torch.autograd.grad(output, inputs.leaves, projected(inputs.leaves[0])[:, here])]


def parts(lengths, backend):
    return [part(lengths, *case, backend) for case in CASES]


@pytest.mark.parametrize("backend, lengths", [("reference", (9, 3)), ("torch", (70, 3)), ("torch", (1, 64, 130, 2))])
def test_shards_match_the_complete_sequence(ranks, backend, lengths):
    results = ranks(len(lengths), parts, lengths, backend)
    for case, *of_ranks in zip(CASES, *results, strict=True):
        outputs, *gradients = zip(*of_ranks, strict=True)
        actual = [torch.cat(outputs, 1), *(sum(gradient) for gradient in gradients)]
        assert_same(actual, complete(lengths, *case))


def with_bfloat16():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 40, 4, generator=generator).bfloat16()
    parameters = [torch.randn(8, 3, generator=generator) for _ in range(4)]
    shard = ContextShard.of(dist.group.WORLD, 20, x.device)
    with torch.autocast("cpu", torch.bfloat16):
        output = damped_ema(x[:, shard.start :][:, :20], *parameters, shard=shard)
        return output, damped_ema(x, *parameters)[:, shard.start :][:, :20]


def test_half_precision_is_rounded_once(ranks):
    for actual, expected in ranks(2, with_bfloat16):
        assert actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual, expected, atol=0, rtol=2**-7)


def invalid_calls():
    x, parameters = torch.randn(1, 5, 2), [torch.randn(2, 3) for _ in range(4)]
    shard = ContextShard.of(dist.group.WORLD, 5, x.device)
    damped_ema(x, *parameters, truncation=10, shard=shard)
    messages = []
    for options in (
        {"truncation": 9},
        {"return_state": True},
        {"cu_seqlens": torch.tensor([0, 5])},
        {"shard": shard._replace(lengths=(5, 5, 5)[: shard.rank] + (4, 5))},
    ):
        with pytest.raises(ValueError) as error:
            damped_ema(x, *parameters, **{"shard": shard} | options)
        messages.append(str(error.value))
    return messages


def test_unsupported_arguments_raise_on_every_rank(ranks):
    for messages in ranks(2, invalid_calls):
        for message, part in zip(
            messages, ("below the 10 positions", "return_state", "cu_seqlens", "has length 5"), strict=True
        ):
            assert part in message
