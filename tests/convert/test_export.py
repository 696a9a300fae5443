"""`luna-mega export`: models of every format that were not converted, edited folders, options, and errors."""

import pytest
import torch
from safetensors.torch import load_file

from luna_mega import LunaConfig, LunaForMaskedLM, MegaConfig, MegaForSequenceClassification
from luna_mega.convert import convert_checkpoint
from luna_mega.convert.evidence import ModelSpec
from luna_mega.convert.export.exporter import export_checkpoint
from luna_mega.convert.export.writer import write_args, writer_of
from luna_mega.convert.formats.registry import find_format
from luna_mega.convert.safe_load.reader import read_checkpoint
from luna_mega.inspection.verify import compare
from tests.convert import exports, luna
from tests.convert.exports import edit, fails, half, identical, load, new_model, read
from tests.convert.mega import mega
from tests.convert.mega_lm import KINDS, mega_lm

CLASSIFICATION, PAIR = "LunaForSequenceClassification", "LunaForSequencePairClassification"
MEGA, MEGA_PAIR = "MegaForSequenceClassification", "MegaForSequencePairClassification"
HEADS = {
    "cls": "sentence_classification_head",
    "packed_max": "pooling_classification_head",
    "packed_attention": "attention_classification_head",
}
LRA_2021 = {"tie_key_value": False, "classifier_activation": "relu", "classifier_bias": False}
LRA_2023 = {"classifier_num_layers": 0, "classifier_dropout": 0.1, "classifier_bias": False}
PADDED = {"pool_padding": True, "drop_first_token": True, "tie_key_value": True}
BEFORE = {"normalize_before_mega": True, "normalize_before_ffn": True, "final_norm": True}
AFTER = {"normalize_before_mega": False, "normalize_before_ffn": False, "final_norm": False}
VALUES = BEFORE | {"input_type": "values", "pooling": "mean"}
CHUNKS = {"relative_positional_bias": "simple", "use_chunking": True, "chunk_size": 6, "truncation": 4}
BANDS = {"adaptive_input_cutoffs": [10, 20], "adaptive_softmax_cutoffs": [10, 20]}
UNEQUAL = {"adaptive_input_cutoffs": [10], "adaptive_softmax_cutoffs": [15, 25], "adaptive_softmax_factor": 2.0}


def save(folder, name, **fields):
    return exports.save(folder, new_model(name, **fields))


def weights(folder):
    return load_file(folder / "model.safetensors")


def convert_again(tmp_path, folder, *, head=None):
    """Export the folder, convert the result, and check that tensors are bitwise equal.

    Return the report of the export and the converted folder.
    """
    report = export_checkpoint(folder, tmp_path / "fairseq" / "model.pt")
    back = tmp_path / "back"
    convert_checkpoint(tmp_path / "fairseq" / "model.pt", back, head=head)
    ours, theirs = weights(folder), weights(back)
    identical(ours, {name: tensor for name, tensor in theirs.items() if name in ours})
    return report, back


