"""Sums over 9,000 positions with a mean of 12 in 16 bits are accurate. They exceed the range of float16."""

import pytest
import torch

from luna_mega.kernels import api
from luna_mega.kernels.common.comparison import ROUNDING, row_error
from luna_mega.kernels.moving_average import native

LENGTH, MEAN = 9_000, 12.0


def randoms(*shape: int, mean: float = 0.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) + mean


def tokens(*sizes: int, mean: float = MEAN) -> torch.Tensor:
    return randoms(1, LENGTH, *sizes, mean=mean)


MASK = torch.arange(LENGTH)[None] >= 7
PARAMETERS = [randoms(4, 16) for _ in range(4)]


def causal(*leaves, **options):
    output, state = api.luna_causal_attention(*leaves, mask=MASK, return_state=True, **options)
    return output, *state[:2]


def norm(x, weight, bias, **options):
    output, state = api.timestep_norm(x, 2, weight, bias, mask=MASK, return_state=True, **options)
    return output, state.mean, state.variance


def complex_average(x, **options):
    options |= {"mask": MASK, "return_state": True}
    return api.complex_ema(x, *PARAMETERS[:2], randoms(4), randoms(4, 16, 2), **options)


def diagonal_model(x, **options):
    options |= {"mask": MASK, "return_state": True}
    return api.diagonal_ssm(x, -PARAMETERS[0].exp(), PARAMETERS[1], randoms(4, 16, 2), **options)


# op -> (function, leaves). Keys and scores are small, so that all positions have about the same weight.
CALLS = {
    "luna_pack": (
        lambda *x, **o: [api.luna_pack(*x, MASK, **o)],
        (randoms(1, 4, 2, 8) / 9, tokens(2, 8), tokens(2, 8)),
    ),
    "luna_pack with dropout": (
        lambda *x, **o: [api.luna_pack(*x, MASK, dropout=1e-9, **o)],
        (randoms(1, 4, 2, 8) / 9, tokens(2, 8), tokens(2, 8)),
    ),
    "luna_causal_attention": (
        causal,
        (tokens(1, 8, mean=0.0), randoms(1, 4, 1, 8), tokens(1, 8, mean=0.0), tokens(1, 8), tokens(1, 8)),
    ),
    "damped_ema": (lambda x, **o: api.damped_ema(x, *PARAMETERS, mask=MASK, return_state=True, **o), (tokens(4),)),
    "complex_ema": (complex_average, (tokens(4),)),
    "diagonal_ssm": (diagonal_model, (tokens(4),)),
    "timestep_norm": (norm, (tokens(4), randoms(4), randoms(4))),
    "gated_attention": (
        lambda *x, **o: [api.gated_attention(*x, None, function="softmax", mask=MASK, **o)],
        (randoms(1, 3, 4) / 9, tokens(4), tokens(8)),
    ),
    "gated_attention_step": (
        lambda *x, **o: [api.gated_attention_step(*x, None, function="softmax", **o)],
        (randoms(1, 4) / 9, tokens(4), tokens(8)),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_sums_over_many_positions(name, dtype):
    function, leaves = CALLS[name]
    leaves = [x.to(dtype) for x in leaves]
    exact = function(*(x.double() for x in leaves), backend="torch")
    others = ["reference"] if "attention" in name or "pack" in name else []
    if name == "luna_causal_attention":  # the reference stores the sums before every position
        others = []
    if name in ("damped_ema", "complex_ema", "diagonal_ssm") and native.missing() is None:
        others = ["native"]
    for backend in ("torch", *others):
        for actual, expected in zip(function(*leaves, backend=backend), exact, strict=True):
            assert row_error(actual, expected) <= ROUNDING[dtype] / 4
