"""Mean of several checkpoints of a run, which translates better than each of them."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_NAME

from common.arguments import fail


def choose_checkpoints(folder: str, count: int, metric: str | None) -> list[Path]:
    """Choose `count` of the checkpoints that a run has left in `folder`: the last or, by `metric`, the best.

    A metric is the better the higher it is, unless it is a loss ("eval_loss").
    """
    checkpoints = {
        int(path.parent.name.rpartition("-")[2]): path.parent
        for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*/{SAFE_WEIGHTS_NAME}")
    }
    if len(checkpoints) < count:
        fail(f"{folder} has {len(checkpoints)} checkpoints, too few for --average_checkpoints {count}")
    steps = sorted(checkpoints)
    if metric is not None:
        state = json.loads((checkpoints[steps[-1]] / "trainer_state.json").read_text(encoding="utf-8-sig"))
        history = state["log_history"]
        scores = {entry["step"]: entry[metric] for entry in history if metric in entry}
        if unknown := [step for step in steps if step not in scores]:
            fail(f"the checkpoint of step {unknown[0]} has no {metric}; evaluate whenever a checkpoint is saved")
        steps.sort(key=scores.get, reverse=metric.endswith("loss"))
    return [checkpoints[step] for step in steps[-count:]]


def average(checkpoints: list[Path]) -> dict[str, torch.Tensor]:
    """Return the mean of the weights, added up in float32; tensors of integers come from the last checkpoint."""
    total: dict[str, torch.Tensor] = {}
    for path in checkpoints:
        weights = load_file(path / SAFE_WEIGHTS_NAME)
        if total and total.keys() != weights.keys():
            fail(f"{path} holds another model than {checkpoints[0]}")
        for name, tensor in weights.items():
            summed = tensor.is_floating_point() and name in total
            total[name] = total[name] + tensor.float() if summed else tensor
    return {
        name: (total[name] / len(checkpoints)).to(tensor.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }
