"""The contract of all operators: every call equals the definition of its operator (`loops.py`) in float64.

A `Case` describes a call by a few numbers and flags, from which `Inputs` makes tensors, so that Hypothesis reduces a
failure to its smallest case. `check` states what must hold: outputs, states and gradients equal the definition of each
sequence by itself, for all backends, layouts, dtypes and places in memory, and two calls are equal bit for bit.

Layouts: "dense"; "mask": positions are dropped anywhere, in one row all; "varlen": sequences with `cu_seqlens`, some of
them empty; "lengths": the states are those after the first positions of each row; "left": left padding that does not
count as positions (`start`).
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from luna_mega.kernels import api
from tests.kernels.backends import instructions, poisoned_memory, shrink_blocks
from tests.kernels.calls import OF_SEQUENCES, OPERATORS, STATES, TOKENS, WIDE, Call, Sizes
from tests.kernels.comparisons import assert_same, relative_error

# The largest error of results and gradients, relative to each tensor and to each of its rows.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}
NORM_BOUNDS = BOUNDS | {torch.bfloat16: 4e-3, torch.float16: 5e-4}
# The same for Triton, by the first letters of operators. The interpreter truncates float32 to bfloat16, and a GPU
# rounds. For float16 tensors, a GPU multiplies float32 sums of causal attention in TF32, truncated to 10 bits.
GPU = torch.cuda.is_available()
TRITON_BOUNDS = {
    "luna_causal": {torch.float32: 1e-5, torch.bfloat16: 1e-2 if GPU else 3e-2, torch.float16: 5e-3 if GPU else 1e-3},
    "luna_attention": {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3},  # two attentions
    "luna": {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3},
    "gated": {torch.float32: 2e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3},
    "timestep_norm": {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4},
    "": {torch.float32: 5e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4},
}
LENGTHS = (3, 1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 130)
FEW_LENGTHS = (3, 1, 2, 5, 8, 9, 17)  # of interpreted kernels, and of slow ways


def at_odd_place(x: Tensor) -> Tensor:
    return torch.cat((x.new_zeros(3), x.flatten()))[3:].view(x.shape)


def is_relative(case: "Case", backend: str) -> bool:
    """Return whether errors may also be twice those of the reference in the same dtype."""
    if backend == "triton":
        return case.dtype != torch.float32 and "luna" not in case.operator and "norm" not in case.operator
    if backend == "reference" or case.dtype == torch.float64 or "causal" in case.operator:
        return False
    return case.dtype == torch.float32 or "norm" not in case.operator


def bound_of(case: "Case", backend: str) -> float:
    """Return the largest error of a backend."""
    width = case.sizes.channels // case.sizes.groups
    if "norm" in case.operator and width <= 2 and case.dtype == torch.float32:
        return {1: 1e-5, 2: 5e-5}[width]  # at the first position, the variance is 0 or small
    if case.scale > 1.0 and case.dtype == torch.float32:
        return 2e-4  # scores are rounded
    if backend != "triton":
        bounds = NORM_BOUNDS if "norm" in case.operator else BOUNDS
        # Sums of causal attention grow with each position, and gradients of the parameters of an average are sums over
        # all positions, which can cancel (390 terms of a sum of 1.5, where the formula in PyTorch has an error of
        # 1.1e-6). Their order depends on the processor.
        terms = case.sizes.batch * case.sizes.length * (case.is_average and not case.is_step)
        grows = case.decays != "trained" or "causal" in case.operator or terms > 256
        return 5e-6 if case.dtype == torch.float32 and grows else bounds[case.dtype]
    if case.operator == "complex_ema" and case.decays == "slow" and case.sizes.length > 200:
        return 2e-5  # rounded phases rotate states that persist; the reference in float32 has eight times this error
    return next(bounds[case.dtype] for name, bounds in TRITON_BOUNDS.items() if case.operator.startswith(name))


# Places in memory: all values are equal, or rows are copies of the first one.
PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "odd": at_odd_place,
    "every second": lambda x: torch.stack((x, x), -1)[..., 1],
    "columns": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "heads": lambda x: x.transpose(-2, -3).contiguous().transpose(-2, -3) if x.dim() > 2 else x,
    "expanded": lambda x: x[:1].expand_as(x) if x.dim() > 1 else x,
    "negated": lambda x: torch.complex(x, -x).conj().imag if x.dtype in (torch.float32, torch.float64) else x,
}


@dataclass(frozen=True)
class Case:
    """A call of an operator; `seed` chooses masks, places, and the tensors that require gradients.

    `scale` multiplies the scores of attention.

    Decays of averages are those of a trained model, "slow" (400 to 20,000 positions), or "extreme" (0, 1 and between).
    """

    operator: str
    options: dict[str, Any] = field(default_factory=dict)
    sizes: Sizes = Sizes(2, 5, 2, 3, 4, 4, 3, 2, 5)
    layout: str = "dense"
    lengths: tuple[int, ...] = ()
    stateful: bool = False
    omitted: tuple[str, ...] = ()
    pack_masked: bool = False
    garbage: bool = False
    dtype: torch.dtype = torch.float64
    places: str = "contiguous"
    decays: str = "trained"
    scale: float = 1.0
    blocks: str = "small"
    autocast: bool = False
    seed: int | None = None

    @property
    def is_step(self) -> bool:
        return "_step" in self.operator

    @property
    def is_average(self) -> bool:
        return "_ema" in self.operator or "ssm" in self.operator


class Inputs:
    """The tensors of a case in float64, which are exact in its dtype, and its call."""

    def __init__(self, case: Case):
        self.case, self.row = case, OPERATORS[case.operator]
        flags = {} if not self.row.stateful or case.is_average and case.is_step else {"stateful": case.stateful}
        self.call: Call = self.row.make(case.sizes, **case.options, **flags)
        generator = torch.Generator().manual_seed(case.seed or 0)
        self.leaves = {key: x for key, x in self.call.leaves.items() if key not in case.omitted}
        self._choose_decays()
        scaled = self.leaves.keys() & {"rows", "query"} if "causal" not in case.operator else set()
        self.leaves |= {key: case.scale * self.leaves[key] for key in scaled}
        names = list(PLACES) if case.places == "any" else [case.places]
        drawn = torch.randint(len(names), (len(self.leaves),), generator=generator).tolist()
        self.places = {key: names[place] for key, place in zip(self.leaves, drawn, strict=True)}
        self.leaves = {key: PLACES[self.places[key]](x).contiguous() for key, x in self.leaves.items()}
        self.batch, self.length = case.sizes[:2]
        self.columns = torch.arange(self.length).expand(self.batch, -1)
        self.mask = self._mask(generator)
        self.tensors = {}  # further tensors of the call
        if case.pack_masked:
            rows = self.leaves["rows" if "rows" in self.leaves else "pack_query"].shape[1]
            self.tensors["pack_mask"] = torch.arange(rows) != torch.arange(self.batch)[:, None] % rows
            if self.batch > 1 and case.seed is not None and case.seed % 3 == 0:
                self.tensors["pack_mask"][-1] = False
            if "key_mean" in self.leaves:  # states of masked rows of P are 0
                real = self.tensors["pack_mask"][:, None]
                self.leaves |= {"key_mean": self.leaves["key_mean"] * real[:, None]}
                self.leaves |= {"value_mean": self.leaves["value_mean"] * real[..., None]}
        if case.stateful and {"mean", "key_mean"} & self.leaves.keys():
            self.tensors["count"] = torch.tensor([7, 0, 1_000_000, 5])[: self.batch]
        drawn = torch.rand(len(self.leaves), generator=generator) < (2.0 if case.seed is None else 0.5)
        chosen = [key for key, is_chosen in zip(self.leaves, drawn.tolist(), strict=True) if is_chosen]
        self.chosen = chosen or list(self.leaves)[-1:]  # the tensors that require gradients
        self.read = None if case.seed is None else case.seed % 4  # the only result that is used; None or 3 = all

    def _choose_decays(self) -> None:
        slow = self.case.decays == "slow"
        if not self.case.is_average or self.case.decays == "trained":
            return
        for key in self.leaves.keys() & {"log_decay", "input_logit", "damping_logit", "phase_logit"}:
            x = self.leaves[key]
            values = {"log_decay": [0.0, -30.0, -0.1, -1000.0, -1e-6], "phase_logit": [-1e4, -20.0, 0.0, 30.0, 1e4]}
            values = values.get(key, [-1e4, -100.0, -30.0, 0.0, 20.0, 30.0, 90.0, 100.0, 1e4])
            values = torch.tensor(values, dtype=x.dtype).roll(int(key == "damping_logit"))
            extremes = values[torch.arange(x.numel()) * (1 + (key == "damping_logit")) % len(values)].view(x.shape)
            rates = torch.linspace(-10.0, -6.0, max(x.numel(), 1), dtype=x.dtype)[: x.numel()].view(x.shape)
            rates = {"log_decay": -rates.exp(), "input_logit": rates}.get(key, x)
            self.leaves[key] = (rates if slow else extremes).bfloat16().double()

    def _mask(self, generator: torch.Generator) -> Tensor | None:
        case, size = self.case, (self.batch, self.length)
        if case.is_step and case.layout == "mask" and "gated" not in case.operator:
            return torch.arange(self.batch) % 2 == 0
        if case.layout == "left":
            return self.columns >= torch.tensor(case.lengths)[:, None]
        kept = torch.rand(size, generator=generator) < 0.7
        if case.layout == "mask":
            kept[:, self.length // 2] |= self.length > 1
            kept[-1:] = kept[-1:] & (self.batch < 2)
            return kept
        if case.layout == "lengths":
            return kept & (self.columns < torch.tensor(case.lengths)[:, None])
        return kept if case.layout == "varlen" and "mask" in self.row.layouts and (case.seed or 0) % 2 else None

    @property
    def kept(self) -> Tensor | None:
        """Return the positions whose outputs are defined; None = all."""
        case = self.case
        of_steps = case.is_step and case.layout == "mask" and "gated" not in case.operator
        return self.mask if of_steps or case.layout == "left" or case.garbage and "x" in self.leaves else None

    def run(self, backend: str, **leaves: Tensor) -> tuple[Tensor, ...]:
        """Call the operator."""
        leaves, options = self.arguments(backend, **leaves)
        return self._defined(self.call.run(**leaves, **options, backend=backend))

    def arguments(self, backend: str, **leaves: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors of a call as the layout stores them, and the options of the call."""
        case, options, device = self.case, dict(self.tensors), next(iter(leaves.values())).device
        masked = self.mask is not None and (case.garbage or case.layout == "left")
        if masked and not (case.is_step and self.mask.dim() == 1 and "x" not in leaves):
            can_skip = "x" in leaves or "causal" in case.operator or backend == "triton"
            content, dropped = float("nan") if can_skip and case.layout != "left" else 1e3, ~self.mask
            for key in leaves.keys() & TOKENS - {"query"}:
                rows = dropped.view(*dropped.shape, *[1] * (leaves[key].dim() - dropped.dim()))
                leaves[key] = leaves[key].masked_fill(rows.to(device), content)
        if case.garbage and case.pack_masked and "causal" in case.operator:
            dropped = ~self.tensors["pack_mask"][..., None, None].to(device)
            leaves["pack_query"] = leaves["pack_query"].masked_fill(dropped, float("nan"))
        if case.garbage and "count" in self.tensors and "mean" in leaves:
            unused = self.tensors["count"][:, None].to(device) == 0
            leaves["mean"] = leaves["mean"].masked_fill(unused, float("nan"))
        if self.mask is not None:
            options["mask"] = self.mask
        if case.layout == "varlen":
            real = self.columns < torch.tensor(case.lengths)[:, None]
            leaves = {key: x[real.to(device)][None] if key in TOKENS else x for key, x in leaves.items()}
            options |= {"mask": self.mask[real][None]} if self.mask is not None else {}
            options["cu_seqlens"] = torch.tensor([0, *case.lengths]).cumsum(0, dtype=self._integer())
            options["max_seqlen"] = max(case.lengths) + (case.seed or 0) % 3 if (case.seed or 0) % 2 else None
        elif case.layout == "lengths":
            options |= {"lengths": torch.tensor(case.lengths), "return_state": True}
        elif case.layout == "left":
            options["start"] = -torch.tensor(case.lengths)
        if case.stateful and case.is_average and not case.is_step:
            options["return_state"] = True
        return leaves, {key: x.to(device) if torch.is_tensor(x) else x for key, x in options.items()}

    def _integer(self) -> torch.dtype:
        return torch.int32 if (self.case.seed or 0) % 2 else torch.int64

    def loop(self, **leaves: Tensor) -> tuple[Tensor, ...]:
        """Compute the definition, of one sequence after the other if the layout has sequences."""
        case = self.case
        if case.layout in ("dense", "mask"):
            used = {} if self.mask is None else {"mask": self.mask}
            return self._defined(self.call.loop(**leaves, **used, **self.tensors))
        spans = [(0, n) if case.layout != "left" else (n, self.length) for n in case.lengths]
        every = leaves | self.tensors
        results = []
        for row, (first, end) in enumerate(spans):
            part = {key: x[row : row + 1] if key in OF_SEQUENCES else x for key, x in every.items()}
            part |= {key: x[row : row + 1, first:end] for key, x in every.items() if key in TOKENS}
            if self.mask is not None and case.layout != "left":
                part["mask"] = self.mask[row : row + 1, first:end]
            results.append(self._alone(part, first < end))
        outputs, *states = zip(*results, strict=True)
        if case.layout == "lengths":
            outputs = self.call.loop(**leaves, mask=self.mask)[:1]
        elif case.layout == "left":
            padding = [y.new_zeros(1, first, y.shape[2]) for y, first in zip(outputs, case.lengths, strict=True)]
            outputs = [torch.cat(pair, 1) for pair in zip(padding, outputs, strict=True)]
        by_row = case.layout != "varlen" or case.operator == "luna_pack"
        return self._defined((torch.cat(outputs, 0 if by_row else 1), *map(torch.cat, states)))

    def _alone(self, part: dict[str, Tensor], has_tokens: bool) -> tuple[Tensor, ...]:
        """Return the results of one sequence; one without tokens keeps its state."""
        if has_tokens or not ({"x", "pack_query"} & part.keys()):
            return self.call.loop(**part)
        with_one = {key: torch.cat((x, x.new_zeros(1, 1, *x.shape[2:])), 1) for key, x in part.items() if key in TOKENS}
        output, *states = self.call.loop(**part | with_one | {"mask": torch.zeros(1, 1, dtype=torch.bool)})
        if self.case.is_average and self.case.stateful:
            states = [part["state"]]
        return output[:, :0], *states

    def _defined(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.kept is None:
            return outputs
        kept = self.kept
        if self.case.layout == "varlen":
            kept = kept[self.columns < torch.tensor(self.case.lengths)[:, None]][None]
        rows = kept.to(outputs[0].device)
        rows = rows.view(*rows.shape, *[1] * (outputs[0].dim() - rows.dim()))
        return outputs[0].masked_fill(~rows, 0.0), *outputs[1:]

    def given(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Return the leaves in a dtype, states and the bias in float32 at least, in their places in memory."""
        wide = torch.promote_types(dtype, torch.float32)
        moved = {key: x.to(device, wide if key in WIDE else dtype) for key, x in self.leaves.items()}
        return {key: PLACES[self.places[key]](x).detach() for key, x in moved.items()}


def project(outputs: tuple[Tensor, ...], read: int | None, place: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a fixed random projection of one output, or of all, whose gradients have a place in memory."""
    generator = torch.Generator().manual_seed(1)
    used = outputs if read is None or read >= len(outputs) else outputs[read : read + 1]
    weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in used]
    return sum((place(y) * weight).sum() for y, weight in zip(used, weights, strict=True))


def results(inputs: Inputs, run: Callable[..., tuple[Tensor, ...]], leaves: dict[str, Tensor]) -> list[Tensor]:
    """Return the outputs, and the gradients of the chosen tensors, on the CPU."""
    leaves = {key: x.detach().requires_grad_(key in inputs.chosen) for key, x in leaves.items()}
    outputs = run(**leaves)
    place = PLACES["contiguous" if inputs.case.places == "contiguous" else "columns"]
    total, chosen = project(outputs, inputs.read, place), [leaves[key] for key in inputs.chosen]
    gradients = [torch.zeros_like(x) for x in chosen]
    if total.requires_grad:
        gradients = torch.autograd.grad(total, chosen, allow_unused=True, materialize_grads=True)
    return [x.detach().cpu() for x in (*outputs, *gradients)]


def exact_results(inputs: Inputs, leaves: dict[str, Tensor], count: int) -> list[Tensor]:
    """Return the first `count` outputs of the definition in float64, and the gradients of the chosen tensors."""
    wide = {key: x.cpu().double() for key, x in leaves.items()}
    return results(inputs, lambda **tensors: inputs.loop(**tensors)[:count], wide)


@contextmanager
def surroundings(case: Case, backend: str) -> Iterator[str]:
    """Choose sizes of blocks, instructions and autocast; yield the name of the backend."""
    with ExitStack() as stack:
        name, _, level = backend.partition(" ")
        shrink_blocks(stack.enter_context(pytest.MonkeyPatch.context()), case.blocks, name == "triton")
        if level:
            stack.enter_context(instructions(level))
        if name in ("native", "triton"):
            stack.enter_context(poisoned_memory())
        yield name


def check(case: Case, backend: str, device: torch.device | str = "cpu", bound: float | None = None) -> None:
    """Compare outputs, states and gradients with the definition in float64, and two calls with each other."""
    inputs = Inputs(case)
    with surroundings(case, backend) as name:
        leaves = inputs.given(case.dtype, device)
        before = [x.clone() for x in leaves.values()]

        def run(chosen: str = name, **tensors: Tensor) -> tuple[Tensor, ...]:
            with autocast():
                return inputs.run(chosen, **tensors)

        kind = torch.device(device).type
        autocast = functools.partial(torch.autocast, kind, torch.bfloat16, enabled=case.autocast)
        actual = results(inputs, run, leaves)
        # Users may call backward() inside. PyTorch differentiates a step of attention, in the dtype of autocast.
        with nullcontext() if case.operator == "gated_attention_step" else autocast():
            again = results(inputs, run, leaves)
        with torch.no_grad():
            without = [x.cpu() for x in run(**leaves)]
        compared = bound is None and is_relative(case, name)
        plain = results(inputs, lambda **x: inputs.run("reference", **x), leaves) if compared else actual
    assert all(map(torch.equal, leaves.values(), before)), "a call changes its inputs"
    exact = exact_results(inputs, leaves, len(without))
    for index, (x, same, low, right) in enumerate(zip(actual, again, plain, exact, strict=True)):
        error, most = relative_error(x, right), bound or bound_of(case, name)
        most = max(most, 2 * relative_error(low, right)) if compared else most
        assert x.shape == right.shape, f"result {index} has shape {list(x.shape)} instead of {list(right.shape)}"
        assert error <= most, f"result {index}: error {error:.1e}"
        assert torch.equal(x, same), f"result {index} of two calls differs"
    bound = bound or bound_of(case, name)
    assert_same(without, exact[: len(without)], 2 * bound if compared else bound)
    assert [x.dtype for x in actual] == dtypes(inputs, case.dtype, len(without))


def dtypes(inputs: Inputs, dtype: torch.dtype, outputs: int) -> list[torch.dtype]:
    """Return the dtypes of all results: outputs as the tokens, gradients as their tensors, wide states."""
    wide = torch.float64 if "norm" in inputs.case.operator else torch.promote_types(dtype, torch.float32)
    state = dtype if "luna_attention" in inputs.case.operator else wide
    leaves = [torch.promote_types(dtype, torch.float32) if key in WIDE else dtype for key in inputs.chosen]
    return [dtype, *[state] * (outputs - 1), *leaves]


@st.composite
def cases(
    draw: st.DrawFn, operators: tuple[str, ...] = tuple(OPERATORS), lengths: tuple[int, ...] = LENGTHS,
    dtypes: tuple[torch.dtype, ...] = (torch.float64,), layouts: tuple[str, ...] = (), **fixed: Any,
) -> Case:  # fmt: skip
    """Draw a case; `layouts` restricts the layouts, and `fixed` are other fields."""

    def choose(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    name = choose(*operators)
    row = OPERATORS[name]
    options = {key: choose(*values) for key, values in row.choices.items()}
    if options.get("truncation", 5) is None:
        options["truncation"] = choose(None, 0)  # there is no truncation below 1
    one_way = options.get("directions", 1) == 1 and not options.get("truncation")
    if options.get("directions", 1) == 1:
        options.pop("shift", None)
    step = "_step" in name
    layout = choose(*[x for x in row.layouts if (not layouts or x in layouts) and (x != "lengths" or one_way)])
    batch, length = choose(2, 1, 3), choose(*lengths)
    spans: tuple[int, ...] = ()
    if layout != "dense" and layout != "mask":
        first, most = (0, length - 1) if layout == "left" else (length, length)
        spans = (first, *(draw(st.integers(0, most)) for _ in range(batch - 1)))
    elif draw(st.integers(0, 9)) == 0:
        batch, length = (0, length) if "gated" not in name and "luna" not in name or length > 2 else (batch, 0**step)
        length = 1 if "causal" in name and length == 0 else length
    heads, size, groups = choose(1, 2), choose(2, 1, 5), choose(1, 2)
    rows, channels, states, width = choose(3, 1, 4), groups * choose(2, 1, 3), choose(2, 1, 3), choose(3, 5)
    sizes = Sizes(batch, length, heads, size, rows, channels, states, groups, width)
    case = Case(
        name, options, sizes, layout, spans,
        stateful=row.stateful and one_way and draw(st.booleans()),
        omitted=tuple(key for key in row.optional if draw(st.booleans())),
        pack_masked=bool(row.options) and draw(st.booleans()),
        garbage=layout in ("mask", "varlen") and draw(st.booleans()),
        dtype=choose(*dtypes),
        places=choose("contiguous", *[key for key in PLACES if key != "contiguous"], "any"),
        decays=choose("trained", "slow", "extreme"),
        blocks=choose("small", "default", "other"),
        autocast=draw(st.booleans()),
        seed=draw(st.none() | st.integers(0, 1000)),
    )  # fmt: skip
    return replace(case, **fixed)


def check_parts(
    case: Case, backend: str, parts: list[int], device: torch.device | str = "cpu", bound: float | None = None,
) -> None:  # fmt: skip
    """Compare a sequence in segments, and in steps where a part has one position, with the definition of all of it.

    Without gradients, every second step writes its state in place, if the operator supports it.
    """
    inputs = Inputs(case)
    inputs.read = 0 if case.options.get("truncation") else inputs.read  # states of truncated averages have other parts
    with surroundings(case, backend) as name:
        leaves, counts = inputs.given(case.dtype, device), []
        actual = results(inputs, lambda **x: in_parts(inputs, name, parts, counts, **x), leaves)
        with torch.no_grad():  # Triton has kernels of steps without gradients
            without = [x.cpu() for x in in_parts(inputs, name, parts, counts, **leaves)]
    exact = exact_results(inputs, leaves, len(without))
    bound = bound or bound_of(case, name)
    assert_same(actual, exact, bound)
    assert_same(without, exact[: len(without)], bound)
    kept = inputs.length if inputs.mask is None else inputs.mask.sum(1)
    first = inputs.tensors.get("count", torch.tensor(0))
    assert all(torch.equal(x.cpu(), (first + kept).expand(inputs.batch)) for x in counts)


def in_parts(inputs: Inputs, backend: str, parts: list[int], counts: list[Tensor], **leaves: Tensor) -> list[Tensor]:
    """Return the output and the tensors of the last state; append its count, if it has one, to `counts`."""
    name, device, start, outputs = inputs.case.operator.partition(" ")[0], leaves[inputs.chosen[0]].device, 0, []
    options = dict(inputs.case.options)
    fixed = {"backend": backend} | ({"activation": options["activation"]} if "activation" in options else {})
    fixed |= {"pack_mask": inputs.tensors["pack_mask"].to(device)} if inputs.case.pack_masked else {}
    tokens = {key: leaves[key] for key in leaves.keys() & TOKENS}
    rest = {key: x for key, x in leaves.items() if key not in TOKENS | STATES}
    rest |= {"phase": None} if "real" in inputs.case.operator else {}
    if "context" in tokens:
        tokens["key"] = tokens.pop("context")
        tokens.setdefault("value", tokens["key"])
    state = [x for key, x in leaves.items() if key in STATES]
    count = inputs.tensors.get("count", torch.tensor(0)).to(device)
    if not state:
        state = None
    elif inputs.case.is_average:
        (state,) = state
    else:
        state = api.LunaCausalState(*state, count) if "luna" in name else api.TimestepNormState(count, *state)
    truncation = {"truncation": options["truncation"]} if options.get("truncation") else {}
    can_write = "causal" in name and not torch.is_grad_enabled()
    groups = {"groups": inputs.case.sizes.groups} if "norm" in name else {}
    for length in parts:
        mask = None if inputs.mask is None else inputs.mask[:, start : start + length].to(device)
        # A masked position decays the state of an average, and a masked step does not.
        step = length == 1 and (not inputs.case.is_average or state is not None and (mask is None or mask.all()))
        part = {key: x[:, start] if step else x[:, start : start + length] for key, x in tokens.items()}
        key = "state" if step or "luna" in name else "initial_state"
        inplace = can_write and step and state is not None and start % 2 == 1
        state = type(state)(*map(torch.clone, state)) if inplace else state
        before = [x.detach().clone() for x in parts_of(state)]
        given = {key: state, "mask": mask[:, 0] if step and mask is not None else mask} | fixed | rest | groups
        given |= {"inplace": True} if inplace else {} if step else {"return_state": True} | truncation
        output, following = getattr(api, f"{name}_step" if step else name)(**part, **given)
        if inplace:
            assert [x.data_ptr() for x in state] == [x.data_ptr() for x in following], "a step moves its state"
        else:
            assert all(map(torch.equal, before, parts_of(state))), "a call changes its state"
        outputs.append(output[:, None] if step else output)
        state, start = following, start + length
    counts += [state.count] if isinstance(state, (api.LunaCausalState, api.TimestepNormState)) else []
    results = [torch.cat(outputs, 1)]
    if truncation:
        return results
    return [*results, *(x for x in parts_of(state) if x.is_floating_point())]


def parts_of(state: tuple[Tensor, ...] | Tensor | None) -> list[Tensor]:
    """Return the tensors of a state."""
    return [] if state is None else list(state) if isinstance(state, tuple) else [state]
