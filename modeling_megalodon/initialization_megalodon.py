"""First values of the parameters of Megalodon, as the published code has them."""

import math

import torch
from torch import nn
from transformers import initialization as init


def draw_matrix(weight: torch.Tensor, initializer: str, deviation: float = 1.0):
    """Draw a matrix as `config.initializer` says; `deviation`: of `"gaussian"`."""
    if initializer == "he":
        init.kaiming_normal_(weight, a=math.sqrt(5.0))
    elif initializer == "bert":
        init.normal_(weight, std=0.02)
    elif initializer == "gaussian":
        init.trunc_normal_(weight, std=deviation, a=-3.0 * deviation, b=3.0 * deviation)
    elif initializer == "xavier":
        init.xavier_uniform_(weight)
    else:
        init.kaiming_uniform_(weight, a=math.sqrt(5.0))


def draw_average(average: nn.Module):
    """Draw the parameters of a moving average: channels have frequencies from 1 to 1 / d of the highest, at random."""
    init.normal_(average.alpha, std=0.2)
    init.normal_(average.delta, std=0.2)
    width = len(average.theta)
    number = torch.randperm(width, device=average.theta.device) + 1
    init.copy_(average.theta, torch.logit(torch.exp(-math.log(width) / width * number)).view(-1, 1, 1))
    real = torch.randn_like(average.gamma[..., 0])
    init.copy_(average.gamma, torch.stack((real, torch.zeros_like(real)), -1))
    init.trunc_normal_(average.omega, std=0.25, a=-1.0, b=1.0)
