"""Invalid `cu_seqlens` raise an error on the CPU and fail an assertion on other devices."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from luna_mega.kernels import api, varlen
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


X, P, BOUNDS = torch.linspace(-1, 1, 40).view(1, 10, 4).double(), torch.ones(2, 3, 4).double(), torch.tensor([0, 4, 10])
AVERAGE = [torch.linspace(-2, 1, 12).view(4, 3).double()] * 4
VARLEN = {
    "damped_ema": lambda x, **o: api.damped_ema(x, *AVERAGE, **o),
    "damped_ema with states": lambda x, **o: torch.cat(
        [y.flatten() for y in api.damped_ema(x, *AVERAGE, initial_state=P.mT, return_state=True, **o)]
    ),
    "diagonal_ssm with states": lambda x, **o: torch.cat(
        [
            y.flatten()
            for y in api.diagonal_ssm(
                x, -AVERAGE[0].exp(), *AVERAGE[:1], torch.stack(AVERAGE[:2], -1), return_state=True, **o
            )
        ]
    ),
    "timestep_norm": lambda x, **o: api.timestep_norm(x, 2, **o),
    "gated_attention": lambda x, **o: api.gated_attention(x, x, x, **o),
    "luna_pack": lambda x, **o: api.luna_pack(P[:, :, None], x[:, :, None], x[:, :, None], **o),
    "luna_causal_attention": lambda x, **o: api.luna_causal_attention(
        x[:, :, None], P[:, :, None], *[x[:, :, None]] * 3, **o
    ),
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # in `linearize` of PyTorch
@pytest.mark.parametrize("call", VARLEN.values(), ids=VARLEN)
def test_transforms_of_varlen_calls(call):
    """`linearize`, and `vmap` over x or over `cu_seqlens`."""

    def run(x, bounds=BOUNDS):
        return call(x, cu_seqlens=bounds, max_seqlen=6)

    derivative = torch.func.linearize(run, X)[1]
    for tangent in (X.cos(), X):
        torch.testing.assert_close(derivative(tangent), torch.func.jvp(run, (X,), (tangent,))[1])
    others = torch.stack((BOUNDS, torch.tensor([0, 6, 10])))
    torch.testing.assert_close(torch.vmap(run)(torch.stack((X, 2 * X))), torch.stack((run(X), run(2 * X))))
    torch.testing.assert_close(torch.vmap(run, (None, 0))(X, others), torch.stack([run(X, y) for y in others]))
    with pytest.raises(RuntimeError, match="cu_seqlens has no values here .*; pass max_seqlen$"):
        torch.vmap(lambda bounds: call(X, cu_seqlens=bounds))(others)
