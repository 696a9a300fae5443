"""Registry of all measurements: the ops and models, their sizes, and the baselines that they are compared with."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial

import baselines
import floors
import models
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache

from luna_mega.kernels import api
from luna_mega.modeling_common.layout import DENSE

Size = dict[str, int | str]


@dataclass(frozen=True)
class Work:
    """Computation to time: `forward()` returns tensors, whose gradient is taken for the `leaves`."""

    forward: Callable[[], tuple[torch.Tensor, ...]]
    leaves: list[torch.Tensor]
    parameters: int = 0  # parameters of a model that cost time


PASSES = {name: name for name in ("forward", "backward", "both")}


@dataclass(frozen=True)
class Case:
    """Row of the registry. A variant creates a `Work` from (device, dtype) and a size; the first variant is ours."""

    name: str
    variants: dict[str, Callable[..., Work]]
    sizes: tuple[Size, ...]  # a quick run measures the first one
    repeats: int = 3
    long: tuple[Size, ...] = ()  # sizes of our variant only, because the original would need gigabytes
    # Sizes at which all variants must have the same outputs and gradients before any speed-up is printed.
    parity: tuple[Size, ...] = ()
    # On a GPU: sizes, more variants, and compiled variants, which are measured at the first size only to save time.
    gpu: tuple[Size, ...] = ()
    gpu_variants: dict[str, Callable[..., Work]] = field(default_factory=dict)
    compiled: dict[str, Callable[..., Work]] = field(default_factory=dict)
    # Function of (bytes of an element, **size) that returns the floors of forward and backward.
    floor: Callable[..., tuple[floors.Floor, floors.Floor]] | None = None
    # Measured passes -> names in the tables; a forward pass is without gradient, "both" is a training step.
    passes: dict[str, str] = field(default_factory=PASSES.copy)
    # Models of equal size, "tokens" or "images" a second, peak "bytes" per token, or "ms" of a step; None = operators.
    unit: str | None = None
    # Variants relative to which the tables list speed and memory of the others.
    baselines: tuple[str, ...] = ()

    @property
    def ours(self) -> str:
        return next(iter(self.variants))

    def measurements(self, device: str, quick: bool) -> list[tuple[Size, str]]:
        """Return all pairs (size, variant) that are measured on a device."""
        if device != "cuda":
            sizes, long = (self.sizes[:1], ()) if quick else (self.sizes, self.long)
            return [*itertools.product(sizes, self.variants), *((size, self.ours) for size in long)]
        sizes = self.gpu[:1] if quick else self.gpu
        pairs = itertools.product(sizes, self.variants | self.gpu_variants)
        return [*pairs, *itertools.product(sizes[:1], self.compiled)]

    def make(self, variant: str, device: torch.device, dtype: torch.dtype, size: Size) -> Work:
        return (self.variants | self.gpu_variants | self.compiled)[variant](device, dtype, **size)


@cache
def _compiled(function):
    return torch.compile(function, dynamic=False)


def _by_torch(function):
    """Return a function that runs `function` without Triton kernels."""

    def run(*arguments, **options):
        with api.use_backend("torch"):
            return function(*arguments, **options)

    return run


def _draw(device, dtype, *shapes, logits=()):
    """Return random leaves; leaves whose index is in `logits` are small."""
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(shape, generator=generator) * (0.2 if i in logits else 1.0) for i, shape in enumerate(shapes))
    return [x.to(device, dtype).requires_grad_() for x in values]


def _attention(attend, device, dtype, l, n, b=1, masked=1, heads=12, head_size=64):  # noqa: E741 - the paper's l
    query, context, packed = _draw(device, dtype, *((b, length, heads, head_size) for length in (n, n, l)))
    mask = (torch.arange(n) < n - n // 8).expand(b, n).to(device) if masked else None

    def forward():
        # Keys and values are tied. The projections of the packed rows, the same for every variant, are excluded.
        return attend(query, packed, context, context, lambda rows: (rows, rows), context_mask=mask)

    return Work(forward, [query, context, packed])


def _causal_attention(attend, device, dtype, l, n, b=1, heads=8, head_size=64):  # noqa: E741 - the paper's l
    leaves = _draw(device, dtype, *((b, length, heads, head_size) for length in (n, l, n, n)))
    return Work(lambda: (attend(*leaves, leaves[-1]),), leaves)


def _ema(average, device, dtype, b, n, directions, d=512, states=16):
    shapes = ((b, n, d), *[(directions * d, states)] * 4, (d,))
    leaves = _draw(device, dtype, *shapes, logits=(1, 2))
    return Work(lambda: (average(*leaves),), leaves)


def _complex_ema(average, device, dtype, b, n, d=512, states=16):
    shapes = ((b, n, d), (d, states), (d, states), (d,), (d, states, 2), (d,))
    leaves = _draw(device, dtype, *shapes, logits=(1, 2))
    return Work(lambda: (average(*leaves),), leaves)


def _diagonal_ssm(model, device, dtype, b, n, directions=1, d=512, states=16, real=False):
    rows = directions * d
    if real:
        leaves = _draw(device, dtype, (b, n, d), (rows, states), (rows, states), (d,), logits=(1,))
        return Work(lambda: (model(leaves[0], -leaves[1].exp() / 8, None, *leaves[2:]),), leaves)
    shapes = ((b, n, d), (rows, states), (rows, states), (rows, states, 2), (d,))
    leaves = _draw(device, dtype, *shapes, logits=(1,))
    # The parameters of complex numbers are not in half precision.
    parameters = [x.detach().float().requires_grad_() if dtype.itemsize < 4 else x for x in leaves[1:4]]
    leaves = [leaves[0], *parameters, leaves[4]]
    return Work(lambda: (model(leaves[0], -leaves[1].exp() / 8, *leaves[2:]),), leaves)


def _norm(normalize, device, dtype, b, n, d=1024, groups=32):
    leaves = _draw(device, dtype, (b, n, d), (d,), (d,))
    return Work(lambda: (normalize(leaves[0], groups, *leaves[1:]),), leaves)


def _layer_norm(x, groups, weight, bias):
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias)


def _gated(attend, device, dtype, n, function, chunk, b=1, causal=0, shared=128, values=1024):
    leaves = _draw(device, dtype, *((b, n, size) for size in (shared, shared, values)))
    leaves += _draw(device, torch.promote_types(dtype, torch.float32), (2 * (chunk or n) - 1,))
    options = {"function": function, "causal": bool(causal), "chunk_size": chunk or None}
    return Work(lambda: (attend(*leaves, **options),), leaves)


def _mega_layer(run, device, dtype, n, function, chunk, d=512, values=1024, shared=128, b=1):
    """Time one layer with the paper's width; if `chunk` is 0, attention covers the complete sequence."""
    torch.manual_seed(0)
    sizes = {"hidden_size": d, "intermediate_size": values, "shared_representation_size": shared}
    fields = {"attention_activation": function, "use_chunking": chunk > 0, "chunk_size": chunk or -1}
    layer = models.mega(n, num_hidden_layers=1, **sizes, **fields).layers[0].mega_layer.to(device, dtype)
    (x,) = _draw(device, dtype, (b, n, d))
    return Work(lambda: (run(layer, x),), [x, *layer.parameters()])


