"""The work of the host in eager mode: operators of PyTorch, launches of Triton kernels and Python calls.

    TRITON_INTERPRET=1 PYTHONPATH=. python -m tests.kernels.host_counts [name ...]

prints the counts and the time on this machine, for tiny tensors on the CPU and launches that run nothing. The counts
are the same on a GPU, except for norms, which are one operator there.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import luna_mega
from luna_mega.kernels import _export, api
from luna_mega.modeling_common.cache import keep_derived

# The maximum numbers of operators and launches of each case.
BUDGETS = {
    "luna_pack": (12, 4),
    "luna_unpack": (10, 3),
    "luna_causal_attention": (30, 13),
    "damped_ema": (19, 11),
    "damped_ema, two directions": (30, 15),
    "complex_ema": (24, 11),
    "diagonal_ssm": (87, 9),
    "timestep_norm": (23, 6),
    "gated_attention": (11, 7),
    "gated_attention, softmax": (14, 8),
    "LunaForMaskedLM, training step": (1050, 36),
    "LunaForCausalLM, training step": (1333, 90),
    "LunaForCausalLM, decoding step": (214, 6),
    "MegaForMaskedLM, training step": (1615, 102),
    "MegaForCausalLM, training step": (1599, 78),
    "MegaForCausalLM, decoding step": (373, 12),
    "MegalodonForCausalLM, training step": (1929, 108),
    "MegalodonForCausalLM, decoding step": (507, 19),
}


class Counts(TorchDispatchMode):
    """Count the operators of PyTorch that eager mode calls, including those inside functions of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        self.operators += 1
        return operator(*arguments, **(options or {}))


def operator_cases() -> Iterator[tuple[str, Callable]]:
    """Yield (name, function) for each op; the function runs a forward and a backward pass."""
    t, h, k, d, n = 512, 2, 16, 16, 16

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape).requires_grad_()

    def case(run: Callable, *leaves: torch.Tensor) -> Callable:
        def both() -> None:
            outputs = run(*leaves)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs], allow_unused=True)

        return both

    p, x, mask = leaf(1, 16, h, k), leaf(1, t, h, k), torch.arange(t)[None] < t - 64
    tokens, rows = leaf(1, t, d), [leaf(d, n) for _ in range(4)]
    turning = [leaf(d, n), leaf(d, n), leaf(d), leaf(d, n, 2)]
    z, v = leaf(1, t, d), leaf(1, t, 32)
    gated = partial(api.gated_attention, chunk_size=128)
    yield "luna_pack", case(lambda p, x: api.luna_pack(p, x, x, mask), p, x)
    yield "luna_unpack", case(lambda x, p: api.luna_unpack(x, p, p), x, p)
    yield "luna_causal_attention", case(lambda x, p: api.luna_causal_attention(x, p, x, x, x), x, p)
    yield "damped_ema", case(api.damped_ema, tokens, *rows, leaf(d))
    both = [torch.cat((row, row)).detach().requires_grad_() for row in rows]
    yield "damped_ema, two directions", case(api.damped_ema, tokens, *both, leaf(d))
    yield "complex_ema", case(api.complex_ema, tokens, *turning, leaf(d))
    yield "diagonal_ssm", case(api.diagonal_ssm, tokens, leaf(d, n), leaf(d, n), leaf(d, n, 2), leaf(d))
    yield "timestep_norm", case(lambda x, *w: api.timestep_norm(x, 2, *w), tokens, leaf(d), leaf(d))
    yield "gated_attention", case(partial(gated, function="laplace"), z, z, v, leaf(255))
    yield "gated_attention, softmax", case(partial(gated, causal=True), z, z, v, leaf(255))


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 6, "intermediate_size": 64}
MODELS = {
    "LunaForMaskedLM": {"num_attention_heads": 2},
    "LunaForCausalLM": {"num_attention_heads": 2, "is_decoder": True},
    "MegaForMaskedLM": {"shared_representation_size": 16},
    "MegaForCausalLM": {"shared_representation_size": 16, "is_decoder": True, "bidirectional": False},
    "MegalodonForCausalLM": {"shared_representation_size": 16, "value_size": 64},
}


def build(name: str) -> nn.Module:
    """Return a model of 6 layers without dropout."""
    model = getattr(luna_mega, name)
    torch.manual_seed(0)
    return model(model.config_class(**SIZES, **MODELS[name])).eval()


def model_cases() -> Iterator[tuple[str, Callable]]:
    """Yield (name, function) for a training step of each model and a decoding step of each decoder."""
    ids = torch.randint(3, 64, (2, 64), generator=torch.Generator().manual_seed(0))
    for name in MODELS:
        model = build(name)

        def train(model: nn.Module = model) -> None:
            model(input_ids=ids, labels=ids).loss.backward()

        yield f"{name}, training step", train
        if "Causal" in name:
            with torch.no_grad():
                cache = model(input_ids=ids, use_cache=True).cache

            # Luna's state counts the positions, and launches that run nothing do not write the count.
            inputs = {"input_ids": ids[:, :1], "cache": cache, "use_cache": True}
            inputs |= {"position_ids": torch.full((2, 1), 70)} if "Luna" in name else {}

            @torch.no_grad()
            def decode(model: nn.Module = model, inputs: dict = inputs) -> None:
                model(**inputs)

            yield f"{name}, decoding step", decode


@contextlib.contextmanager
def counted_launches() -> Iterator[list[int]]:
    """Yield a list that contains the number of launches, and run no kernel."""
    from triton.runtime.interpreter import InterpretedFunction

    launches = [0]

    def count(*arguments: object, **options: object) -> None:
        launches[0] += 1

    with mock.patch.object(InterpretedFunction, "run", count), api.use_backend("triton"):
        yield launches


def measure(run: Callable) -> tuple[int, int]:
    """Return the number of PyTorch operators and the number of launches of a call."""
    with counted_launches() as launches, keep_derived(True):  # decoding steps as in `generate`
        for _ in range(2):
            run()
        launches[0] = 0
        with mock.patch.object(_export, "_len_torch_dispatch_stack", lambda: 0), Counts() as counts:
            run()
    return counts.operators, launches[0]


def python_calls(run: Callable) -> int:
    """Return the number of calls of Python functions."""
    calls = [0]

    def count(frame: object, event: str, argument: object) -> None:
        calls[0] += event == "call"

    sys.setprofile(count)
    run()
    sys.setprofile(None)
    return calls[0]


def main() -> None:
    torch.set_num_threads(1)
    print("| case | Python calls | operators | launches | ms |\n|---|---|---|---|---|")
    for name, run in (*operator_cases(), *model_cases()):
        if not any(wanted in name for wanted in sys.argv[1:] or [""]):
            continue
        operators, launches = measure(run)
        with counted_launches():
            calls, best = python_calls(run), float("inf")
            for _ in range(30):
                start = time.process_time()
                run()
                best = min(best, time.process_time() - start)
        print(f"| {name} | {calls} | {operators} | {launches} | {1e3 * best:.2f} |", flush=True)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    main()
