"""`damped_ema` and its step in Triton against the reference in float64; interpreted if there is no GPU."""

import copy

import pytest
import torch
from torch.library import opcheck

from luna_mega.kernels.api import damped_ema, damped_ema_step
from luna_mega.kernels.moving_average import reference
from tests.kernels.errors import relative_error
from tests.kernels.test_damped_ema import KINDS, Inputs, assert_same, saturated

CHUNK = 8
FLOAT32 = 5e-6

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture
def forward_module(triton_device):
    from luna_mega.kernels.moving_average import triton_damped_forward as triton_forward

    return triton_forward


@pytest.fixture
def device(triton_device, forward_module, monkeypatch):
    """Chunks of 8 positions, however many processors there are."""
    monkeypatch.setattr(forward_module, "SHORTEST_CHUNK", CHUNK)
    monkeypatch.setattr(forward_module, "CONFIGURATIONS", (forward_module.Configuration(1 << 20, 8),))
    return triton_device


def run(inputs, device="cpu", function=None, used=None, **options):
    """Return outputs and gradients of a fixed random projection, on the CPU; `used`: of these positions only."""
    moved = copy.copy(inputs)
    moved.leaves = [leaf.detach().to(device).requires_grad_() for leaf in inputs.leaves]
    moved.mask = None if inputs.mask is None else inputs.mask.to(device)
    outputs = (function or moved.call)(*moved.leaves, **options)
    outputs = outputs if inputs.stateful else (outputs,)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o) for o in outputs]
    if used is not None:
        weights[0] = weights[0] * used[..., None].to(device)
    gradients = torch.autograd.grad(outputs, moved.leaves, weights)
    return [tensor.detach().cpu() for tensor in (*outputs, *gradients)]


