"""The contract of all ops: the choice of a backend and its reason, ragged input, autocast.

A public function of the kernels is an `Op`. The call, `use_backend` or the environment variable `LUNA_MEGA_BACKEND`, in
this order, names its backend; otherwise the best backend that can run the call is taken.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

from luna_mega.kernels import ragged
from luna_mega.kernels.context_parallel import ContextShard

NAMES = ("auto", "reference", "torch", "triton")
logger = logging.getLogger("luna_mega.kernels")


def _checked(name: str, source: str) -> str:
    if name not in NAMES:
        raise ValueError(f"{source} is {name!r}, which is not a backend; choose one of {', '.join(NAMES)}")
    return name


# Read once: a process-wide default, which torch.compile can guard on.
_default = _checked(os.environ.get("LUNA_MEGA_BACKEND", "auto"), "the environment variable LUNA_MEGA_BACKEND")
_override: str | None = None


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every op inside the block with backend `name` (one of `NAMES`), unless a call names its own."""
    global _override
    previous, _override = _override, _checked(name, "use_backend()'s argument")
    try:
        yield
    finally:
        _override = previous


FLOAT32_PRECISIONS = ("tf32x3", "ieee")
_float32_precision = "tf32x3"


@contextmanager
def use_float32_precision(name: str) -> Iterator[None]:
    """Multiply float32 matrices in Triton kernels with precision `name` inside the block.

    `"tf32x3"`, the default: three passes on tensor cores, accurate to about 1e-6; `"ieee"`: true float32, slower.
    """
    global _float32_precision
    if name not in FLOAT32_PRECISIONS:
        raise ValueError(f"there is no float32 precision {name!r}; choose one of {', '.join(FLOAT32_PRECISIONS)}")
    previous, _float32_precision = _float32_precision, name
    try:
        yield
    finally:
        _float32_precision = previous


def float32_precision() -> str:
    """Return the precision that `use_float32_precision` has set."""
    return _float32_precision


def without_autocast(device: str) -> AbstractContextManager:
    """Return a context in which ops on this type of device keep the dtypes of their inputs."""
    # The meta device has no autocast to switch off.
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