# Class, fields, and the architecture in the exported args.
MADE_HERE = {
    "mlm": ("LunaForMaskedLM", {}, "luna_base_tied_512"),
    "mlm-untied": ("LunaForMaskedLM", {"tie_key_value": False, "tie_word_embeddings": False}, "luna_base_untied_512"),
    "mlm-fixed": ("LunaForMaskedLM", {"dynamic_projection_length": False, "hidden_act": "gelu_new"}, None),
    "max": (
        CLASSIFICATION,
        {"pooling": "packed_max", "num_labels": 3, "classifier_activation": "relu", "dropout": 0.2},
        None,
    ),
    "attention": (
        CLASSIFICATION,
        {"pooling": "packed_attention", "num_labels": 1, "problem_type": "regression", "classifier_dropout": 0.2},
        None,
    ),
    "narrow": (
        CLASSIFICATION,
        {"classifier_hidden_size": 10, "problem_type": "single_label_classification"},
        None,
    ),
    "choice": ("LunaForMultipleChoice", {"pooling": "packed_max"}, None),
    "lra": (CLASSIFICATION, LRA_2021 | {"num_labels": 10}, "luna_lra_imdb"),
    "lra-mean": (CLASSIFICATION, LRA_2021 | {"pooling": "mean", "pool_padding": True}, None),
    "lra-p": (CLASSIFICATION, LRA_2021 | PADDED | {"pooling": "packed_mean"}, None),
    "lra-pair": (PAIR, LRA_2021 | {"share_layers": True, "classifier_num_layers": 2}, "luna_lra_aan"),
    "lra23": (CLASSIFICATION, LRA_2023 | {"position_embedding_type": "sinusoidal"}, None),
    "lra23-mean": (CLASSIFICATION, LRA_2023 | {"pooling": "mean", "embedding_norm": False}, None),
    "lra23-pair": (
        PAIR,
        LRA_2023 | {"pair_features": "interaction", "classifier_num_layers": 1, "classifier_activation": "gelu"},
        "luna_lra_aan",
    ),
    "lra23-image": (CLASSIFICATION, LRA_2023 | {"input_type": "values", "pooling": "mean"}, None),
    "mega": (MEGA, {"pooling": "mean"}, "mega_lra_imdb"),
    "mega cls": (
        MEGA,
        {"num_labels": 4, "classifier_num_layers": 2, "relative_positional_bias": "simple"},
        "mega_lra_imdb",
    ),
    "mega chunks": (MEGA, CHUNKS, "mega_lra_imdb"),
    "mega flash": (
        MEGA,
        {"ema_shift": True, "attention_activation": "laplace", "embedding_norm": True, "normalization_type": "rmsnorm"},
        "mega_lra_imdb",
    ),
    "mega pair": (MEGA_PAIR, BEFORE | {"attention_activation": "relu2"}, "mega_lra_aan"),
    "mega no-ffn": (
        MEGA,
        {"use_normalized_ffn": False, "nffn_hidden_size": 256, "classifier_num_layers": 0}
        | {"classifier_activation": "tanh"},
        "mega_lra_imdb",
    ),
    "mega pixels": (MEGA, VALUES | {"normalization_type": "syncbatchnorm"}, "mega_lra_cifar10"),
    "mega speech": (MEGA, VALUES | {"normalization_type": "batchnorm", "hidden_size": 60}, "mega_sc_raw_base"),
    "lm tied": ("MegaForCausalLM", {"final_norm_affine": False, "scale_embedding": True}, "mega_lm"),
    "lm untied": ("MegaForCausalLM", {"tie_word_embeddings": False, "embedding_size": 12}, "mega_lm"),
    "lm after": (
        "MegaForCausalLM",
        AFTER | {"embedding_norm": True, "normalization_type": "batchnorm", "final_norm_affine": False},
        "mega_lm",
    ),
    "lm chunks": ("MegaForCausalLM", CHUNKS, "mega_lm"),
    "lm table": (
        "MegaForCausalLM",
        {"relative_positional_bias": "simple", "attention_activation": "relu2", "use_normalized_ffn": False},
        "mega_lm",
    ),
    "lm adaptive": (
        "MegaForCausalLM",
        BANDS | {"adaptive_input_factor": 2, "adaptive_softmax_dropout": 0.2},
        "mega_lm_adaptive_big",
    ),
    "lm projections": (
        "MegaForCausalLM",
        BANDS | {"tie_adaptive_projections": True, "embedding_size": 32},
        "mega_lm_adaptive_big",
    ),
    "lm adaptive untied": ("MegaForCausalLM", UNEQUAL | {"tie_word_embeddings": False}, "mega_lm_adaptive_big"),
    "lm adaptive input": (
        "MegaForCausalLM",
        {"adaptive_input_cutoffs": [10], "tie_word_embeddings": False},
        "mega_lm",
    ),
}
# Fields that a conversion does not restore: the original does not store them, or the model does not use them.
UNUSED = {
    "narrow": {"problem_type"},
    "lra23": {"classifier_activation"},
    "lra23-mean": {"classifier_activation"},
    "lra23-image": {"classifier_activation", "vocab_size"},
    "mega pixels": {"vocab_size"},
    "mega speech": {"vocab_size"},
    "lm table": {"nffn_hidden_size"},
    "lm adaptive": {"adaptive_softmax_factor"},
}


