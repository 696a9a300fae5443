"""Damaged checkpoints of every kind give one line that names the fault and leave nothing, or they give a valid model.

Random damage of tensors and args comes first; the rows after it are messages that a random case would not pin down.
`test_reader.py` damages the bytes of a file and has untrusted content.
"""

import functools
import re
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy
import pytest
import torch
from hypothesis import given, strategies as st

from luna_mega.convert import ConversionError
from luna_mega.convert.evidence import cutoffs, flag, integer, language, mean_and_deviation, number, size, word
from luna_mega.convert.formats.format import read_model
from luna_mega.convert.formats.registry import detect
from luna_mega.convert.safe_load import Checkpoint
from luna_mega.errors import shown
from tests.convert import luna
from tests.convert.contract import KINDS, built, changed, convert
from tests.convert.folders import find_format
from tests.convert.mega import BODY
from tests.convert.mega_lm import KINDS as LANGUAGE_MODELS, TAIL, mega_lm

NAN, INFINITY = float("nan"), float("inf")
DTYPES = (torch.complex64, torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64)
# Kinds of damage -> name -> function of the tensors of a model and the name of one of them.
NAMES = {
    "missing": lambda model, key: model.pop(key),
    "renamed": lambda model, key: model.update({f"{key}.more": model.pop(key)}),
    "in another layer": lambda model, key: model.update({".99.".join(f"{key}.0.".split(".0.", 1)): model.pop(key)}),
    "twice": lambda model, key: model.update({f"{key}.more": model[key]}),
    "a name of two lines": lambda model, key: model.update({f"{key}\n# head": model[key]}),
}


def replaced(change):
    return lambda model, key: model.update({key: change(model[key])})


NEVER_SAVED = {
    **{f"{dtype}": replaced(lambda x, dtype=dtype: x.to(dtype)) for dtype in DTYPES},
    "conjugate": replaced(lambda x: x.to(torch.complex64).conj()),
    "sparse": replaced(lambda x: x[None].to_sparse()),
    "meta": replaced(lambda x: x.to("meta")),
    "quantized": replaced(lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8)),
    "nested": replaced(lambda x: torch.nested.nested_tensor([x, x[:3]]) if x.dim() else None),
    "jagged": replaced(lambda x: torch.nested.nested_tensor([x[:3], x], layout=torch.jagged) if x.dim() else None),
    "a list": replaced(lambda x: x.flatten()[:3].tolist()),
    "None": replaced(lambda x: None),
    "text": replaced(lambda x: "weights"),
}
SHAPES = {
    "one row more": replaced(lambda x: torch.cat([x, x[:1]]) if x.dim() else x[None]),
    "twice the rows": replaced(lambda x: torch.cat([x, x]) if x.dim() else x[None]),
    "one dimension more": replaced(lambda x: x[None]),
    "flat": replaced(lambda x: x.flatten()),
    "transposed": replaced(lambda x: x.mT.contiguous() if x.dim() > 1 else x),
    "a number": replaced(lambda x: torch.tensor(1.0)),
    "empty": replaced(lambda x: torch.zeros(0)),
    "no row": replaced(lambda x: torch.zeros(0, 16)),
}
CONTENTS = {
    "NaN": replaced(lambda x: torch.full(x.shape, NAN)),
    "infinity": replaced(lambda x: torch.full(x.shape, INFINITY)),
    "integers": replaced(lambda x: x.to(torch.int64)),
    "booleans": replaced(lambda x: x.to(torch.bool)),
    "one number": replaced(lambda x: torch.ones(()).expand(x.shape)),
    "float16": replaced(lambda x: x.half()),
    "float64": replaced(lambda x: x.double()),
    "negated": replaced(torch._neg_view),
    "a parameter": replaced(lambda x: torch.nn.Parameter(x) if x.is_floating_point() else x),
}
# The number of rows of these tensors is a size of the model.
COUNTED = ("projected_embeddings", "embed_positions.weight", "embed_tokens.weight", "embed_tokens.embed.weight")
COUNTED += ("sentence_projection_layer.weight",)
FITS_NOT = re.compile(
    r"tensor '\S+' (has shape \[|is missing)|(args\.\w+|model\.\w+) = .* \d|args and tensors .* at least \d|"
    r"(a width of|reads|has) \d+"
)


