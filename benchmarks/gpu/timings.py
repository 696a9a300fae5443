"""Timings of the kernels where they run: configurations, ops, models, decoding; and memory."""

import copy
import os
import resource
import shutil
import subprocess
import sys
import time
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import floors
import torch
import triton
from cases import CASES
from gpu.checks import OPS, TOY, Cases, Setting, _of, _step, capture, shown_sizes, tuned_sizes
from measure import agree, measure
from transformers import LlamaConfig, LlamaForCausalLM, RobertaConfig, RobertaModel

from luna_mega import LunaConfig, LunaForCausalLM, LunaModel, MegaConfig, MegaForCausalLM, MegaModel
from luna_mega.kernels import api
from luna_mega.kernels.common import triton_choice


def tune(setting: Setting) -> Cases:
    """Time all configurations of every kernel; every result must equal the default's."""
    for name, op, dtype, size in tuned_sizes(setting):
        yield name, partial(_tune, setting, op, dtype, size)


def _tune(setting, op, dtype, size):
    work, rows = CASES[op].make(CASES[op].ours, setting.device, dtype, size), []

    def compare(kernel, key, configurations, run):
        times, expected = {}, None
        for configuration in configurations:
            call = partial(run, configuration)
            try:
                result = triton_choice.tensors(call())
                expected = result if expected is None else expected
                told = triton_choice.difference(result, expected)
                times[configuration] = _milliseconds(call, setting) if told is None else told
            except triton_choice.REFUSALS as error:
                times[configuration] = str(error)
        right = {c: ms for c, ms in times.items() if not isinstance(ms, str)}
        fastest = min(right, key=right.get, default=configurations[0])
        row = {"kernel": f"{op} {kernel.fn.__name__}", "default_ms": times[configurations[0]], "call": key}
        row |= {"fastest_ms": times[fastest], "fastest": fastest._asdict()}
        row["times"] = {_of(c._asdict()): ms if isinstance(ms, str) else round(ms, 4) for c, ms in times.items()}
        rows.append(row | {"ok": not any(isinstance(ms, str) and "differs" in ms for ms in times.values())})
        return run(configurations[0])

    with api.use_backend("triton"), triton_choice.choosing(compare):
        _step(work)()
    return rows


def _milliseconds(function, setting):
    if setting.device.type == "cuda":
        return triton.testing.do_bench(function, warmup=5, rep=20, return_mode="median")
    start = time.perf_counter()
    function()
    return 1000 * (time.perf_counter() - start)


@cache
def _rates(device, dtype):
    return floors.rates(device, dtype)


def ops(setting: Setting) -> Cases:
    """Measure each op against the baselines of the registry, with percent of the floor, the first sizes of all first.

    Nothing of an op is measured where it does not agree with the original.
    """
    dtype, red = "float32" if setting.toy else "bfloat16", set()
    yield "rates", lambda: [vars(_rates(setting.device.type, dtype)) | {"dtype": dtype}]
    for op in OPS:
        yield f"{op} agrees", partial(_agree, op, setting.device.type, dtype, red)
    for number in range(1 if setting.toy else 4):
        for op in OPS:
            case, size = CASES[op], TOY[op] if setting.toy else shown_sizes(op)[number]
            variants = case.variants if setting.toy else {**case.variants, **case.gpu_variants}
            for variant in (*variants, *(case.compiled if number == 0 and not setting.toy else ())):
                yield f"{op} {_of(size)}, {variant}", partial(_measure, setting, op, variant, size, dtype, red)


def _agree(op, device, dtype, red):
    told = next(filter(None, (agree(op, size, device, dtype) for size in CASES[op].parity[:2])), None)
    if told is not None:
        red.add(op)
    return [{"told": told or "outputs and gradients agree with the original", "ok": told is None}]