@pytest.mark.parametrize("name", MADE_HERE)
def test_models_without_conversion_record(tmp_path, name):
    model_class, fields, arch = MADE_HERE[name]
    folder = save(tmp_path / "model", model_class, **fields)
    report, back = convert_again(tmp_path, folder, head=HEADS["cls"] if name == "narrow" else None)
    assert not report.warnings and arch in (None, report.args["arch"])
    ours, theirs = (load(path).config.to_dict() for path in (folder, back))
    assert ours.pop("_name_or_path") != theirs.pop("_name_or_path")
    differ = {field for field in ours.keys() | theirs.keys() if ours.get(field) != theirs.get(field)}
    assert differ == UNUSED.get(name, set()) | ({"bos_token_id"} if name.startswith("lm") else set())
    convention = None if name.startswith(("mega", "lm")) else "plus-one" if name.startswith("lra23") else "standard"
    assert report.layer_norm == convention and ("flash" in report.layout) is ("flash" in name)
    if "bert" in report.layout and model_class != "LunaForMaskedLM":
        assert report.head == HEADS[fields.get("pooling", "cls")]


@pytest.mark.parametrize("name", ["LunaForMaskedLM", PAIR, MEGA])
def test_logits_of_an_export(tmp_path, name):
    folder = save(tmp_path / "model", name, **LRA_2021 if name == PAIR else {})
    assert compare(folder, convert_again(tmp_path, folder)[1], tolerance=0.0).within


@pytest.mark.parametrize(
    ("preset", "arch"),
    [
        (LunaConfig.base_512(), "luna_base_tied_512"),
        (LunaConfig.base_512(tied=False), "luna_base_untied_512"),
        (LunaConfig.base_2048(), "luna_base_2048"),
        (LunaConfig.large_512(), "luna_large_512"),
        (LunaConfig.large_2048(tied=False), "luna_large_2048"),
        (MegaConfig.lra_listops(17), "mega_lra_listop"),
        (MegaConfig.lra_text(17), "mega_lra_imdb"),
        (MegaConfig.lra_image(), "mega_lra_cifar10"),
        (MegaConfig.lra_pathfinder(), "mega_lra_pf32"),
        (MegaConfig.sc_base(), "mega_sc_raw_base"),
        (MegaConfig.sc_big(), "mega_sc_raw_big"),
    ],
)
def test_architectures_of_presets(preset, arch):
    is_luna = isinstance(preset, LunaConfig)
    model_class = LunaForMaskedLM if is_luna else MegaForSequenceClassification
    spec = ModelSpec(model_class, preset, "r21" if is_luna else "main")
    args = write_args(writer_of(find_format("luna_bert" if is_luna else "mega_lra")), spec)
    assert args["arch"] == arch and (not is_luna or args["untie_luna_kv"] is not preset.tie_key_value)


def test_plus_one_after_training(convert, tmp_path):
    """A norm weight that was trained further is exported as its new value minus one."""
    state = luna.bert23()
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


HALF = {
    "luna": luna.bert,
    # a norm weight in half precision plus one is exact in float32
    "luna, minus one": luna.lra23,
    "mega": lambda: mega(norm_type="batchnorm"),
    "mega values": lambda: mega("mega_lra_pf32", values=True, norm_type="batchnorm"),
    "lm adaptive": lambda: mega_lm(**KINDS["adaptive"]),
}


