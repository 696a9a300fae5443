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
from torch.utils._python_dispatch import TorchDispatchMode

from luna_mega.kernels import _export, api
from luna_mega.modeling_common.cache import keep_derived
from tests.kernels.calls import OPERATORS, Call, Sizes
from tests.kernels.steps import STEPS

# The maximum numbers of operators and launches of each case.
BUDGETS = {
    "luna_pack": (17, 4),
    "luna_unpack": (19, 3),
    "luna_attention": (28, 7),
    "luna_causal_attention": (50, 13),
    "damped_ema": (23, 11),
    "complex_ema": (28, 11),
    "diagonal_ssm": (91, 9),
    "diagonal_ssm real": (37, 9),
    "timestep_norm": (29, 6),
    "gated_attention": (17, 8),
    "gated_attention to other keys": (17, 8),
    "LunaForMaskedLM, training": (393, 12),
    "LunaForCausalLM, training": (374, 8),
    "LunaForConditionalGeneration, training": (974, 32),
    "LunaModel, inference": (106, 4),
    "MegaForMaskedLM, training": (606, 34),
    "MegaForMaskedLM, padding-free training": (624, 34),
    "MegaForCausalLM, training": (592, 26),
    "MegaForConditionalGeneration, training": (1453, 76),
    "MegaModel, inference": (134, 8),
    "MegalodonForCausalLM, training": (624, 40),
    "MegaForCausalLM, decoding": (193, 2),
    "MegalodonForCausalLM, decoding": (248, 5),
}


class Counts(TorchDispatchMode):
    """Count the operators of PyTorch that eager mode calls, including those inside functions of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        self.operators += 1
        return operator(*arguments, **(options or {}))


def train(call: Call, leaves: dict[str, torch.Tensor]) -> None:
    """Run a forward and a backward pass."""
    outputs = call.run(**leaves)
    torch.autograd.grad(outputs, list(leaves.values()), [torch.ones_like(x) for x in outputs], allow_unused=True)


def cases() -> Iterator[tuple[str, Callable]]:
    """Yield (name, function) for a training step of each operator, and the steps of the models."""
    for name, row in OPERATORS.items():
        if "_step" not in name:
            call = row.make(Sizes(1, 512, 2, rows=16))
            yield name, partial(train, call, {key: x.float().requires_grad_() for key, x in call.leaves.items()})
    for name, make in STEPS.items():
        if name != "LunaForCausalLM, decoding":  # the state counts positions, and nothing writes the count
            yield name, make().run


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
    for name, run in cases():
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
