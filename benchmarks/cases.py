"""The registry: what is measured, at which sizes, against what. An entry makes functions of no argument to time."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from baselines import (
    original_causal_attention,
    original_damped_ema,
    original_luna_attention,
    original_mega_layer,
)
from transformers import RobertaConfig, RobertaModel

from luna_mega import LunaConfig, LunaModel, MegaConfig
from luna_mega.kernels.api import damped_ema, luna_attention, luna_causal_attention
from luna_mega.modeling_mega.modeling_mega import MegaGatedAttention, MegaPreTrainedModel

Size = dict[str, int | str]


@dataclass(frozen=True)
class Work:
    """One thing to time: `forward()` gives tensors, `leaves` are what their gradient is taken for."""

    forward: Callable[[], tuple[torch.Tensor, ...]]
    leaves: list[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A row of the registry. A variant is called with (device, dtype) and a size; the first is ours."""

    name: str
    variants: dict[str, Callable[..., Work]]
    sizes: tuple[Size, ...]
    quick: tuple[Size, ...]
    repeats: int
    # Sizes at which the variants must give the same outputs and gradients before any speed-up is printed.
    parity: tuple[Size, ...] = ()

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


def _causal_attention(attend, device, dtype, l, n, batch=1, heads=8, head_size=64):  # noqa: E741 - the paper's l
    generator = torch.Generator().manual_seed(0)
    query, pack_query, pack_key, context = (
        torch.randn(batch, length, heads, head_size, generator=generator).to(device, dtype).requires_grad_()
        for length in (n, l, n, n)
    )
    leaves = [query, pack_query, pack_key, context]
    return Work(lambda: (attend(*leaves, context),), leaves)


def _ema(average, device, dtype, b, n, directions, d=512, states=16):
    generator = torch.Generator().manual_seed(0)
    shapes = ((b, n, d), *[(directions * d, states)] * 4, (d,))
    x, *logits, expansion, projection, skip = (torch.randn(shape, generator=generator) for shape in shapes)
    parameters = [*(0.2 * logit for logit in logits), expansion, projection, skip]
    leaves = [tensor.to(device, dtype).requires_grad_() for tensor in (x, *parameters)]
    return Work(lambda: (average(*leaves),), leaves)


def _mega_layer(run, device, dtype, n, function, chunk, d=512, values=1024, shared=128, b=1):
    """One layer of the paper's width; `chunk` 0 = attention over the whole sequence."""
    torch.manual_seed(0)
    config = MegaConfig(
        hidden_size=d,
        intermediate_size=values,
        shared_representation_size=shared,
        normalization_type="layernorm",
        attention_activation=function,
        use_chunking=chunk > 0,
        chunk_size=chunk or -1,
        dropout_prob=0.0,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    layer = MegaGatedAttention(config)
    layer.apply(MegaPreTrainedModel(config)._init_weights)
    layer = layer.to(device, dtype)
    x = torch.randn(b, n, d, generator=torch.Generator().manual_seed(0)).to(device, dtype).requires_grad_()
    return Work(lambda: (run(layer, x),), [x, *layer.parameters()])


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
            "luna_causal_attention",
            {
                "luna_mega": partial(_causal_attention, luna_causal_attention),
                "original": partial(_causal_attention, original_causal_attention),
            },
            sizes=(
                *({"l": 32, "n": n} for n in (4, 64, 512, 2048)),
                {"l": 16, "n": 2048},
                {"l": 128, "n": 512},
            ),
            quick=({"l": 32, "n": 2048},),
            repeats=5,
            parity=({"l": 16, "n": 33}, {"l": 32, "n": 200}),
        ),
        Case(
            "luna_causal_attention_long",  # the original would need 8 GB and more here
            {"luna_mega": partial(_causal_attention, luna_causal_attention)},
            sizes=tuple({"l": 32, "n": n} for n in (8192, 32768)),
            quick=(),
            repeats=3,
        ),
        Case(
            "base_model",
            {"luna_128": partial(_model, _luna_base), "roberta_sdpa": partial(_model, _roberta_base)},
            sizes=tuple({"n": n} for n in (512, 1024, 2048, 4096, 8192)),
            quick=({"n": 512},),
            repeats=3,
        ),
        Case(
            "damped_ema",
            {"luna_mega": partial(_ema, damped_ema), "original": partial(_ema, original_damped_ema)},
            sizes=tuple(
                {"b": b, "n": n, "directions": directions}
                for b, n in ((1, 1024), (1, 4096), (8, 1024))
                for directions in (1, 2)
            ),
            quick=({"b": 1, "n": 1024, "directions": 2},),
            repeats=5,
            parity=({"b": 2, "n": 77, "directions": 1}, {"b": 2, "n": 77, "directions": 2}),
        ),
        Case(
            "damped_ema_long",  # the original's powers of q alone would need 4 GB here
            {"luna_mega": partial(_ema, damped_ema)},
            sizes=tuple({"b": 1, "n": n, "directions": 2} for n in (4096, 16384, 65536)),
            quick=(),
            repeats=3,
        ),
        Case(
            "mega_layer",
            {
                "luna_mega": partial(_mega_layer, lambda layer, x: layer(x, None)[0]),
                "original": partial(_mega_layer, original_mega_layer),
            },
            sizes=tuple(
                {"n": n, "function": function, "chunk": chunk}
                for n in (1024, 4096)
                for function in ("softmax", "laplace")
                for chunk in (0, 128)
            ),
            quick=({"n": 1024, "function": "laplace", "chunk": 128},),
            repeats=3,
            parity=tuple(
                {"n": 48, "function": function, "chunk": chunk}
                for function in ("softmax", "laplace", "relu2")
                for chunk in (0, 16)
            ),
        ),
    )
}
