"""Custom operators whose gradients are computed by a second operator (`<name>_backward`), and their direct execution.

Eager mode does not call an operator, because its dispatch and autograd take as long as several kernel launches.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ._dispatch import without_autocast
from ._flops import register_flops
from ._mode import COMPILED, DIRECT, TRANSFORMED, has_lost_tangent, is_batched, mode

Values = Sequence[Any]  # tensors, lists of tensors, numbers and None

# Namespace of the operators: the name of the package (`luna_mega`, a package that contains only the kernels, or the
# code of a model folder), because a process can load several of them and a name can be registered only once.
NAMESPACE = re.sub(r"[^A-Za-z0-9]", "_", __package__.removesuffix(".kernels"))
PLAIN = frozenset((Tensor, nn.Parameter, NoneType, bool, int, float, str, list))


def register(
    name: str, inputs: str, outputs: str, forward: Callable[..., Values], fake: Callable[..., Values],
    backward: Callable[..., Sequence[Tensor | None]] | None = None, *, flops: Callable[..., tuple[int, int]],
    differentiable: Sequence[str] = (), gradients: Mapping[int, Sequence[str]] = MappingProxyType({0: ()}),
    saved: str = "", save: Callable[[Values, Values], Values] = lambda inputs, outputs: (),
    formula: Callable[..., Values] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Register the operators `name` and `<name>_backward`, and return the function that computes the first one.

    The function runs `forward` and `backward` directly in eager mode. It calls the operators in compiled and exported
    programs, under dispatch modes and transforms of `torch.func`, for tensor subclasses and for meta tensors. Operators
    and gradients run without autocast; a direct forward pass requires that its caller has disabled it, as `Op` does.

    Args:
        name: name without namespace. The first input and the first output are tensors.
        inputs: schema of the inputs.
        outputs: schema of the outputs.
        forward: computes the outputs.
        fake: returns empty outputs from the inputs, which it receives by name.
        backward: returns the gradients of the `differentiable` inputs, contiguous, or None for inputs that are None.
            Its arguments are the gradients of the outputs at `gradients` (only the first is never None), the `saved`
            tensors and all inputs. None = the outputs have no gradient.
        flops: returns the FLOPs of both operators from the inputs by name, counted as in `_flops`.
        differentiable: names of the inputs with a gradient.
        gradients: indices of the outputs with a gradient, and the names of the `differentiable` inputs that do not
            affect them: an output requires a gradient only if an input that affects it does.
        saved: schema of the results of `save`.
        save: maps (inputs, outputs) to the tensors, lists of tensors and None that the backward pass needs as well.
        formula: computes the outputs with operators of PyTorch, for derivatives of the backward pass; outputs without a
            gradient may be None. Operators with a backward pass have it.
    """
    name = f"{NAMESPACE}::{name}"
    fake, flops = _by_name(fake, inputs), _by_name(flops, inputs)
    schema = f"({inputs}) -> {outputs}"
    operator = torch.library.custom_op(name, _without_autocast(forward), mutates_args=(), schema=schema)
    operator.register_fake(fake)
    register_flops(name, lambda *inputs: flops(*inputs)[0])
    if backward is None:
        return lambda *inputs: (forward if is_plain(inputs) else operator)(*inputs)
    assert formula is not None
    gradient = _Gradient(name, inputs, fake, backward, flops, differentiable, gradients, saved, save, formula)
    operator.register_autograd(gradient.differentiate, setup_context=gradient.set_up_context)

    def compute(ctx: Any, *inputs: Any) -> Values:
        output = tuple(forward(*inputs))
        gradient.set_up_context(ctx, inputs, output)
        return output

    methods = {"forward": staticmethod(compute), "backward": staticmethod(gradient.differentiate)}
    function: Any = type(name.rpartition(":")[2], (Function,), methods)
    places = gradient.places

    def call(*inputs: Any) -> Any:
        if not is_plain(inputs):
            forbid_tangents(name, inputs)
            return operator(*inputs)
        return (function.apply if _require_gradients(inputs[i] for i in places) else forward)(*inputs)

    return call


