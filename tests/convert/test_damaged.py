"""Damaged checkpoints of every format are refused in one line that names the fault, or give a valid model.

Errors do not depend on the file: `test_reader.py` damages its bytes, `test_hostile.py` has content that is untrusted.
"""

import functools
import random
from argparse import Namespace

import numpy
import pytest
import torch

from luna_mega.convert import ConversionError, convert_checkpoint
from luna_mega.errors import shown
from tests.convert import fuzz, luna
from tests.convert.folders import find_format
from tests.convert.mega import BODY, mega
from tests.convert.mega_lm import TAIL, mega_lm
from tests.convert.translation import SINUSOIDAL, checkpoint, luna_seq2seq
from tests.marks import diagonal

ENCODER, BANDS = "encoder.sentence_encoder", "decoder.embed_tokens.embeddings"
LUNA, LRA, MEGA, LM = f"{ENCODER}.layers.1", "encoder.encoder", f"{BODY}.layers.0.mega_layer", "decoder.layers.1"
KINDS = fuzz.BUILDERS | {
    "mega_lra, prenorm": lambda: mega(prenorm=True),
    "luna_seq2seq, sinusoids": lambda: checkpoint(luna_seq2seq(**SINUSOIDAL)),
    "mega_lm, untied": mega_lm,
    "luna_lra, three": lambda: luna.lra21(towers=3),
    "luna_lra, four": lambda: luna.lra21(towers=4),
    "luna_lra, shared": lambda: luna.lra21(layers=1),
    "luna_bert, layers": lambda: luna.bert(encoder_layers=None),
    "nothing": lambda: luna.checkpoint({}),
}
MISSING = {
    "luna_bert": [
        *(f"{LUNA}.self_attn.pc_proj.weight", f"{LUNA}.fc1.bias", f"{ENCODER}.embed_tokens.weight"),
        *(f"{ENCODER}.proj_emb_layer_norm.weight", "encoder.lm_head.weight", "encoder.lm_head.dense.bias"),
        *("classification_heads.topic.out_proj.bias", "classification_heads.topic.out_proj.weight"),
        f"{ENCODER}.projected_embeddings",
    ],
    "luna_lra, 2021": [
        *(f"{LRA}.{x}.weight" for x in ("emb_layer_norm", "embed_tokens", "embed_positions")),
        f"{LRA}.projected_embeddings",
    ],
    "luna_lra, 2023": [f"{LRA}.{x}" for x in ("embed_tokens.weight", "layers.0.self_attn.pk_proj.bias")]
    + [f"{LRA}.projected_embeddings"],
    "mega_lra, prenorm": [
        *(f"{BODY}.embed_tokens.embed.weight", f"{MEGA}.gamma", f"{MEGA}.move.delta", f"{MEGA}.move.omega"),
        *(f"{MEGA}.mx_proj.bias", f"{BODY}.layers.1.nffn.norm.norm.bias", f"{BODY}.final_norm.norm.weight"),
        *("classifier.0.0.weight", "sentence_projection_layer.weight"),
    ],
    "mega_lm, untied": [
        *("decoder.embed_tokens.weight", "decoder.output_projection.weight", "decoder.final_norm.norm.weight"),
    ],
    "mega_lm, adaptive": [
        *(f"{TAIL}.0.2.weight", f"{TAIL}.1.0.weight", f"{BANDS}.2.1.weight", f"{LM}.mega_layer.gamma"),
    ],
    "luna_seq2seq": [
        *("decoder.layers.1.encoder_attn.q_proj.weight", "decoder.output_projection.weight"),
        "encoder.projected_embeddings",
    ],
    "mega_seq2seq": ["decoder.output_projection.weight", "encoder.layers.1.mega_layer.gamma"],
    "mega_image": ["pos_embed", "head.weight"],
}
UNEXPECTED = {
    "luna_bert": [
        *(f"{ENCODER}.quant_noise.weight", f"{LUNA}.self_attn.k_proj.bias", f"{LUNA}.fc1.scale", f"a.{LUNA}.fc1.bias"),
        "x",
    ],
    "mega_lra": [f"{BODY}.version", f"{MEGA}.move.theta2", "classifier.0.0.scale", f"{BODY}.lm.weight"],
    "mega_lm, adaptive": ["decoder.embed_out"],
    "mega_image": ["cls_token"],
}
SHAPES = [
    ("luna_bert", f"{LUNA}.fc2.weight", (16, 23), "[16, 23], the model needs [16, 24]"),
    ("luna_bert", f"{ENCODER}.projected_embeddings", (6, 15), "[6, 15], the model needs [6, 16]"),
    ("luna_bert", f"{ENCODER}.embed_tokens.weight", (17,), "[17], expected [vocabulary, width]"),
    ("luna_bert", "encoder.lm_head.bias", (18,), "[18], the model needs [17]"),
    ("mega_lra", f"{MEGA}.move.alpha", (16, 4, 1), "[16, 4, 1], the model needs [32, 4, 1]"),
    ("mega_lra", f"{MEGA}.mx_proj.weight", (61, 16), "[61, 16], the model needs [62, 16]"),
    ("mega_lra", f"{MEGA}.rel_pos_bias.rel_pos_bias", (9,), "rel_pos_bias"),
    ("mega_lra", f"{MEGA}.v_proj.weight", (24,), "expected [value width, width]"),
    ("mega_lra", f"{BODY}.embed_tokens.embed.weight", (17, 8), "has shape [16], the model needs [8]"),
    ("mega_lra", "classifier.0.0.weight", (10, 48), "reads 48 features"),
    ("mega_lm, adaptive", f"{BANDS}.2.1.weight", (16, 3), "has shape [16, 3]"),
    ("mega_lm, adaptive", f"{TAIL}.1.2.weight", (12, 4), f"'{BANDS}.2.0.weight' are tied"),
    ("mega_lm, adaptive", f"{TAIL}.0.0.weight", (16, 8), f"'{BANDS}.1.1.weight' are tied"),
    ("luna_seq2seq", "decoder.adaptive_softmax.head.weight", (3,), "adaptive softmax"),
    ("luna_seq2seq", "decoder.project_in_dim.weight", (8, 4), "of another width"),
    ("luna_seq2seq", "decoder.embed_tokens.weight", (19, 9), "a width of 8, the decoder"),
    ("luna_seq2seq, sinusoids", "encoder.projected_positions", (5, 8), "is not the sinusoids of the original"),
    ("luna_lra, 2023", f"{LRA}.projected_positions", (6, 16), "projected_positions"),
    ("mega_seq2seq", "decoder.adaptive_softmax.head.weight", (2, 2), "adaptive softmax"),
    ("mega_image", "blocks.0.mega_layer.rel_pos_bias.rel_pos_bias", (19,), "19 entries, which belong to no square"),
    ("mega_image", "patch_embed.pemb.proj.weight", (16, 50), "no square patch"),
    ("mega_image", "pos_embed", (1, 3, 16), "pos_embed"),
]
ARGS = [
    ("luna_bert", {"encoder_layers": 3}, "args.encoder_layers = 3 but the file has 2"),
    ("luna_bert", {"encoder_attention_heads": 5}, "divisible by num_attention_heads"),
    ("luna_bert", {"encoder_attention_heads": None, "arch": "mine"}, "args.encoder_attention_heads is missing"),
    ("luna_lra, three", {}, "reads 48 features"),
    ("luna_lra, four", {}, "16 (one sequence) or 32 (a pair)"),
    ("luna_lra, 2021", {"tie_layer_weights": True}, "args.tie_layer_weights is set"),
    ("luna_lra, shared", {}, "args.encoder_layers = 2 but the file has 1"),
    ("luna_lra, 2021", {"arch": "mine", "encoder_attention_heads": None}, "args.encoder_attention_heads is missing"),
    ("mega_lra", {"attention_activation_fn": "gelu"}, "attention_activation must be one of softmax, laplace, relu2"),
    ("mega_lra", {"sen_rep_type": "first"}, "args.sen_rep_type = 'first'"),
    ("mega_lra, pixels", {"sen_rep_type": "cls"}, "sen_rep_type"),
    ("mega_lra", {"use_p": True}, "args.use_p"),
    ("mega_lra", {"encoder_layers": 3}, "args.encoder_layers = 3 but the file has 2 layers"),
    ("mega_lra", {"arch": "mine", "max_positions": None}, "args.max_positions is missing"),
    ("mega_lra", {"dropout": 1.0}, "dropout_prob must be in [0, 1), got 1.0"),
    ("mega_lm", {"no_affine_final_norm": False}, "missing: decoder.final_norm.norm.weight"),
    ("luna_seq2seq", {"decoder_layers": 3}, "args.decoder_layers = 3 but the file has 2"),
    ("luna_seq2seq", {"encoder_attention_heads": 3}, "divisible by num_attention_heads"),
    *(("luna_seq2seq", {"decoder_layerdrop": x}, "args.decoder_layerdrop = ") for x in (1e9, -0.1, "some", {})),
    ("mega_seq2seq", {"decoder_layers": 3}, "has 2 layers under 'decoder.layers'"),
    ("mega_image", {"drop": "much"}, "drop"),
]
# Values of args that the error shows.
FAULTS = {
    "luna_bert": {
        "arch": [{}, "mega\n# head"],
        "encoder_layerdrop": [1e9, -0.1, {}],
        "dropout": [-0.5, 1.5, "much", {}],
        "activation_fn": [{}, []],
        "encoder_attention_heads": [{}, 2.5, 3],
        "pooler_activation_fn": [{"a": 1}],
    },
    "luna_lra, 2021": {"layer_type": [{}, {"luna": 1}, 3], "sen_rep_type": [{}, "first"], "act_dropout": [2, -1]},
    "mega_lra": {
        "layer_type": [{}],
        "activation_fn": [{}],
        "attention_activation_fn": [{}, "gelu"],
        "chunk_size": [{}, "wide", 10**18, 4.0, True],
        "truncation_length": ["all", [1], 10**18, "1024", True],
        "classifier_layers": [{}, "two"],
        "dropout": [-0.1, 1.5, True, float("nan"), float("inf"), "0.1", 10**400],
        "encoder_embed_dim": [-16, 0, "16", True, 2**31, 16.0],
        "feature_dropout": ["yes"],
        "pixel_normalization": ["0.5", [0.5], [0.5, float("nan")]],
        "sen_rep_type": [["mp"], "m\np"],
    },
    "mega_lm, adaptive": {
        "hidden_dropout": [1.0],
        "adaptive_softmax_dropout": [7],
        "decoder_chunk_size": [{}],
        "adaptive_softmax_cutoff": ["12;20", "9" * 12, 12.5, [True], {}],
    },
}
MEANINGLESS_FLAGS = ["False", "no", [0], {"a"}, 2, -1, 0.0, float("nan"), {}, b"1"]
FLAGS = [
    *(("luna_lra, 2021", "use_p"), ("luna_lra, 2021", "tie_kv"), ("luna_bert", "untie_weights_luna")),
    *(("mega_lra", "normalize_embedding"), ("mega_lm, adaptive", "tie_adaptive_proj")),
    ("mega_lm, adaptive", "no_scale_embedding"),
]
SHOWN = [(kind, name, value) for kind, names in FAULTS.items() for name, values in names.items() for value in values]
SHOWN += [(*flag, value) for flag, value in diagonal(FLAGS, MEANINGLESS_FLAGS)]
NO_MEGA = [(key, dtype) for dtype, key in diagonal(
    [torch.complex64, torch.int64, torch.bool, torch.uint8],
    [f"{BODY}.layers.0.mega_layer.v_proj.weight", f"{BODY}.layers.1.nffn.norm.norm.bias"],
)]  # fmt: skip
OPTIONS = [
    ("luna_bert", {"head": "c_head"}, "topic"),
    ("luna_bert, layers", {"head": "c_head"}, "no classification head"),
    *((kind, {"head": "a"}, "--head a") for kind in ("luna_lra, 2021", "mega_lra", "mega_lm", "mega_image")),
    *((kind, {"layer_norm": "standard"}, "--layer-norm standard") for kind in ("mega_lra", "mega_lm", "mega_image")),
    *((kind, {"ema_convention": "main"}, "--ema-convention main") for kind in ("luna_lra, 2021", "mega_image")),
    *((kind, {"bpe": "."}, "LRA has no byte-pair encoding") for kind in ("luna_lra, 2021", "mega_lra")),
]
# Name of the architecture -> tensors of a model that is not supported, and a part of the error.
UNSUPPORTED = {
    "ema": (["delta", "alpha", "beta", "gamma", "omega"], "of none of the kinds that are known"),
    "layer": (["move.delta", "move.alpha"], "of none of the kinds that are known"),
    "megalodon_complex_ema": (["encoder.encoder.layers.0.mega_layer.move.theta"], "Megalodon"),
    "megalodon_real_ema": (
        ["encoder.encoder.layers.0.mega_layer.move.delta", "encoder.encoder.layers.0.mega_layer.h_proj.weight"],
        "Megalodon",
    ),
    "megalodon": (["layers.0.attn.cema.alpha", "layers.0.attn.timenorm.prior_mean"], "Megalodon"),
    "roberta_base": (["decoder.sentence_encoder.layers.0.self_attn.k_proj.weight"], "not a Luna or Mega checkpoint"),
    "transformer": (["encoder.layers.0.self_attn.k_proj.weight"], "not a Luna or Mega checkpoint"),
    "gpt": (["blocks.0.attn.qkv.weight"], "not a Luna or Mega checkpoint"),
    "flash_lra_imdb": (["encoder.encoder.layers.0.flash_layer.gamma"], "not a Luna or Mega checkpoint"),
}


