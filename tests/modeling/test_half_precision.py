"""Parameters that stay in float32 in half-precision models."""

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from . import luna, mega, megalodon_decoders

MODELS = {
    "luna": lambda: luna.make("Model"),
    "mega": lambda: mega.make("Model"),
    "mega batchnorm": lambda: mega.make("Model", normalization_type="batchnorm"),
    "megalodon": lambda: megalodon_decoders.make(dtype=torch.float32),
}


def dtypes(model):
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_constructed_and_loaded_models_have_the_same_dtypes(name, dtype, tmp_path):
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
    auto = AutoModelForCausalLM if name == "megalodon" else AutoModel
    for built in (type(model)._from_config(model.config, dtype=dtype), auto.from_config(model.config, dtype=dtype)):
        assert dtypes(built) == dtypes(loaded)
    exact = {key for key, value in dtypes(loaded).items() if "ema" in key.split(".")[-2]}
    assert bool(exact) is (name != "luna")
    assert {dtypes(loaded)[key] for key in exact} <= {torch.float64 if dtype == torch.float64 else torch.float32}
