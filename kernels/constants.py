"""Results that only depend on weights, such as the coefficients of decoding steps."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ._export import is_eager


class Constants:
    """Values that only depend on weights, which are reused until a weight changes; not copied nor pickled."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[Hashable, list[ref[Tensor]], list[tuple[int, int]], Any]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Constants":
        return Constants()

    def __reduce__(self) -> tuple[type["Constants"], tuple[()]]:
        return Constants, ()

    def get(self, name: str, weights: Sequence[Tensor], compute: Callable[[], Any], key: Hashable = None) -> Any:
        """Return `compute()`, or its last result if `key` and `weights` have not changed.

        Results are not reused in compiled programs, with autograd, and for inference tensors, which have no version.
        Changes through `.data` do not change the version.
        """
        if not is_eager() or torch.is_grad_enabled() and any(x.requires_grad for x in weights):
            return compute()
        key, kept = (key, torch.is_inference_mode_enabled()), self.kept.get(name)  # autograd refuses inference tensors
        if kept is not None and kept[0] == key and len(kept[1]) == len(weights):
            for known, stamp, x in zip(kept[1], kept[2], weights, strict=True):
                if known() is not x or stamp != (x._version, x.data_ptr()):
                    break
            else:
                return kept[3]
        value = compute()
        if not any(x.is_inference() for x in weights):
            self.kept[name] = (key, [ref(x) for x in weights], [(x._version, x.data_ptr()) for x in weights], value)
        return value
