"""Train a S4D classifier of raw waveforms: which of six tones is in the noise. Only torch and the kernels are needed.

OMP_NUM_THREADS=1 python examples/s4d_classifier.py              20 seconds of processor time
OMP_NUM_THREADS=1 python examples/s4d_classifier.py --compare    replace the recurrence of a S4D layer
"""

import argparse
import math
import time

import torch
from torch import Tensor, nn

from luna_mega.kernels.api import diagonal_ssm, discretize
from luna_mega.kernels.modules import DiagonalSSM

TONES = 6


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.ssm, self.mix = nn.LayerNorm(width), DiagonalSSM(width, 16), nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.glu(self.mix(nn.functional.gelu(self.ssm(self.norm(x)))))


class Classifier(nn.Module):
    def __init__(self, width: int = 32, layers: int = 2):
        super().__init__()
        self.encoder, self.head = nn.Linear(1, width), nn.Linear(width, TONES)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))

    def forward(self, waves: Tensor) -> Tensor:
        return self.head(self.blocks(self.encoder(waves[..., None])).mean(1))


def draw(count: int, length: int) -> tuple[Tensor, Tensor]:
    """Return waves `[count, length]`, a tone below the noise with a random phase, and the tones."""
    tones, position = torch.randint(TONES, (count,)), torch.arange(length)
    angle = 2 * math.pi * (0.01 * 1.4 ** tones[:, None] * position + torch.rand(count, 1))
    return 0.5 * torch.sin(angle) + torch.randn(count, length), tones


def train(steps: int, length: int) -> float:
    """Train a classifier and return its accuracy on new waves."""
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(1, steps + 1):
        waves, tones = draw(16, length)
        loss = nn.functional.cross_entropy(model(waves), tones)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    with torch.no_grad():
        waves, tones = draw(300, length)
        return (model(waves).argmax(-1) == tones).float().mean().item()


class S4D(nn.Module):
    """The recurrence of S4D with the parameters of its standalone code, by FFT or by `diagonal_ssm`."""

    def __init__(self, channels: int, states: int, fast: bool):
        super().__init__()
        self.log_dt = nn.Parameter(torch.rand(channels) * math.log(100.0) + math.log(0.001))
        self.C = nn.Parameter(torch.randn(channels, states, 2) * math.sqrt(0.5))
        self.log_A_real = nn.Parameter(torch.full((channels, states), math.log(0.5)))
        self.A_imag = nn.Parameter(math.pi * torch.arange(states).repeat(channels, 1))
        self.D, self.fast = nn.Parameter(torch.randn(channels)), fast

    def forward(self, u: Tensor) -> Tensor:
        """Compute u `[B, T, channels]`."""
        a, dt = torch.complex(-self.log_A_real.exp(), self.A_imag), self.log_dt.exp()
        c, length = torch.view_as_complex(self.C), u.shape[1]
        if self.fast:
            return diagonal_ssm(u, *discretize(a, dt, 2 * c), self.D)
        powers = torch.exp((a * dt[:, None])[..., None] * torch.arange(length))
        kernel = 2 * torch.einsum("dn,dnt->dt", c * (torch.exp(a * dt[:, None]) - 1.0) / a, powers).real
        product = torch.fft.rfft(u.mT, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
        return torch.fft.irfft(product, n=2 * length)[..., :length].mT + self.D * u


def compare(
    length: int, batch: int = 8, channels: int = 256, states: int = 32, steps: int = 4
) -> dict[str, list[float]]:
    """Train both forms of a layer from the same weights; return the losses and print the seconds of a step."""
    x, target, losses = torch.randn(batch, length, channels), torch.randn(batch, length, channels), {}
    seconds = {}
    for name, fast in (("FFT", False), ("diagonal_ssm", True)):
        torch.manual_seed(0)
        layer, losses[name], times = S4D(channels, states, fast), [], []
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
        for _ in range(steps):
            start = time.process_time()
            loss = nn.functional.mse_loss(layer(x), target)
            loss.backward()
            times.append(time.process_time() - start)
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
        seconds[name] = min(times)
        print(f"{name}: loss {losses[name][-1]:.6f}, {seconds[name]:.2f} s of processor time for forward and backward")
    print(f"{seconds['FFT'] / seconds['diagonal_ssm']:.1f} times as fast")
    return losses


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true", help="compare the losses and the time of one S4D layer")
    parser.add_argument("--steps", type=int, default=120, help="training steps of the classifier")
    parser.add_argument("--length", type=int, help="samples of a wave (default: 2,048; 4,096 with --compare)")
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    if arguments.compare:
        compare(arguments.length or 4096)
    else:
        print(f"accuracy on 300 new waves: {train(arguments.steps, arguments.length or 2048):.1%}")


if __name__ == "__main__":
    main()
