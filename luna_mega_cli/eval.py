# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""`luna-mega eval`: evaluate a model folder."""

import argparse

from luna_mega_cli.options import FOLDER, Commands, add_command, show


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "eval",
        run,
        check=check,
        help="evaluate a language model with lm-eval, or embeddings with mteb",
        description="Evaluates a causal language model with lm-eval (extra `eval`): `lm-eval run --model hf "
        "--model_args pretrained=FOLDER ...`, in a process that has imported luna_mega.",
        examples=(
            "my-model --tasks lambada_openai --batch_size 8",
            "--json my-model --tasks wikitext --limit 100",
            "--mteb STSBenchmark,SICK-R my-encoder",
        ),
        json="print the results as JSON, and the tables of lm-eval on stderr; place it before FOLDER",
    )
    parser.add_argument(
        "--mteb",
        metavar="TASKS",
        help="evaluate the embeddings of an encoder on these mteb tasks instead, separated by commas; place it before "
        "FOLDER",
    )
    parser.add_argument("folder", metavar="FOLDER", help=f"{FOLDER}, with its tokenizer")
    parser.add_argument(
        "arguments",
        metavar="...",
        nargs=argparse.REMAINDER,
        help="arguments of lm-eval: --tasks NAME --batch_size N --include_path DIR ... (FOLDER --help shows all)",
    )


def check(options: argparse.Namespace) -> str | None:
    if options.mteb is not None and options.arguments:
        return f"{options.arguments[0]} is an argument of lm-eval; omit all arguments after FOLDER with --mteb"
    return None


def run(options: argparse.Namespace) -> None:
    from luna_mega.inspection.evaluation import embedding_scores, evaluate, scores

    if options.mteb is not None:
        results = embedding_scores(options.folder, options.mteb)
        show(options, "\n".join(f"{name}: {score:.4f}" for name, score in results.items()), results)
    elif options.json:
        show(options, None, scores(options.folder, options.arguments))
    else:
        evaluate(options.folder, options.arguments)
