"""megalodon: folders of the released code of Megalodon, complete or in shards of model-parallel ranks.

The code is `XuezheMax/megalodon`; its loader is `megalodon/reloading.py`.
"""

from typing import Any

import torch

from luna_mega import MegalodonConfig, MegalodonForCausalLM
from luna_mega.convert.dictionaries import PIECES_FILE, Dictionaries, PieceFile
from luna_mega.convert.evidence import Evidence, ModelSpec, flag, integer, number, size
from luna_mega.convert.formats import _megalodon as layout
from luna_mega.convert.formats.format import Bpe, Companions, Facts, Format, Notes
from luna_mega.convert.keymap import WIDE, KeyMap, Row
from luna_mega.convert.safe_load import Checkpoint
from luna_mega.convert.table import Arg, fields
from luna_mega.convert.tokenizers import SENTENCEPIECE, ConvertedTokenizer
from luna_mega.convert.tokenizers.sentencepiece import read_pieces, sentencepiece_tokenizer
from luna_mega.errors import ConversionError, shown

_OUTPUT, _FREQUENCIES = "output.output.weight", "rope.freqs"
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
    """Return the number of tokens; in old configurations it is -1, which means the size of the embedding."""
    given = evidence.arg("vocab_size")
    return {"vocab_size": evidence.shape(layout.EMBEDDING, "vocabulary", "width")[0] if given == -1 else given}


def _scores(evidence: Evidence) -> dict[str, int | None]:
    given = evidence.arg("output_size")
    return {"output_size": None if given == -1 or evidence.arg("share_emb") else given}


def _base(evidence: Evidence) -> dict[str, float]:
    """Return the base of the rotary frequencies; raise an error if the tensor was computed with another base."""
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
    if unknown := sorted(evidence.args.keys() - {row.name for row in _TABLE}):
        raise ConversionError(f"{evidence.shown(unknown[0])}: the released code has no such field; remove it")
    tensors = evidence.tensors
    if prior := next((key for key, tensor in tensors.items() if key.endswith("prior_count") and tensor.any()), None):
        raise ConversionError(
            f"tensor {shown(prior)} is {tensors[prior].tolist()}: statistics before the first position, which no "
            "released model has, are not supported; pass a checkpoint whose norms begin with a count of 0"
        )
    return {}


_TABLE = (
    Arg("num_layers", "num_hidden_layers", default=8, kind=size),
    Arg("model_dim", "hidden_size", default=1024, kind=size),
    Arg("z_dim", "shared_representation_size", default=256, kind=size),
    Arg("value_dim", "value_size", default=2048, kind=size),
    Arg("num_heads", "num_attention_heads", default=1, kind=size),
    Arg("ffn_hidden_dim", "intermediate_size", default=2048, kind=size),
    Arg("cema_ndim", "ema_projection_size", default=16, kind=size),
    Arg("chunk_size", "chunk_size", default=2048, kind=size),
    Arg("efficient_attn", kind=_one_of(*_ATTENTIONS)),
    Arg("init_mode", "initializer", default="he", kind=_one_of("he", "bert", "gaussian", "xavier", "none")),
    Arg("vocab_size", "vocab_size", default=-1, read=_vocabulary, kind=integer),
    Arg("output_size", default=-1, read=_scores, kind=integer),
    Arg("norm_num_groups", "norm_num_groups", default=32, kind=size),
    Arg("norm_affine", "norm_affine", default=True, kind=flag),
    Arg("norm_eps", "norm_eps", default=1e-5, kind=number),
    Arg("rope_base", "rope_theta", read=_base, kind=number),
    Arg("dropout", "dropout_prob", default=0.0, kind=number),
    Arg("hidden_dropout", "hidden_dropout_prob", default=0.0, kind=number),
    Arg("attention_dropout", "attention_probs_dropout_prob", default=0.0, kind=number),
    Arg("swiglu", "swiglu", default=False, kind=flag),
    Arg("rescale_nffn", "rescale_nffn", default=False, kind=flag),
    Arg("scale_emb", "scale_embedding", default=False, kind=flag),
    Arg("share_emb", "tie_word_embeddings", default=False, kind=flag),
    Arg("layerwise_ckpt", kind=flag),
    # The tokenizer and the number of shards.
    Arg(layout.TOKENIZER, kind=layout.tokenizer_settings),
    Arg(layout.SHARDS, kind=size),
    fields(_checked),
)


