"""Every kind of checkpoint converts: the recorded results, the report, the command line, and the output folder.

`python -m tests.convert.test_contract` writes `golden.json` after an intended change. The file does not depend on
versions or random numbers.
"""

import functools
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from torch import nn
from transformers import AutoConfig

import luna_mega
import luna_mega_cli
from luna_mega.convert import ConversionError, convert_checkpoint, importer
from luna_mega.convert.formats.registry import open_checkpoint
from luna_mega.hub.output import temporary_folder
from tests.convert import luna, mega, mega_lm, megalodon, translation
from tests.convert.contract import KINDS, built, check_arrived, save, saved_report, weights
from tests.convert.folders import identical, load, words
from tests.convert.translation import LUNA_KINDS, MEGA_KINDS
from tests.errors import command_error

FILE = Path(__file__).with_name("golden.json")
PREDICTION = {"task": "sentence_prediction"}
IMAGE = {"values": True, "sen_rep_type": "mp"}
OLD = {"rotary": True, "chunk": None, "max_positions": None}  # these args follow from the architecture
NO_FFN = {"ffn": False, "truncation_length": 9}
SPEECH = {"arch": "mega_sc_raw_big", "values": True, "norm_type": "batchnorm", "prenorm": True, "classes": 10}
NO_SIZES = {"encoder_layers": None, "encoder_attention_heads": None}
UNTIED = {"tied": False, "tied_lm": False}
DROPOUTS = {"dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.4, "encoder_layerdrop": 0.1}
DROPOUTS |= {"activation_fn": "relu", "tensorboard_logdir": "", "lr": [0.0006], "stop_min_lr": -1}
SWIFT = {"dropout": 0.1, "rescale_nffn": True, "norm_affine": False, "efficient_attn": "swift", "init_mode": "xavier"}
TASKS = [("masked_lm", ("a", 3)), ("sentence_prediction", ("a", 3), ("b", 2)), ("sentence_prediction",)]
TASKS += [("commonsense_qa", ("a", 1)), ("sentence_ranking", ("a", 4)), ("sentence_ranking", ("x", 1))]
CUTOFFS = {"input_cutoff": "12, 20,32", "softmax_cutoff": "12,21"}  # may end with the size of the vocabulary
# Independent fields share a checkpoint.
BUILDERS = [
    (luna.bert, [{}, UNTIED, UNTIED | {"untie_luna_kv": True, "untie_weights_luna": True}]),
    (luna.bert, [{"heads": [("pooling_classification_head", 3), ("attention_classification_head", 3)]}]),
    (luna.bert, [{"heads": [("a", 1)], "regression_target": True, "fix_projection_length": True} | PREDICTION]),
    (luna.bert, [{"arch": "luna_large_512", "task": None, "max_positions": None} | NO_SIZES | DROPOUTS]),
    (luna.bert, [{"heads": heads, "task": task} for task, *heads in TASKS]),
    (luna.bert, [{"untie_weights_luna": True}, {"tied_lm": False, "untie_weights_luna": False}]),
    (luna.bert, [{"encoder_ffn_embed_dim": 99, "max_positions": 512, "untie_luna_kv": True}]),
    (luna.bert23, [{}]),
    (luna.lra21, [{}, {"sen_rep_type": "mp", "use_p": True, "tied": True, "tie_kv": True}]),
    (luna.lra21, [{"tied": True, "depth": 2, "classifier_activation_fn": "tanh", "classes": 3}]),
    (luna.lra21, [{"arch": "luna_lra_listop", "layers": 1, "tie_layer_weights": True, "encoder_layers": 5}]),
    (luna.lra21, [{"arch": "luna_lra_listop", "layers": 1, "encoder_layers": None}]),
    (luna.lra21, [{"arch": "luna_lra_pf32", "sen_rep_type": "cls"} | NO_SIZES, {"arch": "luna_lra_aan", "towers": 2}]),
    (luna.lra23, [{}, {"towers": 4, "sen_rep_type": "mp"}, {"pre_logits": True, "sen_rep_type": "cls"}]),
    (luna.lra23, [{"learned": True, "dropout": 0.25, "max_positions": None}]),
    (luna.lra23, [{"use_p": True, "sen_rep_type": "cls"}, {"use_p": True, "sen_rep_type": "mp", "image": True}]),
    (translation.luna_seq2seq, LUNA_KINDS.values()),
    (mega.mega, [{}, IMAGE | {"branch": "flash"}, SPEECH | {"chunk": 6}]),
    (mega.mega, [{"prenorm": True, "norm_type": "scalenorm", "sen_rep_type": "cls", "lr": [0.004]}]),
    (mega.mega, [{"rotary": True, "depth": 0, "branch": "flash"}, {"chunk": 8, "ffn": False, "depth": 3}]),
    (mega.mega, [{"embed_norm": True, "norm_type": "rmsnorm", "task": None, "z_dim": None, "tensorboard_logdir": ""}]),
    (mega.mega, [{"arch": "mega_lra_aan", "towers": 2, "depth": 3, "norm_type": "rmsnorm", "prenorm": True}]),
    (mega.mega, [{"arch": "mega_lra_pf32", "values": True, "norm_type": "syncbatchnorm", "prenorm": True}]),
    (mega.mega, [{"depth": 2, "dropout": 0.1, "act_dropout": 0.2, "feature_dropout": True, "chunk": 0} | NO_FFN]),
    (mega.mega, [{"arch": f"mega_lra_{x}"} | OLD for x in ("listop", "imdb", "aan")]),
    (mega.mega, [{"arch": f"mega_{x}", "values": True} | OLD for x in ("lra_cifar10", "lra_pf128", "sc_raw_base")]),
    (mega.mega, [{"arch": "mega_lra_cifar10", "pixel_normalization": x} | IMAGE for x in ([0.48, 0.24], None)]),
    (mega_lm.mega_lm, [*mega_lm.KINDS.values(), mega_lm.KINDS["adaptive"] | {"branch": "flash"}]),
    (mega_lm.mega_lm, [{"arch": "mega_lm_adaptive_big", "activation_dropout": None, "dropout": 0.25}]),
    (mega_lm.mega_lm, [{"arch": f"mega_lm_{x}", "activation_dropout": None} for x in ("big", "enwik8_large")]),
    (mega_lm.mega_lm, [{"tied": x, "share_decoder_input_output_embed": not x} for x in (True, False)]),
    (mega_lm.mega_lm, [mega_lm.KINDS["adaptive"] | {f"adaptive_{x}": y} for x, y in CUTOFFS.items()]),
    (translation.mega_seq2seq, MEGA_KINDS.values()),
    (mega.mega_image, [*mega.IMAGES, {"input_size": 384, "nb_classes": 7}]),
    (megalodon.folder, [{}, {"ranks": 2, "dtype": "bf16"}, {"extra": 256}, {"swiglu": True, "share_emb": True}]),
    (megalodon.folder, [{"scale_emb": True, "rope_base": 500.0, "output_size": 5, "norm_eps": 1e-3} | SWIFT]),
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
    """Return the path of a checkpoint with the same numbers in every run, and its model if it was made of one."""
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
    if isinstance(made, Path):
        return made, None
    if not isinstance(made, nn.Module):
        return save(made, folder), None
    for parameter in made.parameters():  # parameters that are 1 are norm weights
        parameter.data = float(parameter.eq(1).all()) + 0.1 * numbers(parameter.shape)
    return save(translation.checkpoint(made), folder), made


def digest(tensors):
    """Return the number of tensors, and a digest of their names, dtypes, shapes and values."""
    names = str([(name, str(x.dtype), list(x.shape)) for name, x in tensors.items()]).encode()
    inexact = ("projected_positions", "rope.freqs")  # the last bit of sines and powers depends on the machine
    values = [x.float().numpy().tobytes() for name, x in tensors.items() if not name.endswith(inexact)]
    return f"{len(tensors)} {hashlib.sha256(b''.join([names, *values])).hexdigest()[:12]}"


def record(build, fields, folder):
    """Return the results of a conversion."""
    (source, made), model = build_checkpoint(build, fields, folder), folder / "model"
    convert_checkpoint(source, model)
    config, report = (
        json.loads((model / name).read_text(encoding="utf-8")) for name in ("config.json", "conversion_report.json")
    )
    config.pop("auto_map", None)  # the code of the model is not saved in tests
    report["files"] = [name for name in report["files"] if name != "luna_mega_code"]
    arrived = weights(model)
    check_arrived(open_checkpoint(source).tensors, arrived, report)
    if made is not None:
        identical({name: tensor for name, tensor in made.state_dict().items() if name in arrived}, arrived)
    usual = defaults(config["model_type"])
    config = {name: value for name, value in config.items() if value != usual.get(name, "")}
    del report["source"]["sha256"], report["args"]
    places = json.dumps([report.pop("mapped"), report.pop("dropped")])
    report["decisions"] |= {k: round(v, 3) for k, v in report["decisions"].items() if isinstance(v, float)}
    found = {"config": config, "report": report, "places": hashlib.sha256(places.encode()).hexdigest()[:12]}
    found["tensors"] = digest(dict(sorted(arrived.items())))
    for file in model.glob("*or_config.json"):  # of an image processor
        found[file.name] = json.loads(file.read_text(encoding="utf-8"))
    if usual["model_type"].endswith("seq2seq"):
        generation = json.loads((model / "generation_config.json").read_text(encoding="utf-8"))
        found["generation"] = [generation[name] for name in ("num_beams", "decoder_start_token_id", "max_length")]
    return json.loads(json.dumps(found))


@pytest.mark.parametrize("case", CASES)
def test_golden(tmp_path, case):
    """All tensors are converted, and all results equal the recorded ones, with args and fields in the same order."""
    assert json.dumps(record(*CASES[case], tmp_path)) == json.dumps(golden()[case])


def run_json(capsys, *argv):
    """Return the report that the command prints as JSON."""
    assert luna_mega_cli.main(["convert", *map(str, argv), "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


@pytest.mark.parametrize("kind", KINDS)
def test_conversion(kind, tmp_path, monkeypatch, capsys):
    """A dry run prints the report of the function and writes nothing; the folder has all tensors and loads."""
    expected, state = KINDS[kind], built(kind)
    file, output = save(state, tmp_path), tmp_path / "model"
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    dry = run_json(capsys, file, "--dry-run")
    assert luna_mega_cli.main(["convert", str(file), "--dry-run"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before

    report = convert_checkpoint(file, output)
    written = json.loads(json.dumps(asdict(report)))
    assert [dry.pop(name) for name in ("output", "files", "load")] == [None, [], ""]
    assert (
        written.pop("output") == str(output) and written.pop("files") == sorted(report.files[:-1]) + report.files[-1:]
    )
    assert set(report.files) == {file.name for file in output.iterdir()}
    call, _, condition = written.pop("load").partition(" after ")
    assert dry == written and dry["model_class"] == rows["class"] == expected.model
    assert rows["read"].startswith(f"{file.name}: {kind.partition(',')[0]} of the ") and rows["written"] == "nothing"
    assert expected.sizes in f"{rows['sizes']}, " and ("labels" in rows) == ("Classification" in expected.model)
    assert rows["tensors"] == f"{len(report.mapped)} mapped, {len(report.dropped)} dropped, 0 missing, 0 unexpected"
    assert report.source == saved_report(output)["source"]

    card = ModelCard.load(output / "README.md")
    assert report.source["sha256"] in card.text and (card.data.pipeline_tag is None) is ("pixels" in kind)
    assert condition == "`import luna_mega`; without luna-mega, add trust_remote_code=True"
    auto_class = call.split(".")[0]
    model = eval(call, {auto_class: getattr(transformers, auto_class)})
    assert type(model).__name__ == expected.model and load(output).config.to_dict() == model.config.to_dict()
    check_arrived(state["model"], weights(output), written)
    if kind == "luna_bert":  # the folder of a head is also a language model
        load(output, luna_mega.LunaForMaskedLM)
    assert all(x.isfinite().all() for x in [model(**expected.inputs).logits, *model.state_dict().values()])


# Options of the command -> those of the function, and a checkpoint that converts with them.
OPTIONS = [
    (["--head", "a"], {"head": "a"}, lambda: luna.bert(heads=[("a", 3), ("b", 2)])),
    (["--layer-norm", "standard"], {"layer_norm": "standard"}, luna.lra21),
    (["--layer-norm", "plus-one"], {"layer_norm": "plus-one"}, luna.lra23),
    (["--ema-convention", "flash"], {"ema_convention": "flash"}, mega.mega),
    (["--ema-convention", "main"], {"ema_convention": "main"}, mega.mega),
    (["--dtype", "float16"], {"dtype": "float16"}, luna.bert),
    (["--license", "mit"], {"license": "mit"}, luna.bert),
    (["--dict", "dict.txt"], {"dictionaries": ["dict.txt"]}, luna.bert),
]


@pytest.mark.parametrize(("argv", "options", "build"), OPTIONS)
def test_command_and_function_agree(argv, options, build, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("dict.txt").write_text(words(12), encoding="utf-8")
    file = save(build(), tmp_path)
    printed = run_json(capsys, file, "--output", "a", *argv)
    written = json.loads(json.dumps(asdict(convert_checkpoint(file, "b", **options))))
    for name in ("output", "load"):
        assert printed.pop(name) != written.pop(name)
    assert printed == written
    for name in ("config.json", "model.safetensors", "conversion_report.json"):
        assert Path("a", name).read_bytes() == Path("b", name).read_bytes(), name
    assert ModelCard.load("a/README.md").data.license == options.get("license")
    save(luna.checkpoint({}), tmp_path)
    with pytest.raises(ConversionError) as error:
        convert_checkpoint(file, "c", **options)
    for place in (["--output", "c"], ["--dry-run"]):
        found = command_error(capsys, "convert", file, *place, *argv)
        assert found == f"luna-mega convert: error: {error.value}\n" and not Path("c").exists()


@pytest.fixture
def file(tmp_path):
    """Return a checkpoint in an otherwise empty folder."""
    return save(built("luna_lra, 2021"), tmp_path)


def test_empty_output_folder_and_new_parents(file, tmp_path, with_code):
    (tmp_path / "model").mkdir()
    for output in (tmp_path / "model", tmp_path / "model" / "new" / "deeper"):
        convert_checkpoint(file, output)
        names = {"README.md", "config.json", "conversion_report.json", "luna_mega_code", "model.safetensors"}
        assert {path.name for path in output.iterdir()} - {"new"} == names


# What happens while a conversion writes -> exit status of the command, None if the exception is not caught.
FAILURES = {"SIGINT": 130, "SIGTERM": 143, "an exception": None}


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("failure", FAILURES)
def test_failed_write_leaves_no_files(file, tmp_path, monkeypatch, failure, there):
    """A conversion that fails or ends by a signal after the weights are on the disk leaves no files."""
    output = tmp_path / "model" if there else tmp_path / "x" / "y"
    if there:
        output.mkdir()
    before, handler = sorted(tmp_path.rglob("*")), signal.signal(signal.SIGINT, signal.default_int_handler)

    def fail(report, folder):
        assert (folder / "model.safetensors").is_file()
        if FAILURES[failure] is None:
            raise LookupError
        signal.raise_signal(getattr(signal, failure))

    monkeypatch.setattr(importer.Report, "save", fail)
    try:
        with pytest.raises((LookupError, SystemExit)) as raised:
            sys.exit(luna_mega_cli.main(["convert", str(file), "--output", str(output)]))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert getattr(raised.value, "code", None) == FAILURES[failure] and sorted(tmp_path.rglob("*")) == before


def test_files_of_a_killed_conversion_are_removed_by_the_next(file, tmp_path, monkeypatch):
    """Those of a running process stay."""
    with monkeypatch.context() as patch:
        patch.setattr(importer.Report, "save", lambda *_: signal.raise_signal(signal.SIGKILL))
        process = multiprocessing.get_context("fork").Process(
            target=convert_checkpoint, args=[file, tmp_path / "model"]
        )
        process.start()
        process.join()
    assert process.exitcode == -signal.SIGKILL and len(list(tmp_path.glob(".*"))) == 1
    with temporary_folder(tmp_path, "model") as running:
        convert_checkpoint(file, tmp_path / "model")
        assert list(tmp_path.glob(".*")) == [running]


def test_full_disk(file, tmp_path, capsys):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        status = luna_mega_cli.main(["convert", str(file), "--output", str(tmp_path / "model")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 1 and "cannot write model.safetensors" in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == [file]


PATHS = {
    "/home/me/data-bin": "data-bin",
    "/home/me/a:/home/me/b": "a:b",
    "train --data /home/me/data/x --save checkpoints/last.pt": "train --data x --save checkpoints/last.pt",
    "python /home/me/train.py": "python train.py",
    "~me/secret/x": "x",
    "see ~me/secret/x": "see x",
    "C:\\Users\\me\\x": "x",
    "--data=C:/Users/me/x": "--data=x",
    "\\\\server\\me\\x": "x",
    "//server/me/x": "x",
    "file:///home/me/x": "file:x",
    "/home/me/O'Neill, John (old)/x": "x",
    "(x / 255 - 0.5) / 0.5": "(x / 255 - 0.5) / 0.5",
} | dict.fromkeys([same := "env:// tcp://host:1 https://a.b/c </s> w/o 1/2 ../x a/b -"], same)


def test_no_text_of_the_report_keeps_a_path(tmp_path):
    args = {
        "texts": list(PATHS),
        "tuple": ({"/home/me/k": {"train /home/me/k": 1}}, {"/home/me/a", "~me/b/c"}, b"~me/x"),
    }
    output = tmp_path / "model"
    report = convert_checkpoint(save(luna.bert(**args, arch="/home/me/arch", task="/home/me/task"), tmp_path), output)
    saved = saved_report(output)
    assert saved["args"]["texts"] == list(PATHS.values())
    assert saved["args"]["tuple"] == [{"k": {"train k": 1}}, "{'a', 'c'}", "b'x'"]
    assert saved["source"]["arch"] == "arch" and saved["source"]["task"] == "task"
    for file in filter(Path.is_file, output.rglob("*")):
        assert b"home/me" not in file.read_bytes() and b"~me" not in file.read_bytes(), file.name
    assert "home/me" not in str(report).replace(str(output), "")


@pytest.mark.slow
def test_locale_of_a_process(file, tmp_path, repo_root):
    """Input paths that the locale cannot encode are read through a link; such output paths raise an error."""
    environment = os.environ | {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    source = file.rename(tmp_path / "modèle.pt")
    code = "import sys; from luna_mega_cli import main; file, *names = sys.argv[1:]\n"
    code += "print(*(main(['convert', file, '--output', name]) for name in names))"
    outputs = [str(tmp_path / name).encode() for name in ("a", "bé")]
    command = [sys.executable, "-c", code, str(source).encode(), *outputs]
    done = subprocess.run(command, cwd=repo_root, env=environment, capture_output=True)
    assert done.stdout.endswith(b"0 1\n"), done.stderr
    assert b"the locale's encoding is ascii, set PYTHONUTF8=1" in done.stderr


if __name__ == "__main__":
    with TemporaryDirectory() as root:
        table = {name: record(*CASES[name], Path(root, str(number))) for number, name in enumerate(CASES)}
    parts = {name: ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in table[name].items()) for name in table}
    rows = [f" {json.dumps(name)}: {{\n{part}\n }}" for name, part in parts.items()]
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
