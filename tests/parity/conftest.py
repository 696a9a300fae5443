"""The comparison that every parity test uses; it prints the worst difference per fixture."""

import pytest
import torch


class Parity:
    """Collects `|actual - expected| / (atol + rtol * |expected|)`; a ratio above 1 is a failure."""

    def __init__(self):
        self.worst = (0.0, 0.0, "nothing compared")
        self.count = 0

    def check(self, name, actual, expected, atol=1e-5, rtol=1e-4, keep=None, scaled=False):
        """`keep`: bool tensor over the leading dimensions, True = compare.

        `scaled`: `atol` is relative to the largest expected value where that is above 1, as is set for the outputs of
        Mega's models. Float32 sums depend on the CPU, and measured absolutely the original would fail itself: its
        logits of `hf_clm_relu2_rotary` are 1.003 x the tolerance from its own formulas in float64.
        """
        assert actual.shape == expected.shape, f"{name}: {list(actual.shape)} is not {list(expected.shape)}"
        if keep is not None:
            actual, expected = actual[keep], expected[keep]
        if scaled:
            atol = atol * max(1.0, expected.abs().max().item())
        difference = (actual.detach() - expected).abs()
        assert torch.isfinite(difference).all(), f"{name} is not finite"
        ratio = (difference / (atol + rtol * expected.abs())).max().item()
        self.count += 1
        self.worst = max(self.worst, (ratio, difference.max().item(), name))
        assert ratio <= 1.0, f"{name}: off by {difference.max().item():.2e}, {ratio:.1f} x the tolerance"


@pytest.fixture
def parity(request):
    comparison = Parity()
    yield comparison
    ratio, difference, name = comparison.worst
    worst = f"worst: {name}, {difference:.1e}, {ratio:.2f} of the tolerance"
    print(f"\n{request.node.name}: {comparison.count} tensors; {worst}")
    assert comparison.count, "nothing was compared"
