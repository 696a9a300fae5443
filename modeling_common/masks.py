"""Masks of the caller (1 = keep), which models convert to bool."""

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from luna_mega.kernels.for_models import COMPILED, TRANSFORMED, is_capturing, mode

logger = logging.get_logger(__name__)

# Below this bound no layer overflows: attention with squared scores computes the fourth power of a state, which
# overflows in float32 above 10^9.
_LARGEST = 2.0**16


def can_read(x: torch.Tensor) -> bool:
    """Return whether the values can be read: not while a model is being compiled, exported, captured or transformed."""
    return type(x) is torch.Tensor and mode() < TRANSFORMED and not (x.is_meta or is_capturing(x))


def can_look(x: torch.Tensor) -> bool:
    """Return whether reading the values does not wait for a device: on a CPU, outside of programs and transforms."""
    return type(x) is torch.Tensor and x.device.type == "cpu" and mode() < TRANSFORMED


def to_bool_mask(name: str, mask: torch.Tensor | None, drop_full: bool = False) -> torch.Tensor | None:
    """Return a mask as bool, True = keep; None stays None.

    Args:
        name: name of the argument in the error.
        mask: bool of any shape, or numbers that are 1 (keep) or 0 (drop).
        drop_full: return None for a mask that keeps everything, if reading it is free, see `can_look`.

    Raises:
        ValueError: The mask has other values. They are only checked if reading them is free (see `can_look`); else
            every value except 0 keeps.
    """
    if mask is None:
        return None
    kept, looks = mask.bool(), can_look(mask)
    if looks and mask.dtype != torch.bool and not kept.to(mask.dtype).equal(mask):
        raise ValueError(
            f"`{name}` has values from {mask.min().item()} to {mask.max().item()}, but must have only 1 (keep) and 0 "
            f"(drop); convert an additive mask, which has 0 and -inf, with `{name} == 0`"
        )
    return None if drop_full and looks and kept.all() else kept


def padding_token(config: PreTrainedConfig) -> int | None:
    """Return `pad_token_id`, or None if that token does not only mark padding.

    A decoder whose padding token is also an end token must read the end tokens within a text.
    """
    pad, end = config.pad_token_id, config.eos_token_id
    return None if config.is_decoder and pad in (end if isinstance(end, list | tuple) else [end]) else pad


def blank_token(config: PreTrainedConfig) -> int | None:
    """Return the token whose embedding is 0 at first: the padding token, unless targets start with it.

    The state of a start token with embedding 0 would be near 0, and norms would amplify its rounding errors.
    """
    pad = padding_token(config)
    return None if pad == config.decoder_start_token_id else pad


def find_mask(input_ids: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor | None:
    """Return the bool mask of the tokens that are not padding, see `padding_token`; None if there is no such token."""
    if (pad := padding_token(config)) is not None:
        return input_ids != pad
    if config.pad_token_id is not None and mode() < COMPILED:
        logger.warning_once(
            f"`pad_token_id` and `eos_token_id` are both {config.pad_token_id}, so that the decoder does not infer an "
            "attention mask from `input_ids`; pass `attention_mask` if the batch has padding."
        )
    return None


def find_target_mask(input_ids: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor | None:
    """Return the bool mask of targets that include the start token: `find_mask`, but the start token is kept.

    If `decoder_start_token_id` is also the padding token, as in T5 and Marian, the start token is the last of the
    padding tokens before the first other token, and the padding tokens before the start token are left padding.
    """
    mask = find_mask(input_ids, config)
    if mask is None or config.decoder_start_token_id != config.pad_token_id:
        return mask
    before = mask.cumsum(dim=1) == 0
    return mask | (before & ~nn.functional.pad(before[:, 1:], (0, 1)))


def drop_if_full(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return None in place of a bool mask that keeps everything, if reading the mask is free (see `can_look`)."""
    return None if mask is not None and can_look(mask) and mask.all() else mask


def is_sound(x: torch.Tensor) -> torch.Tensor:
    """Return a bool tensor, True for finite numbers that are so small that no layer overflows."""
    return x.isfinite() & (x <= _LARGEST) & (x >= -_LARGEST)


def clean(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return `x` with 0 in place of NaN, infinities and numbers above 2^16 at positions that a bool mask drops.

    The mask has the first dimensions of `x`; None = it keeps all. Kept values do not change. Dropped values have a
    gradient of 0.
    """
    needs_grad = x.requires_grad and torch.is_grad_enabled()
    if mask is None or (not needs_grad and can_look(x) and is_sound(x).all()):
        return x
    kept = mask[(..., *(None,) * (x.dim() - mask.dim()))]
    return torch.where(kept, x, x.detach().masked_fill(~is_sound(x), 0.0))