def _measure(setting, op, variant, size, dtype, red):
    case, row = CASES[op], {"op": op, "size": _of(size), "variant": variant}
    if op in red:
        return [row | {"error": "not measured: the op does not agree with the original", "ok": False}]
    ours = variant == case.ours
    with api.use_backend("triton" if ours and not setting.toy else "auto"):
        row |= measure(op, variant, size, setting.device.type, dtype, 0)
    if "error" in row:  # a baseline may refuse a mask, or need more memory than there is
        return [row | {"ok": not ours}]
    peaks, width = _rates(setting.device.type, dtype), getattr(torch, dtype).itemsize
    for name, floor in zip(("forward", "backward"), case.floor(width, **size), strict=True):
        row[f"{name}_percent"] = 100 * peaks.milliseconds(floor) / row[f"{name}_ms"]
    return [row]


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Models of one layer, in place of those of the registry.
_TOY = {
    "luna_128": lambda n: LunaModel(
        LunaConfig(vocab_size=1000, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
                   projection_length=8, max_position_embeddings=n, dropout=0.0, attention_dropout=0.0)
    ),
    "mega_chunk": lambda n: MegaModel(
        MegaConfig(vocab_size=1000, hidden_size=32, num_hidden_layers=1, intermediate_size=32, nffn_hidden_size=32,
                   shared_representation_size=16, use_chunking=True, chunk_size=16, normalization_type="layernorm",
                   dropout_prob=0.0, **_NO_DROPOUT), add_pooling_layer=False,
    ),
    "roberta_sdpa": lambda n: RobertaModel(
        RobertaConfig(vocab_size=1000, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
                      max_position_embeddings=n + 2, **_NO_DROPOUT), add_pooling_layer=False,
    ),
}  # fmt: skip


def models(setting: Setting) -> Cases:
    """Measure Luna-128 and Mega-chunk against RoBERTa-base, inference and training, at equal tokens a batch."""
    lengths = (16,) if setting.toy else (512, 4096, 16384, 32768)
    base, mega = CASES["base_model"], CASES["mega_model"]
    names = {"luna_128": base, "mega_chunk": mega, "roberta_sdpa": base}
    variants = {name: case.variants[name] for name, case in names.items()}
    if not setting.toy:
        variants["roberta_cudnn"] = base.gpu_variants["roberta_cudnn"]
    for n in lengths:
        for variant, make in variants.items():
            yield f"{variant} n={n}", partial(_model, setting, variant, make, n)


