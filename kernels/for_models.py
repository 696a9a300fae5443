"""Helpers of the kernels for models: program modes, column indices, varlen sequences, precision and dropout.

Code outside of `kernels` imports the operators from `api` and everything else from here.
"""

from ._custom_operator import is_plain
from ._dispatch import without_autocast
from ._mode import COMPILED, EXPORTED, TRANSFORMED, forbid_capture, is_capturing, mode, tracing_error
from .alignment import roll_columns, take_columns
from .dropout import Dropout
from .gated_attention.window import KeyWindow, attend
from .sequences import check_cu_seqlens, checked_copy, locate
from .upcast import upcast, upcast_dtype

__all__ = [
    "COMPILED",
    "EXPORTED",
    "TRANSFORMED",
    "Dropout",
    "KeyWindow",
    "attend",
    "check_cu_seqlens",
    "checked_copy",
    "forbid_capture",
    "is_capturing",
    "is_plain",
    "locate",
    "mode",
    "roll_columns",
    "take_columns",
    "tracing_error",
    "upcast",
    "upcast_dtype",
    "without_autocast",
]
