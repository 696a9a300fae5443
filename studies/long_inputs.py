"""Evaluate masked language models on inputs longer than their training inputs, with time and memory.

    python studies/long_inputs.py --models outputs/teacher outputs/luna --lengths 128 256 512 1024 2048 \
        --dataset_path DIR --output_dir outputs/long

The text is one stream of tokens, masked once and cut into blocks of each length, so that all models predict the same
tokens at all lengths. Batches have the same number of tokens at all lengths, and memory excludes the weights. Lengths
beyond the positions of a model are skipped.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch.nn import functional
from tqdm import tqdm
from transformers import DataCollatorForTokenClassification, HfArgumentParser, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import luna_mega
from luna_mega.distillation import Teacher, check_tokenizer, load_teacher
from luna_mega.training.arguments import check_least, fail, one_line
from luna_mega.training.data import SourceArguments, load_splits
from luna_mega.training.language_modeling import encode
from luna_mega.training.masking import Masking
from luna_mega.training.models import boundary_ids, load_tokenizer
from luna_mega.training.report import save_json, show

plt.rcParams["text.parse_math"] = False  # names may contain $

Batch = dict[str, torch.Tensor]


@dataclass(kw_only=True)
class Arguments(SourceArguments):
    models: list[str] = HfArg(help="folders or Hub names of masked language models")
    output_dir: str = HfArg(help="output folder for report.md, report.png and scores.json")
    lengths: list[int] = HfArg(default_factory=lambda: [128, 256, 512, 1024, 2048], help="tokens of a block")
    split: str = HfArg(default="validation", help="split to evaluate")
    text_column: str = HfArg(default="text", help="column with the text")
    max_tokens: int = HfArg(default=100_000, help="maximum number of tokens")
    mlm_probability: float = HfArg(default=0.15, help="share of the tokens to predict")
    batch_tokens: int = HfArg(default=2048, help="tokens of a batch, or of a block if it is longer")
    seed: int = HfArg(default=42, help="seed of the masks")
    device: str = field(default="cuda" if torch.cuda.is_available() else "cpu")


def parse(argv: list[str] | None) -> Arguments:
    (arguments,) = HfArgumentParser(Arguments, allow_abbrev=False).parse_args_into_dataclasses(argv)
    check_least(arguments, 2, "lengths", "max_tokens")
    check_least(arguments, 1, "batch_tokens")
    if not 0 < arguments.mlm_probability < 1:
        fail(f"--mlm_probability {arguments.mlm_probability} must be between 0 and 1")
    return arguments


def load(arguments: Arguments) -> tuple[dict[str, Teacher], PreTrainedTokenizerBase]:
    """Return the models by name, and their common tokenizer."""
    models, first = {}, None
    for path in arguments.models:
        with one_line(f"--models {path}"):
            model, tokenizer = load_teacher(path, dtype=torch.float32), load_tokenizer(path)
            check_tokenizer(model, tokenizer)
        if model.family.is_decoder or model.is_classifier:
            fail(f"--models {path}: a {type(model.model).__name__} predicts no masked tokens")
        first = first or tokenizer
        if tokenizer.get_vocab() != first.get_vocab():
            fail(f"--models {path} has another vocabulary than {arguments.models[0]}, so losses cannot be compared")
        name = Path(path).name if Path(path).is_dir() else path
        models[path if name in models else name] = model
        model.model.to(arguments.device)
    return models, first


def read_text(arguments: Arguments, tokenizer: PreTrainedTokenizerBase) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the masked tokens of the text, and the labels (-100 = not masked), `[N]`."""
    (split,) = load_splits({arguments.split: None}, arguments, [arguments.text_column]).values()
    tokenizer.eos_token_id = boundary_ids(tokenizer)[1]
    stream = encode(split[arguments.text_column], tokenizer, "eos")[: arguments.max_tokens]
    if len(stream) < max(arguments.lengths) - 1:
        fail(f"the text has {len(stream)} tokens, too few for one block of {max(arguments.lengths)}; reduce --lengths")
    numbers = torch.Generator().manual_seed(arguments.seed)
    masked = Masking(tokenizer, arguments.mlm_probability)({"input_ids": stream.tolist()}, numbers)
    return masked["input_ids"], masked["labels"]


