"""The recorded results of conversions: configuration, report and tensors, in `golden.json`.

`python -m tests.convert.test_values` writes the file after an intended change. It does not depend on versions or random
numbers. The tests after `test_values` are what no recorded result says.
"""

import functools
import hashlib
import json
from argparse import Namespace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy
import pytest
import torch
from torch import nn
from transformers import AutoConfig

from luna_mega.convert import ConversionError, convert_checkpoint
from luna_mega.convert.conventions import decide_layer_norm
from luna_mega.convert.formats.registry import detect, open_checkpoint
from tests.convert import luna, mega, mega_lm, megalodon, translation
from tests.convert.contract import changed, check_arrived, save, weights
from tests.convert.folders import half, identical, load
from tests.convert.translation import LUNA_KINDS, MEGA_KINDS

FILE = Path(__file__).with_name("golden.json")
HEADS = ("sentence_classification_head", "pooling_classification_head", "attention_classification_head")
NEW_HEADS = {"pooler_activation_fn": "relu", "pooler_dropout": 0.3}
# These args are not determined by the name of the architecture.
KEPT = ("arch", "task", "decoder_chunk_size", "normalize_before", "no_affine_final_norm", "no_scale_embedding")
KEPT += ("adaptive_input_factor", "adaptive_softmax_factor", "truncation_length", "attention_activation_fn")


def of_model(change):
    """Return a change of a checkpoint that changes its tensors."""
    return lambda state: changed(state, change(state["model"]))


def without(*parts):
    """Remove the tensors whose names contain a part."""
    return of_model(lambda model: {key: x for key, x in model.items() if not any(part in key for part in parts)})


def filled(numbers):
    """Fill some tensors with other numbers: end of the name -> number."""

    def change(model):
        ends = {key: end for key in model for end in numbers if key.endswith(end)}
        return {key: torch.full_like(x, numbers[ends[key]]) if key in ends else x for key, x in model.items()}

    return of_model(change)


ORDERS = ("sorted", "one layer", "reversed")


def reordered(order):
    """Change the order of the tensors to one of neither branch."""

    def change(model):
        names = list(model)
        if order == "one layer":
            first = names.index(f"{mega.BODY}.layers.1.mega_layer.move.delta")
            names[first : first + 2] = names[first : first + 2][::-1]
        else:
            names.sort(reverse=order == "reversed")
        return {name: model[name] for name in names}

    return of_model(change)


early = of_model(lambda model: {key.replace("encoder.", "decoder.", 1): x for key, x in model.items()})


def only(*kept):
    """Remove the other args; tensors, the architecture or defaults determine them."""
    return lambda state: (
        state | {"args": Namespace(**{name: value for name, value in vars(state["args"]).items() if name in kept})}
    )


def nan_embedding(state):
    """Return a checkpoint with embedding and output weight of NaN; one of them has a single number in the file."""
    embedding = state["model"]["encoder.lm_head.weight"]
    copies = {"encoder.lm_head.weight": torch.full_like(embedding, torch.nan)}
    copies["encoder.sentence_encoder.embed_tokens.weight"] = torch.tensor(torch.nan).expand(embedding.shape)
    return changed(state, state["model"] | copies)


