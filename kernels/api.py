"""Public names of the kernels."""

from luna_mega.kernels import _dispatch
from luna_mega.kernels._dispatch import use_backend
from luna_mega.kernels.damped_ema import op as _damped_ema
from luna_mega.kernels.damped_ema.op import damped_ema, damped_ema_step
from luna_mega.kernels.gated_attention import op as _gated_attention
from luna_mega.kernels.gated_attention.op import gated_attention
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
    "damped_ema",
    "damped_ema_step",
    "explain",
    "gated_attention",
    "luna_attention",
    "luna_causal_attention",
    "luna_causal_attention_step",
    "luna_pack",
    "luna_unpack",
    "use_backend",
]

_BACKENDS = {
    "damped_ema": _damped_ema.BACKENDS,
    "gated_attention": _gated_attention.BACKENDS,
    "luna_attention": _luna_attention.BACKENDS,
    "luna_causal_attention": _luna_causal_attention.BACKENDS,
}


def explain(op: str = "luna_attention", backend: str | None = None) -> str:
    """One line that says which backend `op` would run now, and which backends it has."""
    if op not in _BACKENDS:
        raise ValueError(f"there is no op {op!r}; choose one of {', '.join(_BACKENDS)}")
    chosen = _dispatch.select(op, _BACKENDS[op], backend)
    return f"{op} runs on {chosen!r}; this version has {' and '.join(map(repr, _BACKENDS[op]))}, no Triton kernel"
