"""Helpers of the kernels for models: program modes, column indices, varlen sequences, precision and dropout.

Code outside of `kernels` imports the operators from `api` and everything else from here.
"""

from luna_mega.kernels._custom_operator import is_plain
from luna_mega.kernels._dispatch import without_autocast
from luna_mega.kernels._export import (
    forbid_capture,
    forbid_tracing,
    in_program,
    is_capturing,
    is_exporting,
    is_transformed,
)
from luna_mega.kernels.columns import roll_columns, take_columns
from luna_mega.kernels.dropout import Dropout, dropout
from luna_mega.kernels.upcast import upcast, upcast_dtype
from luna_mega.kernels.varlen import check_cu_seqlens, locate

__all__ = [
    "Dropout",
    "check_cu_seqlens",
    "dropout",
    "forbid_capture",
    "forbid_tracing",
    "in_program",
    "is_capturing",
    "is_exporting",
    "is_plain",
    "is_transformed",
    "locate",
    "roll_columns",
    "take_columns",
    "upcast",
    "upcast_dtype",
    "without_autocast",
]
