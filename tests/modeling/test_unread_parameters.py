"""Parameters that do not affect any loss of a head do not require gradients and remain in checkpoints."""

import copy

import pytest
import torch

import luna_mega
from tests.marks import diagonal

from . import decoders, luna, luna_decoders, mega

POOLED = "ForSequenceClassification"
HEADS = [
    ("ForMaskedLM", {}),
    (POOLED, {}),
    (POOLED, {"pooling": "packed_max"}),
    (POOLED, {"pooling": "packed_attention"}),
]
CASES = [(*head, name, layers) for head, name in diagonal(HEADS, luna.VARIANTS) for layers in (1, 3)]


def assert_frozen_are_unread(model, loss):
    """Check that `loss` depends on exactly the parameters that require a gradient."""
    named = dict(model.named_parameters())
    frozen = {name for name, parameter in named.items() if not parameter.requires_grad}
    model.requires_grad_(True)
    gradients = torch.autograd.grad(loss(model), list(named.values()), allow_unused=True)
    unread = {name for name, gradient in zip(named, gradients, strict=True) if gradient is None}
    assert frozen == unread
    return frozen


@pytest.mark.parametrize("head, fields, variant, layers", CASES)
def test_luna(head, fields, variant, layers):
    fields = luna.VARIANTS[variant] | fields | {"num_hidden_layers": layers}
    inputs = luna.head_inputs(head, [9, 4])
    inputs |= luna.labels(head, inputs)
    frozen = assert_frozen_are_unread(luna.make(head, **fields).train(), lambda model: model(**inputs).loss)
    assert frozen or fields.get("pooling") == "packed_attention" or fields.get("share_layers")


@pytest.mark.parametrize("head", [head for head in luna.HEADS if head != "Model"])
@pytest.mark.parametrize("family", [luna, mega], ids=["luna", "mega"])
def test_every_head(family, head):
    inputs = luna.head_inputs(head, [9, 4])
    inputs |= luna.labels(head, inputs)
    frozen = assert_frozen_are_unread(family.make(head).train(), lambda model: model(**inputs).loss)
    expected = {f"luna.encoder.layers.1.packed_layer_norm.{name}" for name in ("weight", "bias")}
    assert frozen == (expected if family is luna else set())


@pytest.mark.parametrize("fields", [{}, {"pre_norm": True}, {"contextual_projection": False}], ids=str)
def test_encoder_decoder(fields):
    model = luna_decoders.make(is_encoder_decoder=True, num_decoder_layers=2, **fields)
    ids, mask = decoders.padded([7, 3], 7, "right")
    inputs = decoders.source(model, 2) | decoders.target(model, ids, mask) | {"labels": ids}
    frozen = assert_frozen_are_unread(model.train(), lambda model: model(**inputs).loss)
    assert frozen and all(".packed_layer_norm." in name for name in frozen)


def test_layerdrop_makes_any_layer_the_last():
    """With layerdrop, no layer's P is frozen, because any layer may be the last one that pooling reads."""
    fields = {"contextual_projection": False, "pooling": "packed_attention", "num_hidden_layers": 3}
    frozen = {name for name, p in luna.make(POOLED, **fields).named_parameters() if not p.requires_grad}
    assert len(frozen) == 4
    assert all(p.requires_grad for p in luna.make(POOLED, layerdrop=0.5, **fields).parameters())


def test_bodies_keep_their_gradients():
    """All parameters of models without a head require gradients, because P is an output."""
    for model in (luna.make("Model"), luna.make("Model", pre_norm=True), mega.make("Model")):
        assert all(parameter.requires_grad for parameter in model.parameters())


def test_loaded_and_saved(tmp_path):
    model = luna.make("ForMaskedLM")
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    model.save_pretrained(tmp_path)
    loaded, report = luna_mega.LunaForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()) and loaded.state_dict().keys() == model.state_dict().keys()
    assert {name for name, parameter in loaded.named_parameters() if not parameter.requires_grad} == frozen
    assert all(parameter.requires_grad for parameter in luna_mega.LunaModel.from_pretrained(tmp_path).parameters())
    pooled = luna_mega.LunaForSequenceClassification.from_pretrained(tmp_path, pooling="packed_attention")
    assert all(parameter.requires_grad for parameter in pooled.parameters())


class OwnHead(luna_mega.modeling_luna.modeling_luna.LunaPreTrainedModel):
    """A user-defined head that reads P."""

    def __init__(self, config):
        super().__init__(config)
        self.luna = luna_mega.LunaModel(config)
        self.head = torch.nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(self, input_ids):
        return self.head(self.luna(input_ids).packed_last_hidden_state.mean(1))


class OwnMaskedLM(luna_mega.LunaForMaskedLM):
    """A user-defined subclass of a head of the package, which adds a second loss."""


def own_seq2seq():
    own = type("OwnSeq2Seq", (luna_mega.LunaForConditionalGeneration,), {"__module__": __name__})
    return own(luna_decoders.make(is_encoder_decoder=True, num_decoder_layers=2).config)


@pytest.mark.parametrize(
    "make",
    [
        lambda: OwnHead(luna.make("Model").config),
        lambda: OwnHead(luna.make("Model", pre_norm=True).config),
        lambda: OwnMaskedLM(luna.make("Model").config),
        own_seq2seq,
    ],
)
def test_classes_of_users_are_never_frozen(make, tmp_path):
    """User-defined classes have no frozen parameters, also after resizing, copying or loading."""
    model = make()
    assert all(parameter.requires_grad for parameter in model.parameters())
    model.resize_token_embeddings(model.config.vocab_size + 3)
    model.tie_weights()
    model.save_pretrained(tmp_path)
    for other in (model, copy.deepcopy(model), type(model).from_pretrained(tmp_path)):
        assert all(parameter.requires_grad for parameter in other.parameters())


@pytest.mark.parametrize("head", ["ForMaskedLM", POOLED])
def test_parameters_that_a_user_unfreezes_stay_trainable(head):
    model = luna.make(head).requires_grad_(True)
    model.resize_token_embeddings(model.config.vocab_size + 3)
    model.tie_weights()
    assert all(parameter.requires_grad for parameter in model.parameters())
