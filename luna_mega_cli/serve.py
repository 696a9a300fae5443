# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""`luna-mega serve`: serve a language model over HTTP."""

import argparse
import sys

from luna_mega_cli.options import FOLDER, Commands, add_command, chosen, port, positive, show


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "serve",
        run,
        check=check,
        help="serve completions and chat over HTTP, with transformers or vLLM",
        description="Serves completions, chat completions and responses in the OpenAI protocol, with the server of "
        "transformers (extra `serve`) or with vLLM (extra `vllm`, in a separate environment).",
        examples=(
            "my-model",
            "my-model --port 8080 --key secret --max-requests 8",
            "my-model --engine vllm --max-length 16384",
        ),
        json="print the address and the name of the model as JSON",
    )
    parser.add_argument("folder", metavar="FOLDER", help=f"{FOLDER}, of a causal language model with its tokenizer")
    parser.add_argument(
        "--engine", choices=("transformers", "vllm"), default="transformers", help="server (default: transformers)"
    )
    parser.add_argument(
        "--host", metavar="NAME", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all (default: 127.0.0.1)"
    )
    parser.add_argument("--port", metavar="N", type=port, default=8000, help="port to listen on (default: 8000)")
    parser.add_argument("--key", metavar="KEY", help="API key that clients must send (default: none)")
    parser.add_argument(
        "--max-length",
        metavar="N",
        type=positive,
        help="maximum number of tokens of prompt and answer, with --engine vllm",
    )
    parser.add_argument(
        "--max-prompt",
        metavar="N",
        type=positive,
        help="maximum number of tokens of a prompt; longer ones get an error 400 (default: no limit)",
    )
    parser.add_argument(
        "--max-requests",
        metavar="N",
        type=positive,
        help="maximum number of simultaneous requests; further ones get an error 503, or wait with --engine vllm "
        "(default: the server's limit)",
    )


def check(options: argparse.Namespace) -> str | None:
    if options.max_length and options.engine != "vllm":
        return "--max-length applies to --engine vllm; with the server of transformers, use --max-prompt"
    if options.max_prompt and options.engine == "vllm":
        return "--max-prompt applies to the server of transformers; with --engine vllm, use --max-length"
    return None


def run(options: argparse.Namespace) -> None:
    from luna_mega.serving.engines import prepare

    limits = chosen(options, "max_length", "max_prompt", "max_requests")
    start = prepare(**chosen(options, "folder", "engine", "host", "port", "key"), **limits)
    address = f"http://{options.host}:{options.port}/v1"
    show(options, f"{options.folder} at {address}", {"address": address, "model": options.folder})
    sys.stdout.flush()
    start()
