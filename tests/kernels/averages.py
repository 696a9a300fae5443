"""Calls of all kinds of moving averages."""

import torch

from luna_mega.kernels.api import complex_ema, complex_ema_step, damped_ema, damped_ema_step
from tests.kernels.leaves import Leaves, random_mask

DAMPED = ["causal", "states", "bidirectional", "shifted"]
COMPLEX = ["complex", "complex states"]
KINDS = DAMPED + COMPLEX
STATEFUL = ["states", "complex states"]


class Inputs(Leaves):
    """The leaves of a call: x, four parameters, the skip weights and the initial state."""

    def __init__(self, length, kind="causal", masking="none", states=3, batch=2, channels=5, skip=True, dtype=None):
        generator = torch.Generator().manual_seed(100 * length + states)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.complex, self.shift, self.states = kind in COMPLEX, kind == "shifted", int(kind in STATEFUL)
        self.op, self.step = (complex_ema, complex_ema_step) if self.complex else (damped_ema, damped_ema_step)
        rows, self.has_skip = channels if self.complex or self.states or kind == "causal" else 2 * channels, skip
        x, logits = normal(batch, length, channels), [normal(rows, states) - 1.0, normal(rows, states)]
        # Every second row of the parameters decays slowly.
        logits[0][::2] -= 5.0
        shapes = [(rows,), (rows, states, 2)] if self.complex else [(rows, states)] * 2
        tensors = [x, *logits, *(normal(*shape) for shape in shapes), *([normal(channels)] if skip else [])]
        initial = normal(batch, channels, states, *([2] if self.complex else []))
        tensors += [initial] if self.states else []
        self.mask = random_mask(masking, batch, length, generator)
        self.leaves = [tensor.requires_grad_() for tensor in tensors]
        if dtype is not None:
            self.to(dtype)

    def arguments(self, *leaves):
        """Return the list of x, four parameters and the skip weights, and the initial state."""
        *leaves, state = leaves if self.states else (*leaves, None)
        return (leaves if self.has_skip else [*leaves, None]), state

    def call(self, *leaves, **options):
        """Return the output, or the output and the final state."""
        leaves, state = self.arguments(*leaves)
        options = {"mask": self.mask, "initial_state": state, "return_state": bool(self.states)} | options
        return self.op(*leaves, **options, **({} if self.complex else {"shift": self.shift}))


def saturated(length, kind):
    """Return inputs with logits far beyond the values at which a sigmoid saturates at 0 or 1."""
    inputs = Inputs(length, kind, "some", states=9)
    extremes = torch.tensor([-1e4, -100.0, -30.0, 0.0, 20.0, 30.0, 90.0, 100.0, 1e4], dtype=torch.float64)
    with torch.no_grad():
        inputs.leaves[1].copy_(extremes)
        if inputs.complex:
            inputs.leaves[3].copy_(torch.tensor([-1e4, -20.0, 0.3, 30.0, 1e4]))
        for row in range(len(inputs.leaves[2])):
            inputs.leaves[2][row] = extremes.roll(row)
    return inputs
