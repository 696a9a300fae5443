"""The two branches of the Mega code: one calls alpha what the other calls delta.

Both have the same names and shapes, so a file loads in either branch, and gives wrong results in the wrong one. They
register the two parameters in different orders, which a saved state dict keeps. In the `flash` branch, moreover, the
average that runs backward starts at the next token.
"""

import re
from collections.abc import Iterable, Mapping

from luna_mega.convert.decision import Decision
from luna_mega.errors import ConversionError

ORDER = {
    "main": ("delta", "alpha", "beta", "gamma", "omega"),
    "flash": ("alpha", "delta", "beta", "gamma", "omega"),
}
CHOICES = ("auto", *ORDER)


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
    """Return the branch: `choice`, or with "auto" the one that the order of the tensors tells.

    Raises:
        ConversionError: "auto", and neither branch writes this order (the names were sorted, for instance).
    """
    by_order = order_of(tensors)
    if choice == "auto" and by_order is None:
        raise ConversionError(
            "moving average: the order of its tensors is neither branch main's (delta, alpha, beta, ...) nor branch "
            "flash's (alpha, delta, beta, ...); pass --ema-convention main or --ema-convention flash"
        )
    return Decision(
        by_order if choice == "auto" else choice,
        by_order,
        f"--ema-convention {choice} contradicts the order of the tensors, which comes from the {by_order} branch",
    )
