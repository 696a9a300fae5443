"""With `attn_implementation="eager"`, every layer computes attention with basic operations of PyTorch."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from luna_mega.kernels._dispatch import Op

from .decoders import a_third
from .test_without_values import MODELS, inputs_of

OTHERS = ("moving_average", "ema", "timestep_norm")  # parts of the names of operators that are no attention


class Operators(TorchDispatchMode):
    """Record the names of all operators."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        self.names.add(operator._schema.name)
        return operator(*arguments, **(options or {}))

    @property
    def fused(self):
        """The fused and custom operators of attention."""
        own = {name for name in self.names if name.startswith("luna_mega") and not any(x in name for x in OTHERS)}
        return own | {name for name in self.names if "scaled_dot_product" in name}


@pytest.mark.parametrize("name", a_third(MODELS))
def test_operators(name, monkeypatch):
    model, inputs, chosen = MODELS[name](), inputs_of(MODELS[name]()), set()
    choose = Op.choose

    def recorded(op, *arguments):
        backend = choose(op, *arguments)
        chosen.add((op.name, backend))
        return backend

    monkeypatch.setattr(Op, "choose", recorded)
    model.set_attn_implementation("eager")
    with Operators() as operators:
        model(**inputs)[0].sum().backward()
        if model.config.is_encoder_decoder or (model.config.is_decoder and "classifier" not in name):
            own = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
            with torch.no_grad():
                cache = model(**inputs, use_cache=True).cache
                for columns in (slice(0, 3), slice(3, 4), slice(4, 5)):
                    model(**inputs | {own: inputs[own][:, columns]}, cache=cache)
    assert operators.fused == set()
    assert {name for name, backend in chosen if backend != "reference" and not any(x in name for x in OTHERS)} == set()
