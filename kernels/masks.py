"""What models do with masks before they reach the ops."""

import torch


def drop_if_full(mask: torch.Tensor | None) -> torch.Tensor | None:
    """None in place of a bool mask that keeps everything, so that nothing is masked, moved or counted for it.

    Only where finding out is free: on a CPU, and not while the model is traced, compiled or exported.
    """
    if type(mask) is not torch.Tensor or mask.device.type != "cpu":
        return mask
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return mask
    return None if mask.all() else mask
