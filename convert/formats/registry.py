"""Register formats, and detect the format of a file."""

import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from luna_mega.convert.formats.format import Folder, Format, rename_tensors
from luna_mega.convert.formats.luna_bert import LunaBert
from luna_mega.convert.formats.luna_lra import LunaLra
from luna_mega.convert.formats.luna_seq2seq import LunaSeq2Seq
from luna_mega.convert.formats.mega_image import MegaImage
from luna_mega.convert.formats.mega_lm import MegaLM
from luna_mega.convert.formats.mega_lra import MegaLra
from luna_mega.convert.formats.mega_seq2seq import MegaSeq2Seq
from luna_mega.convert.formats.megalodon import Megalodon
from luna_mega.convert.safe_load import Checkpoint, read_checkpoint
from luna_mega.convert.tensors import few
from luna_mega.errors import ConversionError, shown

_FORMATS: dict[str, Format] = {}
# The prefix of a stack of layers, and the name that identifies its kind.
_LAYER = re.compile(r"(?:(.*?)\.)?(?:layers|blocks)\.\d+\.(self_attn\.pq_proj|mega_layer|mega\.cema)\.")
_KINDS = {"self_attn.pq_proj": "luna", "mega_layer": "mega", "mega.cema": "megalodon"}
_LUNA = r"(^|\.)(self_attn\.pq_proj\.|projected_embeddings$)"
_MEGA = r"(^|\.)(mega_layer|move)\.|^(delta|alpha|beta|gamma|omega)$"
# Complex EMA, the norm after the moving average and the timestep norms exist only in Megalodon variants.
_MEGALODON = r"(^|\.)(theta|cema|move_act|timenorm|prior_mean)(\.|$)"


def register_format(checkpoint_format: Format) -> None:
    """Register a format; it is tried after the formats that are registered already.

    Raises:
        ValueError: If another format has this name, or the same stacks under the same names.
    """
    facts = checkpoint_format.facts
    for known in (other.facts for other in _FORMATS.values() if other is not checkpoint_format):
        if known.name == facts.name:
            raise ValueError(f"format {facts.name!r} is registered already; use another name")
        if facts.stacks and (known.stacks, known.aliases) == (facts.stacks, facts.aliases):
            raise ValueError(f"format {facts.name!r} has the same stacks as {known.name!r}: {set(facts.stacks)}")
    _FORMATS[facts.name] = checkpoint_format


def registered_formats() -> tuple[Format, ...]:
    return tuple(_FORMATS.values())


def stacks_of(names: Iterable[str]) -> frozenset[tuple[str, str]]:
    """Return the kind and the prefix of every stack of layers in a file."""
    found = (_LAYER.match(name) for name in names)
    return frozenset((_KINDS[match[2]], match[1] or "") for match in found if match)


def _folder_format(folder: Path) -> Format | None:
    formats = (fmt for fmt in registered_formats() if isinstance(fmt.facts.container, Folder))
    return next((fmt for fmt in formats if fmt.facts.container.claims(folder)), None)


def open_checkpoint(path: str | Path, progress: bool = False) -> Checkpoint:
    """Open a folder of a format, or a file of fairseq; raise an error if it is neither, damaged, or would run code."""
    path = Path(path)
    if path.is_dir() and (fmt := _folder_format(path)) is not None:
        return fmt.facts.container.read(path, progress)
    try:
        return read_checkpoint(path, progress)
    except ConversionError:
        if (fmt := _folder_format(path.parent)) is None:
            raise
        raise ConversionError(f"{path}: one file of a {fmt.facts.name} checkpoint; pass its folder") from None


def detect(checkpoint: Checkpoint) -> tuple[Format, str, Checkpoint, list[str]]:
    """Return the format of a file, the revision of its code, the file with renamed tensors, and notes on the names."""
    tensors, arch = checkpoint.tensors, str(checkpoint.args.get("arch"))
    if found := _recognize(checkpoint):
        return found
    if checkpoint.missing_args is not None:
        raise ConversionError(checkpoint.missing_args)
    shared = os.path.commonprefix(list(tensors))
    for prefix in (shared[: match.end()] for match in re.finditer(r"\.", shared)):
        inner = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        if _recognize(replace(checkpoint, tensors=inner)):
            raise ConversionError(
                f"{checkpoint.path}: all names start with {shown(prefix)}, which the original code does not add; save "
                "the state dict of the model inside, or remove the prefix"
            )
    raise ConversionError(f"{checkpoint.path}: {_reason(tensors, shown(arch), _is_foreign(tensors))}")


def _recognize(checkpoint: Checkpoint) -> tuple[Format, str, Checkpoint, list[str]] | None:
    """Return what `detect` returns, None if no format matches."""
    tensors = checkpoint.tensors
    foreign = _is_foreign(tensors)
    for fmt in registered_formats():
        ours, notes = rename_tensors(fmt, tensors)
        stacks = fmt.facts.stacks
        if stacks and (foreign and ("mega" in {kind for kind, _ in stacks}) or stacks_of(ours) != stacks):
            continue
        file = replace(checkpoint, tensors=ours)
        revision = fmt.recognize(file)
        if revision is not None and (checkpoint.missing_args is None or not fmt.facts.container.needs_args):
            return fmt, revision, file, notes
    return None


def _is_foreign(tensors: dict) -> bool:
    """Return whether the layers belong to a Megalodon variant that was not released."""
    if any(re.search(_MEGALODON, key) for key in tensors):
        return True
    return any(key.endswith("mega_layer.h_proj.weight") and f"{key[:-6]}bias" not in tensors for key in tensors)


def _reason(tensors: dict, arch: str, foreign: bool) -> str:
    """Return why a file that matches no format cannot be converted."""
    if foreign:
        return (
            f"a Megalodon-line checkpoint (arch {arch}: complex EMA, timestep norm), but not as the released code "
            "saves it; pass the folder with consolidate_config.json and consolidated.pth"
        )
    if any(re.search(_MEGA, key) for key in tensors):
        return (
            f"a Mega checkpoint, but of none of the kinds that are known (arch {arch}): this version converts the "
            "encoders of LRA (mega_lra_*) and raw speech (mega_sc_raw_*), language models (mega_lm*) and "
            "encoder-decoders for translation (mega, mega_wmt_*)"
        )
    if any(re.search(_LUNA, key) for key in tensors):
        places = sorted(shown(f"{prefix}.layers".removeprefix(".")) for _, prefix in stacks_of(tensors))
        return (
            f"a Luna checkpoint, but of none of the kinds that are known (arch {arch}): it has layers in "
            f"{few(places) or 'no stack'}; this version converts luna_bert ('encoder.sentence_encoder.layers'), the "
            "encoders of LRA ('encoder.encoder.layers') and encoder-decoders ('encoder.layers' and 'decoder.layers')"
        )
    if any(key.startswith("blocks.0.") for key in tensors) and any("patch_embed." in key for key in tensors):
        return "a vision model without a Mega layer (there is no 'blocks.0.mega_layer.*'); load it with timm"
    return (
        f"not a Luna or Mega checkpoint (arch {arch}): there is neither a packed sequence, '*.projected_embeddings', "
        f"nor a '*.mega_layer' among its {len(tensors)} tensors; the known formats are {', '.join(_FORMATS)}"
    )


for _format in (LunaBert(), LunaLra(), LunaSeq2Seq(), MegaLra(), MegaLM(), MegaSeq2Seq(), MegaImage(), Megalodon()):
    register_format(_format)
