"""Memory of a Megalodon between calls: `MegalodonCache`, whose size does not depend on the length."""

import torch
from transformers.configuration_utils import PreTrainedConfig

from luna_mega.kernels.api import TimestepNormState
from luna_mega.modeling_common.cache import StateCache
from luna_mega.modeling_common.key_cache import KeyValueCacheLayer


class MegalodonCacheLayer(KeyValueCacheLayer):
    """The memory of one block over B sequences: beside the rotated keys and the values of the open chunk, states.

    `average` `[B, D, N, 2]`: states of the moving average, real and imaginary part. `norm_count` `[B]`, `norm_mean`,
    `norm_variance` `[B, G]`: statistics of the block's norm over time. The last block also has those of the norm behind
    it, `final_count`, `final_mean` and `final_variance`. Statistics are float64, whatever the model's dtype is.
    """

    fields = (
        "average", "keys", "values", "mask", "position", "norm_count", "norm_mean", "norm_variance", "final_count",
        "final_mean", "final_variance",
    )  # fmt: skip

    def statistics(self, norm: str) -> TimestepNormState | None:
        """Return the statistics of the norm `"norm"` or `"final"` so far; None = of no position."""
        tensors = [getattr(self, f"{norm}_{name}") for name in ("count", "mean", "variance")]
        return None if tensors[0] is None else TimestepNormState(*tensors)

    def store_statistics(self, norm: str, state: TimestepNormState):
        """Replace the statistics of the norm `"norm"` or `"final"`."""
        self.store(**{f"{norm}_{name}": tensor for name, tensor in state._asdict().items()})


class MegalodonCache(StateCache):
    """The `past_key_values` of a Megalodon."""

    layer_class = MegalodonCacheLayer

    def check(self, config: PreTrainedConfig, batch: int, ranks: int) -> None:
        layer = self.layers[0]
        # Comparing sizes would tie an exported program to the size of the example's cache.
        if not layer.is_initialized or torch.compiler.is_exporting():
            return
        needed = [
            (batch, config.hidden_size, config.ema_projection_size, 2),
            (batch, config.chunk_size, config.shared_representation_size // ranks),
            (batch, config.chunk_size, config.value_size // ranks),
            (batch, config.norm_num_groups),
        ]
        given = [tuple(x.shape) for x in (layer.average, layer.keys, layer.values, layer.norm_mean)]
        if given != needed or len(self) != config.num_hidden_layers:
            raise ValueError(
                f"past_key_values does not fit this model and batch: {len(self)} layers with states, keys, values and "
                f"means of {given}, needed are {config.num_hidden_layers} with {needed} (batch size first)"
            )


__all__ = ["MegalodonCache"]
