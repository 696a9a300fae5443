"""`luna-mega convert`: convert a checkpoint of the original code."""

import argparse

from luna_mega_cli.options import chosen, show

DESCRIPTION = (
    "Converts a fairseq checkpoint of Luna (luna_bert, LRA, translation) or Mega (LRA, raw speech, ImageNet, language "
    "models, translation), or a Megalodon folder, into a folder for transformers. Code in the checkpoint is not "
    "executed. Sizes of the papers: Luna 132 M and 381 M parameters; Mega 252 M (WikiText-103), 39 M (enwik8) and 0.3 "
    "M (raw speech); Megalodon 7.4 B."
)
EXAMPLES = (
    "checkpoint_best.pt --dry-run",
    "checkpoint_best.pt --output my-model",
    "checkpoint_best.pt --output my-model --dict dict.txt --bpe gpt2_bpe/",
    "checkpoint_best.pt --output my-model --dtype bfloat16 --license mit --json",
    "megalodon-folder --output my-model",
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=".pt file of fairseq, or Megalodon folder")
    output = parser.add_mutually_exclusive_group(required=True)
    output.add_argument("--output", metavar="DIR", help="output folder, which must be absent or empty")
    output.add_argument(
        "--dry-run",
        action="store_true",
        help="write nothing; print the report: format, class, sizes, labels, and what is missing",
    )
    parser.add_argument(
        "--dict",
        metavar="FILE",
        nargs="+",
        action="extend",
        default=[],
        help="dictionaries: dict.txt of the vocabulary, and of the labels if there is one; for translation one of the "
        "source and one of the target (default: those in the checkpoint's directory)",
    )
    parser.add_argument(
        "--bpe",
        metavar="PATH",
        help="byte-pair encoding for the tokenizer. luna_bert and language models with GPT-2's vocabulary: folder with "
        "encoder.json and vocab.bpe, or vocab.json and merges.txt. Translation: codes of subword-nmt or fastBPE. "
        "Megalodon: SentencePiece model (default: tokenizer.model in the checkpoint's directory). Not used by other "
        "models",
    )
    parser.add_argument(
        "--head",
        metavar="NAME",
        help="classification head to convert (default: the only head of a fine-tuned model, otherwise masked LM)",
    )
    parser.add_argument(
        "--layer-norm",
        choices=("auto", "standard", "plus-one"),
        default="auto",
        help="storage of Luna's norm weights: unchanged, or minus one as in the code of 2023 (default: detected from "
        "their mean)",
    )
    parser.add_argument(
        "--ema-convention",
        choices=("auto", "main", "flash"),
        default="auto",
        help="branch of the Mega code that wrote the file; flash calls alpha what main calls delta (default: detected "
        "from the order of the tensors)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="dtype of the converted weights (default: float32; for Megalodon as in the checkpoint)",
    )
    parser.add_argument(
        "--license",
        metavar="ID",
        help="license of the weights for the model card: identifier of the Hub, such as mit, or other:NAME (default: "
        "none)",
    )


def run(options: argparse.Namespace) -> None:
    from luna_mega.convert.importer import convert_checkpoint

    arguments = chosen(options, "bpe", "head", "layer_norm", "ema_convention", "dtype", "license")
    report = convert_checkpoint(
        options.checkpoint, options.output, dictionaries=options.dict, progress=not options.json, **arguments
    )
    show(options, report)