def negated(state):
    """Return a checkpoint whose output weight has the negative bit: it stores the negated values of the embedding."""
    weight = state["model"]["encoder.lm_head.weight"]
    return changed(state, state["model"] | {"encoder.lm_head.weight": torch._neg_view(-weight)})


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
SWIFT |= {"attention_dropout": 0.2}
TASKS = [("masked_lm", ("a", 3)), ("sentence_prediction", ("a", 3), ("b", 2)), ("sentence_prediction",)]
TASKS += [("commonsense_qa", ("a", 1)), ("sentence_ranking", ("a", 4)), ("sentence_ranking", ("x", 1))]
CUTOFFS = {"input_cutoff": "12, 20,32", "softmax_cutoff": [12, 21]}  # may end with the size of the vocabulary
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
ADAPTIVE = ("tied", "untied", "adaptive", "adaptive, untied", "adaptive input")
BATCHNORM = {"arch": "mega_lra_cifar10", "values": True, "norm_type": "batchnorm"}
# Name -> how to build the checkpoint, its fields, a change of it, and the options of the conversion.
VARIANTS = {
    **{
        f"head {name}": (luna.bert, {"heads": [(x, 3) for x in HEADS]} | NEW_HEADS, dict, {"head": name})
        for name in HEADS
    },
    "names of an early version": (luna.bert, {}, early, {}),
    "NaN and infinity": (
        luna.bert,
        {},
        filled({"layers.1.fc1.weight": torch.nan, "embed_tokens.weight": torch.inf}),
        {},
    ),
    "norms in between": (luna.bert, {}, filled({"layer_norm.weight": 0.5}), {"layer_norm": "plus-one"}),
    "half": (luna.bert, {}, half, {}),
    "half, to bfloat16": (luna.bert, {}, half, {"dtype": "bfloat16"}),
    "small norms, half": (luna.bert, {}, lambda x: half(filled({"layer_norm.weight": 2.0**-12})(x)), {}),  # not 1 + 0
    "sinusoids, half": (luna.lra23, {}, half, {}),
    "no sinusoids": (luna.lra23, {}, without("projected_positions", "_float_tensor"), {}),
    "no norm": (luna.lra23, {"encoder_normalize_before": False}, without("emb_layer_norm"), {}),
    # Lengths below 1 mean that nothing is truncated.
    **{f"truncation {x}": (mega.mega, {"truncation_length": x}, dict, {}) for x in (7, 1, 0, -1, None)},
    "another branch": (mega.mega, {}, dict, {"ema_convention": "flash"}),
    **{f"order {x}": (mega.mega, {}, reordered(x), {"ema_convention": "flash"}) for x in ORDERS},
    "numbers as flags": (mega.mega, {"prenorm": 1}, lambda x: changed(x, normalize_embedding=numpy.int64(0)), {}),
    "negated": (luna.bert, {}, negated, {}),
    # Equal NaN values are tied, also if the file has one number of one of them.
    "NaN in tied weights": (luna.bert, {"tied_lm": False}, nan_embedding, {}),
    "counters, half": (mega.mega, BATCHNORM | {"prenorm": True}, half, {"dtype": "float16"}),
    "no counters": (mega.mega, BATCHNORM, without("num_batches"), {}),
    "NaN in a dropped tensor": (mega.mega, {"rotary": True}, filled({"_float_tensor": torch.nan}), {}),
    "only a model": (mega.mega_image, {"positions": False, "hidden": 6}, lambda x: {"model": x["model"]}, {}),
    "no dropout of activations": (mega_lm.mega_lm, {"arch": "mega_lm", "activation_dropout": None}, dict, {}),
    **{f"only the architecture, {x}": (mega_lm.mega_lm, mega_lm.KINDS[x], only(*KEPT), {}) for x in ADAPTIVE},
    "layerdrop": (translation.luna_seq2seq, {}, lambda x: changed(x, decoder_layerdrop=0.1), {}),
    "only the architecture, Luna": (translation.luna_seq2seq, translation.SINUSOIDAL, only("arch"), {}),
    "only the architecture, Mega": (translation.mega_seq2seq, {}, only("arch"), {}),
    # Rates and frequencies are not rounded.
    "megalodon to bfloat16": (megalodon.folder, {"share_emb": True}, dict, {"dtype": "bfloat16"}),
    # Tensors take precedence over args.
    "other sizes": (
        mega.mega,
        {"norm_type": "rmsnorm", "z_dim": 7, "encoder_hidden_dim": 25},
        lambda x: changed(x, norm_type="scalenorm", max_positions=40),
        {},
    ),
    "other sharing": (
        translation.mega_seq2seq,
        {"decoder_vocab_size": 14},
        lambda x: changed(x, share_all_embeddings=True, decoder_z_dim=99),
        {},
    ),
}
CASES = {
    f"{build.__module__.rpartition('.')[2]} {build.__name__} {json.dumps(fields)}": (build, fields, dict, {})
    for build, variants in BUILDERS
    for fields in variants
} | VARIANTS


@functools.cache
def golden():
    return json.loads(FILE.read_text(encoding="utf-8"))


@functools.cache
def defaults(model_type):
    return AutoConfig.for_model(model_type).to_dict()


def build_checkpoint(build, fields, change, folder):
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
        return save(change(made), folder), None
    for parameter in made.parameters():  # parameters that are 1 are norm weights
        parameter.data = float(parameter.eq(1).all()) + 0.1 * numbers(parameter.shape)
    return save(change(translation.checkpoint(made)), folder), made


def digest(tensors):
    """Return the number of tensors, and a digest of their names, dtypes, shapes and values."""
    names = str([(name, str(x.dtype), list(x.shape)) for name, x in tensors.items()]).encode()
    inexact = ("projected_positions", "rope.freqs")  # the last bit of sines and powers depends on the machine
    values = [x.float().numpy().tobytes() for name, x in tensors.items() if not name.endswith(inexact)]
    return f"{len(tensors)} {hashlib.sha256(b''.join([names, *values])).hexdigest()[:12]}"


