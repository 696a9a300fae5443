# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
# PYTHON_ARGCOMPLETE_OK
"""The arguments of the command line `luna-mega`.

This module stands beside the package, because `import luna_mega` brings torch and transformers with it, for which
`luna-mega --help` would wait. `luna_mega.cli` runs the commands, and is imported once the arguments are understood.
"""

import argparse
import importlib
import os
from collections.abc import Sequence
from pathlib import Path

DTYPES = ("float32", "float16", "bfloat16")
LAYER_NORMS = ("standard", "plus-one")
EMA_CONVENTIONS = ("main", "flash")
_HELP = {
    "convert": "convert a fairseq checkpoint into a folder that AutoModel loads",
    "export": "write a folder back as a fairseq checkpoint",
    "verify": "compare two models layer by layer on the same inputs",
    "info": "describe a model: parameters, memory, FLOPs, heads, origin",
    "bundle": "add the code to a model folder, for trust_remote_code",
    "onnx": "write a model folder as ONNX, and compare it with the model",
    "eval": "evaluate a language model with lm-eval",
    "demo": "show a model on a page in the browser",
}

_FOLDER = "a model folder, which luna-mega convert or save_pretrained wrote"
_JSON = {
    "eval": "print lm-eval's results as JSON, and its tables on stderr; before FOLDER",
    "demo": "with --space: print what was written as JSON",
}
# What follows `luna-mega COMMAND`.
_EXAMPLES = {
    "convert": [
        "checkpoint_best.pt --output my-model",
        "checkpoint_best.pt --output my-model --dict dict.txt --bpe gpt2_bpe/",
        "checkpoint_best.pt --output my-model --dtype bfloat16 --license mit --json",
    ],
    "export": ["my-model --output checkpoint.pt", "my-model --output checkpoint.pt --layer-norm plus-one"],
    "verify": [
        "checkpoint_best.pt my-model",
        "my-model my-other-model --tolerance 1e-4",
        "my-model my-other-model --text 'A sentence.' 'Another one.' --json",
    ],
    "info": ["my-model", "my-model --length 16384", "checkpoint_best.pt --json"],
    "bundle": ["my-model", "my-model --output my-bundle"],
    "onnx": ["my-model --output my-onnx", "my-classifier --output model.onnx --opset 20"],
    "eval": ["my-model --tasks lambada_openai --batch_size 8", "--json my-model --tasks wikitext --limit 100"],
    "demo": ["my-model", "my-model --host 0.0.0.0 --port 8080", "my-model --space my-space"],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name.

    Args:
        argv: arguments without the program name; those of the process when None.

    Returns:
        Exit status: 0 done, 1 the input is at fault, with one line about it on stderr.

    Raises:
        SystemExit: 2 on wrong usage, 0 after `--help` and `--version`.
    """
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what could come next
        _complete(parser)
    options = parser.parse_args(argv)
    if options.command == "verify":
        _check_verify(options)
    if options.command == "demo":
        _check_demo(options)
    status: int = importlib.import_module("luna_mega.cli").run(options)
    return status


class _Help(argparse.HelpFormatter):
    """Leave the lines of examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class _Version(argparse.Action):
    """Print the version, which the package knows, and leave."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"luna-mega {importlib.import_module('luna_mega').__version__}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {name:10}{text}" for name, text in _HELP.items())
    parser = argparse.ArgumentParser(
        prog="luna-mega",
        usage="luna-mega [-h] [--version] COMMAND ...",
        description=f"Luna and Mega for transformers.\n\ncommands:\n{lines}",
        epilog="`luna-mega COMMAND --help` shows the options of a command, with examples.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show program's version number and exit")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, prog="luna-mega", help=argparse.SUPPRESS
    )
    for name, add_arguments in _COMMANDS.items():
        command = commands.add_parser(name, formatter_class=_Help)
        add_arguments(command)
        command.add_argument("--json", action="store_true", help=_JSON.get(name, "print the report as JSON"))
        command.epilog = "\n".join(["examples:", *(f"  luna-mega {name} {line}" for line in _EXAMPLES[name])])
    return parser


def _complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that completes a command line, which ends the process."""
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(parser)


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Converts a fairseq checkpoint of a Luna encoder (luna_bert, LRA) or a Mega model (LRA, raw speech, language "
        "models, translation) into a folder for transformers. Nothing in the checkpoint is executed."
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the .pt file that fairseq saved")
    parser.add_argument("--output", metavar="DIR", required=True, help="folder to write, absent or empty")
    _add_dictionaries(
        parser,
        "dict.txt of the vocabulary and, if there is one, of the labels, or those of source and target (default: the "
        "ones beside the checkpoint)",
    )
    parser.add_argument(
        "--bpe",
        metavar="PATH",
        help="folder with GPT-2's encoder.json and vocab.bpe, or vocab.json and merges.txt: writes the tokenizer of a "
        "luna_bert model, or of a language model of GPT-2's ids; for translation the codes, a file of subword-nmt "
        "or fastBPE (the others need only the dictionary)",
    )
    _add_conventions(
        parser,
        head="classification head to convert (default: the only head of a fine-tuned model, else masked LM)",
        layer_norm="how norm weights of Luna are stored: as they are, or minus one as the 2023 code does (default: by "
        "their mean)",
        ema_convention="branch of the Mega code that wrote the file: flash calls alpha what main calls delta (default: "
        "by the order of the tensors)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the written weights (default: float32)")
    parser.add_argument(
        "--license", metavar="ID", help="licence of the weights for the model card, as mit (default: none is stated)"
    )


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.description = "Writes a folder of a Luna or Mega encoder back as a checkpoint of the original fairseq code."
    parser.add_argument("folder", metavar="FOLDER", help=_FOLDER)
    parser.add_argument("--output", metavar="FILE", required=True, help="the .pt file to write, which must not exist")
    parser.add_argument(
        "--head",
        metavar="NAME",
        help="name of a luna_bert classification head, which decides its kind (default: its name in the converted "
        "file, else the usual one of its kind)",
    )
    parser.add_argument(
        "--layer-norm",
        choices=LAYER_NORMS,
        help="store norm weights of Luna as they are, or minus one for the 2023 code (default: as the converted file)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="default: that of the converted file, if nothing is lost by it")
    _add_dictionaries(
        parser,
        "dict.txt of the vocabulary and of the labels, to write beside the file (default: those of the folder)",
    )


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs two models on the same inputs, in float32, and prints the largest difference of every layer. Exit "
        "status 0: within the tolerance; 1: not, or the input is at fault."
    )
    for name in "ab":
        parser.add_argument(name, metavar=name.upper(), help="a model folder, or a fairseq checkpoint to convert first")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--inputs", metavar="FILE", help="safetensors file with the model's inputs: input_ids [B, T], ..."
    )
    source.add_argument("--text", metavar="TEXT", nargs="+", default=[], help="texts for the tokenizer of A or B")
    parser.add_argument("--batch", metavar="N", type=_positive, help="random sequences (default: 2)")
    parser.add_argument("--length", metavar="N", type=_positive, help="their length (default: 64)")
    parser.add_argument("--seed", metavar="S", type=int, help="of the random sequences (default: 0)")
    parser.add_argument("--tolerance", metavar="T", type=float, default=1e-5, help="largest difference (default: 1e-5)")
    _add_conventions(
        parser,
        head="classification head of a checkpoint (see luna-mega convert)",
        layer_norm="norm weights of a checkpoint (see luna-mega convert)",
        ema_convention="branch of a checkpoint (see luna-mega convert)",
    )
    parser.set_defaults(error=parser.error)


def _add_info(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Describes a model: architecture, parameters, memory and FLOPs at a length, heads, and which code wrote it."
    )
    parser.add_argument("path", metavar="PATH", help="a model folder or a fairseq checkpoint")
    parser.add_argument("--length", metavar="N", type=_positive, help="positions (default: as many as the model has)")


def _add_bundle(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Makes a model folder self-contained: AutoModel...from_pretrained(FOLDER, trust_remote_code=True) loads it "
        "where luna-mega is not installed. Where luna_mega is imported, its own classes are used."
    )
    parser.add_argument("folder", metavar="FOLDER", help=_FOLDER)
    parser.add_argument("--output", metavar="DIR", help="folder to write, absent or empty (default: FOLDER itself)")


def _add_onnx(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes a model folder as ONNX, for any batch and length. A model that generates becomes two programs, prefill "
        "and decode, with an encoder three. onnxruntime is compared with the model before anything is kept."
    )
    parser.add_argument("folder", metavar="FOLDER", help=_FOLDER)
    parser.add_argument(
        "--output",
        metavar="PATH",
        required=True,
        help="folder to write, absent or empty; for one program also a FILE.onnx",
    )
    parser.add_argument("--opset", metavar="N", type=_positive, help="version of the ONNX operators, 18 or later")


def _add_eval(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Evaluates a causal language model with lm-eval (pip install luna-mega[eval]): `lm-eval run --model hf "
        "--model_args pretrained=FOLDER ...`, in a process that knows the models of luna-mega."
    )
    parser.add_argument("folder", metavar="FOLDER", help=f"{_FOLDER}, with its tokenizer")
    parser.add_argument(
        "arguments",
        metavar="...",
        nargs=argparse.REMAINDER,
        help="arguments of lm-eval: --tasks NAME --batch_size N --include_path DIR ... (FOLDER --help shows all)",
    )


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Shows a model on a page in the browser (pip install 'luna-mega[demo]'): it fills masks, classifies or writes, "
        "and the page draws the pack and unpack weights of Luna, or attention and moving averages of Mega."
    )
    parser.add_argument("folder", metavar="FOLDER", help=f"{_FOLDER}, with its tokenizer")
    parser.add_argument("--host", metavar="NAME", help="address to listen at; 0.0.0.0 = all (default: this machine's)")
    parser.add_argument("--port", metavar="N", type=_positive, help="default: the first free one from 7860 on")
    parser.add_argument(
        "--space",
        metavar="DIR",
        help="write the page as a Hugging Face Space in DIR, absent or empty, and show nothing",
    )
    parser.set_defaults(error=parser.error)


