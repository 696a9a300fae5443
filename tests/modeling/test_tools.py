"""Models with the tools of PyTorch: differentiation in every way, dropouts, fake and meta tensors, operators.

Construction and forward passes read no values: under `FakeTensorMode`, and on the meta device, then `to_empty`. With
`attn_implementation="eager"`, every layer computes attention with basic operations of PyTorch.
"""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.func import functional_call, grad, jvp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from luna_mega import MegaForImageClassification
from tests.marks import slow_but

from . import luna, mega, megalodon_decoders
from .decoders import DECODERS, a_third, make, source, target

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


@pytest.mark.parametrize("name", slow_but(FAKE, MODELS))
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


STEP = 1e-6
DIFFERENTIABLE = {
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
        self.model = DIFFERENTIABLE[name]().double().eval()
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


@pytest.mark.parametrize("name", slow_but(["luna", "mega", "mega, no average", "megalodon"], DIFFERENTIABLE))
def test_every_way(name):
    case = Case(name)
    for way, compute in WAYS.items():
        actual, expected = compute(case)
        for key, value in expected.items():
            torch.testing.assert_close(
                actual[key], value, rtol=1e-5, atol=1e-7, msg=lambda text, way=way, key=key: f"{way}, {key}: {text}"
            )


ALL = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.5)
MEGA_DROPOUT = dict.fromkeys(
    *[("dropout_prob", "hidden_dropout_prob", "attention_probs_dropout_prob", "nffn_activation_dropout_prob")], 0.5
)
MEGALODON_DROPOUT = dict.fromkeys(("dropout_prob", "hidden_dropout_prob", "attention_probs_dropout_prob"), 0.5)
HEAD = {"classifier_dropout": 0.5}
BANDED = {"adaptive_input_cutoffs": [10, 20], "adaptive_softmax_cutoffs": [10, 20], "adaptive_softmax_dropout": 0.5}
BANDED |= {"adaptive_input_factor": 2, "adaptive_softmax_factor": 2}
DROPPED = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForMultipleChoice")
DROPPING = {
    **{f"luna {head}": lambda head=head: luna.make(head, **ALL, **HEAD) for head in DROPPED},
    **{f"mega {head}": lambda head=head: mega.make(head, **MEGA_DROPOUT, **HEAD) for head in DROPPED},
    "mega of features": lambda: mega.make("ForSequenceClassification", **MEGA_DROPOUT, use_feature_dropout=True),
    "mega stochastic depth": lambda: mega.make("ForSequenceClassification", drop_path_rate=0.5),
    "megalodon": lambda: megalodon_decoders.make("ForSequenceClassification", torch.float32, **MEGALODON_DROPOUT),
    "luna words": lambda: make("luna: softplus", word_dropout=0.5).float(),
    "mega adaptive": lambda: make("mega: softmax", **BANDED).float(),
    "luna seq2seq": lambda: make("luna seq2seq: translation", **ALL).float(),
    "mega seq2seq": lambda: make("mega seq2seq: softmax", **MEGA_DROPOUT).float(),
}


def three_results(model):
    """Return the results of three calls with other random numbers."""
    ids, mask = torch.arange(24).view(2, 12) % 17 + 4, torch.ones(2, 12, dtype=torch.long)
    inputs = {**source(model, 2), **target(model, ids, mask)} if model.config.is_encoder_decoder else {"input_ids": ids}
    if type(model).__name__.endswith("Choice"):
        inputs = {"input_ids": ids[:, None].expand(2, 2, 12)}
    options = {"use_cache": False} if model.config.is_decoder or model.config.is_encoder_decoder else {}
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            found.append(model(**inputs, **options)[0])
    return found


def dropouts(model):
    return [module for module in model.modules() if isinstance(module, nn.Dropout)]


@pytest.mark.parametrize("name", DROPPING)
def test_dropouts(name):
    """Monte Carlo dropout, with only the dropouts in training mode, varies as training; without them nothing varies."""
    model = DROPPING[name]().eval()
    first, *others = three_results(model)
    assert all(torch.equal(first, result) for result in others)
    expected = three_results(model.train())
    assert len({result.flatten()[0].item() for result in expected}) > 1
    model.eval()
    for module in dropouts(model):
        module.train()
    for actual, result in zip(three_results(model), expected, strict=True):
        torch.testing.assert_close(actual, result)
    for module in dropouts(model.train()):
        module.p = 0.0
    first, *others = three_results(model)
    assert all(torch.equal(first, result) for result in others)


def batch_norms(model):
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]


def test_batch_norm_with_the_tools_of_pytorch():
    """`momentum=None` is the mean over batches, as in `update_bn`; `convert_sync_batchnorm` keeps masks."""
    model = mega.make("ForSequenceClassification", normalization_type="batchnorm", padded_batch_statistics=False)
    batches = [torch.arange(24).view(2, 12) % 17 + 4, torch.arange(30).view(3, 10) % 13 + 4]
    torch.optim.swa_utils.update_bn(batches, model)
    norm, plain = batch_norms(model)[0], nn.BatchNorm1d(batch_norms(model)[0].num_features, momentum=None).train()
    seen = []
    norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    norm.reset_running_stats()
    norm.momentum = None
    model.train()
    for batch in batches:
        model(batch)
        plain(seen[-1].flatten(0, 1))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(norm, name), getattr(plain, name))
    ids, mask = luna.tokens([12, 5]).values()
    expected = model.eval()(ids, attention_mask=mask).logits
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert all(module.synchronized for module in batch_norms(converted)) and len(batch_norms(converted)) > 0
    assert torch.equal(converted(ids, attention_mask=mask).logits, expected)
