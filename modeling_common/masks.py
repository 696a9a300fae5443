"""Masks as callers give them, 1 = keep: read as bool, and refused where they say something else."""

import torch
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Attention by squared scores takes the fourth power of a state, which overflows in float32 a little above 10^9.
_LARGEST = 2.0**16


def can_look(x: torch.Tensor) -> bool:
    """Return whether looking at the values is free: on a CPU, and not while a model is traced, compiled or exported."""
    return type(x) is torch.Tensor and x.device.type == "cpu" and not is_program()


def is_program() -> bool:
    """Return whether a model is being traced, compiled or exported, so that a value must not decide what it does."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]


def read_mask(name: str, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return a mask as bool, True = keep; None stays None.

    Args:
        name: of the argument, for the error.
        mask: any shape; bool, or numbers that are 1 (keep) or 0 (drop).

    Raises:
        ValueError: the mask has other values. They are looked at where that is free (see `can_look`); elsewhere every
            value but 0 keeps.
    """
    if mask is None or mask.dtype == torch.bool:
        return mask
    kept = mask.bool()
    if can_look(mask) and not kept.to(mask.dtype).equal(mask):
        raise ValueError(
            f"{name} has values from {mask.min().item()} to {mask.max().item()}, and a mask has 1 (keep) and 0 (drop) "
            f"alone: turn an additive mask, which has 0 and -inf, into one with {name} == 0"
        )
    return kept


def find_mask(input_ids: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor | None:
    """Return the bool mask of the tokens that are not `pad_token_id`; None if that token does not only mark padding.

    A decoder whose padding token is also an end token has to read end tokens within a text.
    """
    pad, end = config.pad_token_id, config.eos_token_id
    if pad is None:
        return None
    if config.is_decoder and pad in (end if isinstance(end, list | tuple) else [end]):
        if not is_program():
            logger.warning_once(
                f"`pad_token_id` and `eos_token_id` are both {pad}, so that the decoder does not infer an attention "
                "mask from `input_ids`; pass `attention_mask` if the batch has padding."
            )
        return None
    return input_ids != pad


def drop_if_full(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return None in place of a bool mask that keeps everything, so that nothing is masked, moved or counted for it.

    Only where finding out is free, see `can_look`.
    """
    return None if mask is not None and can_look(mask) and mask.all() else mask


def is_sound(x: torch.Tensor) -> torch.Tensor:
    """Return where numbers are finite, and so small that no layer makes an infinity of them."""
    return x.isfinite() & (x <= _LARGEST) & (x >= -_LARGEST)


def clean(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return `x` with 0 in place of NaN, infinities and numbers above 2^16 where a bool mask drops.

    The mask has the first dimensions of `x`; None = it keeps all. Nothing that is kept changes a bit. What is dropped
    has a gradient of 0.
    """
    differentiated = x.requires_grad and torch.is_grad_enabled()
    if mask is None or (not differentiated and can_look(x) and is_sound(x).all()):
        return x
    kept = mask[(..., *(None,) * (x.dim() - mask.dim()))]
    return torch.where(kept, x, x.detach().masked_fill(~is_sound(x), 0.0))
