"""Fields that the outputs of the models have in common."""

from typing import Any, Protocol

import torch


class BodyOutput(Protocol):
    """Fields that the outputs of all models without a head have."""

    last_hidden_state: torch.Tensor

    def items(self) -> Any: ...
