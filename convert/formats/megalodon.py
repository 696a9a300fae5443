"""megalodon: folders of the released code of Megalodon, complete or in shards of model-parallel ranks.

The code is `XuezheMax/megalodon`; its own loader is `megalodon/reloading.py`. Names and values of tensors are ours.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch

from luna_mega import MegalodonConfig, MegalodonForCausalLM
from luna_mega.convert.argtypes import flag, number, size, whole
from luna_mega.convert.dictionary import PIECES_FILE, Dictionaries
from luna_mega.convert.dictionary_kinds import PieceFile
from luna_mega.convert.evidence import Evidence
from luna_mega.convert.formats._megalodon_folder import (
    CONFIG,
    CONSOLIDATED,
    EXTRA,
    FILE_DTYPES,
    SHARDS,
    TOKENIZER,
    has_folder,
    read_folder,
    shard_names,
    tokenizer_settings,
)
from luna_mega.convert.formats._shards import split_shards
from luna_mega.convert.formats.containers import Export, Files, Folder
from luna_mega.convert.formats.format import Companions, Facts, Format, Notes, Revision
from luna_mega.convert.keymap import WIDE, KeyMap, Row
from luna_mega.convert.safe_load import Checkpoint
from luna_mega.convert.table import Arg, Way, fields, fixed
from luna_mega.convert.target import Target
from luna_mega.convert.tensors import DTYPES, dtype_name
from luna_mega.convert.tokenizers import SENTENCEPIECE, ConvertedTokenizer
from luna_mega.convert.tokenizers.sentencepiece import PieceModel, parse_pieces, read_pieces, sentencepiece_tokenizer
from luna_mega.errors import ConversionError, shown

Tensors = dict[str, torch.Tensor]
_EMBEDDING, _OUTPUT, _FREQUENCIES = "embed.weight", "output.output.weight", "rope.freqs"
_OF_BFLOAT16 = 2**-7  # relative tolerance for frequencies that were rounded to bfloat16
_USUAL_BASE = 10000.0
_ATTENTIONS = (None, "swift", "fused")


def _one_of(*choices: Any) -> Any:
    def check(value: Any) -> Any:
        if value not in choices:
            raise ValueError(f"is not one of {', '.join(map(str, choices))}")
        return value

    return check


def _vocabulary(evidence: Evidence) -> dict[str, int]:
    """Return the number of tokens, which old configurations leave to the tokenizer; the embedding has it too."""
    given = evidence.arg("vocab_size")
    return {"vocab_size": evidence.shape(_EMBEDDING, "vocabulary", "width")[0] if given == -1 else given}


def _scores(evidence: Evidence) -> dict[str, int | None]:
    given = evidence.arg("output_size")
    return {"output_size": None if given == -1 or evidence.arg("share_emb") else given}


def _base(evidence: Evidence) -> dict[str, float]:
    """Return the base of the rotary frequencies, which must fit the frequencies in the file."""
    given = evidence.args.get("rope_base")
    base = _USUAL_BASE if given is None else float(given)
    (pairs,) = evidence.shape(_FREQUENCIES, "pairs of features")
    stored = evidence.tensors[_FREQUENCIES].double()
    expected = base ** -(torch.arange(pairs, dtype=torch.float64) / pairs) if base > 0 else stored
    if not torch.allclose(stored, expected, rtol=_OF_BFLOAT16, atol=1e-7):
        found = f"; they have base {stored[1].item() ** -pairs:.6g}" if pairs > 1 and stored[1] > 0 else ""
        raise ConversionError(
            f"{evidence.settings}.rope_base = {shown(given)} does not fit the tensor '{_FREQUENCIES}'{found}"
        )
    return {"rope_theta": base}


def _checked(evidence: Evidence) -> dict[str, Any]:
    """Raise `ConversionError` for an unknown setting, or for statistics before the first position."""
    if unknown := sorted(evidence.args.keys() - {row.name for row in Megalodon.table}):
        raise ConversionError(f"{evidence.shown(unknown[0])}: the released code has no such field; take it out")
    tensors = evidence.tensors
    if prior := next((key for key, tensor in tensors.items() if key.endswith("prior_count") and tensor.any()), None):
        raise ConversionError(
            f"tensor {shown(prior)} is {tensors[prior].tolist()}: statistics before the first position, which no "
            "released model has, are not supported; give a checkpoint whose norms begin with a count of 0"
        )
    return {}


def _output_size(target: Target) -> int:
    return -1 if target.config.scores == target.config.vocab_size else target.config.scores


_TABLE = (
    Arg("num_layers", "num_hidden_layers", default=8, kind=size),
    Arg("model_dim", "hidden_size", default=1024, kind=size),
    Arg("z_dim", "shared_representation_size", default=256, kind=size),
    Arg("value_dim", "value_size", default=2048, kind=size),
    Arg("num_heads", "num_attention_heads", default=1, kind=size),
    Arg("ffn_hidden_dim", "intermediate_size", default=2048, kind=size),
    Arg("cema_ndim", "ema_projection_size", default=16, kind=size),
    Arg("chunk_size", "chunk_size", default=2048, kind=size),
    fixed("efficient_attn", None, kept=True, kind=_one_of(*_ATTENTIONS)),
    Arg("init_mode", "initializer", default="he", kind=_one_of("he", "bert", "gaussian", "xavier", "none")),
    Arg("vocab_size", "vocab_size", default=-1, read=_vocabulary, kind=whole),
    Arg("output_size", default=-1, read=_scores, write=_output_size, kind=whole),
    Arg("norm_num_groups", "norm_num_groups", default=32, kind=size),
    Arg("norm_affine", "norm_affine", default=True, kind=flag),
    Arg("norm_eps", "norm_eps", default=1e-5, kind=number),
    Arg("rope_base", "rope_theta", Way(lambda base: base, lambda base: None if base == _USUAL_BASE else base),
        read=_base, kind=number),
    Arg("dropout", "dropout_prob", default=0.0, kind=number),
    Arg("hidden_dropout", "hidden_dropout_prob", default=0.0, kind=number),
    Arg("attention_dropout", "attention_probs_dropout_prob", default=0.0, kind=number),
    Arg("swiglu", "swiglu", default=False, kind=flag),
    Arg("rescale_nffn", "rescale_nffn", default=False, kind=flag),
    Arg("scale_emb", "scale_embedding", default=False, kind=flag),
    Arg("share_emb", "tie_word_embeddings", default=False, kind=flag),
    fixed("layerwise_ckpt", False, kept=True),
)  # fmt: skip
# Beside the fields of the model: the tokenizer, and the number of shards.
_BESIDE = (
    Arg(TOKENIZER, write=lambda target: tokenizer_settings({}), kept=True, kind=tokenizer_settings),
    fixed(SHARDS, 1, kept=True, kind=size),
    fields(_checked),
)


class MegalodonFolder(Folder):
    """A folder with config.json, consolidate_config.json and consolidated.pth, or consolidated.00.pth and so on."""

    software = "Megalodon"
    settings = "config.json: model"

    def claims(self, folder: Path) -> bool:
        """Return whether a folder has a file of the original."""
        return has_folder(folder)

    def read(self, folder: Path, progress: bool) -> Checkpoint:
        """Return the checkpoint in a folder; shards are joined, and what they share must be equal in all of them."""
        return read_folder(folder, progress)

    def architecture(self, args: dict[str, Any]) -> str:
        """Return the only architecture."""
        return "megalodon"

    def stored_dtype(self, tensors: Tensors) -> str:
        """Return the dtype of the file, or float32 if it has several."""
        stored = {dtype_name(tensor.dtype) for tensor in tensors.values() if tensor.is_floating_point()}
        return stored.pop() if len(stored) == 1 and stored <= set(DTYPES) else "float32"

    def files(self, export: Export) -> Files:
        """Return the configurations, the tokenizer and the shards."""
        args, config, beside = export.args, export.target.config, export.beside
        count = export.shards or args[SHARDS]
        _check_split(config, count)
        model = {name: value for name, value in args.items() if name not in (TOKENIZER, SHARDS)}
        tokenizer = args[TOKENIZER]
        if PIECES_FILE in beside:
            settings, pieces = tokenizer_settings(tokenizer), parse_pieces(beside[PIECES_FILE], Path(PIECES_FILE))
            extra = _additional(pieces, settings, config.vocab_size)
            tokenizer = settings | {"path": PIECES_FILE, "additional_vocab_size": extra}
        stored = dtype_name(export.tensors[_EMBEDDING].dtype)
        words = next(short for short, long in FILE_DTYPES.items() if long == stored)
        parts = zip(shard_names(count), split_shards(export.tensors, count), strict=True)
        return {
            CONFIG: _json({"model": model, "tokenizer": tokenizer}),
            CONSOLIDATED: _json({"model_parallel_size": count, "dtype": words}),
            **beside,
            **dict(parts),
        }


def _resolve(config: MegalodonConfig) -> MegalodonConfig:
    resolved = copy.copy(config)
    resolved.output_size = config.scores
    return resolved


class Megalodon(Format):
    """Folders of the released code."""

    facts = Facts(
        name="megalodon",
        revisions={"release": Revision("Megalodon", "released code", "the released Megalodon code")},
        written=("release",),
        config_class=MegalodonConfig,
        model_classes=(MegalodonForCausalLM,),
        stacks=frozenset({("megalodon", "")}),
        container=MegalodonFolder(),
        refused={
            "layer-norm": "Megalodon stores norm weights less 1, and the model here does too",
            "ema-convention": "Megalodon has one form of its moving average",
        },
        training_fields=("dropout_prob", "hidden_dropout_prob", "attention_probs_dropout_prob", "initializer"),
        # The original has no padding, and its inference needs no field.
        unused=lambda target: {"pad_token_id", "bos_token_id", "eos_token_id", "windowed_statistics"},
        resolve=_resolve,
        finite=True,
    )
    table = (*_TABLE, *_BESIDE)

    def recognise(self, file: Checkpoint) -> str | None:
        """Return the only revision for the tensors of a folder."""
        return "release" if SHARDS in file.args else None

    def keymap(self, target: Target) -> KeyMap:
        """Return the names; rates and frequencies stay as precise as they are."""
        layer, body = "layers.{layer}", MegalodonForCausalLM.base_model_prefix
        parts = ("rmsnorm.{part}", *(f"{name}.{{part}}" for name in ("wz", "wv", "wr", "wh1", "wh2")), "gamma", "beta")
        own = [f"mega.{name}" for name in parts] + [f"nffn.{name}.{{part}}" for name in ("norm", "fc1", "fc2", "fc3")]
        return KeyMap(
            [
                Row(_EMBEDDING, f"{body}.embed_tokens.weight"),
                Row(_FREQUENCIES, f"{body}.rope.freqs", WIDE),
                Row(f"{layer}.mega.timenorm.{{rest}}", f"{body}.{layer}.mega.timestep_norm.{{rest}}"),
                Row(f"{layer}.mega.cema.{{rest}}", f"{body}.{layer}.mega.cema.{{rest}}", WIDE),
                *(Row(f"{layer}.{name}", f"{body}.{layer}.{name}") for name in (*own, "nffn.alpha")),
                Row("output.final_norm.{rest}", f"{body}.final_norm.{{rest}}"),
                Row(_OUTPUT, "lm_head.weight"),
            ]
        )

    def companions(self, target: Target, evidence: Evidence) -> Companions:
        """Return the SentencePiece model, and a tokenizer with the original's ids."""
        settings, config = evidence.arg(TOKENIZER), target.config

        def tokenizer(
            dictionaries: Dictionaries, bpe: str | Path | None, notes: list[str]
        ) -> ConvertedTokenizer | None:
            path, named = bpe or dictionaries.pieces, settings["path"]
            if path is None:
                if named is not None:
                    raise ConversionError(
                        f"no {PIECES_FILE} in the folder, though {CONFIG} names {shown(named)}; copy it there, or give "
                        "it with --bpe"
                    )
                notes.append(f"no tokenizer: {CONFIG} names none; --bpe FILE gives a SentencePiece model")
                return None
            model = read_pieces(path)
            extra = _additional(model, settings, config.vocab_size)
            for role, index in model.special_ids(extra).items():
                setattr(config, f"{role}_token_id", index)
            made = sentencepiece_tokenizer(model, config.vocab_size)
            return ConvertedTokenizer(made, SENTENCEPIECE, [], source=model.path)

        return Companions(PieceFile(settings["path"]), tokenizer)

    def report(self, target: Target, evidence: Evidence) -> Notes:
        """Return the number of shards and of scores."""
        notes = []
        if target.config.attention_probs_dropout_prob and evidence.args.get("efficient_attn") is not None:
            notes.append("the fused attention of the original drops keys in training; here it drops attention weights")
        decisions = {"shards": evidence.arg(SHARDS), "output_size": target.config.scores}
        return Notes(decisions, notes, heads=["causal LM"])


def _additional(model: PieceModel, settings: dict[str, Any], rows: int) -> int:
    """Return the number of tokens after the pieces; without a tokenizer it follows from the vocabulary."""
    pieces = len(model.pieces)
    extra = rows - pieces if settings["path"] is None else settings["additional_vocab_size"]
    if extra < 0 or extra % EXTRA or pieces + extra != rows:
        raise ConversionError(
            f"{model.path}: {pieces} pieces and {max(extra, 0)} additional tokens do not fit the model, whose "
            f"vocabulary has {rows}; give the SentencePiece model that it was trained with"
        )
    return extra


def _check_split(config: MegalodonConfig, count: int) -> None:
    """Raise an error for a number of shards that the original does not support."""
    sizes = ("num_attention_heads", "norm_num_groups", "intermediate_size")
    if uneven := [f"{name} = {getattr(config, name)}" for name in sizes if getattr(config, name) % count]:
        raise ConversionError(f"--shards {count}: does not divide {', '.join(uneven)}; give a number that does")
    if count > 1 and config.rescale_nffn:
        raise ConversionError(
            f"--shards {count}: the original runs rescale_nffn in one shard only; leave the option out"
        )


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
