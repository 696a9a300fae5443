import json

import pytest
import torch

from luna_mega import LunaForSequencePairClassification
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


@pytest.mark.parametrize(
    ("args", "pooling"),
    [
        ({"sen_rep_type": "mp"}, ("mean", False, False)),
        ({"use_p": True, "sen_rep_type": "cls"}, ("packed_mean", True, False)),
        ({"sen_rep_type": "cls"}, ("cls", False, False)),
    ],
)
def test_2023(convert, make, args, pooling):
    state = make.lra23(dropout=0.25, **args)
    model = load(convert(state))
    config = model.config
    assert (config.pooling, config.pool_padding, config.drop_first_token) == pooling
    assert (config.position_embedding_type, config.scale_embedding) == ("sinusoidal", True)
    assert config.max_position_embeddings == 20
    assert (config.classifier_num_layers, config.classifier_dropout, config.classifier_bias) == (0, 0.25, False)
    all_weights_arrived(model, state, convert.output, raised=True)
    dropped = json.loads((convert.output / "conversion_report.json").read_text())["dropped"]
    assert len(dropped) == 2 and all(row["reason"] for row in dropped)
    assert model(TOKENS).logits.isfinite().all()


def test_2023_with_learned_positions_and_pre_logits(convert, make):
    state = make.lra23(learned=True, pre_logits=True, dropout=0.25)
    model = load(convert(state))
    assert (model.config.position_embedding_type, model.config.scale_embedding) == ("learned", False)
    assert (model.config.classifier_num_layers, model.config.classifier_activation) == (1, "gelu")
    all_weights_arrived(model, state, convert.output, raised=True)


@pytest.mark.parametrize("learned", [False, True])
def test_pixels(convert, make, learned):
    state = make.lra23(arch="luna_lra_cifar10", image=True, learned=learned, sen_rep_type="mp", classes=10)
    model = load(convert(state))
    assert (model.config.input_type, model.config.max_position_embeddings) == ("values", 20)
    all_weights_arrived(model, state, convert.output, raised=True)
    assert model(input_values=torch.rand(2, 9)).logits.shape == (2, 10)
    assert "dictionary" not in convert.screen and "<CLS>" not in convert.screen


def test_shared_layers(convert, make):
    state = make.lra21(arch="luna_lra_listop", layers=1, encoder_layers=5)
    config = load(convert(state)).config
    assert (config.share_layers, config.num_hidden_layers) == (True, 5)


def test_shared_layers_by_default_of_the_arch(convert, make):
    config = load(convert(make.lra21(arch="luna_lra_listop", layers=1, encoder_layers=None))).config
    assert (config.share_layers, config.num_hidden_layers) == (True, 6)


def test_layers_in_the_file_win_over_the_default_of_the_arch(convert, make):
    config = load(convert(make.lra21(arch="luna_lra_listop", layers=2))).config
    assert (config.share_layers, config.num_hidden_layers) == (False, 2)


def test_pairs(convert, make):
    model = load(convert(make.lra21(arch="luna_lra_aan", towers=2)))
    assert type(model) is LunaForSequencePairClassification and model.config.pair_features == "concat"
    assert model(input_ids=TOKENS, pair_input_ids=TOKENS).logits.shape == (2, 2)
    convert.output = convert.output.with_name("2023")
    model = load(convert(make.lra23(arch="luna_lra_aan", towers=4, pre_logits=True)))
    assert type(model) is LunaForSequencePairClassification and model.config.pair_features == "interaction"


def test_old_args_get_the_defaults_of_their_arch(convert, make):
    state = make.lra21(arch="luna_lra_pf32", encoder_layers=None, encoder_attention_heads=None, max_positions=None)
    config = load(convert(state)).config
    assert (config.num_attention_heads, config.num_hidden_layers, config.pooling) == (4, 2, "mean")
    convert.output = convert.output.with_name("2023")
    assert load(convert(make.lra23(max_positions=None))).config.max_position_embeddings == 4002


def test_buffers_may_be_absent(convert, make):
    state = make.lra23()
    del state["model"]["encoder.encoder.projected_positions"]
    del state["model"]["encoder.encoder.embed_positions._float_tensor"]
    assert load(convert(state)).config.position_embedding_type == "sinusoidal"


def test_sinusoids_in_half_precision(convert, make):
    state = make.lra23()
    state["model"] = {key: tensor.half() for key, tensor in state["model"].items()}
    convert(state)


def test_other_sinusoids(convert, make):
    state = make.lra23()
    state["model"]["encoder.encoder.projected_positions"] += 0.1
    assert "projected_positions" in convert.error(state)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (lambda make: make.lra21(towers=3), "reads 48 features"),
        (lambda make: make.lra21(towers=4), "16 (one sequence) or 32 (a pair)"),
        (lambda make: make.lra21(sen_rep_type="first"), "args.sen_rep_type = 'first'"),
        (lambda make: make.lra21(tie_layer_weights=True), "args.tie_layer_weights is set"),
        (lambda make: make.lra21(layers=1), "args.encoder_layers = 2 but the file has 1"),
        (lambda make: make.lra21(arch="mine", encoder_attention_heads=None), "args.encoder_attention_heads is missing"),
    ],
)
def test_args_and_tensors_that_contradict(convert, make, state, expected):
    assert expected in convert.error(state(make))


def test_head_option_is_for_luna_bert(convert, make):
    assert "--head a" in convert.error(make.lra21(), "--head", "a")


@pytest.mark.parametrize("state", ["lra21", "lra23"])
@pytest.mark.parametrize("key", ["emb_layer_norm.weight", "embed_tokens.weight", "layers.0.self_attn.pk_proj.bias"])
def test_missing_tensor(convert, make, state, key):
    state = getattr(make, state)(encoder_normalize_before=True)
    del state["model"][f"encoder.encoder.{key}"]
    message = convert.error(state)
    assert "missing" in message and f"encoder.encoder.{key}" in message


def test_without_embedding_norm(convert, make):
    state = make.lra23(encoder_normalize_before=False)
    state["model"] = {key: tensor for key, tensor in state["model"].items() if "emb_layer_norm" not in key}
    assert load(convert(state)).config.embedding_norm is False


def test_2021_file_needs_its_position_table(convert, make):
    state = make.lra21()
    del state["model"]["encoder.encoder.embed_positions.weight"]
    assert "embed_positions.weight' is missing" in convert.error(state)
