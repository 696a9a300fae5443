"""The model FLOPs utilisation of a run, and the peak of a CPU."""

import logging
import time

import torch
from transformers import PreTrainedModel

from luna_mega.inspection.costs import flops_per_token

logger = logging.getLogger(__name__)


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


def warn_of_slow_bfloat16() -> None:
    """Log a warning on a CPU that has no instructions for bfloat16."""
    half, full = (measure_peak(dtype, side=512) for dtype in (torch.bfloat16, torch.float32))
    if half < full:
        logger.warning("--bf16 is slow here: products take %.1fx as long as with --bf16 false", full / half)
