"""Conversions and exports return the results in `golden.json`.

`python -m tests.convert.test_golden` writes it after an intended change; it depends on no version or random number.
"""

import hashlib
import json
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig

from luna_mega.convert import convert_checkpoint, export_checkpoint
from tests.convert import luna, mega, mega_lm, megalodon
from tests.convert.exports import read
from tests.convert.test_convert_mega_image import VARIANTS, mega_image
from tests.convert.test_luna_seq2seq import KINDS as LUNA_KINDS, model as luna_seq2seq
from tests.convert.test_mega_seq2seq import KINDS as MEGA_KINDS, model as mega_seq2seq

FILE = Path(__file__).with_name("golden.json")
IMAGE = {"values": True, "sen_rep_type": "mp"}
SPEECH = {"arch": "mega_sc_raw_big", "values": True, "norm_type": "batchnorm", "prenorm": True, "classes": 10}
BUILDERS = [
    (luna.bert, [{}, {"tied": False, "tied_lm": False}, {"stop_min_lr": -1}, {"fix_projection_length": True}]),
    (luna.bert, [{"heads": [("pooling_classification_head", 3), ("attention_classification_head", 3)]}]),
    (luna.bert, [{"heads": [("x", n)], "task": f"sentence_{x}"} for n, x in ((2, "prediction"), (1, "ranking"))]),
    (luna.lra21, [{}, {"towers": 2}, {"tied": True, "depth": 2}, {"sen_rep_type": "mp"}, {"use_p": True}]),
    (luna.lra21, [{"arch": "luna_lra_listop", "layers": 1, "tie_layer_weights": True}]),
    (luna.lra23, [{}, {"towers": 4}, {"image": True, "sen_rep_type": "mp"}, {"pre_logits": True}, {"learned": True}]),
    (luna_seq2seq, LUNA_KINDS.values()),
    (mega.mega, [{}, {"branch": "flash"}, {"towers": 2}, IMAGE, IMAGE | {"branch": "flash"}, SPEECH]),
    (mega.mega, [{"prenorm": True, "norm_type": "scalenorm", "sen_rep_type": "cls"}, {"rotary": True, "depth": 0}]),
    (mega.mega, [{"chunk": 8, "ffn": False, "depth": 3}, {"embed_norm": True, "norm_type": "rmsnorm"}]),
    (mega_lm.mega_lm, [*mega_lm.KINDS.values(), {"branch": "flash"}]),
    (mega_seq2seq, MEGA_KINDS.values()),
    (mega_image, VARIANTS),
    (megalodon.folder, [{}, {"ranks": 2}, {"dtype": "bf16"}, {"extra": 256}, {"swiglu": True, "share_emb": True}]),
]
CASES = {
    f"{build.__module__.rpartition('.')[2]} {build.__name__} {json.dumps(fields)}": (build, fields)
    for build, variants in BUILDERS
    for fields in variants
}


def build_checkpoint(build, fields, folder):
    """Write a checkpoint in the original's layout and return its path."""
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
    if isinstance(made, dict):
        torch.save(made, folder / "checkpoint.pt")
    elif isinstance(made, nn.Module):
        for parameter in made.parameters():  # those that are 1 are norm weights
            parameter.data = float(parameter.eq(1).all()) + 0.1 * numbers(parameter.shape)
        made.save_pretrained(folder / "built")
        export_checkpoint(folder / "built", folder / "checkpoint.pt")
    return made if isinstance(made, Path) else folder / "checkpoint.pt"


def digest(tensors):
    """Return the number of tensors, and a digest of their names, dtypes, shapes and values."""
    names = str([(name, str(x.dtype), list(x.shape)) for name, x in tensors.items()]).encode()
    inexact = ("projected_positions", "rope.freqs")  # sines and powers differ between machines in the last bit
    values = [x.float().numpy().tobytes() for name, x in tensors.items() if not name.endswith(inexact)]
    return f"{len(tensors)} {hashlib.sha256(b''.join([names, *values])).hexdigest()[:12]}"


def contents(path):
    """Return the args and the digest of the tensors of every file of a checkpoint."""
    if path.is_file():
        state = read(path)
        return {"args": vars(state["args"]), "tensors": digest(state["model"])}
    args = {file.name: json.loads(file.read_text()) for file in sorted(path.glob("*.json"))}
    return {"args": args, "tensors": [digest(torch.load(file)) for file in sorted(path.glob("*.pth"))]}


def record(build, fields, folder):
    """Return the results of a conversion, and of exports with and without the record of the conversion."""
    source, model = build_checkpoint(build, fields, folder), folder / "model"
    convert_checkpoint(source, model)
    config, report = (json.loads((model / name).read_text()) for name in ("config.json", "conversion_report.json"))
    defaults = AutoConfig.for_model(config["model_type"]).to_dict()
    config = {name: value for name, value in config.items() if value != defaults.get(name, "")}
    del report["source"]["sha256"], report["args"]
    places = json.dumps([report.pop("mapped"), report.pop("dropped")])
    report["decisions"] |= {k: round(v, 3) for k, v in report["decisions"].items() if isinstance(v, float)}
    found = {"config": config, "report": report, "places": hashlib.sha256(places.encode()).hexdigest()[:12]}
    found["tensors"] = digest(dict(sorted(load_file(model / "model.safetensors").items())))
    export_checkpoint(model, folder / "out" / source.name)
    (model / "conversion_report.json").unlink()
    export_checkpoint(model, folder / "plain" / source.name)
    exported, found["plain"] = (contents(folder / name / source.name) for name in ("out", "plain"))
    found["exported"] = "equal to the source" if exported == contents(source) else exported
    return json.loads(json.dumps(found))


@pytest.mark.parametrize("case", CASES)
def test_golden(tmp_path, case):
    found, expected = record(*CASES[case], tmp_path), json.loads(FILE.read_text(encoding="utf-8"))[case]
    assert found == expected
    assert json.dumps(found) == json.dumps(expected)  # args and fields in the same order


if __name__ == "__main__":
    with TemporaryDirectory() as root:
        table = {name: record(*CASES[name], Path(root, str(number))) for number, name in enumerate(CASES)}
    FILE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
