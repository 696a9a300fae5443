"""Autograd of causal Luna attention, shared by the operators of all backends."""

import torch

# Number of tensor inputs of an operator: tokens and pack_query, count, masks, means and seen. The activation, the
# dropout, the seed and further options follow.
_TENSORS = 11


def register(attend, attend_backward) -> None:
    """Register the operator `attend_backward` as the gradient of the operator `attend`."""

    def save(ctx, inputs, output):
        *ctx.options, seed = inputs[_TENSORS : _TENSORS + 3]
        ctx.further = inputs[_TENSORS + 3 :]
        ctx.save_for_backward(*inputs[:_TENSORS], seed)
        ctx.set_materialize_grads(False)

    def backward(ctx, grad_output, *grad_means):
        *tensors, seed = ctx.saved_tensors
        if grad_output is None:
            grad_output = torch.zeros_like(tensors[3])
        grads = attend_backward(grad_output, *grad_means, *tensors, *ctx.options, seed, *ctx.further)
        of_means = (None if x is None else grad for x, grad in zip(tensors[8:10], grads[5:], strict=True))
        return *grads[:5], None, None, None, *of_means, *[None] * (4 + len(ctx.further))

    attend_backward.register_fake(lambda grad_output, grad_key_mean, grad_value_mean, *inputs: empty_gradients(*inputs))
    attend.register_autograd(backward, setup_context=save)


def empty_gradients(*inputs) -> list[torch.Tensor]:
    """Return an empty tensor for every gradient: of the tokens, pack_query and, if given, both means."""
    return [inputs[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in (*inputs[:5], *inputs[8:10])]