@pytest.mark.parametrize("kind", HALF)
def test_half_precision_comes_back(convert, tmp_path, kind):
    state = half(HALF[kind]())
    report, _ = convert_again(tmp_path, convert(state))
    exported = read_checkpoint(tmp_path / "fairseq" / "model.pt").tensors
    for tensors in (state["model"], exported):  # the dtype of fairseq's placeholder is not stored
        tensors.pop("encoder.encoder.embed_positions._float_tensor", None)
    identical(state["model"], exported)
    assert report.dtype == "float16" and not any("was float16" in note for note in report.notes)


@pytest.mark.parametrize("build", [luna.bert, luna.bert23])
def test_half_precision_is_left_where_it_would_lose(convert, tmp_path, build):
    """Weights that were trained further in float32 are exported in float32 if half precision would round them."""
    folder = convert(half(build()))
    model = LunaForMaskedLM.from_pretrained(folder)
    with torch.no_grad():
        (model.lm_head.dense.bias if build == luna.bert else model.luna.embeddings.layer_norm.weight)[0] = 1.5001
    model.save_pretrained(folder)
    report, _ = convert_again(tmp_path, folder)
    assert report.dtype == "float32" and any("was float16" in note for note in report.notes)
    forced = export_checkpoint(folder, tmp_path / "half.pt", dtype="float16")
    assert forced.dtype == "float16"
    assert {tensor.dtype for tensor in read_checkpoint(tmp_path / "half.pt").tensors.values()} == {torch.float16}


@pytest.mark.parametrize("convention", ["standard", "plus-one"])
def test_layer_norm_on_request(tmp_path, convention):
    folder = save(tmp_path / "model", "LunaForMaskedLM")
    model = LunaForMaskedLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.layer_norm.weight[:2] = torch.tensor([0.1, 0.25])
    model.save_pretrained(folder)
    report = export_checkpoint(folder, tmp_path / "model.pt", layer_norm=convention)
    assert report.layer_norm == convention
    tensors, ours = read_checkpoint(tmp_path / "model.pt").tensors, weights(folder)
    norm = tensors["encoder.lm_head.layer_norm.weight"]
    assert torch.equal(norm, ours["lm_head.layer_norm.weight"] - int(convention == "plus-one"))
    assert torch.equal(tensors["encoder.lm_head.layer_norm.bias"], ours["lm_head.layer_norm.bias"])
    # 0.25 - 1 is exact, so that only one weight is rounded
    rounded = [note for note in report.notes if note.startswith("1 norm weights below 0.5")]
    assert len(rounded) == (convention == "plus-one")


@pytest.mark.parametrize("convention", ["main", "flash"])
def test_convention_that_was_given(convert, tmp_path, convention):
    """An export uses the convention that was passed to the conversion.

    The tensors of the input file are sorted; the export has the order that identifies the branch.
    """
    state = mega(branch="main")
    state["model"] = dict(sorted(state["model"].items()))
    convert_again(tmp_path, convert(state, "--ema-convention", convention))
    exported = read_checkpoint(tmp_path / "fairseq" / "model.pt").tensors
    identical(state["model"], exported)
    names = [name.rsplit(".", 1)[1] for name in exported if ".layers.0.mega_layer.move." in name]
    assert names[:2] == (["delta", "alpha"] if convention == "main" else ["alpha", "delta"])


def test_encoder_without_head_is_exported_with_a_new_lm_head(tmp_path):
    folder = save(tmp_path / "model", "LunaModel")
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