def without(prefix):
    return lambda model: [model.pop(key) for key in list(model) if key.startswith(prefix)]


def moved_layer(model):
    for key in [key for key in model if ".layers.1." in key]:
        model[key.replace(".layers.1.", ".layers.2.")] = model.pop(key)


def prefixed(prefix):
    return lambda model: [model.update({f"{prefix}{key}": model.pop(key)}) for key in list(model)]


def nested(times, kind=list):
    value = kind()
    for _ in range(times):
        value = kind((value, value))
    return value


def loop():
    found = []
    found.append(found)
    return found


MANY, DEEP = "more than 100,000 values", "nested more than 50 deep"
# Values of an arg that are too large for the report or cannot be part of it.
ODD = {
    "lists that are shared": (nested(40), MANY),
    "tuples that are shared": (nested(40, tuple), MANY),
    "a dict of shared lists": ({"a": {"b": nested(40)}}, MANY),
    "many values": (list(range(100_001)), MANY),
    "a deep list": (functools.reduce(lambda inner, _: [inner], range(60), []), DEEP),
    "a large tensor": (torch.zeros(1).expand(1 << 40), MANY),
    "a long text often": (["x" * 100_000] * 101, MANY),
    "a large set": (set(range(100_001)), MANY),
    "many keys": (dict.fromkeys(range(50_001)), MANY),
    "a loop": (loop(), "'args' contains itself"),
}