def record(build, fields, change, options, folder):
    """Return the results of a conversion."""
    (source, made), model = build_checkpoint(build, fields, change, folder), folder / "model"
    convert_checkpoint(source, model, **options)
    load(model)
    config, report = (
        json.loads((model / name).read_text(encoding="utf-8")) for name in ("config.json", "conversion_report.json")
    )
    config.pop("auto_map", None)  # the code of the model is not saved in tests
    report["files"] = [name for name in report["files"] if name != "luna_mega_code"]
    arrived = weights(model)
    check_arrived(detect(open_checkpoint(source))[2].tensors, arrived, report)
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
def test_values(tmp_path, case):
    """All tensors are converted, and all results equal the recorded ones, with args and fields in the same order."""
    assert json.dumps(record(*CASES[case], tmp_path)) == json.dumps(golden()[case])


@pytest.mark.parametrize("branch", ["main", "flash"])
def test_branches(tmp_path, branch):
    """The order of the tensors identifies the branch, since names and shapes are the same in both."""
    weight, damping = {"main": ("delta", "alpha"), "flash": ("alpha", "delta")}[branch]
    state = mega.mega(branch=branch)
    report = convert_checkpoint(save(state, tmp_path), tmp_path / "model")
    average = load(tmp_path / "model").mega.layers[1].mega_layer.ema_gate
    source = f"{mega.BODY}.layers.1.mega_layer.move"
    assert torch.equal(average.damping_factor, state["model"][f"{source}.{weight}"])
    assert torch.equal(average.decay_factor, state["model"][f"{source}.{damping}"])
    assert f"of the branch {branch}" in str(report)


@pytest.mark.parametrize("order", ORDERS)
def test_order_of_neither_branch(tmp_path, order):
    file = save(reordered(order)(mega.mega()), tmp_path)
    with pytest.raises(ConversionError, match=f"{file}: .*pass --ema-convention main or --ema-convention flash"):
        convert_checkpoint(file, None)
    with pytest.raises(ValueError, match="ema_convention must be one of auto, main, flash, got 'other'"):
        convert_checkpoint(file, None, ema_convention="other")


def test_dropout_of_the_head(tmp_path):
    """Dropout is applied before every layer of the head, with the dropout probability of the encoder."""
    convert_checkpoint(save(mega.mega(dropout=0.5, act_dropout=0.0), tmp_path), tmp_path / "model")
    head, inputs = load(tmp_path / "model").classifier.train(), []
    for linear in (head.dense, head.out_proj):
        linear.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    head(torch.ones(100, 16))
    assert set(inputs[0].unique().tolist()) == {0.0, 2.0}
    assert all(0.4 < (states == 0).float().mean() < 0.6 for states in inputs)


# Values of the norm weights, the option, and the convention or the error.
NORMS = [
    *((mean, "auto", "standard") for mean in (1.0, 0.65, 1.3)),
    *((mean, "auto", "plus-one") for mean in (0.0, 0.35, -0.3)),
    *((mean, "auto", None) for mean in (0.42, 0.5, 0.58, 1.5, -0.5, 40.0, float("nan"))),
    *((mean, choice, choice) for mean in (0.0, 0.5, 1.0) for choice in ("standard", "plus-one")),
]


@pytest.mark.parametrize(("mean", "choice", "expected"), NORMS)
def test_convention_of_layer_norms(mean, choice, expected):
    """The mean of the norm weights decides, NaN is ignored, and an option that contradicts it has a warning."""
    weights = [torch.full((3,), mean - 0.01), torch.tensor([mean + 0.01, torch.nan])]
    if expected is None:
        with pytest.raises(ConversionError, match="--layer-norm standard or --layer-norm plus-one"):
            decide_layer_norm(weights, choice)
        return
    decision = decide_layer_norm(weights, choice)
    assert decision.convention == expected and decision.mean == pytest.approx(mean, abs=0.01)
    contradicted = choice != "auto" and mean == {"standard": 0, "plus-one": 1}[choice]
    assert bool(decision.warning) is contradicted and (not contradicted or "contradicts" in decision.warning)


if __name__ == "__main__":
    with TemporaryDirectory() as root:
        table = {name: record(*CASES[name], Path(root, str(number))) for number, name in enumerate(CASES)}
    parts = {name: ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in table[name].items()) for name in table}
    rows = [f" {json.dumps(name)}: {{\n{part}\n }}" for name, part in parts.items()]
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