def is_dropped(key):
    """Return whether a tensor is a buffer that the model does not need."""
    return key.endswith(("version", "_float_tensor", "projected_positions", "num_batches_tracked"))


def damaged(changes):
    """Return the strategy of conversions of a random kind in which one of the changes is made to a random tensor.

    A member has the name of the change, the name and the value of the tensor, and the report or the error.
    """

    def convert_damaged(kind, index, name):
        model = dict(built(kind)["model"])
        key = list(model)[index % len(model)]
        tensor = model[key]
        changes[name](model, key)
        with TemporaryDirectory() as folder:
            return name, key, tensor, convert(changed(built(kind), model), Path(folder))

    names = st.sampled_from(list(changes))
    return st.builds(convert_damaged, kind=st.sampled_from(list(KINDS)), index=st.integers(0, 999), name=names)


@given(damaged(NAMES))
def test_missing_and_unexpected_tensors_are_named(case):
    _, key, _, found = case
    module = ".".join(key.split(".")[-3:-1])  # the other tensors of the module are unexpected without this one
    if not isinstance(found, str):
        assert is_dropped(key) or key.startswith("classification_heads.")
    else:
        assert key in found or module and module in found or "layers [" in found or "layers under" in found, found


@given(damaged(NEVER_SAVED))
@pytest.mark.filterwarnings("ignore")
def test_values_that_the_original_never_saves_are_named(case):
    """These are errors in any tensor, also in one that the model does not need."""
    _, key, _, found = case
    assert isinstance(found, str) and any(x in found for x in (key, "pickle", "GLOBAL", "not dense")), found


@given(damaged(SHAPES))
def test_wrong_shapes_are_named(case):
    """The error names the tensor, one that it does not fit, or both numbers; some rows change a size of the model."""
    change, key, tensor, found = case
    if isinstance(found, str):
        assert key in found or FITS_NOT.search(found), found
    else:
        SHAPES[change](model := {key: tensor}, key)
        assert is_dropped(key) or key.endswith(COUNTED) or model[key].shape == tensor.shape


@given(damaged(CONTENTS))
def test_wrong_contents_are_named(case):
    """NaN and Inf are reported with the names of the model, and integers raise an error; other values are converted."""
    change, key, tensor, found = case
    if isinstance(found, str):
        assert key in found or "NaN or Inf in 1 of" in found or "LayerNorm" in found, found
    elif change in ("NaN", "infinity") and tensor.is_floating_point() and not is_dropped(key):
        (warning,) = (line for line in found.warnings if line.startswith("NaN or Inf in "))
        targets = {row["target"] for row in found.mapped if row["source"] == key}
        assert targets & {*found.non_finite} and warning.endswith(", ".join(found.non_finite))
    elif change in ("integers", "booleans"):
        assert not tensor.is_floating_point() or is_dropped(key), key


