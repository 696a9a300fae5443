"""The results of a run: speed and memory, a summary as table and JSON, the curve as PNG, the model card."""

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib

try:
    import resource
except ImportError:  # Windows
    resource = None

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from accelerate.utils import DistributedType
from transformers import PreTrainedModel, Trainer, TrainerCallback

import luna_mega
from common.arguments import RunArguments
from luna_mega.hub.card import FILE_NAME, training_card
from luna_mega.inspection.costs import flops_per_token

SCRIPTS = ("examples", "studies")  # the folders with scripts that train
NOT_SHARDED = ", not FSDP: accelerate does not shard on CPUs"
PARALLEL = {
    DistributedType.NO: "none",
    DistributedType.MULTI_CPU: "DDP",
    DistributedType.MULTI_GPU: "DDP",
    DistributedType.FSDP: "FSDP",
    DistributedType.DEEPSPEED: "DeepSpeed",
}


def peak_memory_gb(device: torch.device) -> float | None:
    """Return the peak memory so far in GB: on CUDA the accelerator's, else the process's own (None where unknown)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


def measure_peak(dtype: torch.dtype, side: int = 1024) -> float:
    """Return the FLOPs a second of the fastest of five matrix products on this CPU."""
    left, times = torch.randn(side, side).to(dtype), []
    for _ in range(6):
        start = time.perf_counter()
        left @ left
        times.append(time.perf_counter() - start)
    return 2 * side**3 / min(times[1:])


def throughput(
    model: PreTrainedModel,
    length: int,
    tokens_per_second: float,
    processes: int,
    device: torch.device,
    dtype: torch.dtype,
    peak: float | None,
    head_share: float = 1.0,
) -> dict[str, float | str]:
    """Return the speed in all and of a process, and the model FLOPs utilisation `mfu`, or why it is not known.

    It is the share of `peak` (FLOPs a second of a process; None = measured on a CPU) that the forward pass takes, times
    three for the backward pass, for sequences of `length` tokens. The head scores `head_share` of them.
    """
    speeds = {
        "tokens_per_second": tokens_per_second,
        "tokens_per_second_per_process": tokens_per_second / processes,
    }
    if model.config.is_encoder_decoder:
        return speeds | {"mfu": "not known: the formulas take a source and a target of one length"}
    if model.config.model_type not in ("luna", "mega"):
        return speeds | {"mfu": f"not known: there are no formulas for {model.config.model_type}"}
    if peak is None and device.type != "cpu":
        return speeds | {"mfu": "not known: pass --peak_flops of the device"}
    peak = peak or measure_peak(dtype)
    flops = flops_per_token(model, length)
    needed = 3 * (flops["total"] - (1 - head_share) * flops["head"]) * tokens_per_second
    return speeds | {"mfu": needed / (peak * processes), "peak_flops": peak}


class SpeedCallback(TrainerCallback):
    """Counter of the seconds and the tokens of one call of `Trainer.train`, without evaluation and saving.

    Trainer counts the tokens, if `include_num_input_tokens_seen` is "non_padding" or "all". `total_seconds` are with
    those of the calls whose checkpoint was resumed, and every entry of the log gets them as `train_seconds`.
    """

    def __init__(self) -> None:
        self.seconds = self._seconds_before = 0.0
        self.tokens = 0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._tokens_before = state.num_input_tokens_seen  # above 0 when a checkpoint is resumed
        self._seconds_before = max((entry.get("train_seconds", 0.0) for entry in state.log_history), default=0.0)

    @property
    def total_seconds(self) -> float:
        return self._seconds_before + self.seconds

    def on_log(self, args, state, control, **kwargs) -> None:
        state.log_history[-1]["train_seconds"] = self.total_seconds

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._step_start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.seconds += time.perf_counter() - self._step_start
        self.tokens = state.num_input_tokens_seen - self._tokens_before


def show(value: Any) -> str:
    """Format a value for a table: four digits, thousands separated."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else str(value)


