"""Small Megalodon folders in the original's layout, and SentencePiece models."""

import contextlib
import json
import re
import struct

import torch

MODEL = {"num_layers": 2, "model_dim": 16, "z_dim": 8, "value_dim": 24, "num_heads": 2, "ffn_hidden_dim": 12}
MODEL |= {"cema_ndim": 3, "chunk_size": 8, "vocab_size": -1, "output_size": -1, "norm_num_groups": 4}
PIECES = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("\u2581a", -0.0, 1), ("bc", -1.0, 1)]
PIECES += [(letter, -2.0 - index, 1) for index, letter in enumerate("\u2581abc")]
# Dimension along which the original shards a tensor -> names of the tensors. Other tensors are replicated.
SPLIT = {
    0: re.compile(r".*(\.(wz|wv|wr|wh1|fc1|fc3)\.(weight|bias)|cema\.\w+|(timenorm|final_norm)\.(?!prior_count)\w+)"),
    1: re.compile(r"embed\.weight|.*(output\.output\.weight|wh2\.weight|fc2\.weight|mega\.gamma|mega\.beta)"),
}


def state(vocabulary=9, **settings):
    """Return the tensors of a model under their original names."""
    c = MODEL | settings
    d, z, v, f, n, groups = (c[name] for name in
        ("model_dim", "z_dim", "value_dim", "ffn_hidden_dim", "cema_ndim", "norm_num_groups"))  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def norm(prefix):
        shapes = {"weight": (d,), "bias": (d,), "prior_mean": (groups,), "prior_logv": (groups,)}
        tensors = {f"{prefix}.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        return tensors | {f"{prefix}.prior_count": torch.zeros((), dtype=torch.int64)}

    shapes = {"embed.weight": (vocabulary, d)}
    layer = {"mega.gamma": (2, z), "mega.beta": (2, z), "mega.cema.alpha": (d, n, 1), "mega.cema.delta": (d, n, 1)}
    layer |= {"mega.cema.theta": (d, 1, 1), "mega.cema.gamma": (d, n, 2), "mega.cema.omega": (d, 1)}
    for name, rows in (("wz", z), ("wv", v), ("wr", v), ("wh1", d)):
        layer |= {f"mega.{name}.weight": (rows, d), f"mega.{name}.bias": (rows,)}
    layer |= {"mega.wh2.weight": (d, v), "nffn.fc1.weight": (f, d), "nffn.fc2.weight": (d, f)}
    if c.get("norm_affine", True):
        layer |= {"mega.rmsnorm.weight": (d,), "nffn.norm.weight": (d,), "nffn.norm.bias": (d,)}
    layer |= {"nffn.fc3.weight": (f, d)} if c.get("swiglu") else {}
    layer |= {"nffn.alpha": (d,)} if c.get("rescale_nffn") else {}
    shapes |= {f"layers.{i}.{name}": shape for i in range(c["num_layers"]) for name, shape in layer.items()}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for index in range(c["num_layers"]):
        tensors |= norm(f"layers.{index}.mega.timenorm")
    tensors |= norm("output.final_norm")
    pairs = z // c["num_heads"] // 2
    tensors["rope.freqs"] = c.get("rope_base", 1e4) ** -(torch.arange(pairs) / pairs)
    rows = c["output_size"] if c["output_size"] > 0 else vocabulary
    tied = c.get("share_emb")
    tensors["output.output.weight"] = tensors["embed.weight"] if tied else torch.randn(rows, d, generator=generator)
    return tensors


def part(name, tensor, rank, ranks):
    """Return the part of a tensor that a rank saves."""
    for dimension, names in SPLIT.items():
        if names.fullmatch(name):
            return tensor.chunk(ranks, dimension)[rank].clone()
    return tensor


def pieces(*, kinds=PIECES, model_type=2, byte_fallback=0, normalizer=b""):
    """Return the bytes of a SentencePiece model; `normalizer` contains its NormalizerSpec."""

    def field(number, content):
        return bytes([number << 3 | 2, len(content)]) + content

    content = b""
    for text, score, kind in kinds:
        content += field(1, field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + bytes([0x18, kind]))
    trainer = bytes([0x18, model_type, 0x98, 0x02, byte_fallback])
    return content + field(2, trainer) + field(3, normalizer)


def folder(path, *, tensors=None, ranks=1, dtype="fp32", extra=0, tokenizer="tokenizer.model", **settings):
    """Write a folder in the format that the original loader reads."""
    path.mkdir(parents=True)
    tensors = state(len(PIECES) + extra, **settings) if tensors is None else tensors
    if dtype == "bf16":
        tensors = {name: x.bfloat16() if x.is_floating_point() else x for name, x in tensors.items()}
    for rank in range(ranks):
        name = f"consolidated.{rank:02d}.pth" if ranks > 1 else "consolidated.pth"
        shard = {key: part(key, x, rank, ranks) if ranks > 1 else x for key, x in tensors.items()}
        with contextlib.chdir(path):  # torch stores no name if the path has non-ASCII characters
            torch.save(shard, name)
    named = {"path": tokenizer, "additional_vocab_size": extra, "data_tokenized": False}
    (path / "config.json").write_text(json.dumps({"model": MODEL | settings, "tokenizer": named}), encoding="utf-8")
    (path / "consolidate_config.json").write_text(
        json.dumps({"model_parallel_size": ranks, "dtype": dtype}), encoding="utf-8"
    )
    (path / "tokenizer.model").write_bytes(pieces())
    return path
