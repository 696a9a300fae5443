# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""The commands of the command line `luna-mega`; `luna_mega_cli.py` has their arguments and help."""

import argparse
import json
import sys
from dataclasses import asdict

from luna_mega.convert.exporter import export_checkpoint
from luna_mega.convert.importer import convert_checkpoint
from luna_mega.errors import ConversionError
from luna_mega.hub.bundle import bundle
from luna_mega.inspection.evaluation import evaluate
from luna_mega.inspection.info import describe
from luna_mega.inspection.verify import compare
from luna_mega.onnx import export_onnx
from luna_mega_cli import main

__all__ = ["main", "run"]


def run(options: argparse.Namespace) -> int:
    """Run the command of these options.

    Returns:
        Exit status: 0 done; 1 the input is at fault, with one line about it on stderr, or two models differ.
    """
    try:
        return _COMMANDS[options.command](options)
    except (ConversionError, OSError) as error:
        print(f"luna-mega {options.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def _chosen(options: argparse.Namespace, *names: str) -> dict:
    return {name: getattr(options, name) for name in names}


def _convert(options: argparse.Namespace) -> int:
    chosen = _chosen(options, "bpe", "head", "layer_norm", "ema_convention", "dtype", "license")
    print(convert_checkpoint(options.checkpoint, options.output, dictionaries=options.dict, **chosen))
    return 0


def _export(options: argparse.Namespace) -> int:
    chosen = _chosen(options, "head", "layer_norm", "dtype")
    print(export_checkpoint(options.folder, options.output, dictionaries=options.dict, progress=True, **chosen))
    return 0


def _verify(options: argparse.Namespace) -> int:
    chosen = _chosen(options, "inputs", "tolerance", "head", "layer_norm", "ema_convention")
    random = _chosen(options, "batch", "length", "seed")
    chosen |= {name: value for name, value in random.items() if value is not None}
    comparison = compare(options.a, options.b, texts=options.text, progress=not options.json, **chosen)
    if options.json:
        summary = {"largest": comparison.largest, "within": comparison.within}
        print(json.dumps(asdict(comparison) | summary, indent=2))
    else:
        print(comparison)
    return 0 if comparison.within else 1


def _info(options: argparse.Namespace) -> int:
    info = describe(options.path, options.length)
    print(json.dumps(asdict(info), indent=2) if options.json else info)
    return 0


def _bundle(options: argparse.Namespace) -> int:
    files = bundle(options.folder, options.output)
    print(f"written to {options.output or options.folder}: {', '.join(files)}; config.json names them in auto_map")
    return 0


def _onnx(options: argparse.Namespace) -> int:
    print(export_onnx(options.folder, options.output, options.opset))
    return 0


def _eval(options: argparse.Namespace) -> int:
    evaluate(options.folder, options.arguments)
    return 0


_COMMANDS = {
    "convert": _convert,
    "export": _export,
    "verify": _verify,
    "info": _info,
    "bundle": _bundle,
    "onnx": _onnx,
    "eval": _eval,
}