def print_table(title: str, values: dict[str, Any]) -> None:
    """Print `values` by name below `title`; None is left out."""
    values = {name.replace("_", " "): value for name, value in values.items() if value is not None}
    width = max(map(len, values))
    print(f"\n{title}")
    for name, value in values.items():
        print(f"  {name:<{width}}  {show(value)}")


def save_json(content: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def plot_curve(histories: dict[str, list[dict[str, float]]], metrics: list[str], title: str, path: Path) -> None:
    """Draw the losses and the evaluated `metrics` (as Trainer logs them, "eval_accuracy") over the steps.

    `histories` holds the Trainer's `log_history` of each run by its name in the legend ("" for a single run).
    """
    figure, (loss_axis, metric_axis) = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for axis, keys in ((loss_axis, ["loss", "eval_loss"]), (metric_axis, metrics)):
        for (name, history), key in itertools.product(histories.items(), keys):
            points = [(entry["step"], entry[key]) for entry in history if key in entry]
            if points:
                axis.plot(*zip(*points, strict=True), marker=".", label=f"{name} {key}".strip())
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def describe(trainer: Trainer, run: RunArguments) -> dict[str, Any]:
    """Return the first entries of the summary."""
    asked = trainer.args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    asked = asked and not trainer.is_fsdp_enabled
    return {
        "model": run.model,
        "seed": trainer.args.seed,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "device": str(trainer.args.device),
        "processes": trainer.args.world_size,
        "parallel": PARALLEL[trainer.accelerator.distributed_type] + (NOT_SHARDED if asked else ""),
        "luna_mega": luna_mega.__version__,
    }


def finish(trainer: Trainer, run: RunArguments, summary: dict[str, Any]) -> dict[str, Any]:
    """Complete, print, save and return the summary; after a training, write the model card and push if asked to."""
    summary = save_summary(trainer, run, summary)
    if trainer.args.do_train:
        publish(trainer, run.command, summary, run.card)
    return summary


def save_summary(trainer: Trainer, run: RunArguments, summary: dict[str, Any]) -> dict[str, Any]:
    """Complete, print, save and return the summary, with a curve of the losses and of its metric as PNG."""
    if not trainer.is_world_process_zero():
        return summary
    output = Path(trainer.args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    if trainer.args.do_train:
        title = f"{run.title}: {summary['model']}"
        plot_curve({"": trainer.state.log_history}, [summary["metric"]], title, output / "curve.png")
        summary["curve"] = str(output / "curve.png")
    summary |= {
        "peak_memory_gb": peak_memory_gb(trainer.args.device),
        "total_seconds": time.perf_counter() - run.start,
        "output_dir": str(output),
    }
    save_json(summary, output / "summary.json")
    print_table(run.title, {name: value for name, value in summary.items() if (name, value) != ("task", run.title)})
    return summary


def publish(
    trainer: Trainer,
    command: tuple[str, list[str] | None],
    summary: dict[str, Any],
    card: dict[str, str | None],
) -> None:
    """Write README.md and push the output folder, which stays complete whatever happens to the push.

    Args:
        command: `__file__` and the arguments of `main`, for the command in the card.
        summary: the summary; its entries that begin with "eval_" are the results.
        card: data set, base model and license, as `training_card` takes them.
    """
    script, argv = command
    root = Path(__file__).resolve().parents[2]
    # The path may be relative to a folder that was left since; the name alone is safe.
    path = next(path for folder in SCRIPTS for path in (root / folder).rglob(Path(script).name)).relative_to(root)
    text = training_card(
        trainer,
        ["python", path.as_posix(), *(sys.argv[1:] if argv is None else argv)],
        metrics={name: value for name, value in summary.items() if name.startswith("eval_")},
        **card,
    )
    output = Path(trainer.args.output_dir)
    # Trainer writes a card before it pushes, which would replace this one.
    trainer.create_model_card = lambda **_: text.save(output / FILE_NAME)
    if trainer.is_world_process_zero():
        trainer.create_model_card()
    if not trainer.args.push_to_hub:
        return
    from common.hub import one_line  # read where it is asked for

    with one_line(trainer.hub_model_id, output):
        trainer.push_to_hub()
