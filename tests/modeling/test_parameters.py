"""Parameters: their initialization, and those that no loss reads, which do not require gradients."""

import copy

import pytest
import torch

import luna_mega
from luna_mega import LunaConfig, LunaForSequenceClassification, LunaModel
from tests.marks import diagonal
from tests.modeling import decoders, luna, luna_decoders, mega

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


TINY = {"vocab_size": 200, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.mark.parametrize("value", [None, 0.02])
def test_new_heads_have_the_value_of_the_folder(value, tmp_path):
    """Folders of earlier versions and of the converters store 0.02."""
    torch.manual_seed(0)
    config = LunaConfig(hidden_size=64, initializer_range=value, **TINY)
    LunaModel(config).save_pretrained(tmp_path)
    model = LunaForSequenceClassification.from_pretrained(tmp_path, num_labels=50)
    new = [p for name, p in model.named_parameters() if not name.startswith("luna.") and p.ndim == 2]
    assert new and all(abs(p.std() / config.initializer_range - 1) < 0.1 for p in new)


def test_a_default_luna_learns(import_benchmark):
    """With a deviation of 0.02, the accuracy after 150 steps is 28 % (12.5 % is chance)."""
    program = import_benchmark("initialization")
    torch.manual_seed(1)
    model = program.make("luna", "find", 64, None)
    steps, accuracy = program.train(model, program.find, seed=1, steps=80, rate=2e-3)
    assert steps < 80 and accuracy >= 0.95


FAMILIES = {"luna": luna, "mega": mega}


def initialized(family, **fields):
    """Return the configuration and the tensors of a model that is initialized from the meta device."""
    config = FAMILIES[family].tiny_config(**fields)
    model = FAMILIES[family].HEADS["ForSequenceClassification"].from_pretrained(None, config=config, state_dict={})
    tensors = model.state_dict()
    assert all(not tensor.is_meta and torch.isfinite(tensor).all() for tensor in tensors.values())
    return config, tensors


@pytest.mark.parametrize("fields", [*luna.VARIANTS.values(), luna.VALUES])
def test_every_parameter_of_luna_is_initialized(fields):
    config, tensors = initialized("luna", pooling="packed_attention", **fields)
    for name, parameter in tensors.items():
        norm = "layer_norm.weight" in name
        scaled = config.scale_embedding and ("word_embeddings" in name or "packed_embeddings" in name)
        deviation = config.hidden_size**-0.5 if scaled else 0.02
        assert norm or parameter.abs().max() < 7 * deviation, name
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif not norm:
            assert 0.5 * deviation < parameter.std() < 1.5 * deviation, name


@pytest.mark.parametrize("fields", [*mega.VARIANTS.values(), mega.VALUES])
def test_every_parameter_of_mega_is_initialized(fields):
    for name, tensor in initialized("mega", add_token_type_embeddings=True, **fields)[1].items():
        assert tensor.abs().max() < 10, name
        if name.endswith("ema_expansion_matrix"):
            assert (tensor[:, ::2] > 0).all() and (tensor[:, 1::2] < 0).all()
