"""Loading teachers: weights in safetensors and in pickles, damaged files, and errors before a model is built."""

import json
import re
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file

from luna_mega.distillation import load_teacher
from tests.damage import NOT_OBJECTS, SHARES, cut
from tests.distillation.models import change, make_model
from tests.errors import check_error

WEIGHTS, PICKLE = "model.safetensors", "pytorch_model.bin"
HEADS = [("bert", "ForMaskedLM"), ("roberta", "ForSequenceClassification")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    make_model("bert", "ForMaskedLM").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "bert")


def check(folder, named, **options):
    start = time.perf_counter()
    check_error(lambda: load_teacher(str(folder), **options), (ValueError, OSError), named)
    assert time.perf_counter() - start < 20


def write_pickles(model, folder, how):
    """Save a model as transformers did before safetensors."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    tensors = model.state_dict()
    if how == "shards":
        names = [f"pytorch_model-0000{index}-of-00002.bin" for index in (1, 2)]
        places = {key: names[index % 2] for index, key in enumerate(tensors)}
        (folder / f"{PICKLE}.index.json").write_text(json.dumps({"weight_map": places}), encoding="utf-8")
        for name in names:
            torch.save({key: tensors[key] for key, place in places.items() if place == name}, folder / name)
        return
    if how == "old names":  # names in models that were converted from TensorFlow
        old = {"weight": "gamma", "bias": "beta"}
        tensors = {
            re.sub("(?<=LayerNorm.)(weight|bias)$", lambda match: old[match[1]], key): tensor
            for key, tensor in tensors.items()
        }
        assert any(key.endswith("gamma") for key in tensors)
    torch.save(tensors, folder / PICKLE, _use_new_zipfile_serialization=how != "legacy")


@pytest.mark.parametrize("how", ["safetensors", "zip", "legacy", "shards", "old names"])
def test_weights(how, tmp_path):
    name, head = HEADS[how in ("safetensors", "shards")]
    model = make_model(name, head).half()
    model.save_pretrained(tmp_path) if how == "safetensors" else write_pickles(model, tmp_path, how)
    teacher = load_teacher(str(tmp_path), dtype="auto").model
    assert type(teacher) is type(model) and teacher.dtype == torch.float16 and not teacher.training
    loaded = teacher.state_dict()
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, loaded[key]) for key, tensor in model.state_dict().items())
    assert load_teacher(str(tmp_path), dtype=torch.float32).model.dtype == torch.float32


class Payload:
    """An object that creates a file when an ordinary unpickler loads it."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_is_not_run(zipped, folder):
    state = {**load_file(folder / WEIGHTS), "a": Payload(folder / "ran")}
    (folder / WEIGHTS).unlink()
    torch.save(state, folder / PICKLE, _use_new_zipfile_serialization=zipped)
    check(folder, "nothing was executed")
    assert not (folder / "ran").exists()


FIELDS = {
    "layers": ("num_hidden_layers", 10**6, "1000000 layers"),
    "fewer layers": ("num_hidden_layers", 1, "1 layers"),
    "width": ("hidden_size", 10**6, "parameters"),
    "overflow": ("hidden_size", 10**15, "bert: "),
    "words": ("vocab_size", 10**9, "parameters"),
    "positions": ("max_position_embeddings", 10**9, "parameters"),
    "another width": ("intermediate_size", 25, "config.json specifies [25"),
    "heads": ("num_attention_heads", 0, "ZeroDivisionError"),
    "odd heads": ("num_attention_heads", 5, "hidden size"),
    "type": ("hidden_size", "many", "hidden_size"),
    "none": ("vocab_size", None, "vocab_size"),
    "activation": ("hidden_act", "magic", "magic"),
    "dropout": ("hidden_dropout_prob", float("nan"), "dropout"),
    "architectures": ("architectures", 5, "TypeError"),
    "epsilon": ("layer_norm_eps", float("nan"), "not finite"),
    "quantized": ("quantization_config", {"quant_method": "gptq", "bits": 4}, "quantized (gptq)"),
    "eight bits": ("quantization_config", {"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
    "pretraining": ("architectures", ["BertForPreTraining"], "BertForPreTraining"),
    "unknown class": ("architectures", ["MyClassifier"], "MyClassifier"),
    "another head": ("architectures", ["BertForNextSentencePrediction"], "BertForNextSentencePrediction"),
}


@pytest.mark.parametrize(("field", "value", "named"), FIELDS.values(), ids=FIELDS)
def test_values_of_the_configuration(folder, field, value, named):
    change(folder / "config.json", **{field: value})
    check(folder, named)


INDEXES = {
    "path": b'{"weight_map": {"a": "../x.safetensors"}}', "none": b"{}", "number": b'{"weight_map": {"a": 1}}',
}  # fmt: skip


@pytest.mark.parametrize("content", NOT_OBJECTS.values(), ids=NOT_OBJECTS)
def test_a_damaged_configuration(folder, content):
    (folder / "config.json").write_bytes(content)
    check(folder, "")


@pytest.mark.parametrize("content", (NOT_OBJECTS | INDEXES).values(), ids=NOT_OBJECTS | INDEXES)
def test_a_damaged_index(folder, content):
    weights = PICKLE if content in INDEXES.values() else WEIGHTS
    (folder / WEIGHTS).unlink()
    (folder / f"{weights}.index.json").write_bytes(content)
    check(folder, f"{weights}.index.json")


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("weights", [WEIGHTS, PICKLE])
def test_truncated_weights(folder, weights, share):
    if weights == PICKLE:
        torch.save(load_file(folder / WEIGHTS), folder / PICKLE)
        (folder / WEIGHTS).unlink()
    cut(folder / weights, share)
    check(folder, weights)


def test_missing_weights(folder):
    (folder / WEIGHTS).unlink()
    check(folder, PICKLE)
    make_model("bert").save_pretrained(folder)
    change(folder / "config.json", architectures=["BertForMaskedLM"])
    check(folder, "lacks")


def test_other_files(folder, tmp_path):
    check(folder, "trust_remote_code", trust_remote_code=True)
    (folder / "adapter_config.json").write_text("{}", encoding="utf-8")
    check(folder, "merge_and_unload")
    (tmp_path / "model-Q4.gguf").write_bytes(b"GGUF")
    for name in (tmp_path, tmp_path / "model-Q4.gguf"):
        check(name, "GGUF")
