"""Helpers of the kernels for models: program modes, column indices, varlen sequences, precision and dropout.

Code outside of `kernels` imports the operators from `api` and everything else from here.
"""

from ._custom_operator import is_plain
from ._dispatch import without_autocast
from ._export import (
    forbid_capture,
    forbid_tracing,
    in_program,
    is_capturing,
    is_eager,
    is_exporting,
)
from .columns import roll_columns, take_columns
from .dropout import Dropout
from .gated_attention.window import KeyWindow, attend
from .upcast import upcast, upcast_dtype
from .varlen import check_cu_seqlens, checked_copy, locate

__all__ = [
    "Dropout",
    "KeyWindow",
    "attend",
    "check_cu_seqlens",
    "checked_copy",
    "forbid_capture",
    "forbid_tracing",
    "in_program",
    "is_capturing",
    "is_eager",
    "is_exporting",
    "is_plain",
    "locate",
    "roll_columns",
    "take_columns",
    "upcast",
    "upcast_dtype",
    "without_autocast",
]