# Class -> fields; each of them raises an error that names it.
UNSUPPORTED_FIELDS = {
    "LunaForMaskedLM": {"pre_norm": True, "contextual_projection": False, "num_pack_attention_heads": 2}
    | {"share_layers": True, "position_embedding_type": "none", "scale_embedding": True, "embedding_norm": False}
    | {"layer_norm_eps": 1e-6, "pad_token_id": 0, "hidden_act": "silu", "first_position": 0},
    "LunaForMultipleChoice": {"pooling": "mean"},
    CLASSIFICATION: {"classifier_num_layers": 2},
    "LunaForConditionalGeneration": {"causal_activation": "elu", "contextual_projection": False, "share_layers": True}
    | {"decoder_position_embedding_type": "none"},
    "MegaForConditionalGeneration": {"decoder_start_token_id": 0, "norm_affine": False, "final_norm": True},
    MEGA: {"bidirectional": False, "norm_affine": False, "scale_embedding": True, "add_token_type_embeddings": True}
    | {"pad_token_id": 0, "classifier_bias": True, "activation": "tanh", "classifier_activation": "tanh"},
    "MegaForCausalLM": {"add_lm_hidden_dense_layer": True, "lm_head_bias": True, "normalize_before_ffn": False}
    | {"final_norm": False, "embedding_norm": True, "pad_token_id": 0, "eos_token_id": 5, "activation": "tanh"}
    | {"add_token_type_embeddings": True},
    "MegaForImageClassification": {"num_channels": 1, "normalization_type": "rmsnorm", "pooling": "cls"}
    | {"output_projection": False, "relative_positional_bias": "rotary"},
}
HEADLESS = ["LunaForTokenClassification", "LunaForQuestionAnswering", "MegaModel", "MegaForMaskedLM"]
HEADLESS += ["MegaForMultipleChoice", "MegaForTokenClassification"]
# Class, fields, and a part of the error.
UNSUPPORTED = [
    *((name, {x: y}, f"{x} = {y!r}") for name, fields in UNSUPPORTED_FIELDS.items() for x, y in fields.items()),
    *((name, {}, f"no head like {name}") for name in HEADLESS),
    ("LunaForMaskedLM", {"position_embedding_type": "sinusoidal"}, "position_embedding_type"),
    (CLASSIFICATION, LRA_2021 | {"pooling": "mean"}, "pool_padding = False"),
    (PAIR, {}, "classifier_bias = True"),
    (CLASSIFICATION, LRA_2023 | {"input_type": "values"}, "pooling = 'cls'"),
    (
        "MegaForConditionalGeneration",
        {"relative_positional_bias": "simple", "cross_attention_positions": 9},
        "cross_attention_positions = 9",
    ),
    ("MegaSeq2SeqModel", {}, "MegaForConditionalGeneration"),
    (MEGA, {"normalize_before_mega": True}, "normalize_before_ffn = False"),
    (MEGA, {"normalize_before_mega": True, "normalize_before_ffn": True}, "final_norm = False"),
    (MEGA, BEFORE | {"embedding_norm": True}, "embedding_norm = True"),
    (MEGA, {"normalization_type": "rmsnorm", "legacy_rms_norm": True}, "legacy_rms_norm = True"),
    (MEGA, {"input_type": "values"}, "pooling = 'cls'"),
]


@pytest.mark.parametrize(("name", "fields", "named"), UNSUPPORTED)
def test_models_unsupported_by_the_original(tmp_path, capsys, name, fields, named):
    folder = save(tmp_path / "model", name, **fields)
    message = fails(capsys, folder, tmp_path / "new" / "model.pt")
    assert named in message and str(folder) in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize(
    ("name", "fields", "options", "named"),
    [
        (CLASSIFICATION, {}, ["--head", "pooling_classification_head"], "pooling = 'cls' (it has 'packed_max')"),
        (CLASSIFICATION, {}, ["--head", "a.b"], "letters, digits"),
        (CLASSIFICATION, LRA_2021, ["--head", "a"], "no named head"),
        ("LunaForMaskedLM", {}, ["--head", "a"], "no named head"),
        (MEGA, {}, ["--head", "a"], "no named head"),
        (MEGA, {}, ["--layer-norm", "standard"], "--layer-norm standard"),
    ],
)
def test_options_that_do_not_apply(tmp_path, capsys, name, fields, options, named):
    folder = save(tmp_path / "model", name, **fields)
    assert named in fails(capsys, folder, tmp_path / "model.pt", *options)


