"""Averages of rows whose last positions are masked: the state does not decay at masked positions."""

import pytest
import torch

from luna_mega.kernels.api import complex_ema, complex_ema_step, damped_ema, damped_ema_step
from tests.kernels.backends import SLOW_TRITON

LENGTHS = [40, 17, 1, 0]
OPS = {
    "damped": (damped_ema, damped_ema_step, [(5, 3)] * 4, (5, 3)),
    "complex": (complex_ema, complex_ema_step, [(5, 3), (5, 3), (5,), (5, 3, 2)], (5, 3, 2)),
}
BACKENDS = ["reference", "torch", SLOW_TRITON]


def make(name, backend, stateful, device="cpu"):
    """Return an average, its step function, x `[B, T, D]`, the parameters and the initial state."""
    op, step, shapes, state = OPS[name]
    dtype = torch.float32 if backend == "triton" else torch.float64
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype).to(device).requires_grad_()

    x, parameters = draw(len(LENGTHS), 40, 5), [draw(*shape) for shape in shapes]
    return op, step, x, parameters, draw(len(LENGTHS), *state) if stateful else None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stateful", [True, False])
@pytest.mark.parametrize("name", OPS)
def test_state_after_lengths(name, stateful, backend, triton_device):
    op, _, x, parameters, initial = make(name, backend, stateful, triton_device)
    lengths = torch.tensor(LENGTHS, device=triton_device)
    mask = torch.arange(40, device=triton_device) < lengths[:, None]
    options = {"return_state": True, "backend": backend}
    output, state = op(x, *parameters, mask=mask, initial_state=initial, lengths=lengths, **options)
    leaves = [x, *parameters, *([initial] if stateful else [])]
    total, results = 0.0, []
    for row, length in enumerate(LENGTHS[:-1]):
        first = initial[row : row + 1] if stateful else None
        separate, last = op(x[row : row + 1, :length], *parameters, initial_state=first, **options)
        torch.testing.assert_close(output[row : row + 1, :length], separate)
        torch.testing.assert_close(state[row : row + 1], last)
        total = total + last.sin().sum() + separate.sin().sum()
        results.append(output[row, :length].sin().sum() + state[row].sin().sum())
    torch.testing.assert_close(state[-1], initial[-1] if stateful else torch.zeros_like(state[-1]))
    wanted, got = (torch.autograd.grad(sum_, leaves) for sum_ in (total, sum(results)))
    for gradient, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(gradient, right, atol=1e-4 if backend == "triton" else 1e-9, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPS)
def test_a_step_holds_the_states_of_dropped_rows(name, backend, triton_device):
    _, step, x, parameters, state = make(name, backend, True, triton_device)
    mask = torch.tensor([True, False, True, False], device=triton_device)
    output, after = step(x[:, 0], state, *parameters, mask=mask, backend=backend)
    expected, moved = step(x[mask, 0], state[mask], *parameters, backend=backend)
    torch.testing.assert_close(output[mask], expected)
    torch.testing.assert_close(after[mask], moved)
    assert torch.equal(after[~mask], state[~mask])
    grad_x, grad_state = torch.autograd.grad(after[~mask].sin().sum(), [x, state])
    assert not grad_x.any() and torch.equal(grad_state[~mask], state[~mask].cos()) and not grad_state[mask].any()


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_truncated_states(backend):
    op, step, x, parameters, _ = make("damped", backend, stateful=False)
    lengths, options = torch.tensor(LENGTHS), {"truncation": 4, "return_state": True, "backend": backend}
    _, first = op(x[:, :9], *parameters, **options)
    _, state = op(
        x, *parameters, mask=torch.arange(40) < lengths[:, None], initial_state=first, lengths=lengths, **options
    )
    mask = torch.tensor([True, False, True, False])
    _, after = step(x[:, 3], state, *parameters, mask=mask, backend=backend)
    for row, length in enumerate(LENGTHS):
        rows = torch.cat([x[row, :9], x[row, :length], *([x[row, 3:4]] if mask[row] else [])])[None]
        _, last = op(rows, *parameters, **options)
        for got, reference in zip(after, last, strict=True):
            torch.testing.assert_close(got[row], reference[0])


@pytest.mark.parametrize("name", OPS)
def test_lengths_that_do_not_fit(name):
    op, _, x, parameters, _ = make(name, "torch", stateful=False)
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    with pytest.raises(ValueError, match=r"lengths must be integers \[4\], got torch.int64 \[3\]"):
        op(x, *parameters, mask=mask, lengths=torch.ones(3, dtype=torch.long), return_state=True)
    for options in ({"mask": mask}, {"return_state": True}):
        with pytest.raises(ValueError, match="lengths need return_state=True and a mask"):
            op(x, *parameters, lengths=torch.tensor(LENGTHS), **options)
