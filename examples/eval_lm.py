"""Evaluate a causal language model on blocks of text that are read in segments with a cache.

    python examples/eval_lm.py --model_name_or_path OUT --dataset_path DIR --split validation --output_dir SCORES

Plot the perplexity over the context length and, for models with a rotary bias, over the attention chunk. Such models
can be evaluated with longer chunks than in training (Mega, appendix D.3 and Figure 6).
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import PreTrainedModel
from transformers.hf_argparser import HfArg

from luna_mega import training as lib

plt.rcParams["text.parse_math"] = False  # names may contain $


@dataclass(kw_only=True)
class Arguments(lib.SourceArguments):
    model_name_or_path: str = HfArg(help="folder or Hub name of the model")
    output_dir: str = HfArg(help="output folder for scores and plots")
    split: str = HfArg(default="validation", help="split to evaluate")
    last_share: float = HfArg(default=1.0, help="evaluate only this last share of the tokens: 0.1")
    text_column: str = HfArg(default="text", help="column with the text")
    line_end: str = HfArg(default="eos", help="separator of the texts: newline, or eos (</s>)")
    context: list[int] = HfArg(default_factory=lambda: [128, 512, 2048, 8192], help="block lengths in tokens")
    chunk: list[int] = HfArg(default_factory=list, help="attention chunk sizes; default: the model's")
    segment: int = HfArg(default=1024, help="tokens of a forward pass")
    batch_size: int = HfArg(default=8, help="number of blocks of a forward pass")
    device: str = field(default="cuda" if torch.cuda.is_available() else "cpu")


def parse(argv: list[str] | None) -> Arguments:
    (arguments,) = lib.parse_arguments((Arguments,), argv)
    lib.check_least(arguments, 1, "context", "chunk", "segment", "batch_size")
    lib.check_choice(arguments, "line_end", ("newline", "eos"))
    if not 0 < arguments.last_share <= 1:
        lib.fail(f"--last_share {arguments.last_share} must be in (0, 1]")
    return arguments


def with_chunk(model: PreTrainedModel, chunk: int) -> PreTrainedModel:
    """Return a copy of the model with another chunk size."""
    config = model.config
    if not getattr(config, "use_chunking", False) or config.relative_positional_bias != "rotary":
        lib.fail("--chunk requires a model with chunked attention and a rotary bias; other biases have a fixed length")
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
        axis.set(xlabel=name, ylabel="perplexity")
        if axis.lines:
            axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> list[dict[str, float | None]]:
    arguments = parse(argv)
    model, tokenizer = lib.language_modeling.load_language_model(arguments.model_name_or_path, arguments.device)
    (split,) = lib.load_splits({arguments.split: None}, arguments, [arguments.text_column]).values()
    stream = lib.language_modeling.encode(split[arguments.text_column], tokenizer, arguments.line_end)
    stream = stream[-round(len(stream) * arguments.last_share) :]
    scores = []
    for chunk in arguments.chunk or [getattr(model.config, "attention_chunk", None)]:
        if arguments.chunk:
            model = with_chunk(model, chunk)
        for context in arguments.context:
            lengths = (context, arguments.segment, arguments.batch_size)
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
