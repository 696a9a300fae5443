"""`luna-mega onnx`: export a model folder to ONNX."""

import argparse

from luna_mega_cli.options import COUNT, FOLDER, show

DESCRIPTION = (
    "Exports a model folder to ONNX (extra `onnx`), for any batch size and length. A generative model "
    "is exported as two programs, prefill and decode, and one for the encoder if there is one. The results of "
    "onnxruntime are compared with those of the model before anything is written."
)
EXAMPLES = ("my-model --output my-onnx", "my-classifier --output model.onnx --opset 20")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", **FOLDER)
    parser.add_argument(
        "--output",
        metavar="PATH",
        required=True,
        help="output folder, absent or empty, or FILE.onnx for a model that is exported as one program",
    )
    parser.add_argument("--opset", **COUNT, help="version of the ONNX operators, at least 18")


def run(options: argparse.Namespace) -> None:
    from luna_mega.hub.onnx import export_onnx

    show(options, export_onnx(options.folder, options.output, options.opset))
