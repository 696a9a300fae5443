"""`luna-mega info`: published parameter counts, and the description of folders and checkpoints."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import luna_mega
from luna_mega import LunaConfig, LunaForMaskedLM, LunaForSequenceClassification, LunaModel, MegaConfig
from luna_mega.inspection.info import count_parameters, describe
from luna_mega_cli import main
from tests.convert.folders import half
from tests.errors import command_error

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 56,
    "projection_length": 8,
    "max_position_embeddings": 64,
}


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
        # The 132 M and 147 M in the original's README include the LM head and a head for two classes.
        classifier = count_parameters(LunaForSequenceClassification(config))["head"]
        assert total + classifier == total + (config.hidden_size + 1) * config.hidden_size + 2 * (
            config.hidden_size + 1
        )


def save(folder, model_class=LunaForMaskedLM, **fields):
    model_class(LunaConfig(**SIZES | fields)).save_pretrained(folder)
    return folder


def test_folder(tmp_path, capsys):
    folder = save(tmp_path / "a")
    assert main(["info", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "save_pretrained of transformers 5" in printed and "masked LM" in printed and "cache" not in printed
    assert len(printed.splitlines()) <= 20
    assert main(["info", str(folder), "--length", "10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["length"] == 10 and found["model_class"] == "LunaForMaskedLM" and found["cache_bytes"] is None
    size = LunaForMaskedLM.from_pretrained(folder).num_parameters()
    assert found["parameters"]["total"] == size and found["config"]["vocab_size"] == 40
    assert found["weights"] == {"dtype": "float32", "bytes": 4 * size}


@pytest.mark.parametrize(
    ("model_class", "fields", "attention"),
    [
        ("MegaModel", {}, "all positions, quadratic"),
        ("MegaModel", {"use_chunking": True, "chunk_size": 128}, "chunks of 128, linear"),
        ("MegaForConditionalGeneration", {}, "all positions, quadratic"),
        (
            "MegaForConditionalGeneration",
            {"use_chunking": True, "chunk_size": 16, "decoder_chunk_size": 0},
            "encoder: chunks of 16, linear; decoder: all positions, quadratic",
        ),
        ("MegalodonForCausalLM", {"chunk_size": 128}, "chunks of 128, linear"),
        ("LunaModel", {"projection_length": 8, "num_attention_heads": 4}, "8 packed rows, linear"),
    ],
)
def test_attention(tmp_path, capsys, model_class, fields, attention):
    model_class = getattr(luna_mega, model_class)
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 56}
    model_class(model_class.config_class(**sizes | fields)).save_pretrained(tmp_path)
    assert main(["info", str(tmp_path)]) == 0
    assert f"\nattention    {attention}\n" in capsys.readouterr().out


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
    convert.save(half(make.lra21(towers=2)))
    info = describe(convert.file)
    assert info.weights["dtype"] == "float16" and info.model_class == "LunaForSequencePairClassification"


@pytest.mark.parametrize(
    ("damage", "options", "expected"),
    [
        (lambda folder: None, ["--length", "65"], "64 learned positions"),
        (lambda folder: (folder / "config.json").unlink(), [], "no config.json"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"junk"), [], "damaged"),
        (
            lambda folder: (folder / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8"),
            [],
            "model_type 'bert'",
        ),
    ],
)
def test_bad_input(tmp_path, capsys, damage, options, expected):
    folder = save(tmp_path / "a")
    damage(folder)
    assert expected in command_error(capsys, "info", folder, *options)


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
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    assert info.heads[1:] == [f"{name}: {sizes['num_classes']} classes" for name, sizes in meta["heads"].items()]
    assert "2023" in describe(parity_folder("luna", "head_bert_tied") / "checkpoint.pt").written_by
