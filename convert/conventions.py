"""Conventions that do not show in the names and shapes of a file: the storage of norm weights, and the branch of Mega.

The code of Luna stores norm weights as `weight` or, in 2023, as `weight - 1`. The two branches of Mega swap the names
alpha and delta of a moving average, so a file loads in either branch and gives wrong results in the wrong one. They
register the two parameters in different orders, which a saved state dict keeps. In the `flash` branch, moreover, the
average that runs backward starts at the next token.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from luna_mega.errors import ConversionError

MINUS_ONE = "plus-one"  # the code adds one to the stored weights
NORMS = ("standard", MINUS_ONE)
ORDER = {"main": ("delta", "alpha", "beta", "gamma", "omega"), "flash": ("alpha", "delta", "beta", "gamma", "omega")}
_CENTER = {"standard": 1.0, MINUS_ONE: 0.0}
_MARGIN = 0.4  # training moves the mean: in models like BERT it ends up below 1


@dataclass(frozen=True)
class Decision:
    """The convention to use, the one that the tensors suggest (None: neither), and the warning if they differ.

    `mean` is the mean of all norm weights, 1 or 0 in a fresh model.
    """

    convention: str
    suggested: str | None
    conflict: str
    mean: float | None = None

    @property
    def warning(self) -> str | None:
        """Return the warning if the tensors suggest another convention."""
        return None if self.suggested in (None, self.convention) else self.conflict


def decide_layer_norm(weights: list[torch.Tensor], choice: str) -> Decision:
    """Return the storage of norm weights: `choice`, or with "auto" the one that the mean of the weights suggests.

    Raises:
        ConversionError: If `choice` is "auto" and the mean is near neither 1 nor 0.
    """
    mean = torch.cat([weight[weight.isfinite()].double() for weight in weights]).mean().item()
    suggested = next((name for name, center in _CENTER.items() if abs(mean - center) <= _MARGIN), None)
    if choice == "auto" and suggested is None:
        raise ConversionError(
            f"LayerNorm: the mean of the norm weights is {mean:.3f}, near neither 1 (stored as they are) nor 0 (stored "
            "minus one, the 2023 code); pass --layer-norm standard or --layer-norm plus-one"
        )
    conflict = f"contradicts the norm weights: their mean is {mean:.3f}, which looks like {suggested}"
    return Decision(suggested if choice == "auto" else choice, suggested, f"--layer-norm {choice} {conflict}", mean)


def order_of(keys: Iterable[str]) -> str | None:
    """Return the branch that registers the parameters of a moving average in the order of `keys`; None: neither."""
    averages: dict[str, list[str]] = {}
    for key in keys:
        if match := re.fullmatch(rf"(.*\.move)\.({'|'.join(ORDER['main'])})", key):
            averages.setdefault(match[1], []).append(match[2])
    fitting = [
        branch
        for branch, order in ORDER.items()
        if all(names == [name for name in order if name in names] for names in averages.values())
    ]
    return fitting[0] if len(fitting) == 1 else None


def decide_ema_convention(tensors: Mapping, choice: str) -> Decision:
    """Return the branch: `choice`, or with "auto" the one that fits the order of the tensors.

    Raises:
        ConversionError: If `choice` is "auto" and neither branch writes this order (for example, sorted names).
    """
    by_order = order_of(tensors)
    if choice == "auto" and by_order is None:
        raise ConversionError(
            "moving average: the order of its tensors is neither branch main's (delta, alpha, beta, ...) nor branch "
            "flash's (alpha, delta, beta, ...); pass --ema-convention main or --ema-convention flash"
        )
    conflict = f"--ema-convention {choice} contradicts the order of the tensors, which comes from the {by_order} branch"
    return Decision(by_order if choice == "auto" else choice, by_order, conflict)
