"""Small synthetic Luna checkpoints in fairseq's layout, so that their tests need no external files."""

import argparse

import torch

WIDTH, FFN, PACKED, LAYERS, HEADS, POSITIONS, SYMBOLS = 16, 24, 6, 2, 4, 20, 12
VOCABULARY = 4 + SYMBOLS + 1


def linear(name, rows, columns=WIDTH, bias=True):
    tensors = {f"{name}.weight": torch.randn(rows, columns) * 0.3}
    return tensors | ({f"{name}.bias": torch.randn(rows) * 0.1} if bias else {})


def norm(name):
    return {f"{name}.weight": 1 + 0.1 * torch.randn(WIDTH), f"{name}.bias": torch.randn(WIDTH) * 0.1}


def layer(name, tied):
    projections = ["pq", "q", "out"] + (["pc", "c"] if tied else ["pk", "pv", "k", "v"])
    tensors = {}
    for projection in projections:
        tensors |= linear(f"{name}.self_attn.{projection}_proj", WIDTH)
    for part in ("self_attn_layer_norm", "self_atten_proj_layer_norm", "final_layer_norm"):
        tensors |= norm(f"{name}.{part}")
    return tensors | linear(f"{name}.fc1", FFN) | linear(f"{name}.fc2", WIDTH, FFN)


def encoder(name, tied, layers=LAYERS, embedding=None, positions=POSITIONS + 2):
    tensors = {f"{name}.projected_embeddings": torch.randn(PACKED, WIDTH)}
    tensors |= embedding or {f"{name}.embed_tokens.weight": torch.randn(VOCABULARY, WIDTH)}
    if positions:
        tensors[f"{name}.embed_positions.weight"] = torch.randn(positions, WIDTH)
    for index in range(layers):
        tensors |= layer(f"{name}.layers.{index}", tied)
    return tensors | norm(f"{name}.emb_layer_norm") | norm(f"{name}.proj_emb_layer_norm")


def checkpoint(model, /, **args):
    """Return the dict that fairseq saves, without entries that are needed only for training.

    Arguments that are None are omitted from the args.
    """
    args = {name: value for name, value in args.items() if value is not None}
    history = [{"num_updates": 500}, {"num_updates": 1000}]
    return {"args": argparse.Namespace(**args), "model": model, "optimizer_history": history}


SIZES = {"encoder_layers": LAYERS, "encoder_embed_dim": WIDTH, "encoder_ffn_embed_dim": FFN}
SIZES |= {"encoder_attention_heads": HEADS, "max_positions": POSITIONS}
BERT = SIZES | {"arch": "luna_base_tied_512", "task": "masked_lm", "projection_length": PACKED}
LRA = SIZES | {"task": "long_range_arena", "encoder_projection_length": PACKED}


def bert_head(name, classes=3, inner=WIDTH):
    source = f"classification_heads.{name}"
    tensors = linear(f"{source}.dense", inner) | linear(f"{source}.out_proj", classes, inner)
    if name == "pooling_classification_head":
        tensors |= linear(f"{source}.in_proj", WIDTH)
    if name == "attention_classification_head":
        for projection in ("q", "k", "v", "out"):
            tensors |= linear(f"{source}.attn.{projection}_proj", WIDTH)
        tensors |= norm(f"{source}.layernorm")
    return tensors


def bert(heads=(), tied=True, tied_lm=True, **args):
    """Return a luna_bert checkpoint; `heads` are pairs (name, classes)."""
    model = encoder("encoder.sentence_encoder", tied)
    embedding = model["encoder.sentence_encoder.embed_tokens.weight"]
    model["encoder.lm_head.weight"] = embedding if tied_lm else torch.randn_like(embedding)
    model["encoder.lm_head.bias"] = torch.randn(VOCABULARY)
    model |= linear("encoder.lm_head.dense", WIDTH) | norm("encoder.lm_head.layer_norm")
    for name, classes in heads:
        model |= bert_head(name, classes)
    return checkpoint(model, **BERT | args)


def lra21(arch="luna_lra_imdb", tied=False, layers=LAYERS, classes=2, towers=1, depth=1, **args):
    """Return a Luna LRA checkpoint of the 2021 code."""
    model = encoder("encoder.encoder", tied, layers) | linear("classifier.0", 10, towers * WIDTH)
    for index in range(1, depth):
        model |= linear(f"classifier.{index}", 10, 10)
    model |= linear("sentence_projection_layer", classes, 10, bias=False)
    return checkpoint(model, **LRA | {"arch": arch} | args)


def sinusoids(length, width):
    """Return fairseq's sinusoids, computed number by number."""
    half = width // 2
    rows = [[position / 10000 ** (k / (half - 1)) for k in range(half)] for position in range(length)]
    angles = torch.tensor(rows)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def lra23(arch="luna_lra_imdb", classes=2, towers=1, pre_logits=False, learned=False, image=False, **args):
    """Return a Luna LRA checkpoint of the 2023 code, which stores norm weights minus one."""
    name = "encoder.encoder"
    values = {f"{name}.embed_tokens.weight": torch.randn(WIDTH), f"{name}.embed_tokens.bias": torch.randn(WIDTH)}
    positions = (POSITIONS if image else POSITIONS + 2) if learned else 0
    model = encoder(name, tied=False, embedding=values if image else None, positions=positions)
    if not learned:
        model[f"{name}.projected_positions"] = sinusoids(PACKED, WIDTH)
        model[f"{name}.embed_positions._float_tensor"] = torch.full((1,), 1e30)
    if pre_logits:
        model |= linear("pre_logits.0", WIDTH, towers * WIDTH)
    features = WIDTH if pre_logits else towers * WIDTH
    model |= linear("sentence_projection_layer", classes, features, bias=False)
    kind = "image" if image else "text"
    found = LRA | {"arch": arch, "task": f"lra-{kind}", "input_type": kind, "encoder_learned_pos": learned}
    return checkpoint(minus_one(model), **found | {"stop_min_lr": -1} | args)


def is_norm(key):
    return "norm" in key and key.endswith(".weight")


def minus_one(model):
    """Return the same model with norm weights stored minus one, as in the 2023 code."""
    return {key: tensor - 1 if is_norm(key) else tensor for key, tensor in model.items()}


def bert23(**args):
    """Return a luna_bert checkpoint of the 2023 code."""
    state = bert(stop_min_lr=-1, **args)
    return state | {"model": minus_one(state["model"])}
