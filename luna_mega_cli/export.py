"""`luna-mega export`: write a checkpoint of the original code."""

import argparse

from luna_mega_cli.options import COUNT, DTYPES, FILES, FOLDER, LAYER_NORMS, chosen, show

DESCRIPTION = "Writes a model folder as a checkpoint of the original code."
EXAMPLES = (
    "my-model --output checkpoint.pt",
    "my-model --output checkpoint.pt --layer-norm plus-one",
    "my-megalodon --output megalodon-folder --shards 2",
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", **FOLDER)
    parser.add_argument(
        "--output",
        metavar="PATH",
        required=True,
        help=".pt file to write, which must not exist; for Megalodon a folder, absent or empty",
    )
    parser.add_argument(
        "--head",
        metavar="NAME",
        help="name of a luna_bert classification head, which specifies its type (default: its name in the converted "
        "file, otherwise the usual name)",
    )
    parser.add_argument(
        "--layer-norm",
        choices=LAYER_NORMS,
        help="storage of Luna's norm weights: unchanged, or minus one for the code of 2023 (default: as in the "
        "converted file)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of the exported weights (default: as in the converted file, if that is lossless)",
    )
    parser.add_argument(
        "--dict",
        **FILES,
        help="dictionaries to write to the directory of the file: dict.txt of the vocabulary and of the labels, or for "
        "Megalodon the SentencePiece model (default: those in the folder)",
    )
    parser.add_argument(
        "--shards",
        **COUNT,
        help="number of weight files of a Megalodon, one per model-parallel rank (default: as in the converted folder, "
        "otherwise 1)",
    )


def run(options: argparse.Namespace) -> None:
    from luna_mega.convert.export.exporter import export_checkpoint

    arguments = chosen(options, "head", "layer_norm", "dtype", "shards")
    report = export_checkpoint(
        options.folder, options.output, dictionaries=options.dict, progress=not options.json, **arguments
    )
    show(options, report)
