"""Models with the tools of PyTorch: differentiation in every way, dropouts, and operators.

With `attn_implementation="eager"`, every layer computes attention with basic operations of PyTorch.
"""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from tests.marks import slow_but
from tests.modeling import contract, luna, mega
from tests.modeling.contract import MEMBERS, Batch, Member, collate

SOME = ["luna ForSequenceClassification", "mega batchnorm, norms around", "mega adaptive", "luna: elu, untied"]
SOME += ["mega: laplace chunks", "megalodon ForSequenceClassification", "megalodon decoder", "mega seq2seq"]


class Operators(TorchDispatchMode):
    """Fail if attention is computed by a fused or custom operator."""

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        name = operator._schema.name
        assert "scaled_dot_product" not in name
        assert "luna_mega" not in name or any(x in name for x in ("moving_average", "ema", "timestep_norm"))
        return operator(*arguments, **(options or {}))


@pytest.mark.parametrize("name", slow_but(["luna ForSequenceClassification", "mega: laplace chunks"], SOME))
def test_operators(name):
    model, (inputs, _) = MEMBERS[name].make(), collate(MEMBERS[name], Batch("right", (9, 4)))
    model.set_attn_implementation("eager")
    with Operators():
        output = model(**inputs)
        (output[0].sum() if output.get("loss") is None else output.loss).backward()
        if MEMBERS[name].head in contract.DECODERS:
            contract.check_division(model, contract.Division((3, 1, 1), (5, 3), eager=True))


TANGENT = 1e-6
DIFFERENTIABLE = {
    "luna": Member("luna", "ForSequenceClassification", {"pooling": "mean"}),
    "luna, no contextual P": MEMBERS["luna P not contextual"],
    "luna, causal": MEMBERS["luna decoder"],
    "mega": Member("mega", "ForSequenceClassification", {"pooling": "mean"}),
    "mega, chunks": MEMBERS["mega: laplace chunks"],
    "mega, no average": MEMBERS["mega no average, no bias"],
    "megalodon": MEMBERS["megalodon decoder"],
}


@pytest.mark.parametrize("name", slow_but(["luna", "mega", "mega, no average", "megalodon"], DIFFERENTIABLE))
def test_every_way_of_differentiation(name):
    """Gradients of every kind are those of a backward pass, and second derivatives are their differences."""
    model = DIFFERENTIABLE[name].make(num_hidden_layers=1)
    ids, generator = torch.randint(3, 20, (2, 19)), torch.Generator().manual_seed(1)
    options = {"use_cache": False} if model.config.is_decoder else {}
    values = {name: x.detach().requires_grad_() for name, x in model.named_parameters()}
    direction = {name: torch.randn(x.shape, dtype=x.dtype, generator=generator) / 9 for name, x in values.items()}

    def loss(values, ids=ids):
        return functional_call(model, values, (ids,), options).logits.square().mean()

    def backward(function, values, **more):
        more |= {"allow_unused": True, "materialize_grads": True}
        found = torch.autograd.grad(function(values), [*values.values()], **more)
        return dict(zip(values, found, strict=True))

    def along(gradients):
        return sum((gradients[name] * x).sum() for name, x in direction.items())

    def slope(values):
        """Return the derivative of the loss in the direction, as a function that can be differentiated."""
        return along(backward(loss, values, create_graph=True))

    first = backward(loss, values)
    above, below = (
        backward(loss, {name: x + sign * TANGENT * direction[name] for name, x in values.items()}) for sign in (1, -1)
    )
    second = {name: (above[name] - below[name]) / (2 * TANGENT) for name in values}
    rows = vmap(lambda row: grad(loss)(values, row[None]))(ids)  # as for differential privacy
    for actual, expected in (
        (grad(loss)(values), first),
        ({name: x.mean(0) for name, x in rows.items()}, first),
        ({"": jvp(loss, (values,), (direction,))[1]}, {"": along(first)}),
        (jvp(grad(loss), (values,), (direction,))[1], second),
        (backward(slope, values), second),
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


OFF = {"luna": luna.NO_DROPOUT, "mega": mega.NO_DROPOUT}
FIELDS = {  # the dropouts of each class, one at a time
    "luna ForSequenceClassification": ("dropout", "attention_dropout", "activation_dropout", "classifier_dropout"),
    "luna ForMultipleChoice": ("classifier_dropout",),
    "luna decoder": ("dropout", "attention_dropout", "activation_dropout", "word_dropout"),
    "luna seq2seq": ("dropout", "attention_dropout", "activation_dropout"),
    "mega ForMaskedLM": tuple(mega.NO_DROPOUT),
    "mega ForTokenClassification": ("classifier_dropout",),
    "mega ForSequenceClassification": ("drop_path_rate", "classifier_dropout"),
    "mega laplace chunks": tuple(mega.NO_DROPOUT),
    "mega adaptive": ("adaptive_softmax_dropout",),
    "mega seq2seq": tuple(mega.NO_DROPOUT),
    "megalodon decoder": ("dropout_prob", "hidden_dropout_prob", "attention_probs_dropout_prob"),
}
DROPPING = [(name, field) for name, fields in FIELDS.items() for field in fields]


@pytest.mark.parametrize("name, field", DROPPING)
def test_dropouts(name, field):
    """Monte Carlo dropout, with only the dropouts in training mode, varies as training; without them nothing varies.

    Checkpoints drop the same values twice.
    """
    member, features = MEMBERS[name], {"use_feature_dropout": True} if name == "mega laplace chunks" else {}
    model = member.make(**OFF.get(member.family, {}) | features | {field: 0.5})
    inputs, kept = collate(member, Batch("right", (9, 4)))
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]

    def assert_equal(found):
        torch.testing.assert_close(found, found[:1] * 3, rtol=0, atol=0)

    def three():
        found = []
        for seed in range(3):
            torch.manual_seed(seed)
            found.append(contract.run(model, inputs, kept)[:2])
        return found

    assert_equal(three())
    model.train()
    expected = three()
    assert len({loss.item() for loss, _ in expected}) > 1
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": field == "dropout"})
    torch.testing.assert_close(three(), expected)
    model.gradient_checkpointing_disable()
    model.eval()
    for module in dropouts:
        module.train()
    torch.testing.assert_close(three(), expected)
    for module in dropouts:
        module.p = 0.0
    model.train()
    assert_equal(three())
