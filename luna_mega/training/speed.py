"""Model FLOPs utilization (MFU), and the peak FLOP/s of a CPU."""

import logging
import time

import torch
from transformers import PreTrainedModel

from luna_mega.inspection.costs import flops_per_token

logger = logging.getLogger(__name__)


def measure_peak(dtype: torch.dtype, side: int = 1024) -> float:
    """Return the FLOP/s of the fastest of five matrix products on this CPU."""
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
    """Return the total speed, the speed per process and the MFU, or the reason why it is not known.

    `length` is the mean length of the sequences, `peak` the peak FLOP/s of a device (None = measured on a CPU), and
    `head_share` the share of the tokens for which the head computes logits.
    """
    speeds = {"tokens_per_second": tokens_per_second, "tokens_per_second_per_process": tokens_per_second / processes}
    if model.config.is_encoder_decoder:
        return speeds | {"mfu": "not known: the formulas require source and target of equal length"}
    if model.config.model_type not in ("luna", "mega"):
        return speeds | {"mfu": f"not known: there are no formulas for {model.config.model_type}"}
    if peak is None and device.type != "cpu":
        return speeds | {"mfu": "not known: pass --peak_flops of the device"}
    peak = peak or measure_peak(dtype)
    flops = flops_per_token(model, length)
    needed = 3 * (flops["total"] - (1 - head_share) * flops["head"]) * tokens_per_second
    return speeds | {"mfu": needed / (peak * processes), "peak_flops": peak}


def warn_of_slow_bfloat16() -> None:
    """Log a warning if bfloat16 products are slower than float32 products on this CPU."""
    half, full = (measure_peak(dtype, side=512) for dtype in (torch.bfloat16, torch.float32))
    if half < full:
        logger.warning(
            "--bf16 is slow on this CPU: matrix products take %.1fx as long as with --bf16 false", full / half
        )
