"""Tells which code wrote a checkpoint, from its tensor names and args; refuses what cannot be converted."""

import re
from dataclasses import dataclass

from luna_mega.convert.ema_convention import order_of
from luna_mega.convert.fairseq_reader import Checkpoint
from luna_mega.errors import ConversionError

_MEGA = r"(^|\.)(mega_layer|move)\.|^(delta|alpha|beta|gamma|omega)$"
# Complex EMA, the norm after the moving average and the group norms over time exist in the Megalodon line only.
_MEGA_LAYOUTS = {
    frozenset({"encoder.encoder"}): "mega_lra",
    frozenset({"decoder"}): "mega_lm",
    frozenset({"encoder", "decoder"}): "mega_seq2seq",
}
_MEGALODON = r"(^|\.)(theta|cema|move_act|timenorm|prior_mean)(\.|$)"


@dataclass(frozen=True)
class Source:
    """The kind of file: `layout` is "luna_bert", "luna_lra", "luna_seq2seq", "mega_lra" (also raw speech), "mega_lm" or
    "mega_seq2seq".

    `revision` of Luna is "r21" (2021 code) or "head" (2023), of Mega the branch: "main", "flash" or "unknown".
    """

    layout: str
    revision: str
    arch: str

    @property
    def is_mega(self) -> bool:
        return self.layout.startswith("mega_")


def detect(checkpoint: Checkpoint) -> Source:
    """Which original code wrote the file.

    Raises:
        ConversionError: not such a model; the message names what it is and what to do.
    """
    keys, arch = checkpoint.tensors.keys(), str(checkpoint.args.get("arch"))
    if any(re.search(_MEGA, key) for key in keys) or any(re.search(_MEGALODON, key) for key in keys):
        if refusal := _mega_refusal(keys, arch):
            raise ConversionError(f"{checkpoint.path}: {refusal}")
        return Source(_MEGA_LAYOUTS[_stacks(keys)], order_of(keys) or "unknown", arch)
    if any(re.match(r"(encoder|decoder)\.sentence_encoder\.projected_embeddings$", key) for key in keys):
        # An argument that the code has had since May 2022.
        return Source("luna_bert", "head" if "stop_min_lr" in checkpoint.args else "r21", arch)
    if "encoder.encoder.projected_embeddings" in keys:
        return Source("luna_lra", "r21" if any(key.startswith("classifier.") for key in keys) else "head", arch)
    if "encoder.projected_embeddings" in keys and any(key.startswith("decoder.layers.") for key in keys):
        return Source("luna_seq2seq", "r21", arch)
    raise ConversionError(f"{checkpoint.path}: {_other_refusal(keys, arch)}")


def _mega_refusal(keys, arch: str) -> str | None:
    no_output_bias = any(k.endswith("mega_layer.h_proj.weight") and k[:-6] + "bias" not in keys for k in keys)
    if no_output_bias or any(re.search(_MEGALODON, key) for key in keys):
        return (
            f"a Megalodon-line checkpoint (arch {arch!r}: complex EMA, timestep norm): neither Luna nor Mega computes "
            "what its layers do, so it cannot be converted; run it with the code that wrote it"
        )
    if _stacks(keys) in _MEGA_LAYOUTS:
        return None
    return (
        f"a Mega checkpoint, but of none of the kinds that are known (arch {arch!r}): this version converts the "
        "encoders of LRA (mega_lra_*) and raw speech (mega_sc_raw_*), language models (mega_lm*) and encoder-decoders "
        "for translation (mega, mega_wmt_*)"
    )


def _stacks(keys) -> frozenset[str]:
    """Where the file has layers."""
    return frozenset(key.split(".layers.")[0] for key in keys if ".layers." in key)


def _other_refusal(keys, arch: str) -> str:
    return (
        f"not a Luna or Mega checkpoint (arch {arch!r}): there is neither a packed sequence, '*.projected_embeddings', "
        f"nor a '*.mega_layer' among its {len(keys)} tensors; this version converts luna_bert, Luna LRA and Mega LRA "
        "encoders, Mega for raw speech, Mega language models, and encoder-decoders of both"
    )


def canonical(checkpoint: Checkpoint) -> dict:
    """The tensors, in order, under today's names: early luna_bert files say `decoder.` for `encoder.`."""
    early = r"^decoder\.(?=(sentence_encoder|lm_head)\.)"
    return {re.sub(early, "encoder.", key): tensor for key, tensor in checkpoint.tensors.items()}