# Format, change of the tensors, change of the args, options, and parts of the error.
CASES = [
    *((kind, without(key), {}, {}, ["missing", key]) for kind, keys in MISSING.items() for key in keys),
    *((kind, lambda x, key=key: x.update({key: torch.zeros(3)}), {}, {}, ["unexpected", key])
      for kind, keys in UNEXPECTED.items() for key in keys),
    *((kind, lambda x, key=key, shape=shape: x.update({key: torch.ones(shape)}), {}, {}, [named])
      for kind, key, shape, named in SHAPES),
    *(("mega_lra", lambda x, key=key, dtype=dtype: x.update({key: x[key].to(dtype)}), {}, {},
       [f"tensor {key!r} has dtype {str(dtype)[6:]}"]) for key, dtype in NO_MEGA),
    *((kind, None, args, {}, [named]) for kind, args, named in ARGS),
    *((kind, None, {name: value}, {}, [f"args.{name} = {shown(value)}"]) for kind, name, value in SHOWN),
    *(("luna_bert", None, {"odd": value}, {}, [named]) for value, named in ODD.values()),
    ("luna_bert", None, {"encoder_layers": "2\n3"}, {}, [r"encoder_layers = '2\n3' is not an integer"]),
    *((kind, None, {}, options, [named]) for kind, options, named in OPTIONS),
    *(("nothing", lambda x, keys=keys: x.update(dict.fromkeys(keys, torch.zeros(2))), {"arch": arch}, {},
       [named, f"'{arch}'"]) for arch, (keys, named) in UNSUPPORTED.items()),
    *(("luna_bert", prefixed(x), {}, {}, [f"all names start with '{x}'", f"save model.{x}state_dict()"])
      for x in ("module.", "_orig_mod.", "model.")),
    *((kind, prefixed(x), {}, {}, [f"all names start with '{x}'", "remove the prefix"])
      for kind, x in (("luna_bert", "net."), ("mega_lm, adaptive", "a.b."), ("mega_lra, prenorm", "encoders.x."))),
    ("mega_lra, prenorm", without(f"{BODY}.final_norm."), {}, {}, ["missing"]),
    ("mega_lra, prenorm", without(f"{BODY}.layers.0."), {}, {}, ["layers"]),
    ("mega_lra, prenorm", without(f"{MEGA}.norm."), {}, {}, ["incomplete"]),
    ("mega_lra, prenorm", without(f"{MEGA}.rel_pos_bias."), {}, {}, ["missing"]),
    ("mega_lra, prenorm", without("classifier."), {}, {}, ["classifier"]),
    ("mega_lm, adaptive", without(f"{BANDS}.1.0."), {}, {}, ["missing"]),
    ("luna_bert, layers", moved_layer, {}, {}, ["layers [0, 2]"]),
    ("nothing", lambda x: x.update({key: torch.ones(2) for key in ("patch_embed.proj.weight", "blocks.0.attn.qkv.w")}),
     {"arch": "deit"}, {}, ["a vision model without a Mega layer"]),
    ("luna_lra, 2023", without(f"{LRA}.emb_layer_norm.weight"), {"encoder_normalize_before": True}, {}, ["missing"]),
]  # fmt: skip


