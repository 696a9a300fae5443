# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
# PYTHON_ARGCOMPLETE_OK
"""The command line `luna-mega`: the list of its commands, `COMMANDS` at the end, and how it reads their arguments.

This module stands beside the package, because `import luna_mega` imports torch and transformers, and `luna-mega --help`
should not wait for them. What runs a command is imported once its arguments are understood.
"""

import argparse
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

DTYPES = ("float32", "float16", "bfloat16")
LAYER_NORMS = ("standard", "plus-one")
EMA_CONVENTIONS = ("main", "flash")
_FOLDER = "a model folder, written by luna-mega convert or save_pretrained"


@dataclass(frozen=True)
class Command:
    """A command: its help, how its arguments are added to a parser, and the dotted name of the function that runs it.

    `examples` are what follows `luna-mega NAME`; `check` returns what is wrong with a combination of options, or None.
    """

    name: str
    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    examples: Sequence[str]
    target: str
    json: str = "print the report as JSON"
    check: Callable[[argparse.Namespace], str | None] = lambda options: None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name.

    Args:
        argv: arguments without the program name; those of the process when None.

    Returns:
        Exit status: 0 if the command succeeded, 1 if its input is invalid (one line on stderr), 130 after Ctrl-C.

    Raises:
        SystemExit: 2 on wrong usage, 0 after `--help` and `--version`, 143 after SIGTERM.
    """
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what could come next
        _complete(parser)
    options = parser.parse_args(argv)
    if (wrong := options.chosen.check(options)) is not None:
        options.error(wrong)
    try:
        with _exit_on_sigterm():
            status: int = importlib.import_module("luna_mega.commands").run(options.chosen.target, options)
        return status
    except KeyboardInterrupt:
        print(f"luna-mega {options.command}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Raise `SystemExit` on SIGTERM during the block, so that temporary files are removed."""

    def leave(*_: object) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():  # only the main thread can set a handler
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Parser(argparse.ArgumentParser):
    """Show an argument that is at fault without the characters that a terminal acts on."""

    def error(self, message: str) -> NoReturn:
        super().error("".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in message))


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
    lines = "\n".join(f"  {command.name:10}{command.help}" for command in COMMANDS)
    parser = _Parser(
        prog="luna-mega",
        usage="luna-mega [-h] [--version] COMMAND ...",
        description=f"Luna, Mega and Megalodon for transformers.\n\ncommands:\n{lines}",
        epilog="`luna-mega COMMAND --help` shows the options of a command, with examples.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show program's version number and exit")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, prog="luna-mega", help=argparse.SUPPRESS
    )
    for command in COMMANDS:
        added = commands.add_parser(command.name, formatter_class=_Help)
        command.arguments(added)
        added.add_argument("--json", action="store_true", help=command.json)
        added.epilog = "\n".join(["examples:", *(f"  luna-mega {command.name} {line}" for line in command.examples)])
        added.set_defaults(chosen=command, error=added.error)
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
        "Converts a fairseq checkpoint of a Luna model (luna_bert, LRA, translation) or a Mega model (LRA, raw speech, "
        "ImageNet pictures, language models, translation), or a Megalodon folder, into a folder for transformers. "
        "Nothing in the checkpoint is executed."
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the .pt file of fairseq, or a folder of Megalodon")
    parser.add_argument("--output", metavar="DIR", required=True, help="folder to write, absent or empty")
    _add_dictionaries(
        parser,
        "dictionaries: dict.txt of the vocabulary, and of the labels if there is one; for translation one of the "
        "source and one of the target (default: the ones beside the checkpoint)",
    )
    parser.add_argument(
        "--bpe",
        metavar="PATH",
        help="byte-pair encoding for the tokenizer. For luna_bert and for language models with GPT-2's vocabulary: a "
        "folder with encoder.json and vocab.bpe, or vocab.json and merges.txt. For translation: the file of codes from "
        "subword-nmt or fastBPE. For Megalodon: the SentencePiece model (default: tokenizer.model beside the "
        "checkpoint). Other models need only the dictionary",
    )
    _add_conventions(
        parser,
        head="classification head to convert (default: the only head of a fine-tuned model, else masked LM)",
        layer_norm="how the file stores the norm weights of Luna: as they are, or minus one, as the 2023 code does "
        "(default: decided by their mean)",
        ema_convention="branch of the Mega code that wrote the file: flash names alpha what main names delta (default: "
        "decided by the order of the tensors)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of the weights that are written (default: float32; for Megalodon as in the checkpoint)",
    )
    parser.add_argument(
        "--license",
        metavar="ID",
        help="licence of the weights for the model card: an identifier of the Hub, such as mit, or other:NAME "
        "(default: none is stated)",
    )


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.description = "Writes the folder of a model back as a checkpoint of the original code."
    parser.add_argument("folder", metavar="FOLDER", help=_FOLDER)
    parser.add_argument(
        "--output",
        metavar="PATH",
        required=True,
        help="the .pt file to write, which must not exist; for Megalodon a folder, absent or empty",
    )
    parser.add_argument(
        "--head",
        metavar="NAME",
        help="name of a luna_bert classification head, which decides its kind (default: its name in the converted "
        "file, otherwise the usual name)",
    )
    parser.add_argument(
        "--layer-norm",
        choices=LAYER_NORMS,
        help="store the norm weights of Luna as they are, or minus one for the 2023 code (default: as in the converted "
        "file)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of the weights that are written (default: as in the converted file, if that loses nothing)",
    )
    _add_dictionaries(
        parser,
        "dictionaries to write beside the file: dict.txt of the vocabulary and of the labels, or for Megalodon the "
        "SentencePiece model (default: those in the folder)",
    )
    parser.add_argument(
        "--shards",
        metavar="N",
        type=_positive,
        help="number of files for the weights of a Megalodon, one a model-parallel rank (default: as in the converted "
        "folder, otherwise 1)",
    )


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs two models on the same inputs, in float32, and prints the largest difference of every layer. Exit "
        "status 0: all differences are within the tolerance; 1: one is not, or the input is at fault."
    )
    for name in "ab":
        parser.add_argument(name, metavar=name.upper(), help="a model folder, or a checkpoint to convert first")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--inputs", metavar="FILE", help="safetensors file with the model's inputs: input_ids [B, T], ..."
    )
    source.add_argument("--text", metavar="TEXT", nargs="+", default=[], help="texts for the tokenizer of A or B")
    parser.add_argument("--batch", metavar="N", type=_positive, help="number of random sequences (default: 2)")
    parser.add_argument("--length", metavar="N", type=_positive, help="length of the random sequences (default: 64)")
    parser.add_argument("--seed", metavar="S", type=_seed, help="seed of the random sequences (default: 0)")
    parser.add_argument(
        "--tolerance",
        metavar="T",
        type=float,
        default=1e-5,
        help="largest difference that counts as equal (default: 1e-5)",
    )
    _add_conventions(
        parser,
        head="classification head of a checkpoint (see luna-mega convert)",
        layer_norm="how a checkpoint stores norm weights (see luna-mega convert)",
        ema_convention="branch that wrote a checkpoint (see luna-mega convert)",
    )


