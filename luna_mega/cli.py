# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""The commands of the command line `luna-mega`; `luna_mega_cli.py` has their arguments and help."""

import argparse
import json
import os
import sys
from dataclasses import asdict
from typing import Any

import torch
from transformers.utils import logging

from luna_mega.convert.exporter import export_checkpoint
from luna_mega.convert.importer import convert_checkpoint
from luna_mega.demo.page import serve, write_space
from luna_mega.errors import ConversionError
from luna_mega.hub.bundle import bundle
from luna_mega.inspection.evaluation import evaluate, scores
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
    bars = logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # those of transformers; our own look for themselves
    try:
        return _COMMANDS[options.command](options)
    except torch.OutOfMemoryError as error:
        reason = str(error).strip().partition(". ")[0]
        message = (
            f"out of memory ({reason}); give shorter inputs, or hide the GPU with CUDA_VISIBLE_DEVICES= to use the CPU"
        )
    except (ConversionError, OSError) as error:
        message = " ".join(str(error).split())
    finally:
        if bars:
            logging.enable_progress_bar()
    print(f"luna-mega {options.command}: {_red('error:')} {message}", file=sys.stderr)
    return 1


def _red(text: str) -> str:
    """Return the text in red where stderr is a terminal that shows colours (https://no-color.org)."""
    colours = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\033[31m{text}\033[0m" if colours else text


def _chosen(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names}


def _print(options: argparse.Namespace, report: Any, content: dict[str, Any]) -> None:
    """Print a report, or with `--json` its content."""
    print(json.dumps(content, indent=2, default=str) if options.json else report)


def _convert(options: argparse.Namespace) -> int:
    chosen = _chosen(options, "bpe", "head", "layer_norm", "ema_convention", "dtype", "license")
    report = convert_checkpoint(
        options.checkpoint, options.output, dictionaries=options.dict, progress=not options.json, **chosen
    )
    _print(options, report, asdict(report))
    return 0


def _export(options: argparse.Namespace) -> int:
    chosen = _chosen(options, "head", "layer_norm", "dtype")
    report = export_checkpoint(
        options.folder, options.output, dictionaries=options.dict, progress=not options.json, **chosen
    )
    _print(options, report, asdict(report))
    return 0


def _verify(options: argparse.Namespace) -> int:
    chosen = _chosen(options, "inputs", "tolerance", "head", "layer_norm", "ema_convention")
    random = _chosen(options, "batch", "length", "seed")
    chosen |= {name: value for name, value in random.items() if value is not None}
    comparison = compare(options.a, options.b, texts=options.text, progress=not options.json, **chosen)
    summary = {"largest": comparison.largest, "within": comparison.within}
    _print(options, comparison, asdict(comparison) | summary)
    return 0 if comparison.within else 1


def _info(options: argparse.Namespace) -> int:
    info = describe(options.path, options.length, progress=not options.json)
    _print(options, info, asdict(info))
    return 0


def _bundle(options: argparse.Namespace) -> int:
    files, output = bundle(options.folder, options.output), options.output or options.folder
    text = f"written to {output}: {', '.join(files)}; config.json names them in auto_map"
    _print(options, text, {"output": output, "files": files})
    return 0


def _onnx(options: argparse.Namespace) -> int:
    report = export_onnx(options.folder, options.output, options.opset, progress=not options.json)
    _print(options, report, asdict(report))
    return 0


def _eval(options: argparse.Namespace) -> int:
    if options.json:
        _print(options, None, scores(options.folder, options.arguments))
    else:
        evaluate(options.folder, options.arguments)
    return 0


def _demo(options: argparse.Namespace) -> int:
    if options.space:
        files = write_space(options.folder, options.space)
        _print(options, f"written to {options.space}: {', '.join(files)}", {"output": options.space, "files": files})
    else:
        serve(options.folder, options.host, options.port)
    return 0


_COMMANDS = {
    "convert": _convert,
    "export": _export,
    "verify": _verify,
    "info": _info,
    "bundle": _bundle,
    "onnx": _onnx,
    "eval": _eval,
    "demo": _demo,
}