@pytest.mark.parametrize(
    ("name", "others", "fields"),
    [
        (CLASSIFICATION, LRA_2021, {"layerdrop": 0.1, "classifier_dropout": 0.3}),
        (CLASSIFICATION, {}, {"problem_type": "multi_label_classification"}),
        (MEGA, {}, {"nffn_activation_dropout_prob": 0.2, "classifier_dropout": 0.3, "padded_batch_statistics": True}),
        ("MegaForCausalLM", BANDS, {"legacy_adaptive_loss": True, "padded_batch_statistics": True}),
    ],
)
def test_fields_of_training_are_a_warning(tmp_path, name, others, fields):
    report = export_checkpoint(save(tmp_path / "model", name, **others | fields), tmp_path / "model.pt")
    assert {warning.split(" = ")[0] for warning in report.warnings} == fields.keys()


# Name -> converted file, edited fields, args that change, and edits that raise an error with the given text.
EDITS = {
    "luna": (
        lambda: luna.lra21(sen_rep_type="mp", lr=[0.1], dropout=0.1),
        {"dropout": 0.25},
        "dropout",
        [({"pool_padding": False}, "pool_padding = False"), ({"architectures": ["LunaForMultipleChoice"]}, "no head")],
    ),
    "mega": (
        lambda: mega("mega_sc_raw_base", values=True, chunk=6, lr=[0.1], dropout=0.1),
        {"dropout_prob": 0.25, "classifier_dropout": 0.25},
        "dropout",
        [
            ({"ema_shift": True}, "ema_shift = True"),
            ({"ema_shift": False, "chunk_size": 5}, "chunk_size = 5 (it reads"),
        ],
    ),
    "mega_lm": (
        lambda: mega_lm(**KINDS["adaptive"], lr=[0.1]),
        {"dropout_prob": 0.25, "chunk_size": 16},
        "decoder_chunk_size",
        [({"adaptive_input_factor": 3}, "error")],
    ),
}


@pytest.mark.parametrize("kind", EDITS)
def test_edited_configuration(convert, tmp_path, capsys, kind):
    build, changes, replaced, failing = EDITS[kind]
    folder = convert(build())
    edit(folder, **changes)
    report, back = convert_again(tmp_path, folder)
    assert f"args of the converted file that no longer apply are replaced: {replaced}" in report.warnings
    config = load(back).config
    assert {field: getattr(config, field) for field in changes} == changes
    assert report.args["lr"] == [0.1] and report.args["arch"] == vars(build()["args"])["arch"]
    for changes, named in failing:
        edit(folder, **changes)
        assert named in fails(capsys, folder, tmp_path / "model.pt")


def test_sizes_that_the_model_rejects(tmp_path, capsys):
    folder = save(tmp_path / "model", "MegaForCausalLM", embedding_size=12, tie_word_embeddings=False)
    edit(folder, tie_word_embeddings=True)
    assert "tie_word_embeddings=True needs embedding_size" in fails(capsys, folder, tmp_path / "model.pt")


def test_a_tied_tensor_is_written_once(convert, tmp_path):
    export_checkpoint(convert(mega_lm(**KINDS["adaptive"])), tmp_path / "model.pt")
    tensors = read(tmp_path / "model.pt")["model"]
    copies = "decoder.adaptive_softmax.tail.0.2.weight", "decoder.embed_tokens.embeddings.1.0.weight"
    assert len({tensors[name].data_ptr() for name in copies}) == 1


def test_layout_of_the_file(tmp_path):
    """The file has the entries that fairseq's `_upgrade_state_dict` and `Trainer.load_checkpoint` read."""
    export_checkpoint(save(tmp_path / "model", "LunaForMultipleChoice"), tmp_path / "model.pt")
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