def _add_info(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Describes a model: architecture, parameters, memory and FLOPs at a length, heads, and which code wrote it."
    )
    parser.add_argument("path", metavar="PATH", help="a model folder or a checkpoint")
    parser.add_argument(
        "--length", metavar="N", type=_positive, help="number of positions (default: all that the model has)"
    )
    parser.add_argument("--explain", action="store_true", help="also print the formulas behind the numbers")


def _add_bundle(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Makes a model folder self-contained: AutoModel...from_pretrained(FOLDER, trust_remote_code=True) loads it "
        "without luna-mega. Where luna_mega is imported, its own classes are used."
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
        help="folder to write, absent or empty; a model that becomes a single program may also be a FILE.onnx",
    )
    parser.add_argument("--opset", metavar="N", type=_positive, help="version of the ONNX operators, 18 or later")


def _add_eval(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Evaluates a causal language model with lm-eval (extra `eval`): `lm-eval run --model hf "
        "--model_args pretrained=FOLDER ...`, in a process that knows the models of luna-mega."
    )
    parser.add_argument(
        "--mteb",
        metavar="TASKS",
        help="judge an encoder's embeddings by these tasks of mteb instead, names with commas between; before FOLDER",
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
        "Shows a model on a page in the browser (extra `demo`): it fills masks, classifies or writes, "
        "and the page draws the pack and unpack weights of Luna, or attention and moving averages of Mega."
    )
    parser.add_argument("folder", metavar="FOLDER", help=f"{_FOLDER}, with its tokenizer")
    parser.add_argument(
        "--host", metavar="NAME", help="address to listen on; 0.0.0.0 = all (default: this machine only)"
    )
    parser.add_argument(
        "--port", metavar="N", type=_port, help="port to listen on (default: the first free one from 7860)"
    )
    parser.add_argument(
        "--space",
        metavar="DIR",
        help="write the page as a Hugging Face Space into DIR, absent or empty, instead of serving it",
    )


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Answers completions, chat and responses in the protocol of OpenAI, by the server of transformers (extra "
        "`serve`) or by vLLM (extra `vllm`, in a separate environment)."
    )
    parser.add_argument("folder", metavar="FOLDER", help=f"{_FOLDER}, of a causal language model with its tokenizer")
    parser.add_argument(
        "--engine", choices=("transformers", "vllm"), default="transformers", help="who serves (default: transformers)"
    )
    parser.add_argument(
        "--host", metavar="NAME", default="127.0.0.1", help="address to listen on; 0.0.0.0 = all (default: 127.0.0.1)"
    )
    parser.add_argument("--port", metavar="N", type=_port, default=8000, help="port to listen on (default: 8000)")
    parser.add_argument("--key", metavar="KEY", help="what clients must send as their API key (default: none)")
    parser.add_argument(
        "--max-length", metavar="N", type=_positive, help="tokens of prompt and answer, at most; with --engine vllm"
    )
    parser.add_argument(
        "--max-prompt",
        metavar="N",
        type=_positive,
        help="maximum number of tokens of a prompt; longer ones get an error 400 (default: no limit)",
    )
    parser.add_argument(
        "--max-requests",
        metavar="N",
        type=_positive,
        help="requests at once; further ones get an error 503, or wait with --engine vllm (default: the engine's)",
    )


