"""`luna-mega export`: converted folders and new models are written in the layout of fairseq."""

import json

import pytest
import torch
from safetensors.torch import load_file

import luna_mega
from luna_mega import LunaConfig, LunaForMaskedLM, LunaForSequenceClassification
from luna_mega.convert import convert_checkpoint
from luna_mega.convert.evidence import Target
from luna_mega.convert.exporter import export_checkpoint
from luna_mega.convert.formats.registry import find_format
from luna_mega.convert.safe_load.reader import read_checkpoint
from luna_mega.convert.table import write_args
from luna_mega.inspection.verify import compare
from tests.convert import exports
from tests.convert.exports import edit, fails, identical, read

KINDS = {
    "cls": "sentence_classification_head",
    "packed_max": "pooling_classification_head",
    "packed_attention": "attention_classification_head",
}
SIZES = {
    "vocab_size": 17,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "projection_length": 6,
    "max_position_embeddings": 20,
}
LRA_2021 = {"tie_key_value": False, "classifier_activation": "relu", "classifier_bias": False}
LRA_2023 = {"classifier_num_layers": 0, "classifier_dropout": 0.1, "classifier_bias": False}


def save(folder, model_class, **fields):
    return exports.save(folder, model_class(LunaConfig(**SIZES | fields)))


def weights(folder):
    return load_file(folder / "model.safetensors")


def convert_again(tmp_path, folder, *, head=None):
    """Export the folder and convert the result: tensors, model and logits are bitwise equal."""
    report = export_checkpoint(folder, tmp_path / "fairseq" / "model.pt")
    back = tmp_path / "back"
    convert_checkpoint(tmp_path / "fairseq" / "model.pt", back, head=head)
    ours, theirs = weights(folder), weights(back)
    identical(ours, {name: tensor for name, tensor in theirs.items() if name in ours})
    assert compare(folder, back, tolerance=0.0).within
    return report, back


