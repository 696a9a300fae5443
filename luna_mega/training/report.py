"""Results of a run: speed, memory, and a summary as a table and as JSON."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

try:
    import resource
except ImportError:  # Windows
    resource = None

import torch
from accelerate.utils import DistributedType
from transformers import Trainer, TrainerCallback

import luna_mega
from luna_mega.escaping import terminal
from luna_mega.training.arguments import RunArguments
from luna_mega.training.hub import publish

NOT_SHARDED = ", not FSDP: Accelerate does not shard on CPUs"
PARALLEL = {
    DistributedType.NO: "none",
    DistributedType.MULTI_CPU: "DDP",
    DistributedType.MULTI_GPU: "DDP",
    DistributedType.FSDP: "FSDP",
    DistributedType.DEEPSPEED: "DeepSpeed",
}


def peak_memory_gb(device: torch.device) -> float | None:
    """Return the peak memory in GB: of the GPU with CUDA, else of the process (None on Windows)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    if resource is None:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9


class SpeedCallback(TrainerCallback):
    """Counter of the seconds and tokens of `Trainer.train`, without evaluation and saving.

    Tokens are counted if `include_num_input_tokens_seen` is "non_padding" or "all". Each log entry contains
    `total_seconds` as `train_seconds`, which includes the seconds before a resumed checkpoint.
    """

    def __init__(self) -> None:
        self.seconds = self._seconds_before = 0.0
        self.tokens = 0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._tokens_before = state.num_input_tokens_seen  # above 0 if the run resumes
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
    """Format a value for a table, with four digits and separated thousands."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else terminal(str(value))


def print_table(title: str, values: dict[str, Any]) -> None:
    """Print the `values` that are not None below `title`."""
    values = {name.replace("_", " "): value for name, value in values.items() if value is not None}
    width = max(map(len, values))
    print(f"\n{title}")
    for name, value in values.items():
        print(f"  {name:<{width}}  {show(value)}")


def save_json(content: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def describe(trainer: Trainer, run: RunArguments) -> dict[str, Any]:
    """Return the entries of the summary that describe model and hardware."""
    requested = trainer.args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    requested = requested and not trainer.is_fsdp_enabled
    return {
        "model": run.model,
        "seed": trainer.args.seed,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "device": str(trainer.args.device),
        "processes": trainer.args.world_size,
        "parallel": PARALLEL[trainer.accelerator.distributed_type] + (NOT_SHARDED if requested else ""),
        "luna_mega": luna_mega.__version__,
    }


def finish(trainer: Trainer, run: RunArguments, summary: dict[str, Any]) -> dict[str, Any]:
    """Print, save and return the results; after training, write the model card and, if requested, push the model."""
    summary = save_summary(trainer, run, summary)
    if trainer.args.do_train:
        publish(trainer, run.command, summary, run.card)
    return summary


def save_summary(trainer: Trainer, run: RunArguments, summary: dict[str, Any]) -> dict[str, Any]:
    """Complete, print, save and return the summary."""
    if not trainer.is_world_process_zero():
        return summary
    output = Path(trainer.args.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    summary |= {
        "peak_memory_gb": peak_memory_gb(trainer.args.device),
        "total_seconds": time.perf_counter() - run.start,
        "output_dir": str(output),
    }
    save_json(summary, output / "all_results.json")
    print_table(run.title, {name: value for name, value in summary.items() if (name, value) != ("task", run.title)})
    return summary
