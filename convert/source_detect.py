"""Tells which code wrote a checkpoint, from its tensor names and args; refuses what cannot be converted."""

import re
from dataclasses import dataclass

from luna_mega.convert.ema_convention import order_of
from luna_mega.convert.errors import ConversionError
from luna_mega.convert.fairseq_reader import Checkpoint

_MEGA = r"(^|\.)(mega_layer|move)\.|^(delta|alpha|beta|gamma|omega)$"
# Complex EMA, the norm after the moving average and the group norms over time exist in the Megalodon line only.
_MEGALODON = r"(^|\.)(theta|cema|move_act|timenorm|prior_mean)(\.|$)"


@dataclass(frozen=True)
class Source:
    """The kind of file: `layout` is "luna_bert", "luna_lra", "mega_lra" (also raw speech) or "mega_lm".

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
        layout = "mega_lm" if any(key.startswith("decoder.") for key in keys) else "mega_lra"
        return Source(layout, order_of(keys) or "unknown", arch)
    if any(re.match(r"(encoder|decoder)\.sentence_encoder\.projected_embeddings$", key) for key in keys):
        # An argument that the code has had since May 2022.
        return Source("luna_bert", "head" if "stop_min_lr" in checkpoint.args else "r21", arch)
    if "encoder.encoder.projected_embeddings" in keys:
        return Source("luna_lra", "r21" if any(key.startswith("classifier.") for key in keys) else "head", arch)
    raise ConversionError(f"{checkpoint.path}: {_other_refusal(keys, arch)}")


def _mega_refusal(keys, arch: str) -> str | None:
    no_output_bias = any(k.endswith("mega_layer.h_proj.weight") and k[:-6] + "bias" not in keys for k in keys)
    if no_output_bias or any(re.search(_MEGALODON, key) for key in keys):
        return (
            f"a Megalodon-line checkpoint (arch {arch!r}: complex EMA, timestep norm): neither Luna nor Mega computes "
            "what its layers do, so it cannot be converted; run it with the code that wrote it"
        )
    has = {key.split(".layers.")[0] for key in keys if ".layers." in key}
    if has in ({"encoder.encoder"}, {"decoder"}):
        return None
    kind = "a Mega checkpoint, but neither an encoder of LRA or raw speech nor a language model"
    if has == {"encoder", "decoder"}:
        kind = "a Mega encoder-decoder for translation"
    return (
        f"{kind} (arch {arch!r}): this version has no such model yet; it converts the Mega encoders of LRA "
        "(mega_lra_*) and raw speech (mega_sc_raw_*) and language models (mega_lm*)"
    )


def _other_refusal(keys, arch: str) -> str:
    if "encoder.projected_embeddings" in keys and any(key.startswith("decoder.layers.") for key in keys):
        return (
            f"a Luna encoder-decoder (arch {arch!r}): encoder-decoder conversion is not there yet in this version, "
            "which converts luna_bert and Luna LRA encoders"
        )
    return (
        f"not a Luna or Mega checkpoint (arch {arch!r}): there is neither a packed sequence, '*.projected_embeddings', "
        f"nor a '*.mega_layer' among its {len(keys)} tensors; this version converts luna_bert, Luna LRA and Mega LRA "
        "encoders, Mega for raw speech, and Mega language models"
    )


def canonical(checkpoint: Checkpoint) -> dict:
    """The tensors, in order, under today's names: early luna_bert files say `decoder.` for `encoder.`."""
    early = r"^decoder\.(?=(sentence_encoder|lm_head)\.)"
    return {re.sub(early, "encoder.", key): tensor for key, tensor in checkpoint.tensors.items()}
