# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""`luna-mega demo`: show a model on a web page."""

import argparse

from luna_mega_cli.options import FOLDER, Commands, add_command, port, show


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "demo",
        run,
        check=check,
        help="show a model on a page in the browser",
        description="Shows a model on a page in the browser (extra `demo`). The page runs the task of the model "
        "(masked tokens, classification, text generation or translation), and plots the pack and unpack weights of "
        "Luna, or the attention weights and moving averages of Mega and Megalodon.",
        examples=("my-model", "my-model --host 0.0.0.0 --port 8080", "my-model --space my-space"),
        json="with --space: print the written files as JSON",
    )
    parser.add_argument("folder", metavar="FOLDER", help=f"{FOLDER}, with its tokenizer")
    parser.add_argument("--host", metavar="NAME", help="address to listen on; 0.0.0.0 for all (default: 127.0.0.1)")
    parser.add_argument("--port", metavar="N", type=port, help="port to listen on (default: first free port from 7860)")
    parser.add_argument(
        "--space",
        metavar="DIR",
        help="write the page as a Hugging Face Space to DIR, absent or empty, instead of serving it",
    )


def check(options: argparse.Namespace) -> str | None:
    if options.space and (options.host or options.port):
        return "--host and --port have no effect with --space; omit them"
    if options.json and not options.space:
        return "--json applies to --space only; omit it, or add --space"
    return None


def run(options: argparse.Namespace) -> None:
    from luna_mega.demo.page import serve, write_space

    if options.space:
        files = write_space(options.folder, options.space)
        show(options, f"written to {options.space}: {', '.join(files)}", {"output": options.space, "files": files})
    else:
        serve(options.folder, options.host, options.port)