def _model_work(forward, model):
    def run():
        model.train(torch.is_grad_enabled())
        return forward()

    leaves = [p for p in model.parameters() if p.requires_grad]
    return Work(run, leaves, models.count_parameters(model))


def _model_and_tokens(make, device, dtype, n, b, fields):
    torch.manual_seed(0)
    model = make(n, **fields).to(device, dtype)
    high = min(1000, model.config.vocab_size)
    ids = torch.randint(4, high, (b, n), generator=torch.Generator().manual_seed(0), device="cpu").to(device)
    return model, ids


def _encoder(make, device, dtype, n, b=1, within=nullcontext, **fields):
    model, ids = _model_and_tokens(make, device, dtype, n, b, fields)

    def forward():
        with within():
            return (model(ids).last_hidden_state,)

    return _model_work(forward, model)


def _decoder(make, device, dtype, n, b=1, **fields):
    """Time a forward pass over n positions.

    With gradients, it returns the loss of all positions; else it fills a cache and returns the last logits.
    """
    model, ids = _model_and_tokens(make, device, dtype, n, b, fields)

    def forward():
        if torch.is_grad_enabled():
            return (model(ids, labels=ids, use_cache=False).loss,)
        return (model(ids, use_cache=True, logits_to_keep=1).logits,)

    return _model_work(forward, model)


