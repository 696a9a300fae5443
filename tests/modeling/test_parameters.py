"""Parameters: their initialization, and those that no loss reads, which do not require gradients."""

import copy

import pytest
import torch
from hypothesis import given

import luna_mega
from luna_mega import LunaConfig, LunaForSequenceClassification, LunaModel
from tests.modeling import contract, luna, mega
from tests.modeling.contract import MEMBERS, Batch

POOLED = "ForSequenceClassification"
TRAINED = [name for name in MEMBERS if name.startswith("luna")][::2] + ["mega ForMaskedLM", "megalodon decoder"]


def check_frozen_are_unread(member):
    """Check that the loss, or the results of a body, depend on exactly the parameters that require a gradient."""
    model, batch = member.make().train(), Batch("right", (9, 4))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    _, gradients, _ = contract.run(model.requires_grad_(True), *contract.collate(member, batch))
    assert frozen == {name for name, _ in model.named_parameters()} - gradients.keys()
    assert not frozen or (member.family == "luna" and member.head != "Model")


@pytest.mark.parametrize("name", TRAINED)
def test_frozen_parameters_are_unread(name):
    check_frozen_are_unread(MEMBERS[name])


@given(contract.encoders())
def test_frozen_parameters_of_random_encoders(member):
    check_frozen_are_unread(member)


def test_layerdrop_makes_any_layer_the_last():
    """With layerdrop, no layer's P is frozen, because any layer may be the last one that pooling reads."""
    fields = {"contextual_projection": False, "pooling": "packed_attention", "num_hidden_layers": 3}
    frozen = {name for name, p in luna.make(POOLED, **fields).named_parameters() if not p.requires_grad}
    assert len(frozen) == 4
    assert all(p.requires_grad for p in luna.make(POOLED, layerdrop=0.5, **fields).parameters())


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


@pytest.mark.parametrize("kind", [OwnHead, OwnMaskedLM, luna_mega.LunaForMaskedLM])
def test_parameters_that_a_user_trains_stay_trainable(kind, tmp_path):
    """Classes of users have no frozen parameters, also after resizing, copying or loading; others can be unfrozen."""
    model = kind(luna.tiny_config())
    if kind is luna_mega.LunaForMaskedLM:
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        model.requires_grad_(True)
    assert all(parameter.requires_grad for parameter in model.parameters())
    model.resize_token_embeddings(model.config.vocab_size + 3)
    model.tie_weights()
    assert all(parameter.requires_grad for parameter in model.parameters())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    if kind is luna_mega.LunaForMaskedLM:
        assert {name for name, parameter in loaded.named_parameters() if not parameter.requires_grad} == frozen
        loaded = LunaForSequenceClassification.from_pretrained(tmp_path, pooling="packed_attention")
    for other in (copy.deepcopy(model), loaded):
        assert all(parameter.requires_grad for parameter in other.parameters())


@pytest.mark.parametrize("name", ["luna ForMaskedLM", "mega ForMaskedLM", "megalodon decoder"])
def test_modules_of_users_are_initialized_as_transformers_does(name):
    def make(self, config):
        base.__init__(self, config)
        self.norm, self.convolution = torch.nn.LayerNorm(8), torch.nn.Conv1d(8, 8, 3)
        self.post_init()

    model = MEMBERS[name].make()
    base = type(model)
    own = type("Own", (base,), {"__init__": make})(model.config)
    assert (own.norm.weight == 1).all() and own.convolution.weight.std() > 0


def test_new_heads_have_the_value_of_the_folder(tmp_path):
    """Folders of earlier versions and of the converters store 0.02."""
    torch.manual_seed(0)
    config = LunaConfig(vocab_size=200, num_hidden_layers=1, num_attention_heads=2, hidden_size=64)
    for value in (config.initializer_range, 0.02):
        config.initializer_range = value
        LunaModel(config).save_pretrained(tmp_path)
        model = LunaForSequenceClassification.from_pretrained(tmp_path, num_labels=50)
        new = [p for name, p in model.named_parameters() if not name.startswith("luna.") and p.ndim == 2]
        assert new and all(abs(p.std() / value - 1) < 0.1 for p in new)


def test_a_default_luna_learns(import_benchmark):
    """With a deviation of 0.02, the accuracy after 150 steps is 28 % (12.5 % is chance)."""
    program = import_benchmark("initialization")
    torch.manual_seed(1)
    model = program.make("luna", "find", 64, None)
    steps, accuracy = program.train(model, program.find, seed=1, steps=80, rate=2e-3)
    assert steps < 80 and accuracy >= 0.95


VARIANTS = [(module, fields) for module in (luna, mega) for fields in (*module.VARIANTS.values(), module.VALUES)]


@pytest.mark.parametrize("module, fields", VARIANTS)
def test_every_parameter_is_initialized(module, fields):
    """Parameters that a folder does not have are initialized as those of a new model."""
    fields = fields | ({"pooling": "packed_attention"} if module is luna else {"add_token_type_embeddings": True})
    config, head = module.tiny_config(**fields), module.HEADS[POOLED]
    new, found = head(config).state_dict(), head.from_pretrained(None, config=config, state_dict={}).state_dict()
    for name, tensor in new.items():
        assert not found[name].is_meta and found[name].isfinite().all(), name
        if tensor.numel() < 20 or tensor.double().std() == 0:
            assert found[name].abs().max() <= 10 * tensor.abs().max(), name
        else:
            assert 0.4 < found[name].std() / tensor.std() < 2.5, name