_COMMANDS = {
    "convert": _add_convert,
    "export": _add_export,
    "verify": _add_verify,
    "info": _add_info,
    "bundle": _add_bundle,
    "onnx": _add_onnx,
    "eval": _add_eval,
    "demo": _add_demo,
}


def _add_dictionaries(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--dict", metavar="FILE", nargs="+", action="extend", default=[], help=text)


def _add_conventions(parser: argparse.ArgumentParser, *, head: str, layer_norm: str, ema_convention: str) -> None:
    """Add the options that say how a checkpoint is to be read."""
    parser.add_argument("--head", metavar="NAME", help=head)
    parser.add_argument("--layer-norm", choices=("auto", *LAYER_NORMS), default="auto", help=layer_norm)
    parser.add_argument("--ema-convention", choices=("auto", *EMA_CONVENTIONS), default="auto", help=ema_convention)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a whole number of at least 1")
    return int(text)


def _check_demo(options: argparse.Namespace) -> None:
    """Refuse options that have nothing to act on."""
    if options.space and (options.host or options.port):
        options.error("--host and --port are of the page; leave them out with --space, which shows nothing")
    if options.json and not options.space:
        options.error("--json is of the report of --space; leave it out, a page has none")


def _check_verify(options: argparse.Namespace) -> None:
    """Refuse options that have nothing to act on."""
    for name in ("batch", "length", "seed"):
        if getattr(options, name) is not None and (options.inputs or options.text):
            options.error(f"--{name} is of the random inputs; leave it out with --inputs and --text")
    of_checkpoints = options.head or options.layer_norm != "auto" or options.ema_convention != "auto"
    if of_checkpoints and not any(Path(path).is_file() for path in (options.a, options.b)):
        options.error(
            "--head, --layer-norm and --ema-convention are for checkpoints; leave them out, both models are folders"
        )
