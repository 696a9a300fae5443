"""The registry: what is measured, at which sizes, against what. An entry makes functions of no argument to time."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from baselines import original_luna_attention
from transformers import RobertaConfig, RobertaModel

from luna_mega import LunaConfig, LunaModel
from luna_mega.kernels.api import luna_attention


@dataclass(frozen=True)
class Work:
    """One thing to time: `forward()` gives tensors, `leaves` are what their gradient is taken for."""

    forward: Callable[[], tuple[torch.Tensor, ...]]
    leaves: list[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A row of the registry. `make` of a variant takes (device, dtype) and a size; the first variant is ours."""

    name: str
    variants: dict[str, Callable[..., Work]]
    sizes: tuple[dict[str, int], ...]
    quick: tuple[dict[str, int], ...]
    repeats: int
    # Sizes at which the variants must give the same outputs and gradients before any speed-up is printed.
    parity: tuple[dict[str, int], ...] = ()

    @property
    def ours(self) -> str:
        return next(iter(self.variants))


def _attention(attend, device, dtype, l, n, batch=1, heads=12, head_size=64):  # noqa: E741 - the paper's l
    generator = torch.Generator().manual_seed(0)
    query, context, packed = (
        torch.randn(batch, length, heads, head_size, generator=generator).to(device, dtype).requires_grad_()
        for length in (n, n, l)
    )
    mask = (torch.arange(n) < n - n // 8).expand(batch, n).to(device)

    def forward():
        # Tied keys and values; the projections between are Linear layers, the same for every variant, and left out.
        return attend(query, packed, context, context, lambda rows: (rows, rows), context_mask=mask)

    return Work(forward, [query, context, packed])


def _model(make, device, dtype, n, batch=1):
    torch.manual_seed(0)
    model = make(n).to(device, dtype)
    ids = torch.randint(4, 1000, (batch, n), device=device)
    return Work(lambda: (model(ids).last_hidden_state,), [p for p in model.parameters() if p.requires_grad])


def _luna_base(n):
    return LunaModel(LunaConfig.base_512(max_position_embeddings=n, dropout=0.0, attention_dropout=0.0))


def _roberta_base(n):
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = RobertaConfig(vocab_size=50265, max_position_embeddings=n + 2, type_vocab_size=1, **dropouts)
    return RobertaModel._from_config(config, attn_implementation="sdpa", add_pooling_layer=False)


CASES = {
    case.name: case
    for case in (
        Case(
            "luna_attention",
            {
                "luna_mega": partial(_attention, luna_attention),
                "original": partial(_attention, original_luna_attention),
            },
            sizes=tuple({"l": l, "n": n} for l in (16, 128, 256) for n in (512, 2048, 8192, 32768)),  # noqa: E741
            quick=({"l": 128, "n": 512}, {"l": 128, "n": 4096}),
            repeats=7,
            parity=({"l": 16, "n": 33}, {"l": 128, "n": 500}),
        ),
        Case(
            "base_model",
            {"luna_128": partial(_model, _luna_base), "roberta_sdpa": partial(_model, _roberta_base)},
            sizes=tuple({"n": n} for n in (512, 1024, 2048, 4096, 8192)),
            quick=({"n": 512},),
            repeats=3,
        ),
    )
}
