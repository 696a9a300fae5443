"""The comparison that every parity test uses; it records the largest difference per fixture for the summary."""

import pytest
import torch

from tests.parity.original import Original
from tests.parity.report import KINDS, PROPERTY


class Parity:
    """Compare tensors and record `|actual - expected| / (atol + rtol * |expected|)`; a ratio above 1 fails."""

    def __init__(self, folders):
        self.worst = (0.0, 0.0, "nothing compared")
        self.folders = folders
        self.found = {"folder": "", "tensors": 0, "worst": {}}

    def check(self, name, actual, expected, atol=1e-5, rtol=1e-4, keep=None, scaled=False):
        """Compare two tensors.

        Args:
            name: Name of the tensor; names with `grad` are gradients.
            actual: Result of this package.
            expected: Result of the original code.
            atol: Absolute tolerance.
            rtol: Relative tolerance.
            keep: Bool tensor over the leading dimensions, True = compare.
            scaled: Multiply `atol` by the largest expected value if that is above 1, as for the outputs of Mega models.
                Float32 sums depend on the CPU, and with an absolute tolerance the original would fail itself: its
                logits of `hf_clm_relu2_rotary` differ by 1.003 times the tolerance from its own formulas in float64.
        """
        assert actual.shape == expected.shape, f"{name}: {list(actual.shape)} is not {list(expected.shape)}"
        if keep is not None:
            actual, expected = actual[keep], expected[keep]
        if scaled:
            atol = atol * max(1.0, expected.abs().max().item())
        difference = (actual.detach() - expected).abs()
        assert torch.isfinite(difference).all(), f"{name} is not finite"
        ratio = (difference / (atol + rtol * expected.abs())).max().item()
        self.found["folder"] = self.folders.last
        self.found["tensors"] += 1
        pair, worst, kind = (difference.max().item(), ratio), self.found["worst"], KINDS["grad" in name]
        worst[kind] = tuple(map(max, pair, worst.get(kind, (0.0, 0.0))))
        self.worst = max(self.worst, (ratio, pair[0], name))
        assert ratio <= 1.0, f"{name}: off by {pair[0]:.2e}, {ratio:.1f} times the tolerance"


@pytest.fixture(scope="session")
def outputs(tmp_path_factory):
    """Return the folder of the converted checkpoints, which all tests share."""
    return tmp_path_factory.mktemp("converted")


@pytest.fixture
def original(request, parity_folder, outputs):
    """Return the fixture `family/name` that the parameter specifies."""
    return Original(parity_folder(*request.param.split("/")), outputs)


@pytest.fixture
def parity(request, parity_folder):
    comparison = Parity(parity_folder)
    request.node.user_properties.append((PROPERTY, comparison.found))
    yield comparison
    ratio, difference, name = comparison.worst
    tensors = comparison.found["tensors"]
    print(f"\n{request.node.name}: {tensors} tensors; worst: {name}, {difference:.1e}, {ratio:.2f} of the tolerance")
    assert tensors or not parity_folder.last, "nothing was compared"
