"""Models have the right derivatives with respect to their parameters in every way of PyTorch."""

import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap

from tests.marks import slow_but

from . import luna, mega, megalodon_decoders
from .decoders import make

STEP = 1e-6
MODELS = {
    "luna": lambda: luna.make("ForSequenceClassification", pooling="mean", num_hidden_layers=1),
    "luna, no contextual P": lambda: luna.make("ForMaskedLM", contextual_projection=False),
    "luna, causal": lambda: make("luna: softplus", num_hidden_layers=1),
    "mega": lambda: mega.make("ForSequenceClassification", pooling="mean", num_hidden_layers=1),
    "mega, chunks": lambda: make("mega: laplace chunks", num_hidden_layers=1),
    "mega, no average": lambda: make("mega: laplace chunks, no average, no bias", num_hidden_layers=1),
    "megalodon": lambda: megalodon_decoders.make("ForCausalLM", torch.float64, num_hidden_layers=1),
}
IDS = torch.randint(3, 20, (2, 19), generator=torch.Generator().manual_seed(0))


class Case:
    """The loss of a model as a function of its parameters, its gradient, and the derivative of that in a direction."""

    def __init__(self, name):
        self.model = MODELS[name]().double().eval()
        self.values = {name: x.detach() for name, x in self.model.named_parameters()}
        generator = torch.Generator().manual_seed(1)
        self.direction = {
            name: torch.randn(x.shape, dtype=x.dtype, generator=generator) / 9 for name, x in self.values.items()
        }
        self.first = self.gradient(self.values)
        above, below = (self.gradient(self.moved(sign * STEP)) for sign in (1, -1))
        self.second = {name: (above[name] - below[name]) / (2 * STEP) for name in self.values}

    def moved(self, step):
        return {name: x + step * self.direction[name] for name, x in self.values.items()}

    def loss(self, values, ids=IDS):
        return (
            functional_call(self.model, values, (ids,), {"use_cache": False} if self.decodes else {})
            .logits.square()
            .mean()
        )

    @property
    def decodes(self):
        return self.model.config.is_decoder

    def gradient(self, values):
        leaves = {name: x.detach().requires_grad_() for name, x in values.items()}
        found = torch.autograd.grad(self.loss(leaves), list(leaves.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(leaves, found, strict=True))

    def along(self, gradients):
        return sum((gradients[name] * x).sum() for name, x in self.direction.items())


def second(case):
    leaves = {name: x.clone().requires_grad_() for name, x in case.values.items()}
    every = list(leaves.values())
    found = torch.autograd.grad(case.loss(leaves), every, create_graph=True, allow_unused=True, materialize_grads=True)
    derivative = case.along(dict(zip(leaves, found, strict=True)))
    found = torch.autograd.grad(derivative, every, allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True)), case.second


def of_rows(case):
    """The gradient of each row of the batch, as for differential privacy."""
    rows = vmap(lambda row: grad(case.loss)(case.values, row[None]))(IDS)
    return {name: x.mean(0) for name, x in rows.items()}, case.first


WAYS = {
    "grad": lambda case: (grad(case.loss)(case.values), case.first),
    "jvp": lambda case: (
        {"": jvp(case.loss, (case.values,), (case.direction,))[1]},
        {"": case.along(case.first)},
    ),
    "jvp of grad": lambda case: (jvp(grad(case.loss), (case.values,), (case.direction,))[1], case.second),
    "second": second,
    "of rows": of_rows,
}


@pytest.mark.parametrize("name", slow_but(["luna", "mega", "mega, no average", "megalodon"], MODELS))
def test_every_way(name):
    case = Case(name)
    for way, compute in WAYS.items():
        actual, expected = compute(case)
        for key, value in expected.items():
            torch.testing.assert_close(
                actual[key], value, rtol=1e-5, atol=1e-7, msg=lambda text, way=way, key=key: f"{way}, {key}: {text}"
            )
