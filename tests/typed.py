"""User code with which `make typing` checks the types of public names. It is not run."""

from typing import assert_type

import torch

import luna_mega
import luna_mega_cli
from luna_mega import LunaConfig, LunaForMaskedLM, MegaConfig, MegaForCausalLM
from luna_mega.convert import convert_checkpoint
from luna_mega.convert.report import Report
from luna_mega.hub.bundle import bundle
from luna_mega.kernels.api import (
    LunaCausalState,
    TruncatedEmaState,
    damped_ema,
    explain,
    gated_attention,
    luna_attention,
    luna_pack,
    use_backend,
)


def models() -> None:
    config = LunaConfig(vocab_size=40)
    assert_type(config.vocab_size, int)
    assert_type(MegaConfig().chunk_size, int)
    assert_type(LunaConfig.base_512(num_labels=2), LunaConfig)
    assert_type(MegaConfig.lra_text(256), MegaConfig)
    model = LunaForMaskedLM(config)
    assert_type(model.config, LunaConfig)
    assert_type(MegaForCausalLM.from_pretrained("folder"), MegaForCausalLM)
    LunaConfig(vocab_size="40")  # type: ignore[arg-type]
    luna_mega.LunaForNothing()  # type: ignore[attr-defined]


def ops(x: torch.Tensor, weight: torch.Tensor, state: LunaCausalState, truncated: TruncatedEmaState) -> None:
    assert_type(state.count, torch.Tensor)
    assert_type(explain("luna_pack", device="cpu"), str)
    with use_backend("torch"):
        assert_type(luna_pack(x, x, x), torch.Tensor | tuple[torch.Tensor, torch.Tensor])
        assert_type(luna_attention(x, x, x, x, lambda heads: (heads, heads)), tuple[torch.Tensor, ...])
        damped_ema(x, weight, weight, weight, weight, initial_state=truncated, return_state=True)
    gated_attention(x, x, x, chunk_size="8")  # type: ignore[arg-type]
    explain(3)  # type: ignore[arg-type]


def tools() -> None:
    assert_type(convert_checkpoint("model.pt", "folder"), Report)
    assert_type(convert_checkpoint("model.pt", None).labels, list[str])
    assert_type(bundle("folder"), list[str])
    assert_type(luna_mega_cli.main(["bundle", "folder"]), int)
