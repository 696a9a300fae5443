"""Invalid `cu_seqlens` raise an error on the CPU and fail an assertion on other devices."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from luna_mega.kernels import varlen
from luna_mega.kernels.api import luna_pack

WRONG = {
    "starts after 0": ([1, 4, 10], 6, "must increase from 0 to 10"),
    "ends before the last token": ([0, 4, 9], 6, "must increase from 0 to 10"),
    "ends after the last token": ([0, 4, 11], 7, "must increase from 0 to 10"),
    "falls": ([0, 12, 10], 12, "must increase from 0 to 10"),
    "longer than max_seqlen": ([0, 4, 10], 5, "max_seqlen is 5, but a sequence has length 6"),
}


@pytest.mark.parametrize("bounds, longest, message", WRONG.values(), ids=WRONG)
def test_wrong_bounds(bounds, longest, message):
    """Invalid bounds raise an error; compiled programs check the values at run time, like calls on a GPU."""
    bounds = torch.tensor(bounds)
    with pytest.raises(ValueError, match=message):
        varlen.check_cu_seqlens("an op", bounds, longest, 10)
    with pytest.raises(RuntimeError, match="cu_seqlens must increase from 0 to the length, by at most max_seqlen"):
        varlen._assert_on_device("an op", bounds, bounds.diff(), longest, 10)


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
