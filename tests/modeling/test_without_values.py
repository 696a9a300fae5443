"""Operators of every kind of model.

Construction and forward passes read no values: under `FakeTensorMode`, and on the meta device, then `to_empty`. With
`attn_implementation="eager"`, every layer computes attention with basic operations of PyTorch.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from luna_mega import MegaForImageClassification
from tests.marks import slow_but

from . import luna, mega, megalodon_decoders
from .decoders import DECODERS, a_third, make

BANDS = {"adaptive_input_cutoffs": [10, 20], "adaptive_softmax_cutoffs": [10, 20]}
BANDS |= {"adaptive_input_factor": 2, "adaptive_softmax_factor": 2}
IMAGES = {"input_type": "patches", "image_size": 8, "patch_size": 2, "pooling": "mean"}
MODELS = {
    "luna": lambda: luna.make("ForSequenceClassification"),
    "mega": lambda: mega.make("ForSequenceClassification", normalization_type="batchnorm"),
    "mega: adaptive": lambda: make("mega: softmax", **BANDS),
    "mega: images": lambda: luna.enlarged(MegaForImageClassification, mega.tiny_config(**IMAGES)),
    "megalodon: classifier": lambda: megalodon_decoders.make("ForSequenceClassification", torch.float32),
    **{name: lambda name=name: make(name) for name in DECODERS},
}


def inputs_of(model):
    if model.config.input_type == "patches":
        return {"pixel_values": torch.ones(2, 3, 8, 8)}
    ids = torch.arange(24).view(2, 12) % 17 + 4
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})


@pytest.mark.parametrize("name", a_third(MODELS))
def test_weights_are_loaded_into_empty_memory(name):
    model = MODELS[name]()
    with torch.no_grad():
        expected = model(**inputs_of(model)).logits
    with torch.device("meta"):
        empty = type(model)(model.config)
    empty = empty.to(expected.dtype).to_empty(device="cpu")
    for tensor in (*empty.parameters(), *empty.buffers()):
        tensor.data.fill_(99)
    empty.tie_weights()
    empty.load_state_dict(model.state_dict())
    assert [*dict(empty.named_parameters())] == [*dict(model.named_parameters())]
    with torch.no_grad():
        torch.testing.assert_close(empty.eval()(**inputs_of(model)).logits, expected)


FAKE = ["luna", "mega: adaptive", "mega: laplace chunks", "megalodon: classifier"]


@pytest.mark.parametrize("name", slow_but(FAKE, MODELS))
def test_a_fake_model(name):
    """Results of a model that is constructed and trained under `FakeTensorMode` have their shapes and dtypes."""
    model = MODELS[name]()
    model.config.num_hidden_layers = 1
    model = type(model)(model.config).float()
    expected = model(**inputs_of(model)).logits
    with FakeTensorMode():
        fake, inputs = type(model)(model.config), inputs_of(model)
        if name == "luna":
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        if name == "mega: adaptive":  # the number of tokens of a band depends on their values
            with pytest.raises(DynamicOutputShapeException):
                fake(**inputs)
            return
        logits = fake(**inputs).logits
        logits.sum().backward()
    assert (logits.shape, logits.dtype) == (expected.shape, expected.dtype)
    parameters = dict(model.named_parameters())
    for key, parameter in fake.named_parameters():
        assert (parameter.shape, parameter.dtype) == (parameters[key].shape, parameters[key].dtype)
        assert parameter.grad is None or parameter.grad.shape == parameter.shape


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
def test_operators(name):
    model = MODELS[name]()
    inputs = inputs_of(model)
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
