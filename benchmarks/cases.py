"""Table of all measurements: ops and models, the variants that are compared, and their sizes."""

import importlib
import sys
import tempfile
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def words(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {error}".strip().replace("\n", " ")[:300]


def import_package() -> str | None:
    """Import the package, or if its models cannot be imported only the kernels; return why."""
    try:
        importlib.import_module("luna_mega")
    except Exception as error:  # whatever an unsupported transformers raises
        package = types.ModuleType("luna_mega")
        package.__path__ = [str(ROOT), str(ROOT / "luna_mega")]
        sys.modules["luna_mega"] = package
        return f"skipped: the models cannot be imported: {words(error)}"
    return None


MISSING = import_package()

import baselines  # noqa: E402
import torch  # noqa: E402
from torch.nn.attention import SDPBackend  # noqa: E402

from luna_mega.kernels import api  # noqa: E402
from luna_mega.kernels._dispatch import NAMES as BACKENDS  # noqa: E402

if MISSING is None:
    import models
    from transformers import DynamicCache

Size = dict[str, int | str]


@dataclass(frozen=True)
class Work:
    """Computation to time: `forward()` returns tensors, whose gradients are taken for the `leaves`.

    Args:
        forward: the forward pass.
        leaves: tensors whose gradients a training step computes; if empty, only the forward pass is timed.
        train: a training step, if it is more than the forward and the backward pass.
        elements: number of tokens; 0 = ops, whose number of elements is that of the first leaf.
        parameters: number of parameters of a model that cost time.
    """

    forward: Callable[[], tuple[torch.Tensor, ...]] | None
    leaves: list[torch.Tensor]
    train: Callable[[], object] | None = None
    elements: int = 0
    parameters: int = 0


@dataclass(frozen=True)
class Case:
    """Row of the table.

    Args:
        name: name of the case, of an op that of its function.
        build: returns the `Work` of a variant: `build(variant, device, dtype, **size)`.
        variants: maps names to functions, or to models and their fields; the first one is of this package. Further
            variants are the names of backends, and `variant@backend`.
        sizes: sizes on a CPU; a quick run measures the first one.
        gpu: sizes on a GPU.
        check: sizes at which all variants must have the same outputs and gradients before any time is printed.
    """

    name: str
    build: Callable[..., Work]
    variants: dict[str, Any]
    sizes: tuple[Size, ...]
    gpu: tuple[Size, ...] = ()
    check: tuple[Size, ...] = ()

    @property
    def ours(self) -> str:
        return next(iter(self.variants))

    def make(self, variant: str, device: torch.device, dtype: torch.dtype, size: Size) -> Work:
        name, _, backend = variant.partition("@")
        if name in BACKENDS:
            name, backend = self.ours, name
        if name not in self.variants:
            raise ValueError(f"{self.name} has no variant {name}; it has {', '.join(self.variants)}")
        work = self.build(self.variants[name], device, dtype, **size)
        if not backend:
            return work
        runs = {field: _with_backend(backend, getattr(work, field)) for field in ("forward", "train")}
        return Work(**{**vars(work), **runs})


def _with_backend(backend, function):
    """Return a function that runs `function`, if there is one, with a backend."""

    def run():
        with api.use_backend(backend):
            return function()

    return function and run


def draw(device, dtype, *shapes, logits=()):
    """Return random leaves, which all dtypes represent exactly; leaves whose index is in `logits` are small."""
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(shape, generator=generator) * (0.2 if i in logits else 1.0) for i, shape in enumerate(shapes))
    return [x.bfloat16().to(device, dtype).requires_grad_() for x in values]