def _add_dictionaries(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--dict", metavar="FILE", nargs="+", action="extend", default=[], help=text)


def _add_conventions(parser: argparse.ArgumentParser, *, head: str, layer_norm: str, ema_convention: str) -> None:
    """Add the options that say how a checkpoint is to be read."""
    parser.add_argument("--head", metavar="NAME", help=head)
    parser.add_argument("--layer-norm", choices=("auto", *LAYER_NORMS), default="auto", help=layer_norm)
    parser.add_argument("--ema-convention", choices=("auto", *EMA_CONVENTIONS), default="auto", help=ema_convention)


def _positive(text: str) -> int:
    if not text.isdecimal() or len(text) > 10 or not 1 <= int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text[:40]}: give a whole number of at least 1 and less than 2^31")
    return int(text)


def _seed(text: str) -> int:
    if not text.removeprefix("-").isdecimal() or len(text) > 20 or not -(2**63) <= int(text) < 2**64:
        raise argparse.ArgumentTypeError(f"{text[:40]}: give a whole number of at most 64 bits")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or len(text) > 5 or not 1 <= int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"{text[:40]}: give a port from 1 to 65535")
    return int(text)


def _check_demo(options: argparse.Namespace) -> str | None:
    if options.space and (options.host or options.port):
        return "--host and --port have no effect with --space, which writes files and serves no page; leave them out"
    if options.json and not options.space:
        return "--json prints the report of --space; leave it out, or add --space"
    return None


