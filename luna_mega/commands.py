# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""Functions that the commands of `luna-mega` run, and the one place where an error becomes a line and a status."""

import argparse
import io
import json
import os
import pkgutil
import sys
from dataclasses import asdict
from typing import Any

import torch
from transformers.utils import logging

from luna_mega.convert.exporter import export_checkpoint
from luna_mega.convert.importer import convert_checkpoint
from luna_mega.demo.page import serve, write_space
from luna_mega.errors import ConversionError, shown
from luna_mega.escaping import is_utf8, locale_hint, terminal
from luna_mega.hub.bundle import bundle as make_bundle
from luna_mega.inspection.evaluation import embedding_scores, evaluate, scores
from luna_mega.inspection.info import describe
from luna_mega.inspection.verify import compare
from luna_mega.onnx import export_onnx
from luna_mega.serving.engines import prepare

_PATHS = {"checkpoint", "folder", "path", "a", "b", "inputs", "dict", "bpe", "output", "space"}
_WORDS = {"head", "license", "host", "key", "mteb"}


def run(target: str, options: argparse.Namespace) -> int:
    """Run a command.

    Args:
        target: dotted name of its function, which takes the options and returns the exit status.
        options: the arguments, understood.

    Returns:
        Exit status: 0 done; 1 the input is at fault, with one line about it on stderr, or two models differ.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a locale may lack characters of a report
    bars = logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # the bars of transformers; ours check for a terminal themselves
    try:
        _check_arguments(options)
        status: int = pkgutil.resolve_name(target)(options)
        return status
    except torch.OutOfMemoryError as error:
        reason = str(error).strip().partition(". ")[0]
        message = (
            f"out of memory ({reason}); give shorter inputs, or hide the GPU with CUDA_VISIBLE_DEVICES= to use the CPU"
        )
    except (ConversionError, OSError, UnicodeError) as error:
        message = " ".join(str(error).split())
    finally:
        if bars:
            logging.enable_progress_bar()
    print(f"luna-mega {options.command}: {_red('error:')} {terminal(message)}", file=sys.stderr)
    return 1


def _red(text: str) -> str:
    """Return the text in red where stderr is a terminal that shows colours (https://no-color.org)."""
    colours = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\033[31m{text}\033[0m" if colours else text


def _check_arguments(options: argparse.Namespace) -> None:
    """Refuse arguments that are neither text nor the name of a file, and words with control characters."""
    for name, value in vars(options).items():
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str):
                continue
            try:
                whole = "\0" not in text and os.fsencode(text) is not None
                # Bytes of an argument that are not UTF-8 can still be the name of a file.
                whole = whole and (name in _PATHS or text.encode() is not None)
            except UnicodeEncodeError:
                whole = False
            if not whole or name in _WORDS and not text.isprintable():
                advice = "give text without control characters and broken bytes"
                if not is_utf8(text):
                    advice = locale_hint() or advice
                raise ConversionError(f"{name} {shown(text)}: {advice}")


def _chosen(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names}


def _print(options: argparse.Namespace, report: Any, content: dict[str, Any]) -> None:
    """Print a report, or with `--json` its content."""
    print(json.dumps(content, indent=2, default=str) if options.json else terminal(str(report)))


def convert(options: argparse.Namespace) -> int:
    chosen = _chosen(options, "bpe", "head", "layer_norm", "ema_convention", "dtype", "license")
    report = convert_checkpoint(
        options.checkpoint, options.output, dictionaries=options.dict, progress=not options.json, **chosen
    )
    _print(options, report, asdict(report))
    return 0


def export(options: argparse.Namespace) -> int:
    chosen = _chosen(options, "head", "layer_norm", "dtype", "shards")
    report = export_checkpoint(
        options.folder, options.output, dictionaries=options.dict, progress=not options.json, **chosen
    )
    _print(options, report, asdict(report))
    return 0


def verify(options: argparse.Namespace) -> int:
    chosen = _chosen(options, "inputs", "tolerance", "head", "layer_norm", "ema_convention")
    random = _chosen(options, "batch", "length", "seed")
    chosen |= {name: value for name, value in random.items() if value is not None}
    comparison = compare(options.a, options.b, texts=options.text, progress=not options.json, **chosen)
    summary = {"largest": comparison.largest, "within": comparison.within}
    _print(options, comparison, asdict(comparison) | summary)
    return 0 if comparison.within else 1


def info(options: argparse.Namespace) -> int:
    description = describe(options.path, options.length, progress=not options.json)
    text = f"{description}\n\n{description.explanation}" if options.explain else description
    _print(options, text, asdict(description))
    return 0


def bundle(options: argparse.Namespace) -> int:
    files, output = make_bundle(options.folder, options.output), options.output or options.folder
    text = f"written to {output}: {', '.join(files)}; config.json names them in auto_map"
    _print(options, text, {"output": output, "files": files})
    return 0


def onnx(options: argparse.Namespace) -> int:
    report = export_onnx(options.folder, options.output, options.opset, progress=not options.json)
    _print(options, report, asdict(report))
    return 0


def evaluate_folder(options: argparse.Namespace) -> int:
    if options.mteb is not None:
        results = embedding_scores(options.folder, options.mteb)
        _print(options, "\n".join(f"{name}: {score:.4f}" for name, score in results.items()), results)
    elif options.json:
        _print(options, None, scores(options.folder, options.arguments))
    else:
        evaluate(options.folder, options.arguments)
    return 0


def demo(options: argparse.Namespace) -> int:
    if options.space:
        files = write_space(options.folder, options.space)
        _print(options, f"written to {options.space}: {', '.join(files)}", {"output": options.space, "files": files})
    else:
        serve(options.folder, options.host, options.port)
    return 0


def serve_folder(options: argparse.Namespace) -> int:
    limits = _chosen(options, "max_length", "max_prompt", "max_requests")
    start = prepare(**_chosen(options, "folder", "engine", "host", "port", "key"), **limits)
    address = f"http://{options.host}:{options.port}/v1"
    _print(options, f"{options.folder} at {address}", {"address": address, "model": options.folder})
    sys.stdout.flush()
    start()
    return 0
