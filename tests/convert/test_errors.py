"""Checkpoints of every format with missing, unexpected or misshapen tensors, invalid args or inapplicable options."""

import functools
from argparse import Namespace

import pytest
import torch

from tests.convert import fuzz, luna
from tests.convert.mega import BODY, mega
from tests.convert.mega_lm import TAIL, mega_lm
from tests.convert.translation import SINUSOIDAL, checkpoint, luna_seq2seq
from tests.errors import command_error

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
    "luna_bert": [f"{ENCODER}.quant_noise.weight", f"{LUNA}.self_attn.k_proj.bias", "x"],
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
OPTIONS = [
    ("luna_bert", ["--head", "c_head"], "topic"),
    *((kind, ["--head", "a"], "--head a") for kind in ("luna_lra, 2021", "mega_lra", "mega_lm", "mega_image")),
    *((kind, ["--layer-norm", "standard"], "--layer-norm standard") for kind in ("mega_lra", "mega_lm", "mega_image")),
    *((kind, ["--ema-convention", "main"], "--ema-convention main") for kind in ("luna_lra, 2021", "mega_image")),
    *((kind, ["--bpe", "."], "LRA has no byte-pair encoding") for kind in ("luna_lra, 2021", "mega_lra")),
]


def without(prefix):
    return lambda model: [model.pop(key) for key in list(model) if key.startswith(prefix)]


def moved_layer(model):
    for key in [key for key in model if ".layers.1." in key]:
        model[key.replace(".layers.1.", ".layers.2.")] = model.pop(key)


# Format, change of the tensors, change of the args, options, and parts of the error.
CASES = [
    *((kind, without(key), {}, [], ["missing", key]) for kind, keys in MISSING.items() for key in keys),
    *((kind, lambda x, key=key: x.update({key: torch.zeros(3)}), {}, [], ["unexpected", key])
      for kind, keys in UNEXPECTED.items() for key in keys),
    *((kind, lambda x, key=key, shape=shape: x.update({key: torch.ones(shape)}), {}, [], [named])
      for kind, key, shape, named in SHAPES),
    *((kind, None, args, [], [named]) for kind, args, named in ARGS),
    *((kind, None, {}, options, [named]) for kind, options, named in OPTIONS),
    ("mega_lra, prenorm", without(f"{BODY}.final_norm."), {}, [], ["missing"]),
    ("mega_lra, prenorm", without(f"{BODY}.layers.0."), {}, [], ["layers"]),
    ("mega_lra, prenorm", without(f"{MEGA}.norm."), {}, [], ["incomplete"]),
    ("mega_lra, prenorm", without(f"{MEGA}.rel_pos_bias."), {}, [], ["missing"]),
    ("mega_lra, prenorm", without("classifier."), {}, [], ["classifier"]),
    ("mega_lm, adaptive", without(f"{BANDS}.1.0."), {}, [], ["missing"]),
    ("luna_bert, layers", moved_layer, {}, [], ["layers [0, 2]"]),
    ("luna_lra, 2023", without(f"{LRA}.emb_layer_norm.weight"), {"encoder_normalize_before": True}, [], ["missing"]),
]  # fmt: skip


@functools.cache
def built(kind):
    return fuzz.build(KINDS[kind])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[-1][-1]}")
def test_invalid_checkpoints(tmp_path, capsys, case):
    kind, change, args, options, named = case
    state = built(kind)
    state = state | {"model": dict(state["model"])}
    if change is not None:
        change(state["model"])
    args = {name: value for name, value in (vars(state["args"]) | args).items() if value is not None}
    file = fuzz.save(state | {"args": Namespace(**args)}, tmp_path)
    message = command_error(capsys, "convert", file, "--output", tmp_path / "output", *options)
    assert all(word in message for word in named), message
    assert options or str(file) in message
    assert list(tmp_path.iterdir()) == [file]
