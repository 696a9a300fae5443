"""Public names of the kernels."""

import torch

from ._dispatch import OPS, use_backend, use_float32_precision
from .gated_attention.op import gated_attention, gated_attention_step
from .luna_attention.op import luna_attention, luna_pack, luna_unpack
from .luna_causal_attention.op import luna_causal_attention, luna_causal_attention_step
from .luna_causal_attention.reference import LunaCausalState
from .recurrence.coefficients import complex_ema_coefficients, ema_coefficients
from .recurrence.complex_ema import complex_ema, complex_ema_step
from .recurrence.damped_ema import damped_ema, damped_ema_step
from .recurrence.diagonal_ssm import diagonal_ssm, diagonal_ssm_coefficients, diagonal_ssm_step, discretize
from .recurrence.truncated import TruncatedEmaState
from .timestep_norm.op import timestep_norm, timestep_norm_step
from .timestep_norm.reference import TimestepNormState

__all__ = [
    "LunaCausalState",
    "TimestepNormState",
    "TruncatedEmaState",
    "complex_ema",
    "complex_ema_coefficients",
    "complex_ema_step",
    "damped_ema",
    "damped_ema_step",
    "diagonal_ssm",
    "diagonal_ssm_coefficients",
    "diagonal_ssm_step",
    "discretize",
    "ema_coefficients",
    "explain",
    "gated_attention",
    "gated_attention_step",
    "luna_attention",
    "luna_causal_attention",
    "luna_causal_attention_step",
    "luna_pack",
    "luna_unpack",
    "timestep_norm",
    "timestep_norm_step",
    "use_backend",
    "use_float32_precision",
]


def explain(op: str = "luna_attention", backend: str | None = None, device: torch.device | str | None = None) -> str:
    """Return one line that states which backend the function `op` uses on `device`, and why.

    If `device` is None, the GPU is used if one is available. Arguments of the call (dtype, sizes, options) are not
    considered. If Triton or the C library does not support them, the automatic choice is `"torch"`; on a GPU the logger
    `luna_mega.kernels` warns. If one was specified by name, the call raises an error that names the argument.
    """
    if op not in OPS:
        raise ValueError(f"there is no op {op!r}; choose one of {', '.join(OPS)}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen, reason = OPS[op].decide(backend, torch.device(device))
    return f"{op} runs on {chosen!r}: {reason}"
