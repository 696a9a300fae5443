"""Small Mega checkpoints in fairseq's layout; the tensors are in the original's registration order."""

from types import SimpleNamespace

import torch

from tests.convert.luna import checkpoint, linear

WIDTH, VALUES, SHARED, EMA, FFN, LAYERS, POSITIONS, HIDDEN, SYMBOLS = 16, 24, 6, 4, 20, 2, 30, 10, 12
VOCABULARY = 4 + SYMBOLS + 1
FIELDS = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": VALUES}
FIELDS |= {"shared_representation_size": SHARED, "ema_projection_size": EMA, "nffn_hidden_size": FFN}
BODY = "encoder.encoder"
ORDER = {"main": ("delta", "alpha"), "flash": ("alpha", "delta")}


def norm(name, kind):
    weight = {f"{name}.norm.weight": 1 + 0.1 * torch.randn(WIDTH)}
    if kind == "scalenorm":
        return {f"{name}.norm.scalar": torch.tensor([1.1])}
    if kind == "rmsnorm":
        return weight
    tensors = weight | {f"{name}.norm.bias": torch.randn(WIDTH) * 0.1}
    if kind == "layernorm":
        return tensors
    return tensors | {
        f"{name}.norm.running_mean": torch.randn(WIDTH),
        f"{name}.norm.running_var": 1 + torch.rand(WIDTH),
        f"{name}.norm.num_batches_tracked": torch.tensor(70001),  # float16 cannot represent this number
    }


def layer(name, branch, norm_type, bias, ffn=True, rows=2 * WIDTH):
    attention = f"{name}.mega_layer"
    tensors = {f"{attention}.gamma": torch.randn(2, SHARED), f"{attention}.beta": torch.randn(2, SHARED)}
    tensors |= norm(f"{attention}.norm", norm_type)
    for parameter in (*ORDER[branch], "beta"):
        tensors[f"{attention}.move.{parameter}"] = torch.randn(rows, EMA, 1)
    tensors[f"{attention}.move.gamma"] = torch.randn(rows, EMA)
    tensors[f"{attention}.move.omega"] = torch.randn(WIDTH)
    tensors |= linear(f"{attention}.v_proj", VALUES, WIDTH)
    tensors |= linear(f"{attention}.mx_proj", SHARED + VALUES + 2 * WIDTH, WIDTH)
    tensors |= linear(f"{attention}.h_proj", WIDTH, VALUES)
    tensors |= {f"{attention}.rel_pos_bias.{part}": tensor for part, tensor in bias.items()}
    if not ffn:
        return tensors
    tensors |= norm(f"{name}.nffn.norm", norm_type)
    return tensors | linear(f"{name}.nffn.fc1", FFN, WIDTH) | linear(f"{name}.nffn.fc2", WIDTH, FFN)


def relative_bias(rotary, chunk):
    if rotary:
        return {"alpha": torch.randn(1, SHARED), "beta": torch.randn(1, SHARED), "_float_tensor": torch.zeros(1)}
    return {"rel_pos_bias": torch.randn(2 * (chunk if (chunk or 0) > 0 else POSITIONS) - 1)}


# Fields that determine the tensors of a text model; other fields are args.
SETTINGS = {"values": False, "norm_type": "layernorm", "prenorm": False, "embed_norm": False, "rotary": False}
SETTINGS |= {"chunk": -1, "ffn": True, "classes": 2, "towers": 1, "depth": 1}


def settings(defaults, args):
    """Return the settings, which are removed from the args."""
    return SimpleNamespace(**{name: args.pop(name, value) for name, value in defaults.items()})


def body(name, s, branch, rows):
    """Return the norms and layers of a stack."""
    model = norm(f"{name}.embed_norm", s.norm_type) if s.embed_norm else {}
    for index in range(LAYERS):
        model |= layer(f"{name}.layers.{index}", branch, s.norm_type, relative_bias(s.rotary, s.chunk), s.ffn, rows)
    return model | (norm(f"{name}.final_norm", s.norm_type) if s.prenorm else {})


def sizes(side, s):
    """Return the args that encoders and decoders have."""
    found = {"layers": LAYERS, "embed_dim": WIDTH, "hidden_dim": VALUES, "ffn_embed_dim": FFN if s.ffn else 0}
    args = {f"{side}_{name}": value for name, value in found.items()}
    return args | {"rel_pos_bias": "rotary" if s.rotary else "simple", "normalize_embedding": s.embed_norm}


def mega(arch="mega_lra_imdb", branch="main", **args):
    """Return an LRA checkpoint or, for such an `arch`, a raw speech checkpoint."""
    s = settings(SETTINGS, args)
    model = {f"{BODY}.embed_tokens.embed.weight": torch.randn(VOCABULARY, WIDTH)}
    if s.values:
        model = {f"{BODY}.embed_tokens.{part}": torch.randn(WIDTH) for part in ("weight", "bias")}
    model |= body(BODY, s, branch, 2 * WIDTH)
    for index in range(s.depth):
        model |= linear(f"classifier.{index}.0", HIDDEN, HIDDEN if index else s.towers * WIDTH)
    features = HIDDEN if s.depth else s.towers * WIDTH
    model |= linear("sentence_projection_layer", s.classes, features, bias=False)
    kind, speech = "image" if s.values else "text", arch.startswith("mega_sc")
    found = {"arch": arch, "task": "speech_commands" if speech else f"lra-{kind}"} | sizes("encoder", s)
    found |= {"input_type": None if speech else kind, "z_dim": SHARED, "n_dim": EMA, "chunk_size": s.chunk}
    found |= {"max_positions": POSITIONS, "norm_type": s.norm_type, "classifier_layers": s.depth}
    return checkpoint(model, **found | {"encoder_normalize_before": s.prenorm} | args)


PATCH, SIDE, CLASSES = 4, 3, 5


def mega_image(norm_type="layernorm", *, linear_patches=False, positions=True, hidden=None, **args):
    """Return a checkpoint in the format of the training script."""
    patches = SIDE * SIDE
    model = {"pos_embed": torch.randn(1, patches, WIDTH)} if positions else {}
    weight = torch.randn(WIDTH, 3, PATCH, PATCH)
    model["patch_embed.pemb.proj.weight"] = weight.flatten(1) if linear_patches else weight
    model["patch_embed.pemb.proj.bias"] = torch.randn(WIDTH)
    for index in range(LAYERS):
        bias = {"rel_pos_bias": torch.randn(2 * patches - 1)}
        model |= layer(f"blocks.{index}", "flash", norm_type, bias)
    model |= norm("final_norm", norm_type) | linear("out_proj.fc", WIDTH, WIDTH)
    model |= linear("pre_logits.fc", hidden, WIDTH) if hidden else {}
    model |= linear("head", CLASSES, hidden or WIDTH)
    found = {"model": "mega_mini", "input_size": SIDE * PATCH, "nb_classes": CLASSES, "norm_type": norm_type}
    found |= {"patch_impl": "linear" if linear_patches else "conv", "no_pos_emb": not positions}
    found |= {"representation_size": hidden, "drop": 0.0, "drop_path": 0.1, "data_path": "/home/somebody/imagenet"}
    state = {"model": model, "model_ema": None, "epoch": 3, "steps": 120, "scaler": {}}
    return state | {"args": checkpoint(model, **found | args)["args"]}


IMAGES = [
    {},
    {"linear_patches": True, "hidden": 6},
    {"norm_type": "batchnorm", "positions": False},
    {"norm_type": "scalenorm", "drop_path": 0.4},
]
