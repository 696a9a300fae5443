"""Varlen calls: invalid `cu_seqlens` in programs and on devices, and transforms."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from luna_mega.kernels import varlen
from luna_mega.kernels.api import luna_pack
from tests.kernels.calls import OPERATORS, Sizes
from tests.kernels.contract import Case, Inputs


def test_a_compiled_program_checks_its_bounds(triton_device):
    query, key = torch.randn(2, 3, 1, 8, device=triton_device), torch.randn(1, 10, 1, 8, device=triton_device)

    def pack(cu_seqlens):
        return luna_pack(query, key, key, cu_seqlens=cu_seqlens, max_seqlen=6, backend="triton")

    compiled = torch.compile(pack, fullgraph=True, backend="aot_eager")
    right = torch.tensor([0, 4, 10], device=triton_device)
    assert torch.equal(compiled(right), pack(right))
    if triton_device.type == "cpu":  # on a GPU, the failed assertion ends the process
        with pytest.raises(RuntimeError, match="luna_pack: cu_seqlens must increase from 0"):
            compiled(torch.tensor([0, 4, 9]))


def test_no_device_synchronization():
    """On the meta device, the check reads no values; only the copy of a model is not checked by each op."""

    class Assertions(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, operator, types, arguments=(), options=None):
            self.count += operator is torch.ops.aten._assert_async.msg
            return operator(*arguments, **(options or {}))

    with Assertions() as assertions:
        cu_seqlens = torch.empty(3, dtype=torch.int32, device="meta")
        counts = []
        for total, longest in ((10, 6), (10, 6), (12, 6), (12, 7)):
            assert varlen.check_cu_seqlens("an op", cu_seqlens, longest, total) == longest
            counts.append(assertions.count)
        copy = varlen.checked_copy(cu_seqlens, 7, 12)
        for longest in (7, 7, 6):
            varlen.check_cu_seqlens("an op", copy, longest, 12)
    assert counts == [1, 2, 3, 4] and assertions.count == 5 and copy is not cu_seqlens


VARLEN = [name for name, row in OPERATORS.items() if "varlen" in row.layouts and name != "luna_unpack"]


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # in `linearize` of PyTorch
@pytest.mark.parametrize("operator", VARLEN)
def test_transforms_of_varlen_calls(operator):
    """`linearize`, and `vmap` over tokens or over `cu_seqlens`."""
    stateful = OPERATORS[operator].stateful
    inputs = Inputs(
        Case(operator, sizes=Sizes(2, 6, 1, 4, 3, 4, 3), layout="varlen", lengths=(4, 6), stateful=stateful)
    )
    leaves, options = inputs.arguments("torch", **inputs.leaves)
    key = next(key for key in ("x", "context", "key") if key in leaves)
    tokens, bounds = leaves[key], options["cu_seqlens"]

    def run(x, bounds=bounds, max_seqlen=6):
        outputs = inputs.call.run(**leaves | {key: x}, cu_seqlens=bounds, max_seqlen=max_seqlen)
        return torch.cat([y.flatten() for y in outputs if y is not None])

    derivative = torch.func.linearize(run, tokens)[1]
    for tangent in (tokens.cos(), tokens):
        torch.testing.assert_close(derivative(tangent), torch.func.jvp(run, (tokens,), (tangent,))[1])
    others = torch.stack((bounds, torch.tensor([0, 6, 10])))
    both = torch.stack((tokens, 2 * tokens))
    torch.testing.assert_close(torch.vmap(run)(both), torch.stack([run(x) for x in both]))
    torch.testing.assert_close(
        torch.vmap(run, (None, 0))(tokens, others), torch.stack([run(tokens, y) for y in others])
    )
    with pytest.raises(RuntimeError, match="cu_seqlens has no values here .*; pass max_seqlen$"):
        torch.vmap(lambda bounds: run(tokens, bounds, None))(others)


@pytest.mark.parametrize(
    ("operator", "options"),
    [("luna_pack", {}), ("luna_unpack", {}), ("luna_attention", {}), ("gated_attention", {}),
     ("damped_ema", {"truncation": 3})],
)  # fmt: skip
def test_programs_that_need_max_seqlen(operator, options):
    """These calls compare `max_seqlen` with other lengths, which a program cannot do with a value of a tensor."""
    inputs = Inputs(Case(operator, options, layout="varlen", lengths=(4, 1)))
    leaves, options = inputs.arguments("torch", **inputs.leaves)
    program = torch.compile(inputs.call.run, backend="eager")
    with pytest.raises(RuntimeError, match="needs max_seqlen in a compiled program; pass max_seqlen$"):
        program(**leaves, **options)
