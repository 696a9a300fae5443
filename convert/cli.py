"""The command line of the converter: `luna-mega convert`, `python -m luna_mega.convert`."""

import argparse
import sys
from collections.abc import Sequence

from luna_mega.convert import ema_convention
from luna_mega.convert.errors import ConversionError
from luna_mega.convert.importer import convert_checkpoint
from luna_mega.convert.layer_norm import CHOICES
from luna_mega.convert.tensors import DTYPES


def main(argv: Sequence[str] | None = None) -> int:
    """Converts a checkpoint and prints the report.

    Args:
        argv: arguments without the program name; those of the process when None.

    Returns:
        Exit status: 0 done, 1 the input is at fault, with one line about it on stderr.

    Raises:
        SystemExit: 2 on wrong usage, 0 after `--help`.
    """
    options = _parser().parse_args(argv)
    try:
        report = convert_checkpoint(
            options.checkpoint,
            options.output,
            dictionaries=options.dict,
            bpe=options.bpe,
            head=options.head,
            layer_norm=options.layer_norm,
            ema_convention=options.ema_convention,
            dtype=options.dtype,
            license=options.license,
        )
    except (ConversionError, OSError) as error:
        print(f"luna-mega convert: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(report)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="luna-mega convert",
        description="Turns a fairseq checkpoint of a Luna encoder (luna_bert, LRA) or a Mega model (LRA, raw speech, "
        "language models, translation) into a folder for transformers. Nothing in the checkpoint is executed.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the .pt file that fairseq saved")
    parser.add_argument("--output", metavar="DIR", required=True, help="folder to write, absent or empty")
    parser.add_argument(
        "--dict",
        metavar="FILE",
        nargs="+",
        action="extend",
        default=[],
        help="dict.txt of the vocabulary and, if there is one, of the labels, or those of source and target (default: "
        "the ones beside the checkpoint)",
    )
    parser.add_argument(
        "--bpe",
        metavar="PATH",
        help="folder with GPT-2's encoder.json and vocab.bpe, or vocab.json and merges.txt: writes the tokenizer of a "
        "luna_bert model, or of a language model of GPT-2's ids; for translation the codes, a file of subword-nmt "
        "or fastBPE (the others need only the dictionary)",
    )
    parser.add_argument(
        "--head",
        metavar="NAME",
        help="classification head to convert (default: the only head of a fine-tuned model, else masked LM)",
    )
    parser.add_argument(
        "--layer-norm",
        choices=CHOICES,
        default="auto",
        help="how norm weights of Luna are stored: as they are, or minus one as the 2023 code does (default: by their "
        "mean)",
    )
    parser.add_argument(
        "--ema-convention",
        choices=ema_convention.CHOICES,
        default="auto",
        help="branch of the Mega code that wrote the file: flash calls alpha what main calls delta (default: by the "
        "order of the tensors)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the written weights (default: float32)")
    parser.add_argument(
        "--license", metavar="ID", help="licence of the weights for the model card, as mit (default: none is stated)"
    )
    return parser
