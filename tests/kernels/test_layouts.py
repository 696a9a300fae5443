"""Every op on Triton has the results of separate calls in varlen batches, segments and steps, and with masks."""

import math

import pytest
import torch

from luna_mega.kernels import api
from luna_mega.kernels.luna_causal_attention import torch_backend
from luna_mega.kernels.timestep_norm import torch_passes
from tests.kernels.backends import SLOW_TRITON, TRITON, on_backends
from tests.kernels.calls import CALLS, Sizes
from tests.kernels.comparisons import assert_same

LENGTHS = 20, 3, 0, 1, 9
SIZES = Sizes(len(LENGTHS), max(LENGTHS), 2, 5, 4, 6, 3, 2, 7)
TOKENS = {"query", "context", "value", "x", "pack_key", "key"}
STATES = {"state", "key_mean", "value_mean", "mean", "variance"}
OF_SEQUENCES = {"rows", "pack_query", *STATES}
# Also without calls that differ from another one only in the mask.
OTHERS = ("_step", "truncated", "row_offset", "size=128", "luna_unpack", "_ema masked", "ssm masked", "norm masked, s")
VARLEN = [name for name in CALLS if not any(word in name for word in OTHERS)]
BACKENDS = [SLOW_TRITON]  # the contract has the others


def precision(backend, bound=1e-12):
    """Return the dtype in which a backend is tested, and the bound of its errors."""
    return (torch.float32, 1e-5) if backend in ("native", "triton") else (torch.float64, bound)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(torch_backend, "CHUNK", 8)
    monkeypatch.setattr(torch_passes, "BLOCK", 80)


@pytest.fixture
def small_tiles(monkeypatch):
    from luna_mega.kernels.luna_causal_attention import triton_forward
    from luna_mega.kernels.moving_average import triton_plan
    from luna_mega.kernels.timestep_norm import triton_kernels

    monkeypatch.setattr(triton_forward, "MIN_SEGMENT", 16)
    monkeypatch.setattr(triton_plan, "SHORTEST_CHUNK", 8)
    monkeypatch.setattr(triton_plan, "CONFIGURATIONS", (triton_plan.Configuration(1 << 20, 8),))
    monkeypatch.setattr(triton_kernels, "BLOCK_T", 8)


def make(name, sizes):
    """Return a call without a mask and sequences of its own."""
    off = {"masked", "padding_free"} & CALLS[name].keywords.keys()
    return CALLS[name](sizes, **dict.fromkeys(off, False))


def leaves_of(call, device="cpu", dtype=torch.float64):
    return {key: x.to(device, dtype).requires_grad_() for key, x in call.leaves.items()}


