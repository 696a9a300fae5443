"""The known formats, and the recognition of a file's format."""

from pathlib import Path

from luna_mega.convert.formats._base import Format
from luna_mega.convert.formats.luna_bert import LunaBert
from luna_mega.convert.formats.luna_lra import LunaLra
from luna_mega.convert.formats.luna_seq2seq import LunaSeq2Seq
from luna_mega.convert.formats.mega_image import MegaImage
from luna_mega.convert.formats.mega_lm import MegaLM
from luna_mega.convert.formats.mega_lra import MegaLra
from luna_mega.convert.formats.mega_seq2seq import MegaSeq2Seq
from luna_mega.convert.formats.megalodon import Megalodon
from luna_mega.convert.safe_load.reader import Checkpoint, read_checkpoint
from luna_mega.errors import ConversionError, shown

_FORMATS: dict[str, Format] = {}


def register_format(checkpoint_format: Format) -> None:
    """Make a format known to convert, export and info; it is tried after the formats that are known already.

    Raises:
        ValueError: another format has this name.
    """
    known = _FORMATS.setdefault(checkpoint_format.name, checkpoint_format)
    if known is not checkpoint_format:
        raise ValueError(f"format {checkpoint_format.name!r} is registered already; give another name")


def registered_formats() -> tuple[Format, ...]:
    """Return all formats, in the order in which they are tried for a file or a model."""
    return tuple(_FORMATS.values())


def find_format(name: str) -> Format:
    """Return the format called `name`, the `layout` of a conversion report.

    Raises:
        ConversionError: there is no such format.
    """
    if name not in _FORMATS:
        raise ConversionError(f"format {shown(name)} is not known; this version knows {', '.join(_FORMATS)}")
    return _FORMATS[name]


def is_checkpoint(path: str | Path) -> bool:
    """Return whether a path is to be read as a checkpoint: a file, or a folder that a format claims."""
    path = Path(path)
    return path.is_file() or path.is_dir() and any(fmt.has_folder(path) for fmt in registered_formats())


def open_checkpoint(path: str | Path, progress: bool = False) -> Checkpoint:
    """Open a checkpoint: a folder of the first format that claims it, or a file that fairseq saved.

    With `progress` a bar is shown on stderr if that is a terminal.

    Raises:
        ConversionError: there is no such checkpoint, it is damaged, or it asks to run code.
    """
    path = Path(path)
    for fmt in registered_formats() if path.is_dir() else ():
        if fmt.has_folder(path):
            return fmt.read_folder(path, progress)
    try:
        return read_checkpoint(path, progress)
    except ConversionError:
        if (fmt := next((fmt for fmt in registered_formats() if fmt.has_folder(path.parent)), None)) is None:
            raise
        raise ConversionError(f"{path}: one file of a {fmt.name} checkpoint; give its folder") from None


def detect(checkpoint: Checkpoint) -> tuple[Format, str]:
    """Return the format of a file and the revision of the code that wrote it.

    Raises:
        ConversionError: no format recognises it; the message describes it and says how to go on.
    """
    tensors, arch = checkpoint.tensors, str(checkpoint.args.get("arch"))
    for fmt in registered_formats():
        revision = fmt.recognise(tensors, checkpoint.args)
        if revision is not None and (checkpoint.missing_args is None or not fmt.needs_args):
            return fmt, revision
    if checkpoint.missing_args is not None:
        raise ConversionError(checkpoint.missing_args)
    refusals = (fmt.refusal(tensors, arch) for fmt in registered_formats())
    refusal = next(filter(None, refusals), None) or (
        f"not a Luna or Mega checkpoint (arch {shown(arch)}): there is neither a packed sequence, "
        f"'*.projected_embeddings', nor a '*.mega_layer' among its {len(tensors)} tensors; the known formats are "
        f"{', '.join(_FORMATS)}"
    )
    raise ConversionError(f"{checkpoint.path}: {refusal}")


for _format in (LunaBert(), LunaLra(), LunaSeq2Seq(), MegaLra(), MegaLM(), MegaSeq2Seq(), MegaImage(), Megalodon()):
    register_format(_format)