class Megalodon(Format):
    """Folders of the released code."""

    facts = Facts(
        name="megalodon",
        revisions={"release": "released code"},
        config_class=MegalodonConfig,
        model_classes=(MegalodonForCausalLM,),
        stacks=frozenset({("megalodon", "")}),
        container=layout.MegalodonFolder(),
        unsupported_options={
            "layer-norm": "Megalodon stores norm weights minus 1, as this package does",
            "ema-convention": "Megalodon has one form of its moving average",
        },
        finite=True,
    )
    table = _TABLE

    def recognize(self, file: Checkpoint) -> str | None:
        return "release" if layout.SHARDS in file.args else None

    def keymap(self, spec: ModelSpec) -> KeyMap:
        layer, body = "layers.{layer}", MegalodonForCausalLM.base_model_prefix
        parts = ("rmsnorm.{part}", *(f"{name}.{{part}}" for name in ("wz", "wv", "wr", "wh1", "wh2")), "gamma", "beta")
        own = [f"mega.{name}" for name in parts] + [f"nffn.{name}.{{part}}" for name in ("norm", "fc1", "fc2", "fc3")]
        return KeyMap(
            [
                Row(layout.EMBEDDING, f"{body}.embed_tokens.weight"),
                Row(_FREQUENCIES, f"{body}.rope.freqs", WIDE),
                Row(f"{layer}.mega.timenorm.{{rest}}", f"{body}.{layer}.mega.timestep_norm.{{rest}}"),
                Row(f"{layer}.mega.cema.{{rest}}", f"{body}.{layer}.mega.cema.{{rest}}", WIDE),
                *(Row(f"{layer}.{name}", f"{body}.{layer}.{name}") for name in (*own, "nffn.alpha")),
                Row("output.final_norm.{rest}", f"{body}.final_norm.{{rest}}"),
                Row(_OUTPUT, "lm_head.weight"),
            ]
        )

    def companions(self, spec: ModelSpec, evidence: Evidence) -> Companions:
        settings, config = evidence.arg(layout.TOKENIZER), spec.config

        def tokenizer(dictionaries: Dictionaries, bpe: Bpe, notes: list[str]) -> ConvertedTokenizer | None:
            path, named = bpe or dictionaries.pieces, settings["path"]
            if path is None:
                if named is not None:
                    raise ConversionError(
                        f"no {PIECES_FILE} in the folder, though {layout.CONFIG} names {shown(named)}; copy it there, "
                        "or pass it with --bpe"
                    )
                notes.append(f"no tokenizer: {layout.CONFIG} names none; --bpe FILE specifies a SentencePiece model")
                return None
            model = read_pieces(path)
            extra = layout.additional_tokens(model, settings, config.vocab_size)
            for role, index in model.special_ids(extra).items():
                setattr(config, f"{role}_token_id", index)
            made = sentencepiece_tokenizer(model, config.vocab_size)
            return ConvertedTokenizer(made, SENTENCEPIECE, [], source=model.path)

        return Companions(PieceFile(settings["path"]), tokenizer)

    def report(self, spec: ModelSpec, evidence: Evidence) -> Notes:
        notes = []
        if spec.config.attention_probs_dropout_prob and evidence.args.get("efficient_attn") is not None:
            notes.append("the fused attention of the original drops keys in training; here it drops attention weights")
        decisions = {"shards": evidence.arg(layout.SHARDS), "output_size": spec.config.scores}
        return Notes(decisions, notes)
