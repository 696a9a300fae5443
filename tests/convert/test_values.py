"""Fields of the configuration that args, tensors and options determine, and what the report says about them.

A row of `VALUES` is a checkpoint and the result of its conversion. `test_contract.py` has the recorded results.
"""

from argparse import Namespace

import numpy
import pytest
import torch

from luna_mega.convert import ConversionError, convert_checkpoint
from luna_mega.convert.conventions import decide_layer_norm
from tests.convert.contract import changed, check_arrived, save, weights
from tests.convert.folders import half, load
from tests.convert.luna import bert, lra23
from tests.convert.mega import BODY, POSITIONS, mega, mega_image
from tests.convert.mega_lm import KINDS, mega_lm
from tests.convert.translation import SINUSOIDAL, checkpoint, luna_seq2seq, mega_seq2seq

HEADS = {
    "sentence_classification_head": "cls",
    "pooling_classification_head": "packed_max",
    "attention_classification_head": "packed_attention",
}
NEW_HEADS = {"pooler_activation_fn": "relu", "pooler_dropout": 0.3}
LAYER = "encoder.sentence_encoder.layers.1"
# These args are not determined by the name of the architecture.
KEPT = ("arch", "task", "decoder_chunk_size", "normalize_before", "no_affine_final_norm", "no_scale_embedding")
KEPT += ("adaptive_input_factor", "adaptive_softmax_factor", "truncation_length", "attention_activation_fn")


def without(state, *parts):
    """Return a checkpoint without the tensors whose names contain a part."""
    return changed(state, {key: x for key, x in state["model"].items() if not any(part in key for part in parts)})


def filled(state, numbers):
    """Return a checkpoint with other numbers in some tensors: name or its end -> number."""
    model = {key: x.clone() for key, x in state["model"].items()}
    for end, number in numbers.items():
        for key in [key for key in model if key.endswith(end)]:
            model[key].fill_(number)
    return changed(state, model)


def reordered(state, order):
    """Return a checkpoint whose tensors have an order of neither branch."""
    names = list(state["model"])
    if order == "one layer":
        first = names.index(f"{BODY}.layers.1.mega_layer.move.delta")
        names[first : first + 2] = names[first : first + 2][::-1]
    else:
        names.sort(reverse=order == "reversed")
    return changed(state, {name: state["model"][name] for name in names})


def only(state, *kept):
    """Return a checkpoint with only these args; tensors, the architecture or defaults determine the others."""
    return state | {"args": Namespace(**{name: value for name, value in vars(state["args"]).items() if name in kept})}


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


# Fields of a translation model without args.
DEFAULTS = {"scale_embedding": True, "tie_word_embeddings": True, "share_encoder_decoder_embeddings": True}
LUNA_DEFAULTS = {"num_attention_heads": 8, "decoder_pre_norm": False, "max_position_embeddings": 1024, "dropout": 0.1}
LUNA_DEFAULTS |= {"hidden_act": "relu", "embedding_norm": False, "dynamic_projection_length": True, "layerdrop": 0.0}
MEGA_DEFAULTS = {"truncation": 1024, "attention_activation": "softmax", "activation": "silu", "max_positions": 1024}

