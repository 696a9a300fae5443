"""Writer of Megalodon's format."""

import copy
import json
from pathlib import Path

import torch
from tqdm import tqdm

from luna_mega import MegalodonConfig
from luna_mega.convert.dictionaries import PIECES_FILE
from luna_mega.convert.evidence import ModelSpec, Tensors
from luna_mega.convert.export.writer import Args, Export, Writer, check_disk, register_writer
from luna_mega.convert.formats import _megalodon as layout
from luna_mega.convert.formats.megalodon import USUAL_BASE, Megalodon
from luna_mega.convert.tensors import dtype_name
from luna_mega.convert.tokenizers.sentencepiece import parse_pieces
from luna_mega.errors import ConversionError
from luna_mega.hub.output import complete_folder


@register_writer(Megalodon)
class MegalodonWriter(Writer):
    """Writer of Megalodon folders."""

    is_folder = True
    revisions = ("release",)
    kept = ("efficient_attn", "layerwise_ckpt", layout.TOKENIZER, layout.SHARDS)
    training_fields = ("dropout_prob", "hidden_dropout_prob", "attention_probs_dropout_prob", "initializer")

    def args(self, spec: ModelSpec, args: Args) -> Args:
        config = spec.config
        return args | {
            "output_size": -1 if config.scores == config.vocab_size else config.scores,
            "rope_base": None if config.rope_theta == USUAL_BASE else config.rope_theta,
            "efficient_attn": None,
            "layerwise_ckpt": False,
            layout.TOKENIZER: layout.tokenizer_settings({}),
            layout.SHARDS: 1,
        }

    def unused(self, spec: ModelSpec) -> set[str]:
        # The original has no padding, and its inference has no options.
        return {"pad_token_id", "bos_token_id", "eos_token_id", "windowed_statistics"}

    def resolve(self, config: MegalodonConfig) -> MegalodonConfig:
        resolved = copy.copy(config)
        resolved.output_size = config.scores
        return resolved

    def write(self, output: Path, export: Export, progress: bool) -> list[str]:
        files = _files(export)
        with complete_folder(output) as folder:
            for name, content in tqdm(files.items(), desc="files", disable=None if progress else True, delay=1):
                if isinstance(content, bytes):
                    (folder / name).write_bytes(content)
                else:
                    with check_disk(name):  # with a path, `torch.save` records the name of the file
                        torch.save(content, folder / name)
        return sorted(files)


def _files(export: Export) -> dict[str, bytes | Tensors]:
    """Return the files of a folder: name -> bytes, or tensors that `torch.save` writes."""
    args, config, companions = export.args, export.spec.config, export.companions
    count = export.shards or args[layout.SHARDS]
    sizes = ("num_attention_heads", "norm_num_groups", "intermediate_size")
    if uneven := [f"{name} = {getattr(config, name)}" for name in sizes if getattr(config, name) % count]:
        raise ConversionError(f"--shards {count}: does not divide {', '.join(uneven)}; pass a number that does")
    if count > 1 and config.rescale_nffn:
        raise ConversionError(f"--shards {count}: the original runs rescale_nffn in one shard only; omit the option")
    model = {name: value for name, value in args.items() if name not in (layout.TOKENIZER, layout.SHARDS)}
    tokenizer = args[layout.TOKENIZER]
    if PIECES_FILE in companions:
        settings = layout.tokenizer_settings(tokenizer)
        pieces = parse_pieces(companions[PIECES_FILE], Path(PIECES_FILE))
        extra = layout.additional_tokens(pieces, settings, config.vocab_size)
        tokenizer = settings | {"path": PIECES_FILE, "additional_vocab_size": extra}
    ours = dtype_name(export.tensors[layout.EMBEDDING].dtype)
    dtype = next(name for name, stored in layout.DTYPE_NAMES.items() if stored == ours)
    contents = {
        layout.CONFIG: {"model": model, "tokenizer": tokenizer},
        layout.CONSOLIDATED: {layout.SHARDS: count, "dtype": dtype},
    }
    written = {name: (json.dumps(content, indent=2) + "\n").encode() for name, content in contents.items()}
    parts = zip(layout.shard_names(count), layout.split_shards(export.tensors, count), strict=True)
    return written | companions | dict(parts)