class _Gradient:
    """The gradient of an operator: the values that a forward pass keeps, and `<name>_backward`; see `register`."""

    def __init__(
        self, name: str, inputs: str, fake: Callable[..., Values], backward: Callable[..., Sequence[Tensor | None]],
        flops: Callable[..., tuple[int, int]], differentiable: Sequence[str],
        gradients: Mapping[int, Sequence[str]], saved: str, save: Callable[[Values, Values], Values],
        formula: Callable[..., Values],
    ) -> None:  # fmt: skip
        self.fake, self.gradients, self.save = fake, tuple(gradients), save
        self.run, self.formula = _without_autocast(backward), _without_autocast(formula)
        types, names = zip(*(argument.split() for argument in inputs.split(", ")), strict=True)
        self.tensors = [place for place, kind in enumerate(types) if kind.startswith("Tensor")]
        self.places = [names.index(name) for name in differentiable]
        # For each output, the inputs that affect it.
        self.causes = {i: [names.index(n) for n in differentiable if n not in apart] for i, apart in gradients.items()}
        added = ["Tensor grad_0", *(f"Tensor? grad_{i}" for i in self.gradients[1:]), *([saved] if saved else [])]
        self.operator = torch.library.custom_op(
            f"{name}_backward",
            lambda grad, *rest: [_or_empty(x, grad) for x in self.run(grad, *rest)],
            mutates_args=(),
            schema=f"({', '.join(added)}, {inputs}) -> Tensor[]",
        )
        register_flops(f"{name}_backward", lambda *arguments: flops(*arguments[-len(names) :])[1])

        @self.operator.register_fake
        def _(grad: Tensor, *rest: Any) -> list[Tensor]:
            values = (rest[place - len(names)] for place in self.places)
            return [_or_empty(None if x is None else x.new_empty(x.shape), grad) for x in values]

    def set_up_context(self, ctx: Any, inputs: Values, output: Values) -> None:
        """Store the values that `differentiate` reads."""
        kept = self.save(inputs, output)
        ctx.sizes = [len(x) if isinstance(x, list) else None for x in kept]
        flat = [tensor for x in kept for tensor in (x if isinstance(x, list) else [x])]
        ctx.options = [None if place in self.tensors else x for place, x in enumerate(inputs)]
        ctx.save_for_backward(*flat, *[inputs[place] for place in self.tensors])
        ctx.set_materialize_grads(False)
        needed = ctx.needs_input_grad
        without = [i for i in range(len(output)) if not any(needed[place] for place in self.causes.get(i, ()))]
        ctx.mark_non_differentiable(*(output[i] for i in without if isinstance(output[i], Tensor)))

    def differentiate(self, ctx: Any, *grads: Any) -> Values:
        """Return the gradients of all inputs, None for those without."""
        flat, inputs = iter(ctx.saved_tensors), list(ctx.options)
        kept = [next(flat) if size is None else [next(flat) for _ in range(size)] for size in ctx.sizes]
        for place, x in zip(self.tensors, flat, strict=True):
            inputs[place] = x
        results: list[Tensor | None] = [None] * len(inputs)
        input_grads: Sequence[Tensor | None]
        create_graph = torch.is_grad_enabled()  # with `create_graph=True`, or for a second derivative
        if mode() < COMPILED and (create_graph or any(map(is_batched, grads))):
            with torch.enable_grad():
                input_grads = differentiate_formula(
                    self.formula, inputs, self.places, grads, self.gradients, create_graph
                )
        else:
            first = torch.zeros_like(self.fake(*inputs)[0]) if grads[0] is None else grads[0]
            arguments = (first, *[grads[index] for index in self.gradients[1:]], *kept, *inputs)
            input_grads = (self.run if is_plain(arguments) else self.operator)(*arguments)
        for place, grad in zip(self.places, input_grads, strict=True):
            results[place] = None if inputs[place] is None else grad
        return tuple(results)


def differentiate_formula(
    formula: Callable[..., Values], inputs: list[Any], places: Sequence[int], grads: Values, gradients: Sequence[int],
    create_graph: bool = True,
) -> list[Tensor | None]:  # fmt: skip
    """Return gradients that consist of operators of PyTorch.

    Args:
        formula: computes the outputs with operators of PyTorch.
        inputs: its arguments.
        places: indices of the inputs whose gradients are returned, None for those that require none.
        grads: gradients of all outputs.
        gradients: indices of the outputs with a gradient.
        create_graph: autograd can differentiate the gradients again.
    """
    # Views, because an input may be computed from another one.
    inputs = [x.view_as(x) if place in places and x is not None else x for place, x in enumerate(inputs)]
    needed = [place for place in places if inputs[place] is not None and inputs[place].requires_grad]
    outputs = formula(*inputs)
    # An output may be data, such as an initial state, or None if it is 0.
    used = [i for i in gradients if not (grads[i] is None or outputs[i] is None) and outputs[i].requires_grad]
    if not used:
        return [None] * len(places)
    input_grads = torch.autograd.grad(
        [outputs[i] for i in used],
        [inputs[place] for place in needed],
        [grads[i] for i in used],
        create_graph=create_graph,
        allow_unused=True,
        materialize_grads=True,
    )
    by_place = dict(zip(needed, input_grads, strict=True))
    return [by_place.get(place) for place in places]


def no_second_derivative(name: str, call: str) -> RuntimeError:
    """Return the error of a backward pass that cannot be differentiated, for a kind of `call`."""
    return RuntimeError(
        f"{name}: the gradient{call} cannot be differentiated again (`create_graph=True`); compute the model inside "
        "`use_backend('reference')`"
    )


def forbid_tangents(name: str, inputs: Values) -> None:
    """Raise `RuntimeError` for tangents that `is_transformed` cannot find: an operator would drop them."""
    tensors = (x for value in inputs for x in (value if isinstance(value, list) else [value]) if isinstance(x, Tensor))
    if any(map(has_lost_tangent, tensors)):
        raise RuntimeError(
            f"{name} does not support forward mode with torch {torch.__version__}; compute the model inside "
            "`luna_mega.kernels.api.use_backend('reference')`"
        )


def is_plain(arguments: Values) -> bool:
    """Return whether a call is eager, with ordinary tensors, and outside of dispatch modes and transforms."""
    return mode() == DIRECT and PLAIN.issuperset(map(type, arguments)) and not arguments[0].is_meta


def has_gradients(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether gradients of a call may be required, in backward or in forward mode."""
    return _require_gradients(tensors) or mode() == TRANSFORMED


def _require_gradients(tensors: Iterable[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _without_autocast(function: Callable[..., Values]) -> Callable[..., Values]:
    def run(x: Tensor, *rest: Any) -> Values:
        with without_autocast(x.device.type):
            return function(x, *rest)

    return run


def _by_name(function: Callable[..., Any], inputs: str) -> Callable[..., Any]:
    names = [argument.split()[1] for argument in inputs.split(", ")]
    return lambda *values: function(**dict(zip(names, values, strict=True)))


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x
