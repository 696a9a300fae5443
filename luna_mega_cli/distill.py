"""`luna-mega distill`: convert a trained encoder to a Luna model with linear time and memory."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from luna_mega_cli.options import COUNT, chosen, show

DESCRIPTION = (
    "Converts BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT or ELECTRA, with or without a head, to "
    "a Luna model that equals it on texts of up to --projection-length tokens. Longer texts are packed. By "
    "default, no text is longer than the teacher's limit, and heads that read tokens equal the teacher everywhere. "
    "Nothing is trained. A sentence-transformers model becomes a sentence-transformers folder."
)
EXAMPLES = (
    "sentence-transformers/all-MiniLM-L6-v2 --output my-encoder --texts texts.txt",
    "my-fine-tuned-bert --output my-classifier --projection-length 256",
)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("teacher", metavar="TEACHER", help="trained encoder: a folder or a name on the Hub")
    parser.add_argument("--output", metavar="DIR", required=True, help="output folder, absent or empty")
    parser.add_argument(
        "--projection-length",
        **COUNT,
        help="rows per layer that a text is packed into, at most --max-length (default: 128, or --max-length for "
        "masked language modeling, token classification and question answering)",
    )
    parser.add_argument(
        "--max-length",
        **COUNT,
        help="longest text in tokens (default: the teacher's number of positions); longer texts are worth less than "
        "windows of the teacher, see docs/distillation.md",
    )
    parser.add_argument(
        "--position-extension",
        choices=("interpolate", "wrap"),
        default="interpolate",
        help="positions of texts longer than the teacher's limit (default: interpolate)",
    )
    parser.add_argument(
        "--texts",
        metavar="FILE",
        help="text file to fit the packing on and to compare with the teacher, one text per line; about 100 are enough",
    )
    parser.add_argument(
        "--num-labels",
        **COUNT,
        help="write a classifier to fine-tune, with N labels or 1 for regression; a BERT's pooling layer is its start",
    )


def run(options: argparse.Namespace) -> None:
    from luna_mega.distillation.convert import convert_teacher

    names = ("teacher", "output", "projection_length", "max_length", "position_extension", "texts", "num_labels")
    with _progress(options.json):
        report = convert_teacher(**chosen(options, *names))
    show(options, report)


@contextmanager
def _progress(quiet: bool) -> Iterator[None]:
    """Print the log of the conversion on stderr."""
    import logging

    logger, handler = logging.getLogger("luna_mega.distillation"), logging.StreamHandler()
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
