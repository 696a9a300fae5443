"""Coefficients and taps of the average: the numbers of plain operators, and gradients in closed form."""

import pytest
import torch

from luna_mega.kernels.api import damped_ema, damped_ema_step, ema_coefficients
from luna_mega.kernels.damped_ema import coefficients, reference


@pytest.mark.parametrize("length", [1, 16, 100, 300])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_closed_form_of_the_gradients(dtype, length):
    """The numbers are those of plain operators bit for bit, the gradients those of autograd."""
    values = [-1e4, -80.0, -20.0, -3.0, -0.7, 0.0, 0.9, 6.0, 15.0, 30.0, 50.0, 90.0, 1e4]
    pairs = torch.cartesian_prod(torch.tensor(values), torch.tensor(values)).to(dtype)
    shapes = torch.randn(2, len(pairs), 1, generator=torch.Generator().manual_seed(1)).to(dtype)
    leaves = [x.clone().requires_grad_() for x in (*pairs.T[:, :, None], *shapes)]
    found = []
    for made, taps in (
        (reference.coefficients, coefficients._series),
        (coefficients.coefficients, coefficients._Series.apply),
    ):
        log_q, weight_in, weight_out = made(*leaves)
        kernel = taps(weight_in * weight_out, log_q, length)[0]
        found.append([log_q, weight_in, weight_out, kernel, *torch.autograd.grad(kernel.square().sum(), leaves)])
    assert all(map(torch.equal, found[0][:4], found[1][:4]))
    rtol = 1e-12 if dtype == torch.float64 else 1e-5
    for plain, closed in zip(found[0][4:], found[1][4:], strict=True):  # autograd's a (1 - a) loses what is tiny
        torch.testing.assert_close(closed, plain, rtol=rtol, atol=rtol * plain.abs().max().item())


def test_a_truncated_step_has_no_coefficients():
    x, parameters = torch.randn(2, 6, 5), [torch.randn(5, 3) for _ in range(4)]
    _, state = damped_ema(x, *parameters, truncation=4, return_state=True)
    with pytest.raises(ValueError, match="`coefficients` do not apply to a `TruncatedEmaState`; omit them"):
        damped_ema_step(x[:, 0], state, *parameters, coefficients=ema_coefficients(*parameters))