def with_gradients(outputs, leaves):
    """Return the outputs, and the gradients of a fixed random projection of them."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(x) for x in outputs]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), weights, materialize_grads=True)
    return [x.detach().cpu() for x in (*outputs, *gradients)]


def separate(call, leaves, mask, empty):
    """Return the results of the reference by sequence; those without tokens keep their state unless `empty` is True."""
    results = []
    for row, length in enumerate(LENGTHS):
        part = {key: x[row : row + 1] if key in OF_SEQUENCES else x for key, x in leaves.items()}
        part |= {key: x[row : row + 1, :length] for key, x in leaves.items() if key in TOKENS}
        if length or empty:
            output, *states = call.run(**part, mask=mask[row : row + 1, :length], backend="reference")
        else:
            output, states = output[:, :0], [x for key, x in part.items() if key in STATES] or [0 * x for x in states]
        results.append((output, *states))
    return list(zip(*results, strict=True))


@pytest.mark.parametrize("name, backend", on_backends(VARLEN, BACKENDS))
def test_varlen_sequences(name, backend, device):
    dtype, bound = precision(backend)
    call, mask = make(name, SIZES), torch.rand(SIZES[:2]) < 0.7
    real = torch.arange(SIZES.length) < torch.tensor(LENGTHS)[:, None]
    wide = leaves_of(call)
    outputs, *others = separate(call, wide, mask, empty=name.startswith(("luna_attention", "luna_pack", "gated")))
    exact = [torch.cat(outputs, 0 if name.startswith("luna_pack") else 1), *map(torch.cat, others)]
    leaves = leaves_of(call, device, dtype)
    flat = {key: x[real.to(device)][None] if key in TOKENS else x for key, x in leaves.items()}
    options = {"mask": mask[real][None].to(device), "backend": backend}
    for longest, integer in ((None, torch.int64), (SIZES.length, torch.int32)):
        bounds = torch.tensor([0, *LENGTHS], device=device).cumsum(0, dtype=integer)
        actual = call.run(**flat, cu_seqlens=bounds, max_seqlen=longest, **options)
    assert_same(with_gradients(actual, leaves), with_gradients(exact, wide), bound)


@pytest.mark.parametrize("name, backend", on_backends(VARLEN, BACKENDS))
def test_masked_positions_are_not_read(name, backend, device):
    """Masked positions with NaN before, between and after the others change neither results nor gradients."""
    dtype, bound = precision(backend, 1e-11)
    call, mask = make(name, SIZES._replace(batch=3)), torch.rand(3, SIZES.length) < 0.7
    mask[0, :4], mask[1, 12:], mask[2] = False, False, False
    if name.startswith("damped"):  # adds the skip at masked positions too
        del call.leaves["skip"]
    # Only Triton does not read masked keys and values.
    bad = 1e3 if backend != "triton" and name.startswith(("luna_attention", "luna_pack", "gated")) else math.nan
    results = []
    for place, kind, chosen, content in (("cpu", torch.float64, "reference", 0.0), (device, dtype, backend, bad)):
        leaves, kept = leaves_of(call, place, kind), mask.to(place)
        masked = {key for key in leaves if key in TOKENS and key != "query"}
        given = {key: x.masked_fill(~kept.view(3, -1, *[1] * (x.dim() - 2)), content) if key in masked else x
                 for key, x in leaves.items()}  # fmt: skip
        output, *rest = call.run(**given, mask=kept, backend=chosen)
        if "x" in leaves:
            output = output.masked_fill(~kept[..., None], 0.0)
        results.append(with_gradients([output, *rest], leaves))
    assert_same(results[1], results[0], bound)


@pytest.mark.parametrize("groups", [2, pytest.param(70, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name, backend",
    on_backends(
        [name for name in CALLS if "_step" in name and "gated" not in name and "first" not in name],
        [TRITON],
    ),
)
def test_a_masked_step_holds_the_state(name, groups, backend, device):
    dtype, bound = precision(backend, 1e-11)
    mask = torch.tensor([True, False, True, False, False])
    call = CALLS[name](SIZES._replace(channels=2 * groups, groups=groups))
    leaves, wide = leaves_of(call, device, dtype), leaves_of(call)
    moved = {key: x[mask] if key in TOKENS | OF_SEQUENCES else x for key, x in wide.items()}
    exact = [x[~mask] for key, x in wide.items() if key in STATES]
    output, *states = call.run(**moved, backend="reference")
    held = [torch.zeros(5, *x.shape[1:], dtype=x.dtype).index_copy(0, torch.arange(5)[mask], x) for x in states]
    held = [x.index_copy(0, torch.arange(5)[~mask], y) for x, y in zip(held, exact, strict=True)]
    actual, *states = call.run(**leaves, mask=mask.to(device), backend=backend)
    results = with_gradients([actual[mask.to(device)], *states], leaves)
    exact = with_gradients([output, *held], wide)
    assert_same(results, exact, bound)
    with torch.no_grad():  # Triton has kernels of steps without gradients
        actual, *states = call.run(**leaves, mask=mask.to(device), backend=backend)
    assert_same([x.cpu() for x in (actual[mask.to(device)], *states)], exact[: 1 + len(states)], bound)


def causal(query, pack_query, pack_key, context, state, **options):
    tokens = query, pack_query, pack_key, context, context
    if query.dim() == 3:
        return api.luna_causal_attention_step(*tokens, state, **options)
    return api.luna_causal_attention(*tokens, state=state, return_state=True, **options)


def norm(x, weight, bias, state, **options):
    if x.dim() == 2:
        return api.timestep_norm_step(x, state, 2, weight, bias, **options)
    return api.timestep_norm(x, 2, weight, bias, initial_state=state, return_state=True, **options)


def average(op):
    def run(x, state, **options):
        if x.dim() == 2:
            return getattr(api, f"{op}_step")(x, state, **options)
        return getattr(api, op)(x, initial_state=state, return_state=True, **options)

    return run


OPS = {"luna_causal_attention": causal, "timestep_norm": norm}
OPS |= {op: average(op) for op in ("damped_ema", "complex_ema", "diagonal_ssm")}


def in_parts(name, leaves, mask, lengths, backend):
    """Return the output and the last state of calls with parts of a sequence; a part of one position is a step."""
    op, options, start = name.partition(" ")[0], {"backend": backend}, 0
    rest = {key: x for key, x in leaves.items() if key not in TOKENS | STATES}
    rest |= {"phase": None} if "real" in name else {}
    state = [x for key, x in leaves.items() if key in STATES]
    count = torch.tensor([7, 300], device=mask.device)
    if not state:
        state = None
    elif op in ("luna_causal_attention", "timestep_norm"):
        state = api.LunaCausalState(*state, count) if "luna" in op else api.TimestepNormState(count, *state)
    else:
        (state,) = state
    outputs = []
    for length in lengths:
        kept, part = mask[:, start : start + length], slice(start, start + length)
        # A masked position decays the state of an average, and a masked step does not.
        step = length == 1 and (op in ("luna_causal_attention", "timestep_norm") or kept.all() and state is not None)
        tokens = {key: x[:, start if step else part] for key, x in leaves.items() if key in TOKENS}
        before = None if state is None else [x.detach().clone() for x in state]
        output, following = OPS[op](**tokens, **rest, state=state, mask=kept[:, 0] if step else kept, **options)
        assert before is None or all(map(torch.equal, before, state)), "a call changes its state"
        outputs, state, start = [*outputs, output[:, None] if step else output], following, start + length
    return [torch.cat(outputs, 1), *(state if isinstance(state, tuple) else [state])]


@pytest.mark.parametrize(
    "name, backend",
    on_backends(
        [
            "luna_causal_attention masked, stateful", "luna_causal_attention rows=80", "damped_ema stateful",
            "damped_ema padding_free", "complex_ema stateful", "complex_ema padding_free", "diagonal_ssm stateful",
            "diagonal_ssm real", "timestep_norm stateful", "timestep_norm masked",
        ],
        BACKENDS,
    ),
)  # fmt: skip
def test_segments_and_steps_are_one_call(name, backend, device):
    dtype, bound = precision(backend)
    length, parts = (9, [[1, 5, 1, 1, 1]]) if backend == "triton" else (20, [[1, 2, 7, 1, 9], [1] * 20])
    call = make(name, SIZES._replace(batch=2, length=length))
    mask = torch.arange(length) != torch.tensor([[3], [length]])
    mask[1, 6:8] = False
    leaves, wide = leaves_of(call, device, dtype), leaves_of(call)
    exact = in_parts(name, wide, mask, [length], "reference")
    counts = [x for x in exact if not x.is_floating_point()]
    expected = with_gradients([x for x in exact if x.is_floating_point()], wide)
    for lengths in parts:
        results = in_parts(name, leaves, mask.to(device), lengths, backend)
        actual = [x for x in results if x.is_floating_point()]
        assert all(map(torch.equal, [x.cpu() for x in results if not x.is_floating_point()], counts))
        assert_same(with_gradients(actual, leaves), expected, bound)
        with torch.no_grad():  # Triton has kernels of steps without gradients
            again = in_parts(name, leaves, mask.to(device), lengths, backend)
        assert_same([x.cpu() for x in again if x.is_floating_point()], expected[: len(actual)], bound)
