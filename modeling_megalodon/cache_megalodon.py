"""Cache of Megalodon. Its size does not depend on the length of the sequences."""

import torch

from luna_mega.kernels.api import TimestepNormState
from luna_mega.modeling_common.attention import KeyValueCacheLayer
from luna_mega.modeling_common.cache import StateCache


class MegalodonCacheLayer(KeyValueCacheLayer):
    """Recurrent state of one block for B sequences, and the rotated keys and the values of the current chunk.

    `average` `[B, D, N, 2]` has the real and imaginary parts of the moving average. `norm_count` `[B]`, `norm_mean` and
    `norm_variance` `[B, G]` are the statistics of the timestep norm. The last block also has the statistics of the
    final norm, `final_count`, `final_mean` and `final_variance`. Statistics are float64 for every dtype of the model.
    """

    average: torch.Tensor | None
    norm_mean: torch.Tensor | None

    fields = (
        "average", "keys", "values", "mask", "position", "norm_count", "norm_mean", "norm_variance", "final_count",
        "final_mean", "final_variance",
    )  # fmt: skip

    def statistics(self, norm: str) -> TimestepNormState | None:
        """Return the statistics of the norm `"norm"` or `"final"`, or None before the first position."""
        tensors = [getattr(self, f"{norm}_{name}") for name in ("count", "mean", "variance")]
        return None if tensors[0] is None else TimestepNormState(*tensors)

    def store_statistics(self, norm: str, state: TimestepNormState) -> None:
        """Replace the statistics of the norm `"norm"` or `"final"`."""
        self.store(**{f"{norm}_{name}": tensor for name, tensor in state._asdict().items()})


class MegalodonCache(StateCache):
    """Cache of a Megalodon model, its `past_key_values`."""

    layer_class = MegalodonCacheLayer
    sized_by = (
        "hidden_size", "ema_projection_size", "chunk_size", "shared_representation_size", "value_size",
        "norm_num_groups",
    )  # fmt: skip


__all__ = ["MegalodonCache"]