INTEGERS = ["1024", [1], 10**18, 4.0, True, {}]
# Type of an argument -> values without a meaning.
INVALID = {
    flag: ["False", "no", [0], {"a"}, 2, -1, 0.0, NAN, {}, b"1"],
    integer: INTEGERS,
    size: [*INTEGERS, 0, -16, 2**31, "2\n3"],
    number: [True, NAN, INFINITY, "0.1", "much", 10**400, {}, [0.1]],
    word: [{}, [], 3, {"a": 1}, ["mp"], "m\np", "mega\n# head"],
    language: ["../../x", "/etc/x", "a\nb", "..\\x", ["en"], 3, "\x1b"],
    cutoffs: ["12;20", "9" * 12, 12.5, [True], {}],
    mean_and_deviation: ["0.5", [0.5], [0.5, NAN]],
}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_an_argument_without_a_meaning_is_named(kind, data):
    """Every argument has a row with its type, and a value of another type raises an error with name and value."""
    args, tensors = vars(built(kind)["args"]), built(kind)["model"]
    fmt, revision, *_ = detect(Checkpoint(Path("x"), "", "zip", args, tensors))
    assert fmt is find_format(kind.partition(",")[0])
    row = data.draw(st.sampled_from([row for row in fmt.table if row.kind in INVALID and row.revision is None]))
    value = data.draw(st.sampled_from(INVALID[row.kind]))
    with pytest.raises(ConversionError) as error:
        read_model(fmt, tensors, args | {row.name: value}, revision)
    assert f"{fmt.facts.container.settings}.{row.name} = {shown(value)}" in str(error.value)


VALUES = (
    *(None, True, False, 0, 1, 2, 3, -1, -7, 10**9, 2**31, 10**18, -(10**18), 10**5000),
    *(0.0, 0.5, -0.1, 1.5, 1e9, 1e300, NAN, INFINITY, -INFINITY, 2 + 1j),
    *("", "False", "no", "0", "12", "12,20", "gelu", "mp", "cls", "\x1b[31m", "a\nb", "# head", "x" * 10000, "../../x"),
    *([], [0], [True], [0.5, 0.5], (), (1, 2), {}, {"a": 1}, {1, 2}, {"a"}, b"x", [[[1]]], ["x" * 500]),
    *(numpy.float64(0.1), numpy.int64(3), numpy.bool_(True), numpy.float32(NAN)),
    *(torch.tensor(3), torch.tensor(True), torch.zeros(2), torch.tensor(NAN), Namespace(a=1)),
)


@given(data=st.data(), kind=st.sampled_from(list(KINDS)))
def test_random_arguments(data, kind):
    """Any value of any argument gives one line or a valid model."""
    state = built(kind)
    names = sorted(
        {row.name for row in find_format(kind.partition(",")[0]).table if row.name} | vars(state["args"]).keys()
    )
    found = data.draw(st.dictionaries(st.sampled_from(names), st.sampled_from(VALUES), min_size=1, max_size=2))
    with TemporaryDirectory() as folder:
        convert(changed(state, **found), Path(folder))