def make_batches(
    ids: torch.Tensor, labels: torch.Tensor, length: int, size: int, tokenizer: PreTrainedTokenizerBase
) -> list[Batch]:
    """Cut the text into blocks of `<s>` and `length - 1` tokens; the last block may be shorter."""
    bos, _ = boundary_ids(tokenizer)
    blocks = [functional.pad(block, (1, 0), value=bos) for block in ids.split(length - 1)]
    places = [functional.pad(block, (1, 0), value=-100) for block in labels.split(length - 1)]
    rows = [{"input_ids": block, "labels": labels} for block, labels in zip(blocks, places, strict=True)]
    collate = DataCollatorForTokenClassification(tokenizer)
    return [dict(collate(rows[start : start + size])) for start in range(0, len(rows), size)]


def peak_memory(call: Callable[[], object], device: torch.device) -> float:
    """Return the peak memory of the tensors that a call allocates, in MB."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return (torch.cuda.max_memory_allocated(device) - before) / 1e6
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        call()
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events)) / 1e6


@torch.no_grad()
def score(model: Teacher, batches: list[Batch], device: torch.device) -> dict[str, float]:
    """Return loss and accuracy at the masked tokens, seconds for the text, and memory of a batch."""
    batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]
    memory = peak_memory(lambda: model.logits(batches[0], batches[0]["labels"] != -100), device)
    loss = right = count = 0
    start = time.perf_counter()
    for batch in batches:
        kept = batch["labels"] != -100
        logits, targets = model.logits(batch, kept).float(), batch["labels"][kept]
        loss += functional.cross_entropy(logits, targets, reduction="sum").item()
        right, count = right + (logits.argmax(-1) == targets).sum().item(), count + len(targets)
    seconds = time.perf_counter() - start
    return {"loss": loss / count, "accuracy": right / count, "seconds": seconds, "memory_mb": memory}


def make_table(rows: list[dict[str, Any]]) -> str:
    """Return the scores as Markdown."""
    lines = [["model", "tokens of a block", "loss", "accuracy", "seconds", "memory of a batch, MB"]]
    lines.append(["---"] * len(lines[0]))
    for row in rows:
        scores = [f"{row['loss']:.3f}", f"{100 * row['accuracy']:.1f} %", show(row["seconds"]), show(row["memory_mb"])]
        lines.append([row["model"], show(row["length"]), *scores])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot loss, seconds and memory over the length."""
    panels = {"loss": "loss at masked tokens", "seconds": "seconds for the text", "memory_mb": "memory of a batch, MB"}
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 4), layout="constrained")
    for axis, (entry, label) in zip(axes, panels.items(), strict=True):
        for name in dict.fromkeys(row["model"] for row in rows):
            points = [(row["length"], row[entry]) for row in rows if row["model"] == name]
            axis.plot(*zip(*points, strict=True), "o-", label=name)
        axis.set_xscale("log", base=2)
        axis.set(xlabel="tokens of a block", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    arguments = parse(argv)
    models, tokenizer = load(arguments)
    ids, labels = read_text(arguments, tokenizer)
    device, rows = torch.device(arguments.device), []
    for length in tqdm(arguments.lengths, unit="lengths"):
        size = max(1, arguments.batch_tokens // length)
        batches = make_batches(ids, labels, length, size, tokenizer)
        for name, model in models.items():
            if model.max_length is not None and model.max_length < length:
                print(f"skipped: {name} supports at most {model.max_length} tokens, not {length}")
                continue
            rows.append({"model": name, "length": length, **score(model, batches, device)})
    if not rows:
        fail("none of the models supports inputs of these --lengths; pass shorter ones")
    rows.sort(key=lambda row: list(models).index(row["model"]))
    output = Path(arguments.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    plot(rows, output / "report.png")
    table = make_table(rows)
    (output / "report.md").write_text(
        table + "\n![Loss, seconds and memory over the tokens of a block](report.png)\n", encoding="utf-8"
    )
    print(table)
    summary = {"luna_mega": luna_mega.__version__, "device": str(device), "masked": int((labels != -100).sum())}
    summary |= {"tokens": len(ids), "seed": arguments.seed, "scores": rows}
    save_json(summary, output / "scores.json")
    return summary


if __name__ == "__main__":
    main()
