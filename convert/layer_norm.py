"""The two LayerNorm conventions of files: `weight` or, in the 2023 code, `1 + weight`."""

from dataclasses import dataclass

import torch

from luna_mega.convert.decision import Decision
from luna_mega.errors import ConversionError

MINUS_ONE = "plus-one"  # the code adds one to them
CONVENTIONS = ("standard", MINUS_ONE)
CHOICES = ("auto", *CONVENTIONS)
_CENTRE = {"standard": 1.0, "plus-one": 0.0}
_MARGIN = 0.4  # training moves the mean: in models like BERT it ends up below 1


@dataclass(frozen=True)
class LayerNormDecision(Decision):
    """How norm weights are stored, and the mean of all of them, which is 1 or 0 in a fresh model."""

    mean: float

    @property
    def minus_one(self) -> bool:
        """Return whether the file stores every norm weight minus one."""
        return self.convention == MINUS_ONE


def decide_layer_norm(weights: list[torch.Tensor], choice: str) -> LayerNormDecision:
    """Return the convention: `choice`, or with "auto" the one that the mean of all finite norm weights suggests.

    Raises:
        ConversionError: "auto", and the mean is near neither 1 nor 0.
    """
    finite = torch.cat([weight[weight.isfinite()].double() for weight in weights])
    mean = finite.mean().item()
    suggested = next((name for name, centre in _CENTRE.items() if abs(mean - centre) <= _MARGIN), None)
    if choice == "auto" and suggested is None:
        raise ConversionError(
            f"LayerNorm: the mean of the norm weights is {mean:.3f}, near neither 1 (stored as they are) nor 0 (stored "
            "minus one, the 2023 code); pass --layer-norm standard or --layer-norm plus-one"
        )
    conflict = (
        f"--layer-norm {choice} contradicts the norm weights: their mean is {mean:.3f}, which looks like {suggested}"
    )
    return LayerNormDecision(suggested if choice == "auto" else choice, suggested, conflict, mean)