# Checkpoint, options, fields of the configuration, parts of the printed report (after a !: not in it).
VALUES = [
    *((lambda: bert(heads=[(x, 3) for x in HEADS], **NEW_HEADS), ("head", name),
       {"pooling": HEADS[name], "num_labels": 3, "classifier_activation": "relu", "classifier_dropout": 0.3}, [])
      for name in HEADS),
    (lambda: changed(bert(), {key.replace("encoder.", "decoder.", 1): x for key, x in bert()["model"].items()}), (), {},
     ["'decoder.' is today's 'encoder.'"]),
    (lambda: filled(bert(), {f"{LAYER}.fc1.weight": torch.nan, "embed_tokens.weight": torch.inf}), (),
     {"tie_word_embeddings": False}, ["NaN or Inf in 2 of", "luna.encoder.layers.1.fc1.weight"]),
    (lambda: filled(bert(), {"layer_norm.weight": 0.5}), ("layer_norm", "plus-one"), {}, ["plus-one", "!warning"]),
    (lambda: half(bert()), (), {"dtype": torch.float32}, ["float16 -> float32"]),
    (lambda: half(bert()), ("dtype", "bfloat16"), {"dtype": torch.bfloat16}, ["float16 -> bfloat16"]),
    (lambda: half(filled(bert(), {"layer_norm.weight": 2.0**-12})), (), {}, ["plus-one"]),  # 1 + 2**-12 is 1 in half
    (lambda: half(lra23()), (), {"position_embedding_type": "sinusoidal"}, []),
    (lambda: without(lra23(), "projected_positions", "_float_tensor"), (),
     {"position_embedding_type": "sinusoidal"}, []),
    (lambda: without(lra23(encoder_normalize_before=False), "emb_layer_norm"), (), {"embedding_norm": False}, []),
    *((lambda length=length: changed(mega(), truncation_length=length), (), {"truncation": expected}, [])
      for length, expected in ((7, 7), (1, 1), (0, None), (-1, None), (None, None))),
    (mega, ("ema_convention", "flash"), {"ema_shift": True},
     ["--ema-convention flash contradicts the order of the tensors"]),
    *((lambda order=order: reordered(mega(), order), ("ema_convention", "flash"), {"ema_shift": True}, ["!contradicts"])
      for order in ("sorted", "one layer", "reversed")),
    (lambda: mega(prenorm=1, embed_norm=numpy.int64(0)), (),
     {"normalize_before_mega": True, "embedding_norm": False}, []),
    (lambda: negated(bert()), (), {"tie_word_embeddings": True}, []),
    # Equal NaN values are tied, also if the file has one number of one of them.
    (lambda: nan_embedding(bert(tied_lm=False)), (), {"tie_word_embeddings": True}, ["NaN or Inf"]),
    (lambda: half(mega("mega_lra_cifar10", values=True, norm_type="batchnorm", prenorm=True)), ("dtype", "float16"),
     {"normalization_type": "batchnorm"}, []),
    (lambda: without(mega("mega_lra_cifar10", values=True, norm_type="batchnorm"), "num_batches"), (), {}, []),
    (lambda: filled(mega(rotary=True), {"_float_tensor": torch.nan}), (), {}, ["!NaN"]),
    (lambda: {"model": mega_image(positions=False, hidden=6)["model"]}, (),
     {"use_absolute_position_embeddings": False, "classifier_hidden_size": 6}, []),
    (lambda: mega_lm("mega_lm", activation_dropout=None), (), {"nffn_activation_dropout_prob": 0.0},
     ["args.activation_dropout is missing"]),
    *((lambda kind=kind: only(mega_lm(**KINDS[kind]), *KEPT), (),
       {"tie_word_embeddings": KINDS[kind].get("tied", False),
        "tie_adaptive_projections": KINDS[kind].get("tied_proj", False)}, ["!warning"])
      for kind in ("tied", "untied", "adaptive", "adaptive, untied", "adaptive input")),
    (lambda: only(checkpoint(luna_seq2seq(**SINUSOIDAL)), "arch"), (), DEFAULTS | LUNA_DEFAULTS, ["!warning"]),
    (lambda: only(checkpoint(mega_seq2seq()), "arch"), (), DEFAULTS | MEGA_DEFAULTS, ["!warning"]),
    # Tensors take precedence over args.
    (lambda: changed(mega(norm_type="rmsnorm"), norm_type="scalenorm", z_dim=7, encoder_hidden_dim=25,
                     max_positions=40), (),
     {"shared_representation_size": 6, "intermediate_size": 24, "max_positions": POSITIONS,
          "normalization_type": "rmsnorm"}, ["args.z_dim = 7 but the tensors have 6: using the tensors"]),
    (lambda: checkpoint(mega_seq2seq(decoder_vocab_size=14), share_all_embeddings=True, decoder_z_dim=99), (), {},
     ["args.share_all_embeddings = True but the tensors have False", "args.decoder_z_dim = 99 but the tensors have 6"]),
]  # fmt: skip


@pytest.mark.parametrize("case", VALUES, ids=lambda case: " ".join(map(str, (case[1], case[2], case[3])))[:70])
def test_values(tmp_path, case):
    build, option, fields, lines = case
    state = build()
    report = convert_checkpoint(save(state, tmp_path), tmp_path / "model", **dict([option] if option else []))
    model = load(tmp_path / "model")
    assert {name: getattr(model.config, name) for name in fields} == fields
    printed = str(report).replace(str(tmp_path), "")
    for line in lines:
        assert (line.removeprefix("!") in printed) is not line.startswith("!"), printed
    places = {"mapped": report.mapped, "dropped": report.dropped, "decisions": report.decisions}
    counters = {name for name, x in model.state_dict().items() if name.endswith("num_batches_tracked") and x == 0}
    arrived = {name: x for name, x in weights(tmp_path / "model").items() if name not in counters}
    tensors = {key.replace("decoder.", "encoder.", 1): x for key, x in state["model"].items()}
    check_arrived(tensors if "is today's" in printed else state["model"], arrived, places)


@pytest.mark.parametrize("branch", ["main", "flash"])
def test_branches(tmp_path, branch):
    """The order of the tensors identifies the branch, since names and shapes are the same in both."""
    weight, damping = {"main": ("delta", "alpha"), "flash": ("alpha", "delta")}[branch]
    state = mega(branch=branch)
    report = convert_checkpoint(save(state, tmp_path), tmp_path / "model")
    average = load(tmp_path / "model").mega.layers[1].mega_layer.ema_gate
    source = f"{BODY}.layers.1.mega_layer.move"
    assert torch.equal(average.damping_factor, state["model"][f"{source}.{weight}"])
    assert torch.equal(average.decay_factor, state["model"][f"{source}.{damping}"])
    assert f"of the branch {branch}" in str(report)


@pytest.mark.parametrize("order", ["sorted", "one layer", "reversed"])
def test_order_of_neither_branch(tmp_path, order):
    file = save(reordered(mega(), order), tmp_path)
    with pytest.raises(ConversionError, match=f"{file}: .*pass --ema-convention main or --ema-convention flash"):
        convert_checkpoint(file, None)


def test_dropout_of_the_head(tmp_path):
    """Dropout is applied before every layer of the head, with the dropout probability of the encoder."""
    convert_checkpoint(save(mega(dropout=0.5, act_dropout=0.0), tmp_path), tmp_path / "model")
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
