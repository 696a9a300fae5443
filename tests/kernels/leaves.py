"""The input tensors of a call whose outputs and gradients are tested."""

import copy

import torch

MASKS = ["none", "some", "all of one row"]


class Leaves:
    """Float64 tensors of one call, in the order of the gradients.

    `states` is the number of tensors of the state, which are the last ones. Subclasses define `call`, which returns one
    output or a tuple.
    """

    leaves: list[torch.Tensor]
    states = 0
    mask = pack_mask = count = None

    def to(self, dtype):
        """Convert the tensors to `dtype` in place; states are float32 or wider."""
        first, wide = len(self.leaves) - self.states, torch.promote_types(dtype, torch.float32)
        self.leaves = [
            leaf.detach().to(dtype if index < first else wide).requires_grad_()
            for index, leaf in enumerate(self.leaves)
        ]
        return self

    def exact(self, dtype=torch.float32, **options):
        """Round the tensors to `dtype`, and return the results of the reference for them in float64."""
        exact = self.to(dtype).to(torch.float64).run(backend="reference", **options)
        self.to(dtype)
        return exact

    def on(self, device):
        """Return a copy on another device."""
        moved = copy.copy(self)
        moved.leaves = [leaf.detach().to(device).requires_grad_() for leaf in self.leaves]
        for name in ("mask", "pack_mask", "count"):
            tensor = getattr(self, name)
            setattr(moved, name, None if tensor is None else tensor.to(device))
        return moved

    def run(self, function=None, device="cpu", used=None, **options):
        """Return the outputs in `used` (default: all) and the gradients of a fixed random projection, on the CPU."""
        moved = self.on(device)
        outputs = (function or moved.call)(*moved.leaves, **options)
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o) for o in outputs]
        used = range(len(outputs)) if used is None else used
        outputs, weights = ([tensors[index] for index in used] for tensors in (outputs, weights))
        gradients = torch.autograd.grad(outputs, moved.leaves, weights, materialize_grads=True)
        return [tensor.detach().cpu() for tensor in (*outputs, *gradients)]


def random_mask(masking, batch, length, generator):
    """Return a mask that drops some positions; "all of one row" also drops the entire last row."""
    if masking == "none":
        return None
    mask = torch.rand(batch, length, generator=generator) < 0.7
    if masking == "all of one row":
        mask[-1] = False
    return mask
