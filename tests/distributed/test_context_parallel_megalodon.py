"""`complex_ema` and `timestep_norm` on context-parallel shards against one process, in float64."""

import pytest
import torch
import torch.distributed as dist

from luna_mega.kernels.context_parallel import ContextShard
from tests.kernels import test_complex_ema, test_timestep_norm
from tests.kernels.test_damped_ema import assert_same

OPS = {"complex_ema": test_complex_ema.Inputs, "timestep_norm": test_timestep_norm.Inputs}
CASES = [(op, masking) for op in OPS for masking in ("none", "some")]


def projected(output):
    """Return the loss of an output at all positions: a fixed random projection."""
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def complete(lengths, op, masking):
    inputs = OPS[op](sum(lengths), masking=masking)
    output = inputs.call(*inputs.leaves, return_state=False, backend="reference")
    return [output.detach(), *torch.autograd.grad(output, inputs.leaves, projected(output))]


def part(lengths, op, masking, backend):
    """Return this rank's positions of the output, and the gradients that this rank has of all leaves."""
    inputs = OPS[op](sum(lengths), masking=masking)
    x, *rest = inputs.leaves
    shard = ContextShard.of(dist.group.WORLD, lengths[dist.get_rank()], x.device)
    here = slice(shard.start, shard.start + lengths[shard.rank])
    mask = None if inputs.mask is None else inputs.mask[:, here]
    output = inputs.call(x[:, here], *rest, mask=mask, return_state=False, shard=shard, backend=backend)
    return [output.detach(), *torch.autograd.grad(output, inputs.leaves, projected(x)[:, here])]


def parts(lengths, backend):
    return [part(lengths, *case, backend) for case in CASES]


@pytest.mark.parametrize("backend, lengths", [("reference", (9, 3)), ("torch", (1, 64, 130, 2))])
def test_shards_match_the_complete_sequence(ranks, backend, lengths):
    results = ranks(len(lengths), parts, lengths, backend)
    for case, *of_ranks in zip(CASES, *results, strict=True):
        outputs, *gradients = zip(*of_ranks, strict=True)
        actual = [torch.cat(outputs, 1), *(sum(gradient) for gradient in gradients)]
        assert_same(actual, complete(lengths, *case), 1e-11)


def invalid_calls():
    messages = []
    for op, make in OPS.items():
        inputs = make(5)
        shard = ContextShard.of(dist.group.WORLD, 5, inputs.leaves[0].device)
        for options in (
            {"return_state": True},
            {"cu_seqlens": torch.tensor([0, 5])},
            {"shard": shard._replace(lengths=(4, 4))},
        ):
            with pytest.raises(ValueError) as error:
                inputs.call(*inputs.leaves, **{"shard": shard, "return_state": False} | options)
            messages.append((op, str(error.value)))
    return messages


def test_unsupported_arguments_raise_on_every_rank(ranks):
    for messages in ranks(2, invalid_calls):
        for (op, message), expected in zip(messages, 2 * ("return_state", "cu_seqlens", "has length 5"), strict=True):
            assert op in message and expected in message