ENCODER, MEGA = "encoder.sentence_encoder", f"{BODY}.layers.0.mega_layer"
LONG = "long_" * 1000
NOTHING = functools.partial(luna.checkpoint, {}, arch="mine")
TIED = functools.partial(mega_lm, **LANGUAGE_MODELS["tied"])
# Kind or function that builds a checkpoint, tensors with another shape (None: missing), a part of the error.
TENSORS = [
    ("luna_bert", {"x.layers.7.self_attn.pq_proj.bias": (3,)}, "has layers in 'encoder.sentence_encoder.layers', 'x."),
    ("luna_bert", {f"{ENCODER}.layers.": None}, "a Luna checkpoint, but of none of the kinds that are known"),
    ("luna_bert", {"long_" * 1000: (1,)}, "unexpected: long_long_"),
    ("luna_lra, 2021", {"encoder.encoder.emb_layer_norm.": None}, "missing: encoder.encoder.emb_layer_norm.weight"),
    ("luna_seq2seq", {"decoder.project_in_dim.weight": (8, 4)}, "of another width"),
    ("luna_seq2seq", {"decoder.embed_tokens.weight": (19, 9)}, "a width of 8, the decoder"),
    ("luna_seq2seq", {"encoder.projected_positions": (5, 8)}, "is not the sinusoids of the original"),
    ("mega_lra", {"classifier.0.0.weight": (10, 48)}, "reads 48 features"),
    ("mega_lra", {f"{MEGA}.norm.": None}, f"there is no tensor '{MEGA}.norm.norm.*'; the file is incomplete"),
    ("mega_lra", {f"{BODY}.layers.0.": None}, "layers [1] of 'encoder.encoder.layers' are not 0 to n-1"),
    ("mega_lra", {"classifier.": None}, "classifier"),
    ("mega_lm, adaptive", {f"{TAIL}.0.0.weight": (16, 8)}, "'decoder.embed_tokens.embeddings.1.1.weight' are tied"),
    ("mega_seq2seq", {"decoder.adaptive_softmax.head.weight": (2, 2)}, "adaptive softmax"),
    ("mega_seq2seq", {"decoder.embed_norm.norm.weight": (8,)}, "encoder and decoder differ in embedding_norm (False"),
    ("mega_image", {"patch_embed.": None}, "of none of the kinds that are known"),
    ("mega_image", {"blocks.0.mega_layer.rel_pos_bias.rel_pos_bias": (19,)}, "19 entries, which belong to no square"),
    ("mega_image", {"patch_embed.pemb.proj.weight": (16, 50)}, "has shape [16, 50], which no square patch has"),
    (NOTHING, {"patch_embed.proj.weight": (2,), "blocks.0.attn.qkv.w": (2,)}, "a vision model without a Mega layer"),
    # Architectures that are not supported.
    *((NOTHING, {name: (2,)}, "of none of the kinds that are known") for name in ("gamma", "move.delta")),
    *(
        (NOTHING, dict.fromkeys(names, (2,)), "a Megalodon-line checkpoint")
        for names in ([f"{MEGA}.move.theta"], [f"{MEGA}.move.delta", f"{MEGA}.h_proj.weight"])
    ),
    (NOTHING, {"encoder.layers.0.self_attn.k_proj.weight": (2,)}, "not a Luna or Mega checkpoint"),
]
# Kind or function, args (None: missing), a part of the error.
ARGS = [
    ("luna_bert", {"encoder_layers": 3}, "args.encoder_layers = 3 but the file has 2"),
    ("luna_bert", {"encoder_attention_heads": 5}, "divisible by num_attention_heads"),
    ("luna_bert", {"dropout": 1.5}, "args.dropout = 1.5: dropout must be in [0, 1)"),
    ("luna_bert", {"activation_fn": "swish"}, "args.activation_fn = 'swish' is not one of gelu, gelu_accurate"),
    (functools.partial(luna.lra21, towers=3), {}, "reads 48 features"),
    (functools.partial(luna.lra21, towers=4), {}, "16 (one sequence) or 32 (a pair)"),
    ("luna_lra, 2021", {"tie_layer_weights": True}, "args.tie_layer_weights is set"),
    ("luna_lra, 2021", {"sen_rep_type": "first"}, "args.sen_rep_type = 'first'"),
    ("luna_lra, 2021", {"arch": "mine", "encoder_attention_heads": None}, "args.encoder_attention_heads is missing"),
    ("luna_seq2seq", {"decoder_layerdrop": 1}, "args.decoder_layerdrop = 1"),
    ("mega_lra", {"attention_activation_fn": "gelu"}, "attention_activation must be one of softmax, laplace, relu2"),
    ("mega_lra, pixels", {"sen_rep_type": "cls"}, "sen_rep_type"),
    ("mega_lra", {"use_p": True}, "args.use_p is set, but Mega has no packed sequence"),
    ("mega_lra", {"arch": "mine", "max_positions": None}, "args.max_positions is missing"),
    (TIED, {"no_affine_final_norm": False}, "missing: decoder.final_norm.norm.weight"),
    ("mega_seq2seq", {"source_lang": "../x"}, "is not the name of a language"),
    ("luna_seq2seq", {"encoder_learned_pos": True}, "tensor 'encoder.embed_positions.weight' is missing"),
    ("mega_seq2seq", {"decoder_layers": 3}, "has 2 layers under 'decoder.layers'"),
    # Values in messages are cut.
    (NOTHING, {"arch": f"\x1b{LONG}"}, "long_long_"),
    (functools.partial(luna.bert, [(f"{{layer}}{LONG}", 2)]), {}, "long_long_"),
]
# Kind, options, a part of the error.
OPTIONS = [
    ("luna_bert", {"head": "c_head"}, "--head c_head: the file has topic"),
    (luna.bert, {"head": "c_head"}, "--head c_head: the file has no classification head"),
    ("mega_lm", {"head": "a"}, "--head a: only luna_bert files have named heads"),
    *((kind, {"layer_norm": "plus-one"}, "--layer-norm plus-one") for kind in ("mega_lra", "mega_image", "megalodon")),
    *((kind, {"ema_convention": "main"}, "--ema-convention main") for kind in ("luna_bert", "mega_image", "megalodon")),
    *((kind, {"bpe": "x"}, "--bpe x: LRA has no byte-pair encoding") for kind in ("luna_lra, 2021", "mega_lra")),
    *(
        (kind, {"bpe": "x"}, "--bpe x: there is no dictionary next to")
        for kind in ("luna_bert", "mega_lm", "mega_seq2seq")
    ),
    ("mega_image", {"bpe": "x"}, "--bpe x: the model has no tokenizer"),
    ("megalodon", {"bpe": "x"}, "x: no such file; pass the SentencePiece model"),
    ("megalodon", {"dictionaries": ["x"]}, "--dict x: the original has no dictionary; pass the SentencePiece model"),
]
# Prefix of all names -> kind, and a part of the error.
PREFIXES = {
    "module.": ("luna_bert", "save model.module.state_dict()"),
    "_orig_mod.": ("mega_lra", "save model._orig_mod.state_dict()"),
    "model.": ("megalodon", "save model.model.state_dict()"),
    "a.b.": ("mega_lm, adaptive", "remove the prefix"),
    "encoders.x.": ("mega_lra", "remove the prefix"),
}