def exact_and_float32(*arguments, **options):
    """Return inputs in float64, the results of the reference for them, and the inputs in float32."""
    inputs = Inputs(*arguments, **options).to(torch.float32).to(torch.float64)
    return inputs, run(inputs, backend="reference"), copy.copy(inputs).to(torch.float32)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "length, states, masking",
    [
        (1, 1, "none"),
        (2, 16, "all of one row"),
        (CHUNK - 1, 3, "some"),
        (CHUNK, 2, "none"),
        (CHUNK + 1, 5, "some"),
        (19, 2, "all of one row"),
    ],
)
def test_forward_and_gradients(device, length, states, masking, kind):
    batch = 2 if masking == "all of one row" else 1
    _, exact, inputs = exact_and_float32(length, kind, masking, states, batch=batch, skip=masking != "some")
    assert_same(run(inputs, device, backend="triton"), exact, FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_one_chunk(device, forward_module, monkeypatch, kind, skip):
    monkeypatch.setattr(forward_module, "SHORTEST_CHUNK", 1 << 20)
    _, exact, inputs = exact_and_float32(11, kind, "some", skip=skip)
    assert_same(run(inputs, device, backend="triton"), exact, FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("channels, states", [(37, 9), (10, 40)])
def test_blocks_of_channels(device, channels, states):
    _, exact, inputs = exact_and_float32(10, "states", "some", states, batch=1, channels=channels)
    assert_same(run(inputs, device, backend="triton"), exact, FLOAT32)


@pytest.mark.slow
def test_long(triton_device):
    """500 positions in chunks of 64, decays from 1 - q = 1e-5 on: within 2e-6 of the largest."""
    inputs = Inputs(500, "states", states=4, channels=3, batch=1)
    with torch.no_grad():
        inputs.leaves[1].copy_(torch.linspace(-12.0, -1.0, 12).view(3, 4))
        inputs.leaves[2].fill_(0.5)
    inputs.to(torch.float32).to(torch.float64)
    exact = run(inputs, backend="reference")
    actual = run(inputs.to(torch.float32), triton_device, backend="triton")
    for index, (a, b) in enumerate(zip(actual, exact, strict=True)):
        assert (a - b).abs().max() <= 2e-6 * b.abs().max(), index


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["states", "shifted"])
def test_low_precision_is_deterministic_and_no_worse(device, kind, dtype):
    inputs = Inputs(10, kind, "some", batch=1)
    exact = run(inputs, backend="reference")
    inputs.to(dtype)
    plain = run(inputs, backend="reference")
    actual, again = (run(inputs, device, backend="triton") for _ in range(2))
    floor = {torch.bfloat16: 5e-3, torch.float16: 6e-4}[dtype]
    for index, (low, a, b, expected) in enumerate(zip(plain, actual, again, exact, strict=True)):
        assert a.dtype == low.dtype and torch.equal(a, b), index
        assert relative_error(a, expected) <= max(floor, 2 * relative_error(low, expected)), index


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["states", "bidirectional"])
@pytest.mark.parametrize("skip", [True, False])
def test_padding_may_be_nan(device, kind, skip):
    """Wherever the result is used, and in every gradient of it."""
    inputs, _, low = exact_and_float32(10, kind, "some", skip=skip)
    used = inputs.mask if skip else None
    exact = run(inputs, backend="reference", used=used)
    low.leaves[0] = low.leaves[0].detach().masked_fill(~low.mask[..., None], float("nan")).requires_grad_()
    actual = run(low, device, backend="triton", used=used)
    if skip:
        of_padding = ~low.mask[..., None]
        assert actual[0].isnan().equal(of_padding.expand_as(actual[0]))
        actual[0], exact[0] = (tensor.masked_fill(of_padding, 0.0) for tensor in (actual[0], exact[0]))
    assert_same(actual, exact, FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_padding(device, kind):
    inputs = Inputs(10, kind, "all of one row", skip=False).to(torch.float32)
    outputs = run(inputs, device, backend="triton")
    assert (outputs[2 if kind == "states" else 1][-1] == 0).all()
    assert kind == "states" or (outputs[0][-1] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
@pytest.mark.parametrize("kind", KINDS)
def test_varlen_sequences(device, backend, kind):
    """Every sequence matches a separate call: results, states, gradients."""
    bounds = [0, 3, 3, 13, 14, 32]
    exact, _, inputs = exact_and_float32(32, kind, "some", batch=1)
    if kind == "states":
        state = torch.randn(len(bounds) - 1, *inputs.leaves[-1].shape[1:])
        exact.leaves[-1], inputs.leaves[-1] = state.double().requires_grad_(), state.requires_grad_()

    def separate(x, *rest):
        *parameters, states = rest if kind == "states" else (*rest, None)
        outputs, lasts = [], []
        for index, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            if start == end:
                lasts.append(None if states is None else states[index : index + 1])
                continue
            output = damped_ema(
                x[:, start:end],
                *parameters,
                mask=exact.mask[:, start:end],
                shift=exact.shift,
                initial_state=None if states is None else states[index : index + 1],
                return_state=states is not None,
                backend="reference",
            )
            output, last = output if states is not None else (output, None)
            outputs.append(output)
            lasts.append(last)
        return (torch.cat(outputs, 1), torch.cat(lasts)) if states is not None else torch.cat(outputs, 1)

    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    actual = run(inputs, device, backend=backend, cu_seqlens=cu_seqlens, max_seqlen=18 if kind == "causal" else None)
    assert_same(actual, run(exact, function=separate), FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
def test_varlen_sequences_of_one_chunk_each(triton_device, kind):
    exact, _, inputs = exact_and_float32(12, kind, batch=1, channels=2)

    def varlen(x, *parameters, **options):
        cu_seqlens = torch.tensor([0, 7, 12], device=x.device)
        return damped_ema(x, *parameters, cu_seqlens=cu_seqlens, **options)

    def separate(x, *parameters):
        return torch.cat([damped_ema(part, *parameters, backend="reference") for part in x.split([7, 5], 1)], 1)

    actual = run(inputs, triton_device, varlen, backend="triton")
    assert_same(actual, run(exact, function=separate), FLOAT32)


@pytest.mark.slow
def test_views(device):
    """Non-contiguous x and gradients of the result."""
    _, exact, inputs = exact_and_float32(10, "bidirectional", "some")

    def call(x, *rest, **options):
        wide = torch.stack([x, x], -1).permute(2, 0, 1, 3).contiguous()
        output = inputs.call(wide.permute(1, 2, 0, 3)[..., 1], *rest, **options)
        return output.mT.contiguous().mT

    assert_same(run(inputs, device, call, backend="triton"), exact, FLOAT32)
    x = inputs.leaves[0].detach().to(device).requires_grad_()
    parameters = [leaf.detach().to(device) for leaf in inputs.leaves[1:]]
    expanded = torch.autograd.grad(damped_ema(x, *parameters, backend="triton").sum(), x)[0]
    x, *parameters = (tensor.double() for tensor in (x, *parameters))
    reference_gradient = torch.autograd.grad(damped_ema(x, *parameters, backend="reference").sum(), x)[0]
    assert_same([expanded], [reference_gradient], FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("output", [0, 1])
def test_one_of_two_outputs(device, output):
    """The gradient of only the result, and of only the states."""
    _, _, inputs = exact_and_float32(10, "states", "some")
    gradients = []
    for leaves, backend in ((inputs.leaves, "triton"), ([leaf.double() for leaf in inputs.leaves], "reference")):
        leaves = [leaf.detach().to(device).requires_grad_() for leaf in leaves]
        *rest, state = leaves
        options = {"mask": inputs.mask.to(device), "initial_state": state, "return_state": True, "backend": backend}
        chosen = damped_ema(*rest, **options)[output]
        gradients.append(torch.autograd.grad((chosen * chosen).sum(), leaves, materialize_grads=True))
    assert_same(*gradients, FLOAT32)


@pytest.mark.slow
def test_first_segment(device):
    """Return a state without an initial state."""
    _, _, inputs = exact_and_float32(10)
    gradients = []
    for leaves, backend in ((inputs.leaves, "triton"), ([leaf.double() for leaf in inputs.leaves], "reference")):
        leaves = [leaf.detach().to(device).requires_grad_() for leaf in leaves]
        output, state = damped_ema(*leaves, return_state=True, backend=backend)
        gradients.append(torch.autograd.grad(output.sum() + (state * state).sum(), leaves))
        gradients[-1] += (output, state)
    assert_same(*gradients, FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["states", "bidirectional"])
def test_saturated_logits(device, kind):
    inputs = saturated(10, kind)
    exact = run(inputs, backend="reference")
    assert_same(run(inputs.to(torch.float32), device, backend="triton"), exact, FLOAT32)


@pytest.mark.slow
def test_an_empty_batch(device):
    inputs = Inputs(10, "states").to(torch.float32)
    inputs.leaves[0], inputs.leaves[-1] = (inputs.leaves[i].detach()[:0].requires_grad_() for i in (0, -1))
    output, state, *gradients = run(inputs, device, backend="triton")
    assert output.shape == (0, 10, 5) and state.shape == (0, 5, 3)
    assert all((gradient == 0).all() for gradient in gradients)


def step_inputs(device, masked=True, dtype=torch.float32):
    inputs = Inputs(1, "states", states=5, channels=37, batch=3).to(dtype)
    x, *parameters, skip, state = (leaf.detach().to(device) for leaf in inputs.leaves)
    mask = torch.tensor([True, False, True], device=device) if masked else None
    return [tensor.requires_grad_() for tensor in (x[:, 0].clone(), state, *parameters, skip)], mask


@pytest.mark.slow
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("skip", [True, False])
def test_step(device, masked, skip):
    leaves, mask = step_inputs(device, masked)
    leaves = leaves if skip else leaves[:-1]
    results = []
    for tensors, backend in (
        (leaves, "triton"),
        ([leaf.detach().double().requires_grad_() for leaf in leaves], "reference"),
    ):
        outputs = damped_ema_step(*tensors, mask=mask, backend=backend)
        loss = outputs[0].sin().sum() + outputs[1].square().sum()
        results.append([*outputs, *torch.autograd.grad(loss, tensors)])
    assert_same(*results, FLOAT32)


@pytest.mark.slow
def test_steps_are_the_parallel_form(device):
    inputs = Inputs(10, "states", batch=1).to(torch.bfloat16)
    x, *parameters, state = (leaf.detach().to(device) for leaf in inputs.leaves)
    expected, last = damped_ema(x, *parameters, initial_state=state, return_state=True, backend="triton")
    outputs = []
    for t in range(10):
        output, state = damped_ema_step(x[:, t], state, *parameters, backend="triton")
        outputs.append(output)
    # The parameters are float32 in both, so only the results are rounded.
    assert_same([state], [last], FLOAT32)
    assert_same([torch.stack(outputs, 1)], [expected], 4e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_operator(device, kind):
    from luna_mega.kernels.moving_average import triton_ops  # noqa: F401, registers the operators

    x, u, v, beta, eta, skip, *initial = Inputs(10, kind, "some").to(torch.float32).leaves
    log_q, weight_in, weight_out = (
        rows.detach().mT.contiguous().to(device).requires_grad_()
        for rows in reference.damped_coefficients(u, v, beta, eta)
    )
    state = initial[0].detach().mT.contiguous().to(device).requires_grad_() if initial else None
    x, skip = (tensor.detach().to(device).requires_grad_() for tensor in (x, skip))
    arguments = (x, None, skip, log_q, weight_in, weight_out, state, kind == "states", kind == "shifted", None, 10)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    opcheck(torch.ops.luna_mega.damped_ema_triton, arguments, test_utils=tests)
    leaves, mask = step_inputs(device)
    opcheck(torch.ops.luna_mega.damped_ema_step_triton, (*leaves, mask), test_utils=tests)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["states", "bidirectional"])
def test_compile(device, kind):
    inputs = Inputs(10, kind, "some").to(torch.float32)
    expected = run(inputs, device, backend="triton")
    on_device = copy.copy(inputs)
    on_device.mask = inputs.mask.to(device)
    compiled = torch.compile(on_device.call, fullgraph=True, backend="aot_eager")
    assert_same(run(inputs, device, compiled, backend="triton"), expected, 1e-6)


@pytest.mark.slow
def test_compile_step(device):
    leaves, mask = step_inputs(device)

    def call(*leaves):
        return damped_ema_step(*leaves, mask=mask, backend="triton")

    results = [function(*leaves) for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager"))]
    gradients = [torch.autograd.grad([y.sum(), state.sum()], leaves) for y, state in results]
    assert_same([*results[1], *gradients[1]], [*results[0], *gradients[0]], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, message",
    [
        ({"dtype": torch.float64}, "float64"),
        ({"truncation": 5}, "truncation=5 is below the length 6; choose 'torch'"),
        ({"states": 65}, "65 states per channel are more than 64"),
    ],
)
def test_unsupported_triton_calls_raise(triton_device, options, message):
    truncation = options.pop("truncation", None)
    inputs = Inputs(6, **{"dtype": torch.float32} | options)
    leaves = [leaf.detach().to(triton_device) for leaf in inputs.leaves]
    with pytest.raises(ValueError, match=message):
        damped_ema(*leaves, truncation=truncation, backend="triton")
    damped_ema(*leaves, truncation=truncation)


@pytest.mark.slow
def test_truncation_at_the_length_is_none(device):
    leaves = [leaf.detach().to(device) for leaf in Inputs(6, dtype=torch.float32).leaves]
    assert torch.equal(damped_ema(*leaves, truncation=6, backend="triton"), damped_ema(*leaves, backend="triton"))


@pytest.mark.slow
def test_invalid_cu_seqlens_raise():
    leaves = Inputs(6).leaves
    cu_seqlens = torch.tensor([0, 6])
    with pytest.raises(ValueError, match=r"\[1, total, channels\]"):
        damped_ema(*leaves, cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="requires cu_seqlens"):
        damped_ema(*leaves, max_seqlen=6)
    leaves = Inputs(6, batch=1).leaves
    with pytest.raises(ValueError, match="must increase from 0 to 6"):
        damped_ema(*leaves, cu_seqlens=cu_seqlens - 1)
    with pytest.raises(ValueError, match="state .1, 5, 3., got"):
        damped_ema(*leaves, cu_seqlens=cu_seqlens, initial_state=torch.zeros(2, 5, 3))