def _model(setting, variant, make, n):
    tokens = 32 if setting.toy else 65536
    row = {"model": variant, "n": n, "b": tokens // n}
    dtype = torch.float32 if setting.toy else torch.bfloat16
    backend = "auto" if setting.toy or variant.startswith("roberta") else "triton"
    try:
        with api.use_backend(backend):
            if setting.toy:
                make = partial(make.func, _TOY[variant])
            with setting.device:  # parameters are drawn there
                work = make(setting.device, dtype, n=n, b=tokens // n)
            step = _step(work)
            before = _allocated(setting)
            row["infer_ms"], row["infer_mb"] = _timed(torch.no_grad()(work.forward), setting, before)
            row["train_ms"], row["train_mb"] = _timed(step, setting, before)
    except torch.OutOfMemoryError as error:
        return [row | {"error": str(error).partition("\n")[0][:100], "ok": variant.startswith("roberta")}]
    return [row | {"tokens_per_s": 1000 * tokens / row["train_ms"]}]


def _allocated(setting):
    return torch.cuda.memory_allocated() if setting.device.type == "cuda" else 0


def _timed(function, setting, before=0):
    """Return median milliseconds of a call, and the peak megabytes that it takes above `before`."""
    if setting.device.type != "cuda":
        return _milliseconds(function, setting), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return _milliseconds(function, setting), peak


def _decoders(toy):
    """Return makers of causal language models of about 125 M parameters."""
    width, layers = (32, 1) if toy else (768, 12)
    sizes = {"vocab_size": 1000 if toy else 32000, "hidden_size": width, "num_hidden_layers": layers}
    longest = {"max_position_embeddings": 2**15}
    luna = {"num_attention_heads": width // 16 if toy else 12, "intermediate_size": 4 * width, "projection_length": 32}
    luna |= {"is_decoder": True, "position_embedding_type": "sinusoidal"} | longest
    mega = {"intermediate_size": 2 * width, "nffn_hidden_size": 2 * width, "is_decoder": True, "bidirectional": False}
    mega |= {"use_chunking": True, "chunk_size": 16 if toy else 512, "normalization_type": "layernorm"}
    mega["shared_representation_size"] = 16 if toy else 128
    llama = {"num_attention_heads": luna["num_attention_heads"], "intermediate_size": 8 * width // 3} | longest
    return {
        "luna": lambda: LunaForCausalLM(LunaConfig(**sizes, **luna)),
        "mega": lambda: MegaForCausalLM(MegaConfig(**sizes, **mega)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes, **llama)),
    }


def decoding(setting: Setting) -> Cases:
    """Time a step of generation, called from Python and from a CUDA graph, whose logits must be the same."""
    for context in (20,) if setting.toy else (500, 8100):
        for batch in (1,) if setting.toy else (1, 8):
            for name, make in _decoders(setting.toy).items():
                yield f"{name} context={context} b={batch}", partial(_decode, setting, name, make, context, batch)


@torch.no_grad()
def _decode(setting, name, make, context, batch):
    torch.manual_seed(0)
    dtype, ours = torch.float32 if setting.toy else torch.bfloat16, name != "llama"
    with setting.device:
        model = make().to(dtype).eval()
        ids, token = torch.randint(4, 1000, (batch, context)), torch.randint(4, 1000, (batch, 1))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    floor = 1000 * weights / _rates(setting.device.type, "float32" if setting.toy else "bfloat16").bytes
    row = {"model": name, "context": context, "b": batch, "weights_mb": weights / 2**20, "floor_ms": floor}
    with api.use_backend("triton" if ours and not setting.toy else "auto"):
        filled = model(ids, use_cache=True, logits_to_keep=1).past_key_values

        def step(cache):
            return model(token, past_key_values=cache, use_cache=True).logits

        expected = step(copy.deepcopy(filled))
        row["ms"] = min(_timed(partial(step, copy.deepcopy(filled)), setting)[0] for _ in range(2))
        warm = [copy.deepcopy(filled) for _ in range(4)]  # three warm-ups and the one that is captured
        try:
            replay = capture(lambda: step(warm.pop()), setting.device)
            same = torch.equal(replay(), expected)
            row["graph_ms"] = _timed(replay, setting)[0] if setting.device.type == "cuda" else row["ms"]
        except RuntimeError as error:  # a cache that grows, or waits for the device
            return [row | {"error": f"no CUDA graph: {str(error).partition(chr(10))[0][:100]}", "ok": not ours}]
    return [row | {"ok": same or not ours, "told": "" if same else "the graph's logits differ"}]


def memory(setting: Setting) -> Cases:
    """Check that memory grows linearly with the length and is given back; run a memory checker where there is one."""
    for op in OPS:
        yield op, partial(_grown, setting, op)
    if setting.device.type == "cuda":
        yield "compute-sanitizer", partial(_sanitize, setting)


def _grown(setting, op):
    fixed = {"b": 1} | ({"chunk": 128} if op == "gated_attention" else {})
    peaks, before = {}, None
    for n in (20,) if setting.toy else (8192, 8192, 16384, 32768):
        size = TOY[op] if setting.toy else CASES[op].gpu[0] | fixed | {"n": n}
        work = CASES[op].make(CASES[op].ours, setting.device, torch.float32, size)
        start = _allocated(setting)
        with api.use_backend("triton"):
            peaks[n] = _timed(_step(work), setting, start)[1]
        del work
        # The first run allocates memory that stays, such as workspaces of libraries.
        before = _allocated(setting) if before is None else before
    left = _allocated(setting) - before
    numbers = list(peaks.values())
    linear = all(b <= 2.2 * a + 8 for a, b in pairwise(numbers))
    return [{"op": op, "peak_mb": peaks, "left_bytes": left, "ok": linear and left < 2**20}]


def _sanitize(setting):
    """Run every kernel at tiny sizes under compute-sanitizer, which finds reads and writes outside of tensors."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return [{"told": "compute-sanitizer is not installed"}]
    script = str(Path(__file__).with_name("calls.py"))
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, script]
    # With an allocation for every tensor, a place outside of one belongs to no other.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in run.stdout.splitlines() if "ERROR SUMMARY" in line or "Invalid" in line]
    print(run.stdout[-20000:], run.stderr[-4000:], flush=True)
    return [{"told": "; ".join(lines[:3])[:300] or f"exit status {run.returncode}", "ok": run.returncode == 0}]
