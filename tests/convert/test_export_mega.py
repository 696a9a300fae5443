"""`luna-mega export` of Mega: converted files are reproduced in every bit and in order, and new models are exported."""

import pytest
from safetensors.torch import load_file

import luna_mega
from luna_mega import MegaConfig, MegaForSequenceClassification, MegaForSequencePairClassification
from luna_mega.convert import convert_checkpoint
from luna_mega.convert.exporter import export_checkpoint
from luna_mega.convert.safe_load.reader import read_checkpoint
from luna_mega.inspection.verify import compare
from tests.convert import exports
from tests.convert.exports import cannot_express, edit, fails, identical
from tests.convert.mega import FIELDS, mega
from tests.convert.mega_lm import KINDS, mega_lm

CHECKPOINTS = {
    "text": lambda **branch: mega(**branch, lr=[0.004], tensorboard_logdir=""),
    "cls": lambda **branch: mega("mega_lra_listop", **branch, sen_rep_type="cls", classes=10, chunk=5),
    "rotary": lambda **branch: mega(**branch, rotary=True, norm_type="scalenorm", embed_norm=True, chunk=4),
    "pair": lambda **branch: mega("mega_lra_aan", **branch, towers=2, depth=3, norm_type="rmsnorm", prenorm=True),
    "pixels": lambda **branch: mega("mega_lra_pf32", **branch, values=True, norm_type="syncbatchnorm", prenorm=True),
    "speech": lambda **branch: mega("mega_sc_raw_big", **branch, values=True, norm_type="batchnorm", chunk=6),
    "no-ffn": lambda **branch: mega(**branch, ffn=False, depth=0, truncation_length=9),
    "old-args": lambda **branch: mega(**branch, norm_type="scalenorm", task=None, z_dim=None),
} | {f"lm {kind}": lambda kind=kind, **branch: mega_lm(**branch, **KINDS[kind]) for kind in KINDS}
SIZES = FIELDS | {
    "vocab_size": 17,
    "max_positions": 20,
    "normalize_before_mega": False,
    "normalize_before_ffn": False,
    "hidden_dropout_prob": 0.0,
    "nffn_activation_dropout_prob": 0.0,
    "classifier_dropout": 0.1,
    "classifier_activation": "gelu",
    "classifier_bias": False,
}
BEFORE = {"normalize_before_mega": True, "normalize_before_ffn": True, "final_norm": True}


def save(folder, model_class=MegaForSequenceClassification, **fields):
    return exports.save(folder, model_class(MegaConfig(**SIZES | fields)))


def convert_again(tmp_path, folder):
    """Export the folder and convert the result: tensors, model and logits are bitwise equal."""
    report = export_checkpoint(folder, tmp_path / "fairseq" / "model.pt")
    back = tmp_path / "back"
    convert_checkpoint(tmp_path / "fairseq" / "model.pt", back)
    identical(load_file(folder / "model.safetensors"), load_file(back / "model.safetensors"))
    comparison = compare(folder, back, tolerance=0.0)
    assert comparison.within and "packed" not in comparison.layers[0]
    return report, back


