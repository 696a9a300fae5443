"""Conversions give the results in `golden.json`.

`python -m tests.convert.test_golden` writes `golden.json` after an intended change. The file does not depend on
versions or random numbers.
"""

import functools
import hashlib
import json
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig

from luna_mega.convert import convert_checkpoint
from luna_mega.convert.formats.registry import open_checkpoint
from tests.convert import luna, mega, mega_lm, megalodon, translation
from tests.convert.folders import identical
from tests.convert.fuzz import in_memory
from tests.convert.test_translation import LUNA_KINDS, MEGA_KINDS

FILE = Path(__file__).with_name("golden.json")
PREDICTION = {"task": "sentence_prediction"}
IMAGE = {"values": True, "sen_rep_type": "mp"}
OLD = {"rotary": True, "chunk": None, "max_positions": None}  # these args follow from the architecture
NO_FFN = {"ffn": False, "truncation_length": 9}
SPEECH = {"arch": "mega_sc_raw_big", "values": True, "norm_type": "batchnorm", "prenorm": True, "classes": 10}
NO_SIZES = {"encoder_layers": None, "encoder_attention_heads": None}
UNTIED = {"tied": False, "tied_lm": False}
# Independent fields share a checkpoint.
BUILDERS = [
    (luna.bert, [{}, UNTIED, UNTIED | {"untie_luna_kv": True, "untie_weights_luna": True}]),
    (luna.bert, [{"heads": [("pooling_classification_head", 3), ("attention_classification_head", 3)]}]),
    (luna.bert, [{"heads": [("x", n)], "task": f"sentence_{x}"} for n, x in ((2, "prediction"), (1, "ranking"))]),
    (luna.bert, [{"heads": [("a", 1)], "regression_target": True, "fix_projection_length": True} | PREDICTION]),
    (luna.bert, [{"arch": "luna_large_512", "task": None, "max_positions": None} | NO_SIZES]),
    (luna.bert, [{"activation_fn": "relu", "dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.4}]),
    (luna.bert, [{"encoder_layerdrop": 0.1, "tensorboard_logdir": "", "lr": [0.0006], "stop_min_lr": -1}]),
    (luna.bert23, [{}]),
    (luna.lra21, [{}, {"sen_rep_type": "mp"}, {"use_p": True}, {"use_p": True, "tied": True, "tie_kv": True}]),
    (luna.lra21, [{"tied": True, "depth": 2, "classifier_activation_fn": "tanh", "classes": 3}]),
    (luna.lra21, [{"arch": "luna_lra_listop", "layers": 1, "tie_layer_weights": True, "encoder_layers": 5}]),
    (luna.lra21, [{"arch": "luna_lra_listop", "layers": 1, "encoder_layers": None}]),
    (luna.lra21, [{"arch": "luna_lra_pf32", "sen_rep_type": "cls"} | NO_SIZES, {"arch": "luna_lra_aan", "towers": 2}]),
    (luna.lra23, [{}, {"towers": 4}, {"towers": 4, "sen_rep_type": "mp"}, {"image": True, "sen_rep_type": "mp"}]),
    (luna.lra23, [{"pre_logits": True, "sen_rep_type": "cls"}]),
    (luna.lra23, [{"learned": True, "dropout": 0.25, "max_positions": None}]),
    (luna.lra23, [{"use_p": True, "sen_rep_type": "cls"}, {"use_p": True, "sen_rep_type": "mp", "image": True}]),
    (translation.luna_seq2seq, LUNA_KINDS.values()),
    (mega.mega, [{}, {"branch": "flash"}, IMAGE, IMAGE | {"branch": "flash"}, SPEECH | {"chunk": 6}]),
    (mega.mega, [{"prenorm": True, "norm_type": "scalenorm", "sen_rep_type": "cls", "lr": [0.004]}]),
    (mega.mega, [{"rotary": True, "depth": 0, "branch": "flash"}, {"chunk": 8, "ffn": False, "depth": 3}]),
    (mega.mega, [{"embed_norm": True, "norm_type": "rmsnorm", "task": None, "z_dim": None, "tensorboard_logdir": ""}]),
    (mega.mega, [{"rotary": True, "norm_type": "scalenorm", "embed_norm": True, "chunk": 4, "branch": "flash"}]),
    (mega.mega, [{"arch": "mega_lra_aan", "towers": 2, "depth": 3, "norm_type": "rmsnorm", "prenorm": True}]),
    (mega.mega, [{"arch": "mega_lra_pf32", "values": True, "norm_type": "syncbatchnorm", "prenorm": True}]),
    (mega.mega, [{"arch": "mega_lra_listop", "sen_rep_type": "cls", "classes": 10, "chunk": 5}]),
    (mega.mega, [{"depth": 2, "dropout": 0.1, "act_dropout": 0.2, "feature_dropout": True, "chunk": 0} | NO_FFN]),
    (mega.mega, [{"arch": f"mega_lra_{x}"} | OLD for x in ("listop", "imdb", "aan")]),
    (mega.mega, [{"arch": f"mega_{x}", "values": True} | OLD for x in ("lra_cifar10", "lra_pf32", "lra_pf128")]),
    (mega.mega, [{"arch": f"mega_sc_raw_{x}", "values": True} | OLD for x in ("base", "big")]),
    (mega_lm.mega_lm, [*mega_lm.KINDS.values(), mega_lm.KINDS["adaptive"] | {"branch": "flash"}]),
    (mega_lm.mega_lm, [{"arch": "mega_lm_adaptive_big", "activation_dropout": None, "dropout": 0.25}]),
    (mega_lm.mega_lm, [{"arch": f"mega_lm_{x}", "activation_dropout": None} for x in ("big", "enwik8_large")]),
    (translation.mega_seq2seq, MEGA_KINDS.values()),
    (mega.mega_image, mega.IMAGES),
    (megalodon.folder, [{}, {"ranks": 2, "dtype": "bf16"}, {"extra": 256}, {"swiglu": True, "share_emb": True}]),
    (megalodon.folder, [{"scale_emb": True, "rope_base": 500.0, "output_size": 5, "norm_eps": 1e-3, "dropout": 0.1}]),
    (
        megalodon.folder,
        [{"rescale_nffn": True, "norm_affine": False, "efficient_attn": "swift", "init_mode": "xavier"}],
    ),
]
CASES = {
    f"{build.__module__.rpartition('.')[2]} {build.__name__} {json.dumps(fields)}": (build, fields)
    for build, variants in BUILDERS
    for fields in variants
}


@functools.cache
def golden():
    return json.loads(FILE.read_text(encoding="utf-8"))


@functools.cache
def defaults(model_type):
    return AutoConfig.for_model(model_type).to_dict()


def build_checkpoint(build, fields, folder):
    """Return the content of a checkpoint, its model, or its folder."""
    folder.mkdir(exist_ok=True)
    tensors = count()

    def numbers(*shape, **_):
        shape = torch.Size(shape[0] if isinstance(shape[0], tuple) else shape)
        values = torch.arange(shape.numel()).mul(37).add(11 * next(tensors)).remainder(1009)
        return (values.reshape(shape) - 504) / 512

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rand", "randn"):
            patch.setattr(torch, name, numbers)
        patch.setattr(torch, "randn_like", lambda tensor: numbers(tensor.shape))
        made = build(folder / "checkpoint", **fields) if build is megalodon.folder else build(**fields)
    if isinstance(made, nn.Module):
        for parameter in made.parameters():  # parameters that are 1 are norm weights
            parameter.data = float(parameter.eq(1).all()) + 0.1 * numbers(parameter.shape)
    return made


def digest(tensors):
    """Return the number of tensors, and a digest of their names, dtypes, shapes and values."""
    names = str([(name, str(x.dtype), list(x.shape)) for name, x in tensors.items()]).encode()
    inexact = ("projected_positions", "rope.freqs")  # the last bit of sines and powers depends on the machine
    values = [x.float().numpy().tobytes() for name, x in tensors.items() if not name.endswith(inexact)]
    return f"{len(tensors)} {hashlib.sha256(b''.join([names, *values])).hexdigest()[:12]}"


def check_arrived(source, ours, report):
    """Check that a model has exactly the tensors of the file, with their values."""
    raised = report["decisions"].get("layer_norm") == "plus-one"
    assert ours.keys() <= {row["target"] for row in report["mapped"]}
    assert sorted(row["source"] for row in report["mapped"] + report["dropped"]) == sorted(source.tensors)
    for row in report["mapped"]:
        # the report also lists weights of the language model, which models with a head do not have
        if row["target"] in ours:
            key = row["source"]
            is_norm = key.endswith(("layer_norm.weight", "layernorm.weight"))
            expected = source.tensors[key] + (is_norm and raised)
            assert torch.equal(ours[row["target"]].view(expected.shape), expected), row
    assert all(row["reason"] for row in report["dropped"])


def record(build, fields, folder):
    """Return the results of a conversion."""
    made, model = build_checkpoint(build, fields, folder), folder / "model"
    source, state = (made, None) if isinstance(made, Path) else ("checkpoint.pt", made)
    state = translation.checkpoint(made) if isinstance(made, nn.Module) else state
    with in_memory(state) if state else nullcontext():
        convert_checkpoint(source, model)
        opened = open_checkpoint(source)
    config, report = (
        json.loads((model / name).read_text(encoding="utf-8")) for name in ("config.json", "conversion_report.json")
    )
    config.pop("auto_map", None)  # the code of the model is not saved in tests
    report["files"] = [name for name in report["files"] if name != "luna_mega_code"]
    arrived = load_file(model / "model.safetensors")  # `test_fixtures.py` loads the models
    check_arrived(opened, arrived, report)
    if isinstance(made, nn.Module):
        identical({name: tensor for name, tensor in made.state_dict().items() if name in arrived}, arrived)
    usual = defaults(config["model_type"])
    config = {name: value for name, value in config.items() if value != usual.get(name, "")}
    del report["source"]["sha256"], report["args"]
    places = json.dumps([report.pop("mapped"), report.pop("dropped")])
    report["decisions"] |= {k: round(v, 3) for k, v in report["decisions"].items() if isinstance(v, float)}
    found = {"config": config, "report": report, "places": hashlib.sha256(places.encode()).hexdigest()[:12]}
    found["tensors"] = digest(dict(sorted(arrived.items())))
    return json.loads(json.dumps(found))


@pytest.mark.parametrize("case", CASES)
def test_golden(tmp_path, case):
    """All tensors are converted, and all results equal the recorded ones."""
    found, expected = record(*CASES[case], tmp_path), golden()[case]
    assert found == expected
    assert json.dumps(found) == json.dumps(expected)  # args and fields are in the same order


if __name__ == "__main__":
    with TemporaryDirectory() as root:
        table = {name: record(*CASES[name], Path(root, str(number))) for number, name in enumerate(CASES)}
    parts = {name: ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in table[name].items()) for name in table}
    rows = [f" {json.dumps(name)}: {{\n{part}\n }}" for name, part in parts.items()]
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
