"""Pytest plugin: `from_pretrained` returns weights at addresses that are not multiples of 64 bytes.

Files determine the addresses of loaded weights, and addresses the order of sums on some processors. Tests that require
equal bits of a model in memory and the same model loaded fail: `python -m pytest -p tests.odd_addresses ...`.
"""

import itertools
from collections.abc import Iterator

import pytest
import torch


def moved(tensor: torch.Tensor, place: int) -> torch.Tensor:
    """Return a copy that starts `place` elements after a multiple of 64 bytes."""
    size = tensor.element_size()
    storage = torch.empty(tensor.numel() * size + 64, dtype=torch.uint8)
    start = (place * size - storage.data_ptr()) % 64
    return storage[start : start + tensor.numel() * size].view(tensor.dtype).view(tensor.shape).copy_(tensor)


@pytest.fixture(scope="session", autouse=True)
def odd_addresses() -> Iterator[None]:
    """Move the parameters of every loaded model, a different distance for each model."""
    from transformers import PreTrainedModel  # after conftest.py has set TRITON_INTERPRET

    original = PreTrainedModel.from_pretrained.__func__
    places = itertools.cycle(range(1, 16, 2))

    def from_pretrained(cls, *args, **kwargs):
        result = original(cls, *args, **kwargs)
        place = next(places)
        for parameter in (result[0] if isinstance(result, tuple) else result).parameters():
            if type(parameter) is torch.nn.Parameter and parameter.device.type == "cpu" and parameter.is_contiguous():
                parameter.data = moved(parameter.data, place)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreTrainedModel, "from_pretrained", classmethod(from_pretrained))
        yield
