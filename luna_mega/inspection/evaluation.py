"""`luna-mega eval`: evaluation of language models with lm-eval, and of embeddings with mteb."""

import json
import logging
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from luna_mega.errors import ConversionError, install
from luna_mega.hub.folder import read_folder

logger = logging.getLogger(__name__)


def scores(folder: str | Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Run `evaluate`, and return the results that lm-eval writes; its tables go to stderr.

    Raises:
        ConversionError: As in `evaluate`; the arguments contain `--output_path`; or there are no results.
    """
    if any(argument.split("=")[0] == "--output_path" for argument in arguments):
        raise ConversionError("--json and --output_path write the same JSON; omit one of them")
    with TemporaryDirectory() as place:
        with redirect_stdout(sys.stderr):
            evaluate(folder, [*arguments, "--output_path", place])
        files = sorted(Path(place).rglob("results_*.json"))
        if not files:
            raise ConversionError("lm-eval wrote no results; check the tasks")
        return json.loads(files[-1].read_text(encoding="utf-8-sig"))


def evaluate(folder: str | Path, arguments: Sequence[str]) -> None:
    """Run `lm-eval run --model hf --model_args pretrained=FOLDER` with further arguments.

    Args:
        folder: Folder with a causal language model of this package and its tokenizer.
        arguments: Arguments of `lm-eval run`. Its `--model_args` is added to the model's.

    Raises:
        ConversionError: lm-eval is not installed or rejects the arguments, or the folder has no causal language model.
        SystemExit: 2 for arguments that lm-eval does not know, 0 after `--help`.
    """
    model_class = read_folder(folder).model_class.__name__
    if not model_class.endswith("ForCausalLM"):
        raise ConversionError(
            f"{folder}: contains a {model_class}; lm-eval requires a causal language model, ...ForCausalLM"
        )
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        raise ConversionError(f"lm-eval cannot be imported ({error}); run {install('eval')}") from error
    model = ["--model", "hf", "--model_args", json.dumps({"pretrained": str(folder)})]
    own, sys.argv = sys.argv, ["lm-eval", "run", *model, *arguments]
    try:
        cli_evaluate()
    except Exception as error:  # lm-eval raises many types of errors for invalid tasks, data or arguments
        logger.debug("lm-eval ended with an error", exc_info=True)
        raise ConversionError(f"lm-eval: {type(error).__name__}: {error}") from error
    finally:
        sys.argv = own


def embedding_scores(folder: str | Path, tasks: str) -> dict[str, float]:
    """Return the main score of each task of mteb for the embeddings of an encoder.

    Args:
        folder: Folder with an encoder of this package and its tokenizer, or folder of sentence-transformers. Without
            the pooling of sentence-transformers, an embedding is the mean over the tokens.
        tasks: Names of tasks, separated by commas.

    Raises:
        ConversionError: mteb is not installed or has no such task, or the folder has no encoder of tokens.
    """
    model_class, config = (given := read_folder(folder)).model_class.__name__, given.config
    if config.is_decoder or config.is_encoder_decoder or config.input_type != "tokens":
        raise ConversionError(f"{folder}: contains a {model_class}; mteb evaluates embeddings of encoders of tokens")
    try:
        import mteb
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ConversionError(f"mteb cannot be imported ({error}); run {install('eval')}") from error
    try:
        chosen = mteb.get_tasks(tasks=[name.strip() for name in tasks.split(",")])
        results = mteb.evaluate(SentenceTransformer(str(folder)), chosen, cache=None).task_results
    except Exception as error:  # mteb raises many types of errors for invalid tasks, data or folders
        logger.debug("mteb ended with an error", exc_info=True)
        raise ConversionError(f"mteb: {type(error).__name__}: {error}") from error
    return {result.task_name: float(result.get_score()) for result in results}
