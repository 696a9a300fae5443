import json

import pytest
import torch

from tests.convert.exports import load


def all_weights_arrived(model, state, folder, raised):
    """`raised`: norm weights were stored minus one."""
    ours = model.state_dict()
    for row in json.loads((folder / "conversion_report.json").read_text())["mapped"]:
        tensor = state["model"][row["source"]]
        is_norm = row["source"].endswith("layer_norm.weight")
        assert torch.equal(ours[row["target"]], tensor + 1 if is_norm and raised else tensor), row


TOKENS = torch.tensor([[16, 5, 6, 2], [16, 7, 2, 1]])


@pytest.mark.parametrize("tied", [True, False])
def test_2021(convert, make, tied):
    state = make.lra21(tied=tied, tie_kv=tied, classes=3, depth=2, classifier_activation_fn="tanh", classifier_layers=2)
    model = load(convert(state))
    config = model.config
    assert type(model).__name__ == "LunaForSequenceClassification"
    assert (config.tie_key_value, config.share_layers, config.embedding_norm) == (tied, False, True)
    assert (config.position_embedding_type, config.max_position_embeddings) == ("learned", 20)
    assert (config.pooling, config.pool_padding, config.drop_first_token) == ("cls", False, False)
    assert (config.classifier_num_layers, config.classifier_hidden_size, config.num_labels) == (2, 10, 3)
    assert (config.classifier_activation, config.classifier_dropout, config.classifier_bias) == ("tanh", 0.0, False)
    all_weights_arrived(model, state, convert.output, raised=False)
    assert model(TOKENS).logits.shape == (2, 3)
    assert "warning" not in convert.screen
    assert "id 16" in convert.screen


@pytest.mark.parametrize(
    ("args", "pooling"),
    [
        ({"sen_rep_type": "mp"}, ("mean", True, False)),
        ({"use_p": True}, ("packed_mean", True, True)),
        ({"arch": "luna_lra_pf32"}, ("mean", True, False)),
        ({"arch": "luna_lra_pf32", "sen_rep_type": "cls"}, ("cls", False, False)),
    ],
)
def test_pooling_of_2021(convert, make, args, pooling):
    config = load(convert(make.lra21(**args))).config
    assert (config.pooling, config.pool_padding, config.drop_first_token) == pooling
    assert ("set pool_padding to false" in convert.screen) is pooling[1]


def test_buffers_may_be_absent(convert, make):
    state = make.lra23()
    del state["model"]["encoder.encoder.projected_positions"]
    del state["model"]["encoder.encoder.embed_positions._float_tensor"]
    assert load(convert(state)).config.position_embedding_type == "sinusoidal"


def test_sinusoids_in_half_precision(convert, make):
    state = make.lra23()
    state["model"] = {key: tensor.half() for key, tensor in state["model"].items()}
    convert(state)


def test_without_embedding_norm(convert, make):
    state = make.lra23(encoder_normalize_before=False)
    state["model"] = {key: tensor for key, tensor in state["model"].items() if "emb_layer_norm" not in key}
    assert load(convert(state)).config.embedding_norm is False