@torch.no_grad()
def _decoding(make, device, dtype, n, b=1, beams=0, compiled=False, **fields):
    """Time a decoding step after n positions; if `beams` is set, the caches are reordered before the step.

    Caches with keys and values are filled with random numbers. Other caches have a constant size after at most 1,024
    positions. These end in the middle of a chunk of 512, because on average half of the chunk is in use.
    """
    b = beams or b
    model, ids = _model_and_tokens(make, device, dtype, max(n, 1024) + 1024, b, fields)
    config, model, order = model.config, model.eval(), torch.arange(b, device=device).sub(1).clamp(min=0)
    if config.model_type in ("llama", "gpt2"):
        cache, heads = DynamicCache(config=config), config.num_attention_heads
        for layer in range(config.num_hidden_layers):
            shape = (2, b, heads, n, config.hidden_size // heads)
            cache.update(*torch.randn(shape, device=device, dtype=dtype), layer)
    else:
        length = min(n, 1024) + (256 if n >= 512 and config.model_type != "luna" else 0)
        cache = model(ids[:, :length], use_cache=True, logits_to_keep=1).cache
    step = torch.compile(model) if compiled else model

    def forward():
        if beams:
            cache.reorder_cache(order)
        return (step(ids[:, :1], use_cache=True, cache=cache).logits,)

    return Work(forward, [], models.count_parameters(model))


def _images(make, device, dtype, b, size=224, **fields):
    torch.manual_seed(0)
    model = make(image_size=size, **fields).to(device, dtype)
    pixels = torch.randn(b, 3, size, size, generator=torch.Generator().manual_seed(0), device="cpu").to(device, dtype)
    return _model_work(lambda: (model(pixels).logits,), model)


def _padded(make, unpad, device, dtype, n, b):
    """Time a batch with lengths from n / 8 to n in equal steps; 44 % of it is padding, whose outputs are excluded."""
    torch.manual_seed(0)
    model = make(n).to(device, dtype)
    model.config.unpad_inputs = unpad
    ids = torch.randint(4, 1000, (b, n), device=device)
    lengths = torch.linspace(n // 8, n, b, device=device).long()
    mask = (torch.arange(n, device=device) < lengths[:, None]).long()
    tokens = mask.bool()
    return _model_work(lambda: (model(ids, attention_mask=mask).last_hidden_state[tokens],), model)


def _op(name, make, function=None, compiles=True, others=None, gpu_variants=None, **options):
    """Return the case of an op, compared with `baselines.original_<name>`, on a GPU also with its compiled form."""
    function, original = function or getattr(api, name), getattr(baselines, f"original_{name}")
    return Case(
        name,
        {"luna_mega": partial(make, function), "original": partial(make, original), **(others or {})},
        gpu_variants={"torch": partial(make, _by_torch(function)), **(gpu_variants or {})},
        compiled={"original_compiled": partial(make, _compiled(original))} if compiles else {},
        floor=getattr(floors, name, None),
        **options,
    )


def _sizes(**fields):
    """Return the sizes with all combinations of the values of the fields."""
    return tuple(dict(zip(fields, values, strict=True)) for values in itertools.product(*fields.values()))


_MODEL_TOKENS = tuple({"n": n, "b": 65536 // n} for n in (512, 1024, 2048, 4096, 16384, 32768))
_FORWARD_AND_BOTH = {name: name for name in ("forward", "both")}
_SSM_CHANNELS = 64
_SSM_SIZES = _sizes(b=(4,), n=(512, 2048, 4096, 16384, 65536), states=(16, 32))
_TRAINING = {"both": "Training step (forward and backward)"}

_DECODERS = {
    "luna_32": models.luna_lm,
    "mega_chunk_512": models.mega_lm,
    "megalodon_512": models.megalodon_lm,
    "llama_sdpa": models.llama,
    "gpt2_sdpa": models.gpt2,
}

CASES = {
    case.name: case
    for case in (
        _op(
            "luna_attention",
            _attention,
            sizes=_sizes(l=(128, 16, 256), n=(512, 2048, 8192, 32768)),
            repeats=7,
            parity=({"l": 16, "n": 33}, {"l": 128, "n": 500}),
            gpu=(
                *({"l": rows, "n": n, "b": 65536 // n} for n in (4096, 512, 32768) for rows in (128, 16, 256)),
                {"l": 128, "n": 4096, "b": 16, "masked": 0},
            ),
            gpu_variants={
                "sdpa_cudnn": partial(_attention, partial(baselines.sdpa_luna_attention, SDPBackend.CUDNN_ATTENTION)),
                "sdpa_flash": partial(_attention, partial(baselines.sdpa_luna_attention, SDPBackend.FLASH_ATTENTION)),
            },
        ),
        _op(
            "luna_causal_attention",
            _causal_attention,
            sizes=(*_sizes(l=(32,), n=(2048, 512, 64, 4)), {"l": 16, "n": 2048}, {"l": 128, "n": 512}),
            long=_sizes(l=(32,), n=(8192, 32768)),
            repeats=5,
            parity=({"l": 16, "n": 33}, {"l": 32, "n": 200}),
            gpu=(*({"l": rows, "n": 4096, "b": 8} for rows in (32, 128, 16)), {"l": 32, "n": 65536, "b": 1}),
        ),
        _op(
            "damped_ema",
            _ema,
            sizes=(*_sizes(b=(1, 8), n=(1024,), directions=(2, 1)), *_sizes(b=(1,), n=(4096,), directions=(1, 2))),
            long=_sizes(b=(1,), n=(16384, 65536), directions=(2,)),
            repeats=5,
            parity=_sizes(b=(2,), n=(77,), directions=(1, 2)),
            gpu=(
                *_sizes(b=(8,), n=(4096,), directions=(1, 2)),
                {"b": 64, "n": 512, "directions": 2},
                *_sizes(b=(32,), n=(1024,), directions=(1, 2)),
                *_sizes(b=(1,), n=(65536,), directions=(1, 2)),
            ),
            gpu_variants={"fft": partial(_ema, baselines.fft_damped_ema)},
        ),
        _op(
            "complex_ema",
            _complex_ema,
            sizes=tuple({"b": b, "n": n} for b, n in ((1, 1024), (1, 4096), (8, 1024))),
            repeats=5,
            parity=({"b": 2, "n": 77}, {"b": 1, "n": 4100}),
            gpu=({"b": 8, "n": 2048, "d": 1024}, {"b": 1, "n": 4096, "d": 4096}),
            compiles=False,
            others={"damped_ema": partial(_ema, api.damped_ema, directions=1)},
        ),
        _op(
            "diagonal_ssm",
            _diagonal_ssm,
            sizes=tuple({"b": b, "n": n} for b, n in ((1, 1024), (1, 4096), (8, 1024))),
            repeats=5,
            parity=_sizes(b=(2,), n=(77,), directions=(1, 2)),
            gpu=({"b": 8, "n": 4096}, {"b": 64, "n": 512}, {"b": 2, "n": 16384}),
            compiles=False,
            others={"complex_ema": lambda *where, directions=1, **size: _complex_ema(api.complex_ema, *where, **size)},
        ),
        Case(
            "ssm",
            {
                name: partial(_diagonal_ssm, function, d=_SSM_CHANNELS)
                for name, function in (
                    ("luna_mega", api.diagonal_ssm),
                    ("s4d", baselines.original_diagonal_ssm),
                    ("loop", baselines.loop_diagonal_ssm),
                    ("associative_scan", baselines.scan_diagonal_ssm),
                    ("steps", baselines.steps_diagonal_ssm),
                )
            },
            sizes=_SSM_SIZES,
            parity=_sizes(b=(2,), n=(77,), states=(3,)),
            passes=_FORWARD_AND_BOTH,
        ),
        Case(
            "ssm_real",
            {
                name: partial(_diagonal_ssm, function, d=_SSM_CHANNELS, real=True)
                for name, function in (
                    ("luna_mega", api.diagonal_ssm),
                    ("fft", baselines.fft_real_ssm),
                    ("loop", baselines.loop_diagonal_ssm),
                    ("associative_scan", baselines.scan_diagonal_ssm),
                    ("lfilter", baselines.lfilter_ssm),
                )
            },
            sizes=_SSM_SIZES,
            parity=_sizes(b=(2,), n=(77,), states=(3,)),
            passes=_FORWARD_AND_BOTH,
        ),
        Case(
            "timestep_norm",
            {"luna_mega": partial(_norm, api.timestep_norm), "layer_norm": partial(_norm, _layer_norm)},
            sizes=({"b": 1, "n": 4096}, {"b": 8, "n": 1024}, {"b": 1, "n": 1024, "d": 4096, "groups": 64}),
            repeats=9,
            gpu=({"b": 8, "n": 2048}, {"b": 1, "n": 4096, "d": 4096, "groups": 64}),
            gpu_variants={"torch": partial(_norm, _by_torch(api.timestep_norm))},
            floor=floors.timestep_norm,
        ),
        _op(
            "gated_attention",
            _gated,
            sizes=_sizes(n=(2048,), function=("laplace", "softmax"), chunk=(128, 0)),
            repeats=5,
            parity=_sizes(n=(96,), function=("softmax", "laplace", "relu2"), chunk=(0, 32), causal=(0, 1)),
            gpu=(
                {"n": 4096, "b": 16, "function": "laplace", "chunk": 128, "shared": 64, "values": 256},
                {"n": 4096, "b": 16, "function": "softmax", "chunk": 128},
                {"n": 4096, "b": 16, "function": "laplace", "chunk": 2048, "causal": 1},
                {"n": 2048, "b": 16, "function": "softmax", "chunk": 0},
            ),
        ),
        _op(
            "mega_layer",
            _mega_layer,
            lambda layer, x: layer(x, DENSE)[0],
            sizes=_sizes(n=(1024, 4096), function=("laplace", "softmax"), chunk=(128, 0)),
            parity=_sizes(n=(48,), function=("softmax", "laplace", "relu2"), chunk=(0, 16)),
            gpu=({"n": 4096, "b": 8, "function": "laplace", "chunk": 128},),
        ),
        Case(
            "base_model",
            {"luna_128": partial(_encoder, models.luna_base), "roberta_sdpa": partial(_encoder, models.roberta_base)},
            sizes=_sizes(n=(512, 1024, 2048, 4096, 8192)),
            passes={"forward": "forward", "both": "both"},
            gpu=_MODEL_TOKENS,
            gpu_variants={
                **{
                    f"roberta_{name}": partial(_encoder, models.roberta_base, within=partial(sdpa_kernel, backend))
                    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION))
                },
                "luna_torch": partial(_encoder, models.luna_base, within=partial(api.use_backend, "torch")),
            },
        ),
        Case(
            "padding",
            {"unpadded": partial(_padded, models.luna_base, True), "padded": partial(_padded, models.luna_base, False)},
            sizes=({"n": 512, "b": 8},),
            gpu=({"n": 512, "b": 128}, {"n": 4096, "b": 16}),
        ),
        Case(
            "encoders",
            {
                "luna_128": partial(_encoder, models.luna, projection_length=128),
                "luna_16": partial(_encoder, models.luna, projection_length=16),
                "mega_chunk_128": partial(_encoder, models.mega, chunk_size=128),
                "roberta_sdpa": partial(_encoder, models.roberta),
                "modernbert_sdpa": partial(_encoder, models.modernbert),
                "longformer_512": partial(_encoder, models.longformer),
                "big_bird": partial(_encoder, models.big_bird),
                "nystromformer_64": partial(_encoder, models.nystromformer),
            },
            sizes=_sizes(n=(512, 1024, 2048, 4096, 8192, 16384)),
            gpu=_MODEL_TOKENS,
            passes={"forward": "Inference (forward)", **_TRAINING},
            unit="tokens",
        ),
        Case(
            "text_efficiency",
            {
                "luna_16": partial(_encoder, models.luna, projection_length=16, **models.TEXT_LUNA),
                "luna_128": partial(_encoder, models.luna, projection_length=128, **models.TEXT_LUNA),
                "luna_256": partial(_encoder, models.luna, projection_length=256, **models.TEXT_LUNA),
                "mega": partial(_encoder, models.mega, use_chunking=False, **models.TEXT_MEGA),
                "mega_chunk_128": partial(_encoder, models.mega, chunk_size=128, **models.TEXT_MEGA),
                "transformer_eager": partial(_encoder, models.roberta, attention="eager", **models.TEXT),
                "transformer_sdpa": partial(_encoder, models.roberta, **models.TEXT),
                "longformer_512": partial(_encoder, models.longformer, **models.TEXT),
                "big_bird": partial(_encoder, models.big_bird, **models.TEXT),
                "nystromformer_64": partial(_encoder, models.nystromformer, **models.TEXT),
            },
            sizes=_sizes(n=(1024, 2048, 3072, 4096)),
            gpu=tuple({"n": n, "b": 8} for n in (1024, 2048, 3072, 4096)),
            passes=_TRAINING,
            unit="tokens",
            baselines=("transformer_eager", "transformer_sdpa"),
        ),
        Case(
            "decoders",
            {name: partial(_decoder, make) for name, make in _DECODERS.items()},
            sizes=({"n": 512}, {"n": 4096}),
            gpu=tuple({"n": n, "b": 65536 // n} for n in (512, 4096)),
            passes={"forward": "Prefill (forward, with a cache)", **_TRAINING},
            unit="tokens",
        ),
        Case(
            "decoding",
            {name: partial(_decoding, make) for name, make in _DECODERS.items()},
            sizes=(*_sizes(n=(128, 512, 4096, 16_384), b=(1, 8)), *_sizes(n=(128, 512, 4096, 16_384), beams=(4,))),
            repeats=15,
            gpu=({"n": 512}, {"n": 4096, "b": 8}),
            compiled={f"{name}_compiled": partial(_decoding, make, compiled=True) for name, make in _DECODERS.items()},
            passes={"forward": "Decoding step"},
            unit="ms",
        ),
        Case(
            "memory",  # models of bytes; one step fits the memory of a small machine
            {
                "luna_32": partial(_decoder, models.luna_lm, **models.TEXT_LUNA),
                "mega_chunk_128": partial(_decoder, models.mega_lm, chunk_size=128, **models.TEXT_MEGA),
                "megalodon_chunk_128": partial(_decoder, models.megalodon_lm, **models.TEXT_MEGALODON),
            },
            sizes=_sizes(n=(4096, 16_384, 65_536)),
            repeats=0,
            gpu=_sizes(n=(4096, 16_384, 65_536, 131_072, 262_144, 524_288)),
            passes=_TRAINING,
            unit="bytes",
        ),
        Case(
            "images",
            {"mega_base": partial(_images, models.mega_image), "vit_base_sdpa": partial(_images, models.vit)},
            sizes=({"b": 4},),
            gpu=({"b": 128},),
            passes={"forward": "Inference (forward)", **_TRAINING},
            unit="images",
        ),
    )
}
