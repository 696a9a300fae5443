"""Counts of stored numbers and of peak memory of a model."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def padded(ids):
    """A mask that the model cannot drop."""
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    return mask


def numbers_kept(model, inputs):
    """Numbers stored by a forward pass for the backward pass, and in the logits."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(**inputs)
    numbers = sum(storage.nbytes() for storage in kept.values()) / 4
    if "labels" in inputs and output.logits is not None:
        numbers += output.logits.numel()  # not kept by autograd, but by the output
    return numbers


class Peak(TorchDispatchMode):
    """The peak number of bytes of simultaneous operation results."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak, self.seen = 0, 0, set()

    def free(self, key, size):
        self.alive -= size
        self.seen.remove(key)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves(args) if isinstance(x, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.seen | given:
                self.seen.add(storage._cdata)
                self.alive += storage.nbytes()
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.alive)
        return result
