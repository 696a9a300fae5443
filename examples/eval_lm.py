"""Evaluate a causal language model on blocks of text that are read in segments with a cache.

    python examples/eval_lm.py --model_name_or_path OUT --dataset_path DIR --output_dir SCORES

By default, text and separators are those of the evaluation in run_clm.py. Plot the perplexity over the context length
and over the attention chunk, which can be longer than in training (Mega, appendix D.3 and Figure 6) unless the bias is
`simple`.
"""

from luna_mega_cli.script_options import check_names

check_names(__name__)  # before the imports, which take seconds

import json
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg

from luna_mega import training as lib

CONTEXTS = (128, 512, 2048, 8192)


@dataclass(kw_only=True)
class Arguments(lib.SourceArguments):
    model_name_or_path: str = HfArg(help="folder or Hub name of the model")
    output_dir: str = HfArg(help="output folder for scores and plots")
    split: str | None = HfArg(default=None, help="split to evaluate; default: as in the training, or validation")
    last_share: float | None = HfArg(default=None, help="evaluate only this last share of the tokens: 0.1")
    text_column: str | None = HfArg(default=None, help="column with the text; default: the model's, or text")
    line_end: str | None = HfArg(default=None, help="separator: newline, or eos (</s>); default: the model's, or eos")
    eval_context: list[int] | None = HfArg(default=None, help="block lengths; default: 128 to 8192 and the model's")
    chunk_size: list[int] = HfArg(default_factory=list, help="attention chunk sizes; default: the model's")
    eval_segment: int | None = HfArg(default=None, help="tokens of a forward pass; default: the model's, or 1024")
    per_device_eval_batch_size: int = HfArg(default=8, help="number of blocks of a forward pass")
    device: str = field(default="cuda" if torch.cuda.is_available() else "cpu")


def parse(argv: list[str] | None) -> Arguments:
    (arguments,) = lib.parse_arguments((Arguments,), argv)
    lib.check_least(arguments, 1, "eval_context", "chunk_size", "eval_segment", "per_device_eval_batch_size")
    if arguments.line_end is not None:
        lib.check_choice(arguments, "line_end", ("newline", "eos"))
    if not 0 < (1.0 if arguments.last_share is None else arguments.last_share) <= 1:
        lib.fail(f"--last_share {arguments.last_share} must be in (0, 1]")
    return arguments


def complete(arguments: Arguments, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set missing options to those of the training, and contexts to lengths that the model supports."""
    lib.language_modeling.apply_settings(arguments, tokenizer, "line_end", "text_column", "eval_segment")
    settings = lib.language_modeling.read_settings(tokenizer)
    if arguments.eval_context is None:
        arguments.eval_context = sorted({*CONTEXTS, settings.get("eval_context", CONTEXTS[-1])})
    lib.fit_lengths(model.config, arguments, "eval_context")
    share = settings.get("validation_share")
    if arguments.split is None and share:
        arguments.split = "train"
        arguments.last_share = share if arguments.last_share is None else arguments.last_share
        lib.say(f"evaluating the last {arguments.last_share} of the split train, as in the training (see --split)")
    elif arguments.split is None:
        arguments.split = "validation"
    elif arguments.split == "train" and share and arguments.last_share is None:
        lib.say(f"--split train contains the text of the training; pass --last_share {share} for the other part")
    arguments.last_share = 1.0 if arguments.last_share is None else arguments.last_share


def with_chunk(model: PreTrainedModel, chunk: int) -> PreTrainedModel:
    """Return a copy of the model with another chunk size."""
    config = model.config
    chunks = getattr(config, "attention_chunk", None) is not None
    if not chunks or getattr(config, "relative_positional_bias", None) == "simple":
        lib.fail("--chunk_size requires chunks and another bias than simple, whose table has a fixed length")
    changed = type(model)(type(config).from_dict(config.to_dict() | {"chunk_size": chunk}))
    changed.load_state_dict(model.state_dict())
    return changed.to(model.device, model.dtype).eval()


def plot(scores: list[dict[str, float | None]], path: Path) -> None:
    """Plot perplexity over context and chunk."""
    chunks = list(dict.fromkeys(score["chunk"] for score in scores))
    contexts = list(dict.fromkeys(score["context"] for score in scores))
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for chunk in chunks:
        points = [(score["context"], score["perplexity"]) for score in scores if score["chunk"] == chunk]
        axes[0].plot(*zip(*points, strict=True), "o-", label="full attention" if chunk is None else f"chunk {chunk}")
    for context in contexts if chunks != [None] else []:
        points = [(score["chunk"], score["perplexity"]) for score in scores if score["context"] == context]
        axes[1].plot(*zip(*points, strict=True), "o-", label=f"context {context}")
    for axis, name in zip(axes, ("context, tokens", "attention chunk, tokens"), strict=True):
        axis.set_xscale("log", base=2)
        ticks = sorted({value for line in axis.lines for value in line.get_xdata() if value is not None})
        axis.set_xticks(ticks, list(map(str, ticks)))
        axis.set(xlabel=name, ylabel="perplexity")
        if axis.lines:
            axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> list[dict[str, float | None]]:
    arguments = parse(argv)
    lib.use_onednn(arguments.device)
    model, tokenizer = lib.language_modeling.load_language_model(arguments.model_name_or_path, arguments.device)
    complete(arguments, model, tokenizer)
    (split,) = lib.load_splits({arguments.split: None}, arguments, [arguments.text_column]).values()
    stream = lib.language_modeling.encode(split[arguments.text_column], tokenizer, arguments.line_end)
    _, stream = lib.language_modeling.held_out(stream, arguments.last_share)
    scores = []
    for chunk in arguments.chunk_size or [getattr(model.config, "attention_chunk", None)]:
        if arguments.chunk_size:
            model = with_chunk(model, chunk)
        for context in arguments.eval_context:
            lengths = (context, arguments.eval_segment, arguments.per_device_eval_batch_size)
            metrics = lib.language_modeling.score_stream(model, stream, *lengths, progress=True)
            scores.append({"chunk": chunk, "context": context, **metrics})
            print(f"chunk {chunk}, context {context}: {metrics}", flush=True)
    output = Path(arguments.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    plot(scores, output / "context.png")
    (output / "scores.json").write_text(json.dumps(scores, indent=2) + "\n", encoding="utf-8")
    return scores


if __name__ == "__main__":
    main()
