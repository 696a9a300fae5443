"""Check that a model has the classes and weights of transformers, so that copying its weights copies the model."""

from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import find_adapter_config_file

from luna_mega.errors import ConversionError

_LAYERS = (nn.Linear, nn.Embedding, nn.LayerNorm, Conv1D)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MERGE = "merge it first: `model.merge_and_unload()`"
_DEQUANTIZE = "pass the original checkpoint, or save the result of `model.dequantize()`"


def check_original(model: nn.Module) -> PreTrainedModel:
    """Return a model without the wrapper of `torch.compile`.

    Raises:
        ValueError: It has adapters or quantized weights, or is not an instance of a class of transformers.
    """
    model = getattr(model, "_orig_mod", model)
    kind = type(model)
    for name, module in model.named_modules():
        if type(module).__module__.partition(".")[0] == "peft":
            raise ValueError(f"the teacher has an adapter ({name or kind.__name__}); {_MERGE}")
    if not isinstance(model, PreTrainedModel):
        fix = "its folder or `model.module`" if hasattr(model, "module") else "its folder"
        raise ValueError(f"the teacher must be a model of transformers, got a {kind.__name__}; pass {fix}")
    if getattr(transformers, kind.__name__, None) is not kind:
        bases = [base.__name__ for base in kind.__mro__[1:] if getattr(transformers, base.__name__, None) is base]
        fix = "" if not bases or bases[0].endswith("PreTrainedModel") else f"an instance of {bases[0]}, or "
        raise ValueError(
            f"{kind.__name__} is not a class of transformers, so its own code would be lost; pass {fix}"
            "`model.base_model`"
        )
    _check_weights(model)
    return model


def _check_weights(model: PreTrainedModel) -> None:
    if getattr(model, "is_quantized", False):
        raise ValueError(f"the teacher is {_quantization(model.config)}; {_DEQUANTIZE}")
    for name, module in model.named_modules():
        if isinstance(module, _LAYERS) and type(module) not in _LAYERS:
            raise ValueError(
                f"{name} of the teacher is a {type(module).__name__}, of which a copy of the weights is not a copy; "
                f"{_DEQUANTIZE}"
            )
    for name, tensor in model.named_parameters():
        if type(tensor) is not nn.Parameter or tensor.dtype not in _DTYPES:
            raise ValueError(
                f"{name} of the teacher is a {type(tensor).__name__} of {tensor.dtype}, and only floating-point "
                f"weights are copied; {_DEQUANTIZE}"
            )
        if tensor.is_meta:
            raise ValueError(f"{name} of the teacher is on the device meta; load it without `device_map`")


def _quantization(config: PreTrainedConfig) -> str | None:
    """Return a description of the quantization of the weights for a message, or None if they are not quantized."""
    if not (given := getattr(config, "quantization_config", None)):
        return None
    method = given.get("quant_method") if isinstance(given, dict) else getattr(given, "quant_method", None)
    return f"quantized ({getattr(method, 'value', method)})"


def check_adapter(name: str, places: dict[str, Any]) -> None:
    """Raise `ConversionError` if a folder or repository contains an adapter; `places` specify the revision, ..."""
    if find_adapter_config_file(name, **places):
        raise ConversionError(f"{name} contains an adapter (adapter_config.json); {_MERGE}, and pass its folder")


def check_quantization(name: str, config: PreTrainedConfig) -> None:
    """Raise `ValueError` if the weights of a folder or repository are quantized."""
    if method := _quantization(config):
        raise ValueError(f"{name}: the teacher is {method}; {_DEQUANTIZE}")