def loop():
    found = []
    found.append(found)
    return found


MANY, DEEP = "more than 100,000 values", "nested more than 50 deep"
# Values of an arg that are too large for the report or cannot be part of it.
TOO_LARGE = [
    (functools.reduce(lambda inner, _: [inner, inner], range(40), []), MANY),
    (list(range(100_001)), MANY),
    (functools.reduce(lambda inner, _: [inner], range(60), []), DEEP),
    (torch.zeros(1).expand(1 << 40), MANY),
    (["x" * 100_000] * 101, MANY),
    (set(range(100_001)), MANY),
    (loop(), "'args' contains itself"),
]
# Kind, tensors, args, options, part of the error.
FAULTS = [
    *((kind, tensors, {}, {}, named) for kind, tensors, named in TENSORS),
    *((kind, {}, args, {}, named) for kind, args, named in ARGS),
    *((kind, {}, {}, options, named) for kind, options, named in OPTIONS),
    *(("luna_bert", {}, {"odd": value}, {}, named) for value, named in TOO_LARGE),
]


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: ascii(case[-1])[:60])
def test_faults_are_named(tmp_path, case):
    kind, tensors, args, options, named = case
    state = built(kind) if isinstance(kind, str) else kind()
    removed = tuple(key for key, shape in tensors.items() if shape is None)
    model = {key: x for key, x in state["model"].items() if not removed or not key.startswith(removed)}
    model |= {key: torch.ones(shape) for key, shape in tensors.items() if shape is not None}
    args = {name: value for name, value in (vars(state["args"]) | args).items() if value is not None}
    found = convert(state | {"args": Namespace(**args), "model": model}, tmp_path, **options)
    assert isinstance(found, str) and named in found and len(found) < 800, found
    assert options or "checkpoint" in found  # the name of the file


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes_of_all_names(tmp_path, prefix):
    kind, named = PREFIXES[prefix]
    found = convert(changed(built(kind), {f"{prefix}{key}": x for key, x in built(kind)["model"].items()}), tmp_path)
    assert f"all names start with '{prefix}'" in found and named in found, found