@pytest.mark.covering(1)
@pytest.mark.parametrize("branch", ["main", "flash"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_converted_and_exported(convert, tmp_path, name, branch):
    state = CHECKPOINTS[name](branch=branch)
    report, _ = convert_again(tmp_path, convert(state))
    exported = read_checkpoint(tmp_path / "fairseq" / "model.pt")
    identical(state["model"], exported.tensors)
    assert list(exported.tensors) == list(state["model"])
    assert exported.args == vars(state["args"]) and exported.num_updates == 1000
    assert not report.warnings and branch in report.layout and "layer norm" not in str(report)


HALF = {
    "tokens": lambda: mega(norm_type="batchnorm"),
    "values": lambda: mega("mega_lra_pf32", values=True, norm_type="batchnorm"),
    "lm adaptive": lambda: mega_lm(**KINDS["adaptive"]),
}


@pytest.mark.parametrize("kind", HALF)
def test_half_precision_comes_back(convert, tmp_path, kind):
    state = HALF[kind]()
    state["model"] = {key: t.half() if t.is_floating_point() else t for key, t in state["model"].items()}
    report, _ = convert_again(tmp_path, convert(state))
    identical(state["model"], read_checkpoint(tmp_path / "fairseq" / "model.pt").tensors)
    assert report.dtype == "float16" and not any("was float16" in note for note in report.notes)


@pytest.mark.parametrize("convention", ["main", "flash"])
def test_convention_that_was_given(convert, tmp_path, convention):
    """The input file is sorted; the export has the order that identifies the branch."""
    state = mega(branch="main")
    state["model"] = dict(sorted(state["model"].items()))
    convert_again(tmp_path, convert(state, "--ema-convention", convention))
    exported = read_checkpoint(tmp_path / "fairseq" / "model.pt").tensors
    identical(state["model"], exported)
    names = [name.rsplit(".", 1)[1] for name in exported if ".layers.0.mega_layer.move." in name]
    assert names[:2] == (["delta", "alpha"] if convention == "main" else ["alpha", "delta"])


MADE_HERE = {
    "text": (MegaForSequenceClassification, {"pooling": "mean"}, "mega_lra_imdb"),
    "cls": (MegaForSequenceClassification, {"num_labels": 4, "classifier_num_layers": 2}, "mega_lra_imdb"),
    "simple": (MegaForSequenceClassification, {"relative_positional_bias": "simple"}, "mega_lra_imdb"),
    "chunks": (
        MegaForSequenceClassification,
        {"relative_positional_bias": "simple", "use_chunking": True, "chunk_size": 6, "truncation": 4},
        "mega_lra_imdb",
    ),
    "flash": (MegaForSequenceClassification, {"ema_shift": True, "attention_activation": "laplace"}, "mega_lra_imdb"),
    "embedding-norm": (
        MegaForSequenceClassification,
        {"embedding_norm": True, "normalization_type": "rmsnorm"},
        "mega_lra_imdb",
    ),
    "pair": (MegaForSequencePairClassification, BEFORE | {"attention_activation": "relu2"}, "mega_lra_aan"),
    "no-ffn": (
        MegaForSequenceClassification,
        {"use_normalized_ffn": False, "nffn_hidden_size": 256, "nffn_activation_dropout_prob": 0.1},
        "mega_lra_imdb",
    ),
    "no-classifier": (
        MegaForSequenceClassification,
        {"classifier_num_layers": 0, "classifier_activation": "tanh"},
        "mega_lra_imdb",
    ),
    "pixels": (
        MegaForSequenceClassification,
        BEFORE | {"input_type": "values", "pooling": "mean", "normalization_type": "syncbatchnorm"},
        "mega_lra_cifar10",
    ),
    "speech": (
        MegaForSequenceClassification,
        BEFORE | {"input_type": "values", "pooling": "mean", "normalization_type": "batchnorm", "hidden_size": 60},
        "mega_sc_raw_base",
    ),
}


UNUSED = {"no-ffn": {"nffn_activation_dropout_prob"}, "no-classifier": {"classifier_activation"}}


@pytest.mark.parametrize("name", MADE_HERE)
def test_models_without_conversion_record(tmp_path, name):
    model_class, fields, arch = MADE_HERE[name]
    report, back = convert_again(tmp_path, save(tmp_path / "model", model_class, **fields))
    assert not report.warnings and report.args["arch"] == arch
    assert ("flash" in report.layout) is (name == "flash")
    config, expected = MegaConfig.from_pretrained(back), SIZES | fields
    if "input_type" in fields:
        del expected["vocab_size"]
    for field in expected.keys() - UNUSED.get(name, set()):
        assert getattr(config, field) == expected[field], field


@pytest.mark.parametrize("preset", ["lra_listops", "lra_text", "lra_image", "lra_pathfinder", "sc_base", "sc_big"])
def test_presets_have_their_architecture(tmp_path, preset):
    vocabulary = [17] if preset in ("lra_listops", "lra_text") else []
    config = getattr(MegaConfig, preset)(*vocabulary, num_hidden_layers=1)
    MegaForSequenceClassification(config).save_pretrained(tmp_path / "model")
    report = export_checkpoint(tmp_path / "model", tmp_path / "model.pt")
    arch = {"lra_listops": "listop", "lra_text": "imdb", "lra_image": "cifar10", "lra_pathfinder": "pf32"}
    assert report.args["arch"] in (f"mega_lra_{arch.get(preset)}", f"mega_{preset.replace('sc_', 'sc_raw_')}")
    assert not report.warnings


UNSUPPORTED = {
    "one-direction": ({"bidirectional": False}, "bidirectional = False"),
    "mixed-norms": ({"normalize_before_mega": True}, "normalize_before_ffn = False"),
    "no-final-norm": ({"normalize_before_mega": True, "normalize_before_ffn": True}, "final_norm = False"),
    "embedding-norm": (BEFORE | {"embedding_norm": True}, "embedding_norm = True"),
    "no-affine": ({"norm_affine": False}, "norm_affine = False"),
    "legacy": ({"normalization_type": "rmsnorm", "legacy_rms_norm": True}, "legacy_rms_norm = True"),
    "scaled": ({"scale_embedding": True}, "scale_embedding = True"),
    "token-types": ({"add_token_type_embeddings": True}, "add_token_type_embeddings = True"),
    "padding": ({"pad_token_id": 0}, "pad_token_id = 0"),
    "bias": ({"classifier_bias": True}, "classifier_bias = True"),
    "activation": ({"activation": "tanh"}, "activation = 'tanh'"),
    "classifier": ({"classifier_activation": "tanh"}, "classifier_activation = 'tanh'"),
    "image-cls": ({"input_type": "values"}, "pooling = 'cls'"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_models_unsupported_by_the_original(tmp_path, capsys, name):
    fields, expected = UNSUPPORTED[name]
    cannot_express(capsys, save(tmp_path / "model", **fields), "branch main", expected)


@pytest.mark.parametrize(
    "name", ["MegaModel", "MegaForMaskedLM", "MegaForMultipleChoice", "MegaForTokenClassification"]
)
def test_heads_that_the_original_does_not_have(tmp_path, capsys, name):
    message = fails(capsys, save(tmp_path / "model", getattr(luna_mega, name)), tmp_path / "model.pt")
    assert f"no head like {name}" in message and "MegaForSequencePairClassification" in message


def test_options_of_luna(tmp_path, capsys):
    folder = save(tmp_path / "model")
    assert "no named head" in fails(capsys, folder, tmp_path / "model.pt", "--head", "a")
    message = fails(capsys, folder, tmp_path / "model.pt", "--layer-norm", "standard")
    assert "Mega stores norm weights as they are" in message


def test_fields_of_training_are_a_warning(tmp_path):
    fields = {"nffn_activation_dropout_prob": 0.2, "classifier_dropout": 0.3, "padded_batch_statistics": True}
    report, _ = convert_again(tmp_path, save(tmp_path / "model", **fields))
    assert {warning.split(" = ")[0] for warning in report.warnings} == fields.keys()


def test_edited_configuration(convert, tmp_path, capsys):
    folder = convert(mega("mega_sc_raw_base", values=True, chunk=6, lr=[0.1], dropout=0.1))
    edit(folder, dropout_prob=0.25, classifier_dropout=0.25)
    report, back = convert_again(tmp_path, folder)
    assert "args of the converted file that no longer apply are replaced: dropout" in report.warnings
    assert MegaConfig.from_pretrained(back).dropout_prob == 0.25
    assert report.args["lr"] == [0.1] and report.args["arch"] == "mega_sc_raw_base"
    edit(folder, ema_shift=True)
    assert "ema_shift = True" in fails(capsys, folder, tmp_path / "model.pt")
    edit(folder, ema_shift=False, chunk_size=5)
    assert "chunk_size = 5 (it reads 6)" in fails(capsys, folder, tmp_path / "model.pt")


def test_dictionaries(convert, make, tmp_path):
    make.dictionary(convert.source / "dict.txt")
    make.dictionary(convert.source / "label-bin" / "dict.txt", symbols=2, prefix="c")
    folder = convert(mega())
    report = export_checkpoint(folder, tmp_path / "out" / "model.pt")
    assert report.files == ["dict.txt", "label-bin/dict.txt", "src-bin/dict.txt", "model.pt"]
    for name in ("dict.txt", "label-bin/dict.txt"):
        assert (tmp_path / "out" / name).read_text() == (convert.source / name).read_text()


@pytest.mark.slow
def test_every_fixture(parity_folder, tmp_path):
    """Exports of checkpoints of the original code are bitwise equal to them, in the same order."""
    for fixture in parity_folder.all("mega", "07_*", "08_*", "1[1-4]_*"):
        source = read_checkpoint(fixture / "checkpoint.pt")
        convert_checkpoint(fixture / "checkpoint.pt", tmp_path / fixture.name / "model")
        convert_again(tmp_path / fixture.name, tmp_path / fixture.name / "model")
        exported = read_checkpoint(tmp_path / fixture.name / "fairseq" / "model.pt")
        assert exported.args == source.args and list(exported.tensors) == list(source.tensors)
        placeholders = {name for name in source.tensors if name.endswith("_float_tensor")}
        kept = source.tensors.keys() - placeholders
        identical({name: source.tensors[name] for name in kept}, {name: exported.tensors[name] for name in kept})