CHECKPOINTS = {
    "tied": lambda make: make.bert(encoder_layerdrop=0.1, tensorboard_logdir="", lr=[0.0006]),
    "old-args": lambda make: make.bert(task=None, max_positions=None),
    "untied": lambda make: make.bert(tied=False, untie_luna_kv=True, fix_projection_length=True),
    "untied-lm": lambda make: make.bert(tied_lm=False, untie_weights_luna=True),
    "head": lambda make: make.bert(heads=[("mnli", 3)], task="sentence_prediction"),
    "regression": lambda make: make.bert(heads=[("a", 1)], task="sentence_prediction", regression_target=True),
    "ranking": lambda make: make.bert(heads=[("b", 1)], task="sentence_ranking"),
    "lra21": lambda make: make.lra21(classifier_activation_fn="tanh"),
    "lra21-mean": lambda make: make.lra21(sen_rep_type="mp", depth=2),
    "lra21-p": lambda make: make.lra21(use_p=True, tied=True, tie_kv=True),
    "lra21-pair": lambda make: make.lra21("luna_lra_aan", towers=2),
    "lra21-shared": lambda make: make.lra21("luna_lra_listop", layers=1, tie_layer_weights=True, classes=10),
}
PLUS_ONE_CHECKPOINTS = {
    "bert23": lambda make: {**(state := make.bert(stop_min_lr=-1)), "model": make.minus_one(state["model"])},
    "lra23": lambda make: make.lra23(),
    "lra23-learned": lambda make: make.lra23(learned=True, pre_logits=True),
    "lra23-pair": lambda make: make.lra23(towers=4, sen_rep_type="mp"),
    "lra23-image": lambda make: make.lra23(image=True, sen_rep_type="mp", use_p=True),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_converted_and_exported(convert, make, tmp_path, name, legacy):
    state = CHECKPOINTS[name](make)
    folder = convert(state, legacy=legacy)
    report, _ = convert_again(tmp_path, folder)
    exported = read_checkpoint(tmp_path / "fairseq" / "model.pt")
    identical(state["model"], exported.tensors)
    assert exported.args == vars(state["args"]) and exported.num_updates == 1000
    assert report.layer_norm == "standard" and not report.warnings


@pytest.mark.parametrize("name", PLUS_ONE_CHECKPOINTS)
def test_plus_one(convert, make, tmp_path, name):
    state = PLUS_ONE_CHECKPOINTS[name](make)
    report, _ = convert_again(tmp_path, convert(state))
    exported = read_checkpoint(tmp_path / "fairseq" / "model.pt")
    assert exported.tensors.keys() == state["model"].keys() and exported.args == vars(state["args"])
    for key, tensor in state["model"].items():
        if key.endswith("projected_positions"):
            torch.testing.assert_close(exported.tensors[key], tensor, rtol=0, atol=1e-6)
        elif key.endswith("_float_tensor"):
            assert exported.tensors[key].shape == tensor.shape
        else:
            assert torch.equal(exported.tensors[key], tensor), key
    assert report.layer_norm == "plus-one"


def test_plus_one_after_training(convert, make, tmp_path):
    """After further training, a norm weight differs from the weight in the file."""
    state = PLUS_ONE_CHECKPOINTS["bert23"](make)
    folder = convert(state)
    model = LunaForMaskedLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.layer_norm.weight.mul_(1.5)
    model.save_pretrained(folder)
    convert_again(tmp_path, folder)
    exported = read_checkpoint(tmp_path / "fairseq" / "model.pt").tensors
    trained = "encoder.lm_head.layer_norm.weight"
    assert torch.equal(1 + exported.pop(trained), model.lm_head.layer_norm.weight)
    identical({key: tensor for key, tensor in state["model"].items() if key != trained}, exported)


@pytest.mark.parametrize("name", ["tied", "lra23"])
def test_half_precision_comes_back(convert, make, tmp_path, name):
    state = (CHECKPOINTS | PLUS_ONE_CHECKPOINTS)[name](make)
    state["model"].pop("encoder.encoder.embed_positions._float_tensor", None)
    state["model"] = {key: tensor.half() for key, tensor in state["model"].items()}
    folder = convert(state)
    report, _ = convert_again(tmp_path, folder)
    exported = read_checkpoint(tmp_path / "fairseq" / "model.pt").tensors
    exported.pop("encoder.encoder.embed_positions._float_tensor", None)
    identical(state["model"], exported)  # norm weights too: half of them plus one is exact in float32
    assert report.dtype == "float16" and not any("was float16" in note for note in report.notes)


@pytest.mark.parametrize("plus_one", [False, True])
def test_half_precision_is_left_where_it_would_lose(convert, make, tmp_path, plus_one):
    """After further training, the float32 weights have more bits than the file."""
    state = PLUS_ONE_CHECKPOINTS["bert23"](make) if plus_one else make.bert()
    state["model"] = {key: tensor.half() for key, tensor in state["model"].items()}
    folder = convert(state)
    model = LunaForMaskedLM.from_pretrained(folder)
    with torch.no_grad():
        (model.luna.embeddings.layer_norm.weight if plus_one else model.lm_head.dense.bias)[0] = 1.5001
    model.save_pretrained(folder)
    report, _ = convert_again(tmp_path, folder)
    assert report.dtype == "float32" and any("was float16" in note for note in report.notes)
    forced = export_checkpoint(folder, tmp_path / "half.pt", dtype="float16")
    assert forced.dtype == "float16"
    assert {tensor.dtype for tensor in read_checkpoint(tmp_path / "half.pt").tensors.values()} == {torch.float16}


@pytest.mark.parametrize("convention", ["standard", "plus-one"])
def test_layer_norm_on_request(convert, make, tmp_path, convention):
    folder = convert(make.bert())
    report = export_checkpoint(folder, tmp_path / "model.pt", layer_norm=convention)
    assert report.layer_norm == convention
    tensors, ours = read_checkpoint(tmp_path / "model.pt").tensors, weights(folder)
    norm = tensors["encoder.lm_head.layer_norm.weight"]
    assert torch.equal(norm, ours["lm_head.layer_norm.weight"] - int(convention == "plus-one"))
    assert torch.equal(tensors["encoder.lm_head.layer_norm.bias"], ours["lm_head.layer_norm.bias"])


def test_small_norm_weights_are_rounded_and_counted(tmp_path):
    folder = save(tmp_path / "model", LunaForMaskedLM)
    tensors = LunaForMaskedLM.from_pretrained(folder)
    with torch.no_grad():
        tensors.lm_head.layer_norm.weight[:2] = torch.tensor([0.1, 0.25])
    tensors.save_pretrained(folder)
    report = export_checkpoint(folder, tmp_path / "model.pt", layer_norm="plus-one")
    assert [note for note in report.notes if note.startswith("1 norm weights below 0.5")]


MADE_HERE = {
    "mlm": (LunaForMaskedLM, {}, None),
    "mlm-untied": (LunaForMaskedLM, {"tie_key_value": False, "tie_word_embeddings": False}, None),
    "mlm-fixed": (
        LunaForMaskedLM,
        {"dynamic_projection_length": False, "hidden_act": "gelu_new", "dropout": 0.2},
        None,
    ),
    "cls": (LunaForSequenceClassification, {"num_labels": 3, "classifier_activation": "relu"}, None),
    "max": (LunaForSequenceClassification, {"pooling": "packed_max", "classifier_dropout": 0.2}, None),
    "attention": (LunaForSequenceClassification, {"pooling": "packed_attention"}, None),
    "narrow": (LunaForSequenceClassification, {"classifier_hidden_size": 10}, "sentence_classification_head"),
    "regression": (LunaForSequenceClassification, {"num_labels": 1, "problem_type": "regression"}, None),
    "trained": (LunaForSequenceClassification, {"problem_type": "single_label_classification"}, None),
    "choice": (luna_mega.LunaForMultipleChoice, {"pooling": "packed_max"}, None),
    "lra": (LunaForSequenceClassification, LRA_2021 | {"num_labels": 10}, None),
    "lra-mean": (LunaForSequenceClassification, LRA_2021 | {"pooling": "mean", "pool_padding": True}, None),
    "lra-p": (
        LunaForSequenceClassification,
        LRA_2021 | {"pooling": "packed_mean", "pool_padding": True, "drop_first_token": True, "tie_key_value": True},
        None,
    ),
    "lra-pair": (
        luna_mega.LunaForSequencePairClassification,
        LRA_2021 | {"share_layers": True, "classifier_num_layers": 2},
        None,
    ),
    "lra23": (LunaForSequenceClassification, LRA_2023 | {"position_embedding_type": "sinusoidal"}, None),
    "lra23-mean": (LunaForSequenceClassification, LRA_2023 | {"pooling": "mean", "embedding_norm": False}, None),
    "lra23-pair": (
        luna_mega.LunaForSequencePairClassification,
        LRA_2023 | {"pair_features": "interaction", "classifier_num_layers": 1, "classifier_activation": "gelu"},
        None,
    ),
    "lra23-image": (LunaForSequenceClassification, LRA_2023 | {"input_type": "values", "pooling": "mean"}, None),
}


@pytest.mark.parametrize("name", MADE_HERE)
def test_models_without_conversion_record(tmp_path, name):
    model_class, fields, head = MADE_HERE[name]
    folder = save(tmp_path / "model", model_class, **fields)
    report, back = convert_again(tmp_path, folder, head=head)
    assert not report.warnings
    config = LunaConfig.from_pretrained(back)
    assert {field: getattr(config, field) for field in SIZES | fields if field != "problem_type"} == SIZES | {
        field: value for field, value in fields.items() if field != "problem_type"
    } | ({"vocab_size": 50265} if fields.get("input_type") == "values" else {})
    assert config.problem_type == ("regression" if name == "regression" else None)
    assert report.layer_norm == ("plus-one" if name.startswith("lra23") else "standard")
    if "bert" in report.layout and model_class is not LunaForMaskedLM:
        assert report.head == KINDS[config.pooling]


@pytest.mark.parametrize(
    ("preset", "arch"),
    [
        (LunaConfig.base_512(), "luna_base_tied_512"),
        (LunaConfig.base_512(tied=False), "luna_base_untied_512"),
        (LunaConfig.base_2048(), "luna_base_2048"),
        (LunaConfig.large_512(), "luna_large_512"),
        (LunaConfig.large_2048(tied=False), "luna_large_2048"),
    ],
)
def test_architectures(preset, arch):
    args = write_args(find_format("luna_bert").table, Target(LunaForMaskedLM, preset, "r21"))
    assert args["arch"] == arch and args["untie_luna_kv"] is not preset.tie_key_value


def test_encoder_without_head_is_exported_with_a_new_lm_head(tmp_path):
    folder = save(tmp_path / "model", luna_mega.LunaModel)
    report = export_checkpoint(folder, tmp_path / "one.pt")
    assert any("new, untrained one" in note for note in report.notes)
    export_checkpoint(folder, tmp_path / "two.pt")
    tensors = read_checkpoint(tmp_path / "one.pt").tensors
    identical(tensors, read_checkpoint(tmp_path / "two.pt").tensors)
    embedding = tensors["encoder.sentence_encoder.embed_tokens.weight"]
    assert tensors["encoder.lm_head.weight"].data_ptr() == embedding.data_ptr()
    assert torch.equal(embedding, weights(folder)["embeddings.word_embeddings.weight"])
    assert 0.01 < tensors["encoder.lm_head.dense.weight"].std() < 0.03
    assert not tensors["encoder.lm_head.bias"].any()


def test_the_lm_head_of_a_converted_head_is_kept(convert, make, tmp_path):
    state = make.bert(heads=[("a", 2), ("b", 3)])
    folder = convert(state, "--head", "a")
    report = export_checkpoint(folder, tmp_path / "model.pt", head="c")
    tensors = read_checkpoint(tmp_path / "model.pt").tensors
    for key in ("encoder.lm_head.dense.weight", "encoder.lm_head.bias", "encoder.lm_head.weight"):
        assert torch.equal(tensors[key], state["model"][key])
    source = state["model"]["classification_heads.a.dense.weight"]
    assert torch.equal(tensors["classification_heads.c.dense.weight"], source)
    assert not any("untrained" in note for note in report.notes)
    assert any("left out the heads b" in note for note in report.notes)


UNSUPPORTED = {
    "pre-norm": (LunaForMaskedLM, {"pre_norm": True}, "pre_norm = True"),
    "own-p": (LunaForMaskedLM, {"contextual_projection": False}, "contextual_projection = False"),
    "pack-heads": (LunaForMaskedLM, {"num_pack_attention_heads": 2}, "num_pack_attention_heads = 2 (it has 4)"),
    "shared": (LunaForMaskedLM, {"share_layers": True}, "share_layers = True"),
    "sinusoidal": (LunaForMaskedLM, {"position_embedding_type": "sinusoidal"}, "position_embedding_type"),
    "no-positions": (LunaForMaskedLM, {"position_embedding_type": "none"}, "position_embedding_type = 'none'"),
    "scaled": (LunaForMaskedLM, {"scale_embedding": True}, "scale_embedding = True"),
    "no-norm": (LunaForMaskedLM, {"embedding_norm": False}, "embedding_norm = False"),
    "eps": (LunaForMaskedLM, {"layer_norm_eps": 1e-6}, "layer_norm_eps = 1e-06 (it has 1e-05)"),
    "padding": (LunaForMaskedLM, {"pad_token_id": 0}, "pad_token_id = 0"),
    "activation": (LunaForMaskedLM, {"hidden_act": "silu"}, "hidden_act = 'silu'"),
    "positions": (LunaForMaskedLM, {"first_position": 0}, "first_position = 0"),
    "mean": (luna_mega.LunaForMultipleChoice, {"pooling": "mean"}, "pooling = 'mean'"),
    "two-layers": (LunaForSequenceClassification, {"classifier_num_layers": 2}, "classifier_num_layers = 2"),
    "masked-mean": (LunaForSequenceClassification, LRA_2021 | {"pooling": "mean"}, "pool_padding = False"),
    "pair-bias": (luna_mega.LunaForSequencePairClassification, {}, "classifier_bias = True"),
    "image-cls": (LunaForSequenceClassification, LRA_2023 | {"input_type": "values"}, "pooling = 'cls'"),
    "tokens": (luna_mega.LunaForTokenClassification, {}, "LunaForTokenClassification"),
    "spans": (luna_mega.LunaForQuestionAnswering, {}, "LunaForQuestionAnswering"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_models_unsupported_by_the_original(tmp_path, capsys, name):
    model_class, fields, expected = UNSUPPORTED[name]
    folder = save(tmp_path / "model", model_class, **fields)
    message = fails(capsys, folder, tmp_path / "new" / "model.pt")
    assert expected in message and str(folder) in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("pooling_classification_head", "pooling = 'cls' (it has 'packed_max')"), ("a.b", "letters, digits")],
)
def test_head_names(tmp_path, capsys, name, expected):
    folder = save(tmp_path / "model", LunaForSequenceClassification)
    assert expected in fails(capsys, folder, tmp_path / "model.pt", "--head", name)
    assert export_checkpoint(folder, tmp_path / "model.pt", head="mine").head == "mine"


@pytest.mark.parametrize(("model_class", "fields"), [(LunaForMaskedLM, {}), (LunaForSequenceClassification, LRA_2021)])
def test_head_option_without_a_head(tmp_path, capsys, model_class, fields):
    folder = save(tmp_path / "model", model_class, **fields)
    assert "no named head" in fails(capsys, folder, tmp_path / "model.pt", "--head", "a")


def test_fields_of_training_are_a_warning(tmp_path):
    fields = LRA_2021 | {"layerdrop": 0.1, "classifier_dropout": 0.3}
    report, _ = convert_again(tmp_path, save(tmp_path / "model", LunaForSequenceClassification, **fields))
    assert [warning.split(" = ")[0] for warning in report.warnings] == ["layerdrop", "classifier_dropout"]
    folder = save(tmp_path / "multi", LunaForSequenceClassification, problem_type="multi_label_classification")
    assert ["problem_type" in warning for warning in export_checkpoint(folder, tmp_path / "b.pt").warnings] == [True]


def test_edited_configuration(convert, make, tmp_path, capsys):
    folder = convert(make.lra21(sen_rep_type="mp", lr=[0.1], dropout=0.1))
    edit(folder, dropout=0.25)
    report, back = convert_again(tmp_path, folder)
    assert "args of the converted file that no longer apply are replaced: dropout" in report.warnings
    assert LunaConfig.from_pretrained(back).dropout == 0.25
    assert read_checkpoint(tmp_path / "fairseq" / "model.pt").args["lr"] == [0.1]
    edit(folder, pool_padding=False)
    assert "pool_padding = False" in fails(capsys, folder, tmp_path / "model.pt")
    edit(folder, architectures=["LunaForMultipleChoice"])
    assert "no head like" in fails(capsys, folder, tmp_path / "model.pt")


def test_layout_of_the_file(tmp_path):
    """The file has the entries that fairseq's `_upgrade_state_dict` and `Trainer.load_checkpoint` look up."""
    export_checkpoint(save(tmp_path / "model", luna_mega.LunaForMultipleChoice), tmp_path / "model.pt")
    state = read(tmp_path / "model.pt")
    assert list(state) == ["args", "model", "optimizer_history", "extra_state"]
    history = {
        "criterion_name": "SentenceRankingCriterion",
        "optimizer_name": "FairseqAdam",
        "lr_scheduler_state": {"best": None},
        "num_updates": 0,
    }
    assert state["optimizer_history"] == [history]
    assert state["extra_state"]["train_iterator"] == {"epoch": 1, "iterations_in_epoch": 0, "shuffle": True}
    args = vars(state["args"])
    assert args["task"] == args["criterion"] == "sentence_ranking"
    assert args["ranking_head_name"] == "sentence_classification_head"
    assert args["no_save_optimizer_state"] is True and args["tokens_per_sample"] == 20


@pytest.mark.slow
def test_every_fixture(parity_folder, tmp_path):
    """Exports of checkpoints of the original code are bitwise equal to them."""
    for fixture in parity_folder.all("luna", "bert_*", "head_bert_*", "lra*"):
        meta = json.loads((fixture / "meta.json").read_text())
        source = read_checkpoint(fixture / "checkpoint.pt")
        for head in (None, *(meta.get("heads") or ())):
            case = tmp_path / f"{fixture.name}-{head}"
            convert_checkpoint(fixture / "checkpoint.pt", case / "model", head=head)
            convert_again(case, case / "model", head=head)
            exported = read_checkpoint(case / "fairseq" / "model.pt")
            assert exported.args == source.args
            dropped = {
                row["source"]
                for row in json.loads((case / "model" / "conversion_report.json").read_text())["dropped"]
                if row["source"].startswith("classification_heads.")
            }
            assert exported.tensors.keys() == source.tensors.keys() - dropped
            for key, tensor in exported.tensors.items():
                if key.endswith("._float_tensor"):
                    continue
                assert torch.equal(tensor, source.tensors[key]), (fixture.name, key)
            dictionary = fixture / "dict.txt"
            assert (case / "fairseq" / "dict.txt").is_file() is dictionary.is_file()


@pytest.mark.parametrize(
    "change",
    [
        {"source": []},
        {"source": {"layout": [], "revision": "r21"}},
        {"source": {"layout": "luna_bert", "revision": {}}},
        {"source": {"layout": "luna_bert", "revision": "x\x1b"}},
        {"source": {"layout": "luna_bert", "revision": "r21", "num_updates": "many"}},
        {"source": {"layout": "luna_bert\x1b", "revision": "r21"}},
        {"decisions": {"head": ["a"]}},
        {"decisions": {"head": "a.b"}},
        {"decisions": {"layer_norm": [1]}},
        {"dropped": {"a": 1}},
        {"dropped": [1]},
        {"dtype_in": {"__name__": 1}},
        {"args": [1]},
    ],
    ids=str,
)
def test_a_record_that_no_conversion_wrote(convert, make, tmp_path, capsys, change):
    folder = convert(make.bert())
    edit(folder, "conversion_report.json", **change)
    assert len(message := fails(capsys, folder, tmp_path / "model.pt")) < 1000 and "\x1b" not in message