@dataclass(frozen=True, eq=False)
class Op:
    """One public function of the kernels: its backends and their limits. Autocast is off inside every backend.

    A call is a dict of arguments that the function has checked; backends take them by keyword.

    Args:
        name: of the public function, for errors and `explain`.
        backends: the functions that compute a call, by the name of the backend.
        unsupported: returns the reason why the Triton kernels cannot take a call, None where they can.
        tokens: the arguments `[1, total, ...]` that lie end to end in a ragged call. They are filled up to `[sequences,
            max_seqlen, ...]` for the backends that are not in `native`.
        mask: the argument that masks the filled-up places, None where they do no harm.
        tokens_out: whether the result, or the first of several, is filled up like the tokens.
        native: the backends that take ragged calls as they are, with `cu_seqlens` and `max_seqlen`.
        with_weights: computes output, weights and further results, step by step.
        under_autocast: changes a call under autocast into the call that the Triton kernels compute.
        ragged: runs a ragged call on a backend that is not in `native`; None = by filling up.
        on_ranks: the functions that compute a call whose sequences lie on several ranks, by the name of the backend, or
            "weights" for `with_weights`. The first argument is this rank's `ContextShard`.
    """

    name: str
    backends: dict[str, Callable]
    unsupported: Callable[..., str | None]
    tokens: tuple[str, ...]
    mask: str | None = "mask"
    tokens_out: bool = True
    native: tuple[str, ...] = ("triton",)
    with_weights: Callable | None = None
    under_autocast: Callable[[dict], dict] | None = None
    ragged: Callable | None = None
    on_ranks: dict[str, Callable] = field(default_factory=dict)

    def __call__(
        self,
        backend: str | None,
        call: dict,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        return_weights: bool = False,
        shard: ContextShard | None = None,
    ):
        """Compute a call, ragged where there are `cu_seqlens`, with the requested or the best backend."""
        device = call[self.tokens[0]].device
        if return_weights:
            if cu_seqlens is not None:
                raise ValueError(
                    f"{self.name} returns no weights of ragged sequences: leave return_weights or cu_seqlens out"
                )
            with without_autocast(device.type):
                run = self.with_weights if shard is None else partial(self.on_ranks["weights"], shard)
                return run(**call)
        chosen = self.choose(backend, device, self.unsupported(**call, max_seqlen=max_seqlen))
        if chosen == "triton" and self.under_autocast is not None and torch.is_autocast_enabled(device.type):
            call = self.under_autocast(call)
        if not torch.compiler.is_compiling() and len(call[self.tokens[0]]) == 0:
            chosen = "reference"  # fast paths divide by the batch size
        run = self.backends[chosen] if shard is None else partial(self.on_ranks[chosen], shard)
        with without_autocast(device.type):
            if cu_seqlens is None:
                return run(**call)
            if chosen in self.native:
                return run(**call, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
            return (self.ragged or self.fill_up)(run, call, cu_seqlens, max_seqlen)

    def fill_up(self, run: Callable, call: dict, cu_seqlens: torch.Tensor, max_seqlen: int):
        """Compute a ragged call with a backend that takes only rows of one length."""
        total, filled = call[self.tokens[0]].shape[1], {}
        for name in self.tokens:
            same = next((other for other in filled if call[other] is call[name]), None)
            filled[name] = ragged.pad(call[name], cu_seqlens, max_seqlen) if same is None else filled[same]
        if self.mask is not None:
            mask = call[self.mask]
            kept = ragged.keep(cu_seqlens, max_seqlen)
            filled[self.mask] = kept if mask is None else ragged.pad(mask, cu_seqlens, max_seqlen)
        result = run(**call | filled)
        if not self.tokens_out:
            return result
        if isinstance(result, torch.Tensor):
            return ragged.unpad(result, cu_seqlens, total)
        return ragged.unpad(result[0], cu_seqlens, total), *result[1:]

    def refuse_beside(self, shard: ContextShard | None, **arguments) -> None:
        """Raise `ValueError` where one of the arguments is given beside the shard."""
        given = [name for name, value in arguments.items() if value is not None and value is not False]
        if shard is not None and given:
            raise ValueError(f"{self.name} with shard takes no {' and no '.join(given)}: leave one or the other out")

    def choose(self, backend: str | None, device: torch.device, unsupported: str | None = None) -> str:
        """Return the name of the backend that runs a call on `device`, and log once why it is not Triton on a GPU.

        `unsupported` is the reason why the Triton kernels cannot take the arguments of this call, None where they can.
        Raises `ValueError` if a backend was chosen by name and cannot run the call.
        """
        chosen, reason = self.decide(backend, device, unsupported)
        if device.type == "cuda" and reason.startswith(_FALLBACK) and not torch.compiler.is_compiling():
            told = f"{self.name} runs on {chosen!r}: {reason}"
            if told not in _told:
                _told.add(told)
                logger.warning(told)
        return chosen

    def decide(self, backend: str | None, device: torch.device, unsupported: str | None = None) -> tuple[str, str]:
        """Return the name of the backend, and the reason for the choice."""
        if backend is not None:
            wanted, source = _checked(backend, f"{self.name}'s argument backend"), "its argument"
        elif _override is not None:
            wanted, source = _override, "use_backend"
        else:
            wanted, source = _default, "LUNA_MEGA_BACKEND"
        if wanted == "auto":
            # Interpreted kernels are for tests: they run only when they are chosen by name.
            against = f"the tensors are on {device.type}" if device.type != "cuda" else _why_not(device) or unsupported
            if torch.compiler.is_exporting():
                against = "an exported program must not need this package"
            return ("triton", "automatic choice") if against is None else ("torch", _FALLBACK + against)
        if wanted == "triton" and (against := _why_not(device) or unsupported) is not None:
            raise ValueError(f"{self.name} cannot run on 'triton': {against}; choose 'torch' or 'auto'")
        return wanted, f"chosen by {source}"


def for_ranks(compute: Callable, backends: dict[str, Callable]) -> dict[str, Callable]:
    """Return the functions `on_ranks` of an `Op` that are `compute(run, shard, **call)`, `run` being the backend's."""
    return {name: partial(compute, run) for name, run in backends.items()}


_FALLBACK = "no Triton kernel: "
_told: set[str] = set()


@torch.compiler.assume_constant_result
def _why_not(device: torch.device) -> str | None:
    """Return the reason why no Triton kernel runs on `device`, None where they do."""
    try:
        import triton
    except ImportError:
        return "Triton is not installed; run `pip install triton` (Linux)"
    if device.type == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        return None if major >= 8 else f"compute capability {major}.{minor} is below 8.0"
    if triton.knobs.runtime.interpret:
        return None
    where = "a ROCm device" if device.type == "cuda" else device.type
    return f"the tensors are on {where}; the kernels need CUDA, or TRITON_INTERPRET=1 before the first of them runs"
