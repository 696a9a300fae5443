"""FLOPs of the operators for `torch.utils.flop_counter.FlopCounterMode`; imports of this package register them.

The conventions are those of PyTorch's formula of `scaled_dot_product_attention`, so that the numbers can be compared: a
multiply-add counts as 2; softmax, activations, norms, masks and dropout are not counted; causal attention and padding
count like full attention. A backward operator counts two products for each product of the forward pass, and again the
products that it recomputes. B sequences of T positions (a padding-free batch: T positions in total) count as follows:

| operators | definition | forward | recomputed |
|---|---|---|---|
| `attend`, `luna_attention_triton` | Luna, eq. 3 and 4: M keys, H heads | 4 B T M H K | 2 B T M H K |
| `luna_causal_attention*` | Luna, section 3.3: L rows of P | B T H (6 L K + 4 L V) | B T H (6 L K + 2 L V) |
| `gated_att*` | Mega, sections 3.2 to 3.5: S keys, or the chunk's | 2 B T S (Z + V) | 2 B T S Z |
| `moving_average*` | Mega, section 3.1: N real states, R = D or 2 D rows | 6 B T R N | 4 B T R N |
| the same with complex states | Megalodon, section 3.1; S4D, section 3 | 14 B T R N | 10 B T R N |
| `timestep_norm*` | Megalodon, section 3.2; a norm | 0 | 0 |

`gated_attend` recomputes nothing if it stores the scores. Recurrences (averages and causal Luna attention) count one
update of the state and one output for each position, however the operator computes them: by FFT, in chunks or step by
step. PyTorch counts the parts of a backend that are PyTorch operators: their matrix products count, elementwise
operators do not. The decoding steps of the averages in PyTorch therefore count as 0.
"""

from collections.abc import Callable

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula, sdpa_backward_flop, sdpa_flop


def register_flops(name: str, flops: Callable[..., int]) -> None:
    """Register the function that returns the FLOPs of an operator, `"namespace::name"`, from its inputs."""
    namespace, _, operation = name.partition("::")
    operator = getattr(getattr(torch.ops, namespace), operation)
    register_flop_formula(operator, get_raw=True)(lambda *inputs, out_val=None, **_: flops(*inputs))


# PyTorch's own formulas of SDPA, which torch 2.14 and earlier do not register for the kernels on a CPU.
for on_cpu, formula in (
    (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, sdpa_flop),
    (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, sdpa_backward_flop),
):
    flop_registry.setdefault(on_cpu, formula)
