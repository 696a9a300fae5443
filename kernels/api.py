"""Public names of the kernels."""

import torch

from luna_mega.kernels import _dispatch
from luna_mega.kernels._dispatch import use_backend, use_float32_precision
from luna_mega.kernels.damped_ema import op as _damped_ema
from luna_mega.kernels.damped_ema.op import TruncatedEmaState, damped_ema, damped_ema_step
from luna_mega.kernels.gated_attention import op as _gated_attention
from luna_mega.kernels.gated_attention.op import gated_attention, gated_attention_step
from luna_mega.kernels.luna_attention import op as _luna_attention
from luna_mega.kernels.luna_attention.op import luna_attention, luna_pack, luna_unpack
from luna_mega.kernels.luna_causal_attention import op as _luna_causal_attention
from luna_mega.kernels.luna_causal_attention.op import (
    LunaCausalState,
    luna_causal_attention,
    luna_causal_attention_step,
)

__all__ = [
    "LunaCausalState",
    "TruncatedEmaState",
    "damped_ema",
    "damped_ema_step",
    "explain",
    "gated_attention",
    "gated_attention_step",
    "luna_attention",
    "luna_causal_attention",
    "luna_causal_attention_step",
    "luna_pack",
    "luna_unpack",
    "use_backend",
    "use_float32_precision",
]

_BACKENDS = {
    "damped_ema": _damped_ema.BACKENDS,
    "gated_attention": _gated_attention.BACKENDS,
    "luna_attention": _luna_attention.BACKENDS,
    "luna_causal_attention": _luna_causal_attention.BACKENDS,
}


def explain(op: str = "luna_attention", backend: str | None = None, device: torch.device | str | None = None) -> str:
    """One line that says which backend `op` runs on `device` (None = the GPU where there is one), and why.

    What depends on the arguments of a call (dtype, sizes, options) is not looked at: where Triton cannot take them, the
    automatic choice is `"torch"`, and `"triton"` by name raises an error that says which.
    """
    if op not in _BACKENDS:
        raise ValueError(f"there is no op {op!r}; choose one of {', '.join(_BACKENDS)}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen, reason = _dispatch.decide(op, _BACKENDS[op], backend, torch.device(device))
    return f"{op} runs on {chosen!r}: {reason}"
