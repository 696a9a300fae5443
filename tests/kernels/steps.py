"""Steps of models that run in a CUDA graph, with dropout in training, for `benchmarks/gpu_jobs.py`."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

import luna_mega
from luna_mega.modeling_common.cache import StateCache
from tests.kernels import gpu

VOCABULARY = 64
_SIZES = {"vocab_size": VOCABULARY, "num_hidden_layers": 2}
_SIZES |= {"hidden_size": 256, "intermediate_size": 512} if gpu.GPU else {"hidden_size": 32, "intermediate_size": 64}
_CHUNKS = {"chunk_size": 128 if gpu.GPU else 16}
_LUNA = {"num_attention_heads": 4 if gpu.GPU else 2, "dropout": 0.1, "projection_length": 16}
_MEGA = {"shared_representation_size": 64 if gpu.GPU else 16, "use_chunking": True, **_CHUNKS}
_MEGALODON = {"shared_representation_size": 64 if gpu.GPU else 16, "value_size": 256 if gpu.GPU else 64, **_CHUNKS}
_DECODER = {"is_decoder": True}
BATCH, LENGTH = (4, 512) if gpu.GPU else (2, 32)


class Step(NamedTuple):
    """A function and the tensors of token ids that it reads; decoding has more functions for the comparison."""

    ids: list[torch.Tensor]
    run: Callable[[], list[torch.Tensor]]
    begin: Callable[[], object] = lambda: None  # returns to the state before the first step
    expected: Callable[[], list[torch.Tensor]] | None = None  # None: compare with `run`
    repeats: int = 1


def model(name: str, **fields: object) -> nn.Module:
    torch.manual_seed(0)
    made = getattr(luna_mega, name)
    return made(made.config_class(**_SIZES, **fields)).to(gpu.DEVICE, gpu.DTYPE)


def draw() -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (BATCH, LENGTH), device=gpu.DEVICE)


def training(name: str, packed: bool = False, **fields: object) -> Step:
    """Return a step that computes the loss and all gradients of a training step with dropout."""
    trained = model(name, **fields).train()
    leaves = [x for x in trained.parameters() if x.requires_grad]
    ids = [draw(), draw()] if "Conditional" in name else [draw()]
    options = {}
    if packed:
        bounds = torch.arange(0, BATCH * LENGTH + 1, LENGTH // 2, dtype=torch.int32, device=gpu.DEVICE)
        options = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        options |= dict.fromkeys(("max_length_q", "max_length_k"), LENGTH // 2)

    def run() -> list[torch.Tensor]:
        loss = trained(input_ids=ids[0], labels=ids[-1], **options).loss
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        return [loss.detach(), *(x for x in gradients if x is not None)]

    return Step(ids, run)


def inference(name: str, **fields: object) -> Step:
    """Return a step that computes the states of an encoder."""
    encoder = model(name, **fields).eval()
    ids = [draw()]

    @torch.no_grad()
    def run() -> list[torch.Tensor]:
        return [encoder(input_ids=ids[0]).last_hidden_state]

    return Step(ids, run)


@torch.no_grad()
def decoding(name: str, **fields: object) -> Step:
    """Return a step that computes logits with a static cache, which are compared with those of a dynamic cache."""
    decoder = model(name, **fields, **_DECODER).eval()
    prompt, ids = draw()[:, : LENGTH - 5], draw()[:, :1].contiguous()
    dynamic, static = (decoder(input_ids=prompt, use_cache=True).cache for _ in range(2))
    static.make_static()
    tensors = [x for layer in static.layers for x in layer.tensors.values()]
    saved = [x.clone() for x in tensors]

    @torch.no_grad()
    def run(cache: StateCache = static) -> list[torch.Tensor]:
        return [decoder(input_ids=ids, cache=cache).logits]

    def begin() -> None:
        for mine, first in zip(tensors, saved, strict=True):
            mine.copy_(first)

    return Step([ids], run, begin, lambda: run(dynamic), repeats=64)


STEPS: dict[str, Callable[[], Step]] = {
    "LunaForMaskedLM, training": lambda: training("LunaForMaskedLM", **_LUNA),
    "LunaForCausalLM, training": lambda: training("LunaForCausalLM", **_LUNA, **_DECODER),
    "LunaForConditionalGeneration, training": lambda: training("LunaForConditionalGeneration", **_LUNA),
    "LunaModel, inference": lambda: inference("LunaModel", **_LUNA),
    "MegaForMaskedLM, training": lambda: training("MegaForMaskedLM", **_MEGA),
    "MegaForMaskedLM, padding-free training": lambda: training("MegaForMaskedLM", packed=True, **_MEGA),
    "MegaForCausalLM, training": lambda: training("MegaForCausalLM", **_MEGA, **_DECODER, bidirectional=False),
    "MegaForConditionalGeneration, training": lambda: training("MegaForConditionalGeneration", **_MEGA),
    "MegaModel, inference": lambda: inference("MegaModel", **_MEGA),
    "MegalodonForCausalLM, training": lambda: training("MegalodonForCausalLM", **_MEGALODON),
    "LunaForCausalLM, decoding": lambda: decoding("LunaForCausalLM", **_LUNA, max_position_embeddings=LENGTH + 100),
    "MegaForCausalLM, decoding": lambda: decoding("MegaForCausalLM", **_MEGA, bidirectional=False),
    "MegalodonForCausalLM, decoding": lambda: decoding("MegalodonForCausalLM", **_MEGALODON),
}


def check(name: str) -> None:
    """Check that the replay of a captured step gives the results of the step for other tokens."""
    step = STEPS[name]()
    replay, captured = gpu.record(step.run)
    step.begin()
    generator = torch.Generator(gpu.DEVICE).manual_seed(1)
    for _ in range(step.repeats):
        for ids in step.ids:
            ids.random_(4, VOCABULARY, generator=generator)
        torch.manual_seed(0)
        replay()
        actual = [x.clone() for x in captured]
        torch.manual_seed(0)
        expected = (step.expected or step.run)()
        for index, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
            error = ((mine.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-3)).item()
            assert error <= 3e-2, f"tensor {index}: relative error {error:.1e}"