def _attention(attend, device, dtype, l, n, b=1, masked=1, heads=12, head_size=64):  # noqa: E741 - the paper's l
    query, context, packed = draw(device, dtype, *((b, length, heads, head_size) for length in (n, n, l)))
    mask = (torch.arange(n) < n - n // 8).expand(b, n).to(device) if masked else None

    def forward():
        # Keys and values are tied. The projections of the packed rows, the same for every variant, are excluded.
        return attend(query, packed, context, context, lambda rows: (rows, rows), context_mask=mask)

    return Work(forward, [query, context, packed])


def _causal_attention(attend, device, dtype, l, n, b=1, heads=8, head_size=64):  # noqa: E741 - the paper's l
    leaves = draw(device, dtype, *((b, length, heads, head_size) for length in (n, l, n, n)))
    return Work(lambda: (attend(*leaves, leaves[-1]),), leaves)


def _ema(average, device, dtype, b, n, directions=1, d=512, states=16):
    leaves = draw(device, dtype, (b, n, d), *[(directions * d, states)] * 4, (d,), logits=(1, 2))
    return Work(lambda: (average(*leaves),), leaves)


def _complex_ema(average, device, dtype, b, n, d=512, states=16):
    shapes = ((b, n, d), (d, states), (d, states), (d,), (d, states, 2), (d,))
    leaves = draw(device, dtype, *shapes, logits=(1, 2))
    return Work(lambda: (average(*leaves),), leaves)


def _diagonal_ssm(model, device, dtype, b, n, real=0, directions=1, d=512, states=16):
    rows = (directions * d, states)
    # The parameters of complex numbers are not in half precision.
    wide = dtype if real else torch.promote_types(dtype, torch.float32)
    x, skip = draw(device, dtype, (b, n, d), (d,))
    decay, *phase, weight = draw(device, wide, rows, *([rows] * (not real)), rows if real else (*rows, 2), logits=(0,))
    leaves = [x, decay, *phase, weight, skip]
    return Work(lambda: (model(x, -decay.exp() / 8, *(phase or [None]), weight, skip),), leaves)


def _norm(normalize, device, dtype, b, n, d=1024, groups=32):
    leaves = draw(device, dtype, (b, n, d), (d,), (d,))
    return Work(lambda: (normalize(leaves[0], groups, *leaves[1:]),), leaves)


def _layer_norm(x, groups, weight, bias):
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias)


def _gated(attend, device, dtype, n, function, chunk, b=1, causal=0, shared=128, values=1024):
    leaves = draw(device, dtype, *((b, n, size) for size in (shared, shared, values)))
    leaves += draw(device, torch.promote_types(dtype, torch.float32), (2 * (chunk or n) - 1,))
    options = {"function": function, "causal": bool(causal), "chunk_size": chunk or None}
    return Work(lambda: (attend(*leaves, **options),), leaves)


def _model_work(forward, model, elements):
    def run():
        model.train(torch.is_grad_enabled())
        return forward()

    leaves = [p for p in model.parameters() if p.requires_grad]
    return Work(run, leaves, elements=elements, parameters=models.count_parameters(model))


def _model_and_tokens(variant, device, dtype, n, b, fields):
    torch.manual_seed(0)
    name, own = variant
    model = getattr(models, name)(n, **own, **fields).to(device, dtype)
    high = min(1000, model.config.vocab_size)
    ids = torch.randint(4, high, (b, n), generator=torch.Generator().manual_seed(0), device="cpu").to(device)
    return model, ids


def _encoder(variant, device, dtype, n, b=1, **fields):
    model, ids = _model_and_tokens(variant, device, dtype, n, b, fields)
    return _model_work(lambda: (model(ids).last_hidden_state,), model, b * n)


def _decoder(variant, device, dtype, n, b=1, **fields):
    """Time a forward pass over n positions.

    With gradients, it returns the loss of all positions; else it fills a cache and returns the last logits.
    """
    model, ids = _model_and_tokens(variant, device, dtype, n, b, fields)

    def forward():
        if torch.is_grad_enabled():
            return (model(ids, labels=ids, use_cache=False).loss,)
        return (model(ids, use_cache=True, logits_to_keep=1).logits,)

    return _model_work(forward, model, b * n)


