"""Conventions that names and shapes do not determine: the storage of norm weights, and the branch of Mega.

Luna's code stores norm weights as `weight` or, in 2023, as `weight - 1`. The two branches of Mega swap the names alpha
and delta of a moving average, so a file loads with either convention but gives wrong results with one of them. The
branches register the two parameters in different orders, which a state dict preserves. In the `flash` branch, the
backward average also starts at the next token.
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
_MARGIN = 0.4  # training moves the mean; in BERT-like models it falls below 1


def check_choice(name: str, value: str | None, choices: tuple[str | None, ...]) -> None:
    """Raise `ValueError` unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(filter(None, choices))}, got {value!r}")


@dataclass(frozen=True)
class Decision:
    """Convention to use, a warning if the tensors suggest another one, and the mean of the norm weights."""

    convention: str
    warning: str | None
    mean: float | None = None


def decide_layer_norm(weights: list[torch.Tensor], choice: str) -> Decision:
    """Return the storage of norm weights: `choice`, or with "auto" the one that the mean of the weights suggests."""
    mean = torch.cat([weight[weight.isfinite()].double() for weight in weights]).mean().item()
    suggested = next((name for name, center in _CENTER.items() if abs(mean - center) <= _MARGIN), None)
    if choice == "auto" and suggested is None:
        raise ConversionError(
            f"LayerNorm: the mean of the norm weights is {mean:.3f}, close to neither 1 (stored as they are) nor 0 "
            "(stored minus one, the 2023 code); pass --layer-norm standard or --layer-norm plus-one"
        )
    conflict = f"contradicts the norm weights: their mean is {mean:.3f}, which looks like {suggested}"
    differs = choice != "auto" and suggested not in (None, choice)
    convention = suggested if choice == "auto" else choice
    return Decision(convention, f"--layer-norm {choice} {conflict}" if differs else None, mean)


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
    """Return the branch: `choice`, or with "auto" the one that fits the order of the tensors."""
    by_order = order_of(tensors)
    if choice == "auto" and by_order is None:
        raise ConversionError(
            "moving average: the order of its tensors is neither branch main's (delta, alpha, beta, ...) nor branch "
            "flash's (alpha, delta, beta, ...); pass --ema-convention main or --ema-convention flash"
        )
    conflict = f"--ema-convention {choice} contradicts the order of the tensors, which comes from the {by_order} branch"
    differs = choice != "auto" and by_order not in (None, choice)
    return Decision(by_order if choice == "auto" else choice, conflict if differs else None)
