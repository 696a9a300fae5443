"""`luna-mega info`: counts against published ones, formulas against PyTorch's counts."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

import luna_mega
from luna_mega import LunaConfig, LunaForMaskedLM, LunaForSequenceClassification, LunaModel, MegaConfig
from luna_mega.inspection import costs_luna, costs_mega, costs_megalodon
from luna_mega.inspection.costs import (
    count_parameters,
    flops_per_token,
    inference_activations,
    training_activations,
)
from luna_mega.inspection.info import describe
from luna_mega.kernels.api import use_backend
from luna_mega_cli import main
from tests.inspection.counting import Peak, numbers_kept, padded

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "projection_length": 8,
    "max_position_embeddings": 64,
}
LENGTH = 24


@pytest.mark.parametrize(
    ("config", "total", "encoder_only"),
    [
        (LunaConfig.base_512(), 131_902_041, 131_259_648),
        (LunaConfig.base_512(tied=False), 146_076_249, 145_433_856),
        (LunaConfig.base_2048(), 133_179_993, 132_537_600),
        (LunaConfig.large_512(), 380_783_705, 379_681_792),
        (LunaConfig.large_2048(), 380_914_777, 379_812_864),
    ],
)
def test_parameters_of_the_presets(config, total, encoder_only):
    with torch.device("meta"):
        counts = count_parameters(LunaForMaskedLM(config))
        assert counts["total"] == total == sum(value for part, value in counts.items() if part != "total")
        assert count_parameters(LunaModel(config))["total"] == encoder_only == counts["embeddings"] + counts["encoder"]
        assert count_parameters(LunaModel(config))["head"] == 0
        # The 132 M and 147 M of the original's README: with the LM head and a head for two classes.
        classifier = count_parameters(LunaForSequenceClassification(config))["head"]
        assert total + classifier == total + (config.hidden_size + 1) * config.hidden_size + 2 * (
            config.hidden_size + 1
        )


MODELS = {
    "mlm": ("LunaForMaskedLM", {}),
    "untied": ("LunaForMaskedLM", {"tie_key_value": False}),
    "encoder": ("LunaModel", {"dynamic_projection_length": False, "projection_length": 30}),
    "short": ("LunaModel", {"projection_length": 30}),
    "shared": ("LunaModel", {"share_layers": True}),
    "classes": ("LunaForSequenceClassification", {"classifier_num_layers": 2, "classifier_hidden_size": 10}),
    "max": ("LunaForSequenceClassification", {"pooling": "packed_max"}),
    "attention": ("LunaForSequenceClassification", {"pooling": "packed_attention"}),
    "pair": ("LunaForSequencePairClassification", {"pooling": "packed_max"}),
    "choice": ("LunaForMultipleChoice", {}),
    "tokens": ("LunaForTokenClassification", {}),
    "spans": ("LunaForQuestionAnswering", {}),
    "importance": ("LunaForMaskedLM", {"pack_method": "importance"}),
    "importance, untied": ("LunaModel", {"pack_method": "importance", "tie_key_value": False}),
}


@pytest.mark.parametrize("name", MODELS)
def test_flops_equal_the_count_of_pytorch(name):
    class_name, fields = MODELS[name]
    model = getattr(luna_mega, class_name)(LunaConfig(**SIZES | fields)).eval()
    inputs = {"input_ids": torch.randint(4, 40, (1, LENGTH))}
    sequences = 1
    if name == "pair":
        inputs["pair_input_ids"] = torch.randint(4, 40, (1, LENGTH))
        sequences = 2
    if name == "choice":
        inputs["input_ids"] = inputs["input_ids"][None]
    with torch.no_grad(), use_backend("reference"), FlopCounterMode(display=False) as counter:
        model(**inputs)
    found = flops_per_token(model, LENGTH)
    # The reference packs rows by a matrix of weights [L, n].
    dense_pack = model.config.num_hidden_layers * 2 * SIZES["projection_length"] * SIZES["hidden_size"]
    difference = dense_pack - found["pack"] if "pack" in found else 0
    expected = counter.get_total_flops()
    assert (found["total"] + difference) * LENGTH * sequences == pytest.approx(expected, rel=1e-9)
    assert found["total"] == pytest.approx(sum(value for part, value in found.items() if part != "total"))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dropout": 0.0},
        {"activation_dropout": 0.1},
        {"projection_length": 20},
        {"num_attention_heads": 8},
        {"pack_method": "importance"},
        {"pack_method": "importance", "dropout": 0.0, "projection_length": 20},
    ],
)
@pytest.mark.parametrize("model_class", [LunaModel, LunaForMaskedLM])
def test_training_activations_equal_tensors_saved_by_autograd(tied, fields, model_class):
    model = model_class(LunaConfig(**SIZES | {"attention_dropout": 0.0, "tie_key_value": tied} | fields)).train()
    ids = torch.randint(4, 40, (1, LENGTH))
    labels = {"labels": ids} if model_class is LunaForMaskedLM else {}
    numbers = numbers_kept(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | labels)
    assert training_activations(model, LENGTH) == pytest.approx(numbers, rel=0.03)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_key_value": False},
        {"pre_norm": True},
        {"intermediate_size": 400},
        {"vocab_size": 4000},
        {"pack_method": "importance"},
        {"pack_method": "importance", "intermediate_size": 16, "projection_length": 100},
    ],
)
@pytest.mark.parametrize("model_class", [LunaModel, LunaForMaskedLM])
def test_inference_peak(model_class, fields):
    model = model_class(LunaConfig(**SIZES | {"max_position_embeddings": 600} | fields)).eval()
    ids = torch.randint(4, 40, (1, 600))
    with torch.no_grad(), Peak() as peak:
        model(ids, attention_mask=padded(ids))
    assert inference_activations(model, 600) == pytest.approx(peak.peak / 4, rel=0.04)


def save(folder, model_class=LunaForMaskedLM, **fields):
    model_class(LunaConfig(**SIZES | fields)).save_pretrained(folder)
    return folder


def test_folder(tmp_path, capsys):
    folder = save(tmp_path / "a")
    assert main(["info", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "save_pretrained of transformers 5" in printed and "masked LM" in printed and "length 64" in printed
    assert len(printed.splitlines()) <= 20 and "2 for each multiply-add" not in printed
    assert main(["info", str(folder), "--explain"]) == 0
    explained = capsys.readouterr().out
    assert explained.startswith(printed.rstrip()) and "2 for each multiply-add" in explained
    assert main(["info", str(folder), "--length", "10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["length"] == 10 and found["model_class"] == "LunaForMaskedLM"
    size = LunaForMaskedLM.from_pretrained(folder).num_parameters()
    assert found["parameters"]["total"] == size
    assert found["weights"] == {"dtype": "float32", "bytes": 4 * size}
    assert found["training_state_bytes"] == 16 * size
    assert found["config"]["vocab_size"] == 40 and "2 for each multiply-add" in found["formulas"]["FLOPs/token"]
    assert found["activation_bytes"]["inference"] == 4 * (10 * max(4 * 32 + 2 * 56, 6 * 32) + 5 * 8 * 32)


@pytest.mark.parametrize("family", [costs_luna, costs_mega, costs_megalodon])
def test_the_page_has_the_formulas(repo_root, family):
    page = " ".join((repo_root / "docs" / "costs.md").read_text(encoding="utf-8").split())
    for name, text in family.FORMULAS.items():
        assert f"* **{name}**: {text}" in page


def test_activations_follow_the_length_and_the_dtype(tmp_path):
    model = LunaForMaskedLM(LunaConfig(**SIZES)).half()
    model.save_pretrained(tmp_path / "half")
    half, full = describe(tmp_path / "half", 32), describe(save(tmp_path / "full"), 32)
    assert half.weights["dtype"] == "float16" and 2 * half.weights["bytes"] == full.weights["bytes"]
    assert 2 * half.activation_bytes["training"] == full.activation_bytes["training"]
    longer = describe(tmp_path / "full", 64)
    assert 1.9 < longer.activation_bytes["training"] / full.activation_bytes["training"] < 2


def test_inference_peak_of_a_large_vocabulary(tmp_path):
    folder = save(tmp_path / "a", vocab_size=5000)
    assert describe(folder, 10).activation_bytes["inference"] == 4 * 10 * (5000 + 2 * 32)


HEADS = {
    "LunaModel": [],
    "LunaForTokenClassification": ["TokenClassification: 2 classes"],
    "LunaForQuestionAnswering": ["QuestionAnswering: start and end"],
    "LunaForMultipleChoice": ["MultipleChoice: one score per option, pooling cls"],
    "LunaForSequencePairClassification": ["SequencePairClassification: 2 classes, pooling cls"],
}


@pytest.mark.parametrize("name", HEADS)
def test_heads(tmp_path, name):
    assert describe(save(tmp_path / "a", getattr(luna_mega, name))).heads == HEADS[name]


def test_converted_folder_and_its_checkpoint(convert, make):
    state = make.bert(heads=[("a", 2), ("attention_classification_head", 3)], tied_lm=False)
    folder = convert(state, "--head", "a")
    info = describe(folder)
    assert info.written_by == (
        "luna-mega convert, from model.pt, a luna_bert checkpoint (arch luna_base_tied_512) of the 2021 fairseq code"
    )
    assert info.heads == ["masked LM", "SequenceClassification: 2 classes, pooling cls"]
    info = describe(convert.file, 5)
    assert info.written_by == "fairseq: a luna_bert checkpoint (arch luna_base_tied_512) of the 2021 fairseq code"
    assert info.heads == ["masked LM", "a: 2 classes", "attention_classification_head: 3 classes"]
    unique = {tensor.data_ptr(): tensor.numel() for key, tensor in state["model"].items() if "classif" not in key}
    assert info.parameters["total"] == sum(unique.values())


def test_lra_checkpoints(convert, make):
    convert.save(make.lra23(image=True, sen_rep_type="mp"))
    info = describe(convert.file)
    assert "2023 fairseq code" in info.written_by and "vocab_size" not in info.config
    assert info.heads == ["SequenceClassification: 2 classes, pooling mean"]
    convert.save({**(state := make.lra21(towers=2)), "model": {k: v.half() for k, v in state["model"].items()}})
    info = describe(convert.file)
    assert info.weights["dtype"] == "float16" and info.model_class == "LunaForSequencePairClassification"


@pytest.mark.parametrize(
    ("damage", "options", "expected"),
    [
        (lambda folder: None, ["--length", "65"], "64 learned positions"),
        (lambda folder: (folder / "config.json").unlink(), [], "no config.json"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"junk"), [], "damaged"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "bert"}'), [], "model_type 'bert'"),
    ],
)
def test_bad_input(tmp_path, capsys, damage, options, expected):
    folder = save(tmp_path / "a")
    damage(folder)
    capsys.readouterr()
    assert main(["info", str(folder), *options]) == 1
    printed = capsys.readouterr()
    assert expected in printed.err and printed.err.count("\n") == 1 and printed.out == ""


@pytest.mark.parametrize("name", ["LunaForMaskedLM", "LunaModel", "MegaForCausalLM"])
@pytest.mark.parametrize(
    ("change", "code", "expected"),
    [
        (lambda tensors, last: tensors.pop(last), 1, "the weights lack {}; save the model again"),
        (lambda tensors, last: tensors.update({last: tensors[last][:-1].clone()}), 1, "{} has the shape"),
        (
            lambda tensors, last: tensors.update({"pruned.weight": torch.zeros(2)}),
            0,
            "pruned.weight: {class} has no such",
        ),
    ],
    ids=["missing", "shape", "more"],
)
def test_weights_are_compared_with_the_configuration(tmp_path, capsys, name, change, code, expected):
    sizes = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")}
    config = MegaConfig(**sizes, is_decoder=True, bidirectional=False) if "Mega" in name else LunaConfig(**SIZES)
    getattr(luna_mega, name)(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    assert main(["info", str(tmp_path)]) == 0 and "warning" not in capsys.readouterr().out
    tensors = load_file(file)
    last = next(key for key in sorted(tensors) if "layers.1." in key and key.endswith("bias"))
    change(tensors, last)
    save_file(tensors, file, metadata={"format": "pt"})
    assert main(["info", str(tmp_path)]) == code
    printed = capsys.readouterr()
    bare = last.removeprefix("luna.").removeprefix("mega.")
    assert expected.replace("{class}", name).format(bare) in printed.out + printed.err


def test_usage(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["info", str(tmp_path), "--length", "0"])
    assert stop.value.code == 2
    (tmp_path / "file.pt").write_bytes(b"nothing of the kind")
    assert main(["info", str(tmp_path / "file.pt")]) == 1
    assert "not a checkpoint" in capsys.readouterr().err


def test_fixtures(parity_folder):
    folder = parity_folder("luna", "bert_heads")
    info = describe(folder / "checkpoint.pt")
    meta = json.loads((folder / "meta.json").read_text())
    assert info.heads[1:] == [f"{name}: {sizes['num_classes']} classes" for name, sizes in meta["heads"].items()]
    assert "2023" in describe(parity_folder("luna", "head_bert_tied") / "checkpoint.pt").written_by