@torch.no_grad()
def _decoding(variant, device, dtype, n, b=1, **fields):
    """Time a decoding step after n positions.

    Caches with keys and values are filled with random numbers. Other caches have a constant size after at most 1,280
    positions, which end in the middle of a chunk of 512, because on average half of the chunk is in use.
    """
    model, ids = _model_and_tokens(variant, device, dtype, max(n, 1280) + 1024, b, fields)
    config, model = model.config, model.eval()
    if config.model_type in ("llama", "gpt2"):
        cache, heads = DynamicCache(config=config), config.num_attention_heads
        for layer in range(config.num_hidden_layers):
            shape = (2, b, heads, n, config.hidden_size // heads)
            cache.update(*torch.randn(shape, device=device, dtype=dtype), layer)
    else:
        cache = model(ids[:, : min(n, 1280)], use_cache=True, logits_to_keep=1).cache

    def forward():
        return (model(ids[:, :1], use_cache=True, cache=cache).logits,)

    return Work(forward, [], elements=b, parameters=models.count_parameters(model))


def _images(variant, device, dtype, b, size=224, **fields):
    torch.manual_seed(0)
    model = getattr(models, variant)(image_size=size, **fields).to(device, dtype)
    pixels = torch.randn(b, 3, size, size, generator=torch.Generator().manual_seed(0), device="cpu").to(device, dtype)
    return _model_work(lambda: (model(pixels).logits,), model, b)


def _trainer(variant, device, dtype, n, b=8, steps=8, **fields):
    """Time steps of `Trainer` with a classifier: batches of n / 2 to n tokens, padded, dropout, AdamW."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    torch.manual_seed(0)
    model = getattr(models, variant)(n, **fields).to(dtype)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(n // 2, n + 1, (b * steps,), generator=generator).tolist()
    rows = [{"input_ids": torch.randint(4, 1000, (length,), generator=generator)} for length in lengths]

    def collate(rows):
        ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True, padding_value=1)
        return {"input_ids": ids, "attention_mask": (ids != 1).long(), "labels": ids[:, 0] % 2}

    quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    place = {"use_cpu": device.type == "cpu", "output_dir": tempfile.gettempdir()}
    arguments = TrainingArguments(**quiet, **place, max_steps=steps, per_device_train_batch_size=b)
    trainer = Trainer(model, arguments, data_collator=collate, train_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    return Work(None, [], trainer.train, sum(lengths), models.count_parameters(model))


def _sizes(**fields):
    """Return the sizes with all combinations of the values of the fields."""
    return tuple(dict(zip(fields, values, strict=True)) for values in product(*fields.values()))


def _op(name, build, variants, sizes, **options):
    """Return the case of an op; `luna_mega` is the automatic choice of the backend."""
    return Case(name, build, {"luna_mega": getattr(api, name), **variants}, sizes, **options)


_DECODERS = {
    "luna_32": ("luna_lm", {}),
    "mega_chunk_512": ("mega_lm", {}),
    "megalodon_512": ("megalodon_lm", {}),
    "llama_sdpa": ("llama", {}),
    "gpt2_sdpa": ("gpt2", {}),
}
_SDPA = {
    f"sdpa_{name.partition('_')[0].lower()}": partial(baselines.sdpa_luna_attention, kernel)
    for name, kernel in SDPBackend.__members__.items()
    if name in ("CUDNN_ATTENTION", "FLASH_ATTENTION")
}
_LENGTHS = (512, 4096, 16384, 65536)

CASES = {
    case.name: case
    for case in (
        _op(
            "luna_attention",
            _attention,
            {"original": baselines.original_luna_attention, **_SDPA},
            _sizes(l=(128, 16, 256), n=(512, 2048, 8192, 32768)),
            check=({"l": 16, "n": 33}, {"l": 128, "n": 500}),
            gpu=(
                *({"l": rows, "n": n, "b": 65536 // n} for n in (4096, 512, 32768) for rows in (128, 16, 256)),
                {"l": 128, "n": 4096, "b": 16, "masked": 0},
            ),
        ),
        _op(
            "luna_causal_attention",
            _causal_attention,
            {"original": baselines.original_luna_causal_attention},
            (*_sizes(l=(32,), n=(2048, 512, 64, 4)), {"l": 16, "n": 2048}, {"l": 128, "n": 512}),
            check=({"l": 16, "n": 33}, {"l": 32, "n": 200}),
            gpu=(*({"l": rows, "n": 4096, "b": 8} for rows in (32, 128, 16)), {"l": 32, "n": 65536, "b": 1}),
        ),
        _op(
            "damped_ema",
            _ema,
            {
                "torch": None,
                "original": baselines.original_damped_ema,
                "fft": baselines.fft_damped_ema,
                "transformers": baselines.transformers_damped_ema,
                "copy": baselines.copy,
            },
            _sizes(b=(8,), n=(512, 4096), d=(256,), directions=(1, 2)),
            check=_sizes(b=(2,), n=(77,), d=(24,), directions=(1, 2)),
            gpu=(
                *_sizes(b=(8,), n=(4096,), directions=(1, 2)),
                {"b": 64, "n": 512, "directions": 2},
                *_sizes(b=(32,), n=(1024,), directions=(1, 2)),
                *_sizes(b=(1,), n=(65536,), directions=(1, 2)),
            ),
        ),
        _op(
            "complex_ema",
            _complex_ema,
            {"torch": None, "original": baselines.original_complex_ema, "copy": baselines.copy},
            _sizes(b=(8,), n=(512, 4096), d=(256,)),
            check=({"b": 2, "n": 77, "d": 24}, {"b": 1, "n": 4100, "d": 8}),
            gpu=({"b": 8, "n": 2048, "d": 1024}, {"b": 1, "n": 4096, "d": 4096}),
        ),
        _op(
            "diagonal_ssm",
            _diagonal_ssm,
            {
                "torch": None,
                "s4d": baselines.s4d,
                "loop": baselines.loop_diagonal_ssm,
                "associative_scan": baselines.scan_diagonal_ssm,
                "lfilter": baselines.lfilter_ssm,
                "copy": baselines.copy,
            },
            _sizes(real=(0, 1), b=(4,), n=_LENGTHS, d=(64,)),
            check=_sizes(real=(0, 1), b=(2,), n=(77,), d=(24,), states=(3,), directions=(1, 2)),
            gpu=({"b": 8, "n": 4096}, {"b": 64, "n": 512}, {"b": 2, "n": 16384}),
        ),
        _op(
            "timestep_norm",
            _norm,
            {"torch": None, "layer_norm": _layer_norm, "copy": baselines.copy},
            ({"b": 1, "n": 4096}, {"b": 8, "n": 1024}, {"b": 1, "n": 1024, "d": 4096, "groups": 64}),
            gpu=({"b": 8, "n": 2048}, {"b": 1, "n": 4096, "d": 4096, "groups": 64}),
        ),
        _op(
            "gated_attention",
            _gated,
            {"original": baselines.original_gated_attention},
            _sizes(n=(2048,), function=("laplace", "softmax"), chunk=(128, 0)),
            check=_sizes(n=(96,), function=("softmax", "laplace", "relu2"), chunk=(0, 32), causal=(0, 1)),
            gpu=(
                {"n": 4096, "b": 16, "function": "laplace", "chunk": 128, "shared": 64, "values": 256},
                {"n": 4096, "b": 16, "function": "softmax", "chunk": 128},
                {"n": 4096, "b": 16, "function": "laplace", "chunk": 2048, "causal": 1},
                {"n": 2048, "b": 16, "function": "softmax", "chunk": 0},
            ),
        ),
        Case(
            "base_model",
            _encoder,
            {"luna_128": ("luna_base", {}), "roberta_sdpa": ("roberta_base", {})},
            _sizes(n=(512, 1024, 2048, 4096, 8192)),
            gpu=tuple({"n": n, "b": 65536 // n} for n in (512, 4096, 16384)),
        ),
        Case(
            "encoders",
            _encoder,
            {
                "luna_128": ("luna", {"projection_length": 128}),
                "luna_16": ("luna", {"projection_length": 16}),
                "luna_256": ("luna", {"projection_length": 256}),
                "mega_chunk_128": ("mega", {"chunk_size": 128}),
                "mega": ("mega", {"use_chunking": False}),
                "roberta_sdpa": ("roberta", {}),
                "modernbert_sdpa": ("modernbert", {}),
            },
            _sizes(n=(512, 1024, 2048, 4096, 8192, 16384)),
            gpu=tuple({"n": n, "b": 65536 // n} for n in (512, 1024, 2048, 4096, 16384, 32768)),
        ),
        Case(
            "decoders",
            _decoder,
            _DECODERS,
            ({"n": 512}, {"n": 4096}),
            gpu=tuple({"n": n, "b": 65536 // n} for n in (512, 4096)),
        ),
        Case(
            "decoding",
            _decoding,
            _DECODERS,
            _sizes(n=(128, 600, 4096, 16_384), b=(1, 8)),
            gpu=({"n": 600}, {"n": 4096, "b": 8}),
        ),
        Case(
            "memory",  # models of bytes; one step fits the memory of a small machine
            _decoder,
            {
                "luna_32": ("luna_bytes", {}),
                "mega_chunk_128": ("mega_bytes", {}),
                "megalodon_chunk_128": ("megalodon_bytes", {}),
            },
            _sizes(n=(4096, 16_384, 65_536)),
            gpu=_sizes(n=(4096, 16_384, 65_536, 131_072, 262_144, 524_288)),
        ),
        Case("images", _images, {"mega_base": "mega_image", "vit_base_sdpa": "vit"}, ({"b": 4},), gpu=({"b": 128},)),
        Case("trainer", _trainer, {"mega": "mega_small", "bert": "bert_small"}, ({"n": 128},), gpu=({"n": 128},)),
    )
}
