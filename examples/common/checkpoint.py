"""Checkpoints that several processes write, whole or not at all."""

import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from accelerate import Accelerator


def find_checkpoints(output: Path) -> list[Path]:
    """Return the whole checkpoints of a run, the oldest first."""
    found = [path for path in output.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def remove_half_written(output: Path) -> None:
    """Remove the half-written checkpoint of a run that was killed while it saved."""
    for path in output.glob("checkpoint-*.tmp"):
        shutil.rmtree(path)


def save_checkpoint(accelerator: Accelerator, state: dict[str, Any], output: Path, step: int, keep: int = 2) -> None:
    """Write `state` to a temporary folder, which gets its name when all processes have written; keep the last ones."""
    folder = output / f"checkpoint-{step}"
    dcp.save(state, checkpoint_id=folder.with_suffix(".tmp"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        folder.with_suffix(".tmp").rename(folder)
        for old in find_checkpoints(output)[:-keep]:
            shutil.rmtree(old)