@functools.cache
def built(kind):
    return fuzz.build(KINDS[kind])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {ascii(case[-1][-1])[:60]}")
def test_faults_are_named(case):
    kind, change, args, options, named = case
    state = built(kind)
    model = dict(state["model"])
    if change is not None:
        change(model)
    args = {name: value for name, value in (vars(state["args"]) | args).items() if value is not None}
    with fuzz.in_memory(state | {"model": model, "args": Namespace(**args)}):
        with pytest.raises(ConversionError) as error:
            convert_checkpoint("checkpoint.pt", None, **options)
    message = str(error.value)
    assert all(word in message for word in named) and message.isprintable(), message
    assert options or "checkpoint.pt" in message


NAN, INFINITY = float("nan"), float("inf")
VALUES = (
    *(None, True, False, 0, 1, 2, 3, -1, -7, 10**9, 2**31, 10**18, -(10**18), 10**5000),
    *(0.0, 0.5, -0.1, 1.5, 1e9, 1e300, NAN, INFINITY, -INFINITY, 2 + 1j),
    *("", "False", "no", "0", "12", "12,20", "gelu", "mp", "cls", "\x1b[31m", "a\nb", "# head", "x" * 10000, "../../x"),
    *([], [0], [True], [0.5, 0.5], (), (1, 2), {}, {"a": 1}, {1, 2}, {"a"}, b"x", [[[1]]], ["x" * 500]),
    *(numpy.float64(0.1), numpy.int64(3), numpy.bool_(True), numpy.float32(NAN)),
    *(torch.tensor(3), torch.tensor(True), torch.zeros(2), torch.tensor(NAN), Namespace(a=1)),
)


