"""The two LayerNorm conventions of files: `weight` or, in the 2023 code, `1 + weight`."""

from dataclasses import dataclass

import torch

from luna_mega.errors import ConversionError

CONVENTIONS = ("standard", "plus-one")
CHOICES = ("auto", *CONVENTIONS)
_CENTRE = {"standard": 1.0, "plus-one": 0.0}
_MARGIN = 0.4  # training moves the mean: in models like BERT it ends up below 1


@dataclass(frozen=True)
class LayerNormDecision:
    """The convention, the mean of all norm weights (1 or 0 in a fresh model), and the convention that it suggests."""

    convention: str
    mean: float
    heuristic: str | None

    @property
    def warning(self) -> str | None:
        if self.heuristic in (None, self.convention):
            return None
        return (
            f"--layer-norm {self.convention} contradicts the norm weights: their mean is {self.mean:.3f}, "
            f"which looks like {self.heuristic}"
        )


def decide_layer_norm(weights: list[torch.Tensor], choice: str) -> LayerNormDecision:
    """Return the convention: `choice`, or with "auto" the one that the mean of all finite norm weights suggests.

    Raises:
        ConversionError: "auto", and the mean is near neither 1 nor 0.
    """
    finite = torch.cat([weight[weight.isfinite()].double() for weight in weights])
    mean = finite.mean().item()
    heuristic = next((name for name, centre in _CENTRE.items() if abs(mean - centre) <= _MARGIN), None)
    if choice != "auto":
        return LayerNormDecision(choice, mean, heuristic)
    if heuristic is None:
        raise ConversionError(
            f"LayerNorm: the mean of the norm weights is {mean:.3f}, near neither 1 (stored as they are) nor 0 (stored "
            "minus one, the 2023 code); pass --layer-norm standard or --layer-norm plus-one"
        )
    return LayerNormDecision(heuristic, mean, heuristic)