def _check_eval(options: argparse.Namespace) -> str | None:
    if options.mteb is not None and options.arguments:
        return f"{options.arguments[0]} is an argument of lm-eval; with --mteb nothing follows FOLDER"
    return None


def _check_serve(options: argparse.Namespace) -> str | None:
    if options.max_length and options.engine != "vllm":
        return "--max-length applies to --engine vllm; with the server of transformers, use --max-prompt"
    if options.max_prompt and options.engine == "vllm":
        return "--max-prompt applies to the server of transformers; with --engine vllm, use --max-length"
    return None


def _check_verify(options: argparse.Namespace) -> str | None:
    for name in ("batch", "length", "seed"):
        if getattr(options, name) is not None and (options.inputs or options.text):
            return f"--{name} applies to random inputs only; leave it out with --inputs and --text"
    return None


COMMANDS = (
    Command(
        name="convert",
        help="convert a checkpoint of the original code into a folder that AutoModel loads",
        arguments=_add_convert,
        examples=(
            "checkpoint_best.pt --output my-model",
            "checkpoint_best.pt --output my-model --dict dict.txt --bpe gpt2_bpe/",
            "checkpoint_best.pt --output my-model --dtype bfloat16 --license mit --json",
            "megalodon-folder --output my-model",
        ),
        target="luna_mega.commands.convert",
    ),
    Command(
        name="export",
        help="write a folder back as a checkpoint of the original code",
        arguments=_add_export,
        examples=(
            "my-model --output checkpoint.pt",
            "my-model --output checkpoint.pt --layer-norm plus-one",
            "my-megalodon --output megalodon-folder --shards 2",
        ),
        target="luna_mega.commands.export",
    ),
    Command(
        name="verify",
        help="compare two models layer by layer on the same inputs",
        arguments=_add_verify,
        examples=(
            "checkpoint_best.pt my-model",
            "my-model my-other-model --tolerance 1e-4",
            "my-model my-other-model --text 'A sentence.' 'Another one.' --json",
        ),
        target="luna_mega.commands.verify",
        check=_check_verify,
    ),
    Command(
        name="info",
        help="describe a model: parameters, memory, FLOPs, heads, origin",
        arguments=_add_info,
        examples=("my-model", "my-model --length 16384 --explain", "checkpoint_best.pt --json"),
        target="luna_mega.commands.info",
    ),
    Command(
        name="bundle",
        help="add the code to a model folder, for trust_remote_code",
        arguments=_add_bundle,
        examples=("my-model", "my-model --output my-bundle"),
        target="luna_mega.commands.bundle",
    ),
    Command(
        name="onnx",
        help="write a model folder as ONNX, and compare it with the model",
        arguments=_add_onnx,
        examples=("my-model --output my-onnx", "my-classifier --output model.onnx --opset 20"),
        target="luna_mega.commands.onnx",
    ),
    Command(
        name="eval",
        help="evaluate a language model with lm-eval, or embeddings with mteb",
        arguments=_add_eval,
        examples=(
            "my-model --tasks lambada_openai --batch_size 8",
            "--json my-model --tasks wikitext --limit 100",
            "--mteb STSBenchmark,SICK-R my-encoder",
        ),
        target="luna_mega.commands.evaluate_folder",
        json="print the results as JSON, and the tables of lm-eval on stderr; goes before FOLDER",
        check=_check_eval,
    ),
    Command(
        name="demo",
        help="show a model on a page in the browser",
        arguments=_add_demo,
        examples=("my-model", "my-model --host 0.0.0.0 --port 8080", "my-model --space my-space"),
        target="luna_mega.commands.demo",
        json="with --space: print what was written as JSON",
        check=_check_demo,
    ),
    Command(
        name="serve",
        help="answer completions and chat over HTTP, by transformers or vLLM",
        arguments=_add_serve,
        examples=(
            "my-model",
            "my-model --port 8080 --key secret --max-requests 8",
            "my-model --engine vllm --max-length 16384",
        ),
        target="luna_mega.commands.serve_folder",
        json="print the address and the name of the model as JSON",
        check=_check_serve,
    ),
)
