"""Registration of custom operators whose gradients are computed by a second operator, `<name>_backward`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from luna_mega.kernels._flops import register_flops
from luna_mega.kernels._op import without_autocast

Values = Sequence[Any]  # tensors, lists of tensors, numbers and None


def register(
    name: str, inputs: str, outputs: str, forward: Callable[..., Values], fake: Callable[..., Values],
    backward: Callable[..., Sequence[Tensor | None]], *, flops: Callable[..., tuple[int, int]],
    differentiable: Sequence[str], gradients: Sequence[int] = (0,), saved: str = "",
    save: Callable[[Values, Values], Values] = lambda inputs, outputs: (),
) -> None:  # fmt: skip
    """Register the operators `name` and `<name>_backward`. Both run without autocast.

    Args:
        name: name with namespace, `"luna_mega::..."`. The first input and the first output are tensors.
        inputs: schema of the inputs.
        outputs: schema of the outputs.
        forward: computes the outputs.
        fake: returns empty outputs.
        backward: returns the gradients of the `differentiable` inputs, contiguous, or None for inputs that are None.
            Its arguments are the gradients of the outputs at `gradients` (only the first is never None), the `saved`
            tensors and all inputs.
        flops: returns the FLOPs of both operators from the inputs, counted as in `_flops`.
        differentiable: names of the inputs with a gradient.
        gradients: indices of the outputs with a gradient.
        saved: schema of the results of `save`.
        save: maps (inputs, outputs) to the tensors, lists of tensors and None that the backward pass needs as well.
    """
    names = [argument.split()[-1] for argument in inputs.split(", ")]
    tensors = [argument.startswith("Tensor") for argument in inputs.split(", ")]
    given = ["Tensor grad_0", *(f"Tensor? grad_{index}" for index in gradients[1:]), *([saved] if saved else [])]
    run, schema = _without_autocast(forward), f"({inputs}) -> {outputs}"
    operator = torch.library.custom_op(name, run, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    operator_backward = torch.library.custom_op(
        f"{name}_backward",
        _without_autocast(lambda grad, *rest: [_or_empty(x, grad) for x in backward(grad, *rest)]),
        mutates_args=(),
        schema=f"({', '.join(given)}, {inputs}) -> Tensor[]",
    )

    @operator_backward.register_fake
    def _(grad: Tensor, *rest: Any) -> list[Tensor]:
        values = dict(zip(names, rest[-len(names) :], strict=True))
        of_inputs = (values[name] for name in differentiable)
        return [_or_empty(None if x is None else x.new_empty(x.shape), grad) for x in of_inputs]

    def setup_context(ctx: Any, inputs: Values, output: Values) -> None:
        kept = save(inputs, output)
        ctx.sizes = [len(x) if isinstance(x, list) else None for x in kept]
        flat = [tensor for x in kept for tensor in (x if isinstance(x, list) else [x])]
        ctx.options = [x for x, is_tensor in zip(inputs, tensors, strict=True) if not is_tensor]
        ctx.save_for_backward(*flat, *(x for x, is_tensor in zip(inputs, tensors, strict=True) if is_tensor))
        ctx.set_materialize_grads(False)
        others = (x for index, x in enumerate(output) if index not in gradients and isinstance(x, Tensor))
        ctx.mark_non_differentiable(*others)

    def differentiate(ctx: Any, *grads: Any) -> Values:
        flat, options = iter(ctx.saved_tensors), iter(ctx.options)
        kept = [next(flat) if size is None else [next(flat) for _ in range(size)] for size in ctx.sizes]
        inputs = [next(flat) if is_tensor else next(options) for is_tensor in tensors]
        first = torch.zeros_like(fake(*inputs)[0]) if grads[0] is None else grads[0]
        made = operator_backward(first, *(grads[index] for index in gradients[1:]), *kept, *inputs)
        of_names = dict(zip(differentiable, made, strict=True))
        return tuple(of_names.get(name) if x is not None else None for name, x in zip(names, inputs, strict=True))

    operator.register_autograd(differentiate, setup_context=setup_context)
    register_flops(name, lambda *inputs: flops(*inputs)[0])
    register_flops(f"{name}_backward", lambda *given: flops(*given[-len(names) :])[1])


def _without_autocast(function: Callable[..., Values]) -> Callable[..., Values]:
    def run(x: Tensor, *rest: Any) -> Values:
        with without_autocast(x.device.type):
            return function(x, *rest)

    return run


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x
