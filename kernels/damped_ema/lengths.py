"""Rows that are filled up with dropped positions at their end, over which a state must not decay."""

from typing import Any

import torch

from luna_mega.kernels.gated_attention.alignment import to_end


def from_zero(call: dict[str, Any], lengths: torch.Tensor) -> dict[str, Any]:
    """Return the call of an average whose last states are those after `lengths` positions, from a state of zero."""
    rows = {name: to_end(call[name], lengths) for name in ("x", "mask")}
    return call | rows | {"skip": None, "initial_state": None, "return_state": True}
