"""The two branches of the Mega code: what one of them calls alpha, the other one calls delta.

Both branches have the same names and shapes, so that a file loads in either, and computes something else. They register
the two parameters in another order, which a saved state dict keeps. In the `flash` branch, moreover, the average that
runs backward starts at the next token.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from luna_mega.errors import ConversionError

ORDER = {
    "main": ("delta", "alpha", "beta", "gamma", "omega"),
    "flash": ("alpha", "delta", "beta", "gamma", "omega"),
}
CHOICES = ("auto", *ORDER)


@dataclass(frozen=True)
class EmaDecision:
    """The branch, and the one that the order of the tensors says (None: neither)."""

    convention: str
    by_order: str | None

    @property
    def warning(self) -> str | None:
        if self.by_order in (None, self.convention):
            return None
        return (
            f"--ema-convention {self.convention} contradicts the order of the tensors, which is that of the "
            f"{self.by_order} branch"
        )


def order_of(keys: Iterable[str]) -> str | None:
    """Return the branch that registers the parameters of every moving average in the order of `keys`; None: neither."""
    averages: dict[str, list[str]] = {}
    for key in keys:
        if found := re.fullmatch(rf"(.*\.move)\.({'|'.join(ORDER['main'])})", key):
            averages.setdefault(found[1], []).append(found[2])
    fitting = [
        branch
        for branch, order in ORDER.items()
        if all(names == [name for name in order if name in names] for names in averages.values())
    ]
    return fitting[0] if len(fitting) == 1 else None


def decide_ema_convention(tensors: Mapping, choice: str) -> EmaDecision:
    """Return the branch: `choice`, or with "auto" what the order of the tensors says.

    Raises:
        ConversionError: "auto", and the order is that of neither branch, as after sorting.
    """
    by_order = order_of(tensors)
    if choice == "auto" and by_order is None:
        raise ConversionError(
            "moving average: the order of its tensors, by which the branches main (delta, alpha, beta, ...) and flash "
            "(alpha, delta, beta, ...) are told apart, is that of neither; pass --ema-convention main or "
            "--ema-convention flash"
        )
    return EmaDecision(by_order if choice == "auto" else choice, by_order)