def replaced(change):
    def damage(tensors, key):
        tensors[key] = change(tensors[key])

    return damage


def renamed(change):
    def damage(tensors, key):
        tensors[change(key)] = tensors.pop(key)

    return damage


def added(change):
    def damage(tensors, key):
        tensors[change(key)] = tensors[key]

    return damage


DTYPES = (torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.int8, torch.bool)
DTYPES += (torch.uint8, torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64)
DAMAGES = {
    **{f"as {dtype}": replaced(lambda tensor, dtype=dtype: tensor.to(dtype)) for dtype in DTYPES},
    "NaN": replaced(lambda tensor: torch.full(tensor.shape, NAN)),
    "infinity": replaced(lambda tensor: torch.full(tensor.shape, INFINITY)),
    "a number": replaced(lambda tensor: torch.tensor(1.0)),
    "nothing in it": replaced(lambda tensor: torch.zeros(0)),
    "no row": replaced(lambda tensor: torch.zeros(0, 16)),
    "a row more": replaced(lambda tensor: torch.cat([tensor, tensor]) if tensor.dim() else tensor[None]),
    "a dimension more": replaced(lambda tensor: tensor[None]),
    "flat": replaced(lambda tensor: tensor.flatten()),
    "turned": replaced(lambda tensor: tensor.t() if tensor.dim() == 2 else tensor),
    "one number everywhere": replaced(lambda tensor: torch.ones(()).expand(tensor.shape)),
    "sparse": replaced(lambda tensor: tensor.to_sparse() if tensor.dim() else tensor),
    "meta": replaced(lambda tensor: tensor.to("meta")),
    "conjugate": replaced(lambda tensor: tensor.to(torch.complex64).conj()),
    "negative": replaced(torch._neg_view),
    "a parameter": replaced(lambda tensor: torch.nn.Parameter(tensor) if tensor.is_floating_point() else tensor),
    "quantized": replaced(lambda tensor: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8)),
    "nested": replaced(lambda tensor: torch.nested.nested_tensor([tensor.flatten(), tensor.flatten()[:1]])),
    "a list": replaced(lambda tensor: tensor.flatten()[:3].tolist()),
    "None": replaced(lambda tensor: None),
    "text": replaced(lambda tensor: "weights"),
    "missing": lambda tensors, key: tensors.pop(key),
    "another name": renamed(lambda key: f"{key}.more"),
    "another layer": renamed(lambda key: key.replace(".0.", ".99.")),
    "one more": added(lambda key: f"more.{key}"),
    "one more layer": added(lambda key: key.replace(".1.", ".2.")),
    "a name of two lines": added(lambda key: f"{key}\n# head"),
    "a number as name": added(lambda key: 3),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("damaged", ["args", "weights"])
@pytest.mark.parametrize("kind", fuzz.BUILDERS)
@pytest.mark.parametrize("tries", [10, pytest.param(45, marks=pytest.mark.exhaustive)])
def test_random_damage(tmp_path, tries, kind, damaged):
    state, draw = fuzz.build(fuzz.BUILDERS[kind]), random.Random(7)
    assert fuzz.survives(state, tmp_path, kind)
    names = sorted({row.name for row in find_format(kind.partition(",")[0]).table} | vars(state["args"]).keys())
    kept = 0
    for _ in range(tries):
        if damaged == "args":
            found = {name: draw.choice(VALUES) for name in draw.sample(names, draw.choice((1, 1, 1, 2)))}
            other = fuzz.changed(state, **found)
        else:
            tensors = dict(state["model"])
            found = draw.choice(list(tensors)), draw.choice(list(DAMAGES))
            DAMAGES[found[1]](tensors, found[0])
            other = state | {"model": tensors}
        kept += fuzz.survives(other, tmp_path, found)
    assert kept < tries and (kept or tries == 10)
