"""Layers with parameters: Mega's and Megalodon's moving averages, and S4D. They need only torch.

All layers map x `[B, T, D]` to `[B, T, D]`, without normalization, dropout or other layers.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .recurrence.coefficients import complex_ema_coefficients, ema_coefficients
from .recurrence.complex_ema import complex_ema, complex_ema_step
from .recurrence.damped_ema import damped_ema, damped_ema_step
from .recurrence.diagonal_ssm import diagonal_ssm, diagonal_ssm_coefficients, diagonal_ssm_step, discretize
from .upcast import as_complex, upcast, upcast_dtype

__all__ = ["ComplexMovingAverage", "DiagonalSSM", "MovingAverage"]


class RecurrentLayer(nn.Module):
    """Base class of layers that compute an op whose state continues a sequence.

    Subclasses define the op, its step and coefficients, and the arguments that the op takes before `skip`.
    """

    op: Callable[..., Any]
    op_step: Callable[..., Any]
    op_coefficients: Callable[..., tuple[Tensor, ...]]
    skip: Tensor | None

    def __init__(self, channels: int, states: int, bidirectional: bool = False) -> None:
        super().__init__()
        self.channels, self.states, self.bidirectional = channels, states, bidirectional

    def arguments(self) -> tuple[Tensor | None, ...]:
        """Return the arguments of the op between x and the skip."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, state: Tensor | None = None, *, mask: Tensor | None = None, return_state: bool = False,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Compute the layer.

        Args:
            x: `[B, T, D]`.
            state: the states before the first position, from an earlier call; None = 0. Causal layers only.
            mask: `[B, T]` bool, True = keep; None = all.
            return_state: also return the states after the last position. Causal layers only.
            options: other options of the op: `lengths`, `cu_seqlens`, `max_seqlen` and `backend`.

        Returns:
            `[B, T, D]`, or (output, states) if `return_state` is set.
        """
        if (run := options.pop("run", None)) is not None:  # of `step`, which the hooks of the layer precede and follow
            return run(x, state, mask)
        options |= {"mask": mask, "initial_state": state, "return_state": return_state}
        return type(self).op(x, *self.arguments(), self.skip, **options)

    def step(
        self, x: Tensor, state: Tensor | None = None, *, mask: Tensor | None = None,
        coefficients: tuple[Tensor, ...] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Compute one further position x `[B, D]`; return y `[B, D]` and the next states.

        Hooks of the layer run as in a call with x `[B, 1, D]`.

        Args:
            x: `[B, D]`.
            state: the states before this position, from `forward` or `step`; None = 0. They are not modified.
            mask: `[B]` bool; rows that are not kept keep their states, and their y is undefined.
            coefficients: `step_coefficients()` of the current weights; None = computed, which takes most of the time of
                a step. After a change of the weights, earlier coefficients give the results of the earlier weights.

        Raises:
            ValueError: if shapes or dtypes do not match.
        """

        def run(x: Tensor, state: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
            arguments = self.arguments() if coefficients is None else self._step_arguments()
            if state is None:
                assert coefficients is not None
                state = coefficients[0].new_zeros(len(x), *coefficients[0].shape)
            options = {"mask": None if mask is None else mask[:, 0], "coefficients": coefficients}
            y, state = type(self).op_step(x[:, 0], state, *arguments, self.skip, **options)
            return y[:, None], state

        options: dict[str, Any] = {"mask": None if mask is None else mask[:, None], "return_state": True}
        if state is not None or coefficients is not None:
            options["run"] = run
        y, state = self(x[:, None], state, **options)
        return y[:, 0], state

    def step_coefficients(self, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """Return the coefficients that `step` computes from the weights, for several steps with the same weights.

        Hooks of the layer run as in a call of zeros.

        Args:
            dtype: the dtype of the states; None = float32, or float64 if a weight is float64. Pass float64 for x in
                float64 and weights in float32.

        Raises:
            ValueError: if the layer has two directions.
        """
        if self.bidirectional:
            raise ValueError("a bidirectional layer has no steps; call the layer with all positions")

        def run(*_: object) -> tuple[Tensor, ...]:
            arguments = self.arguments()
            return type(self).op_coefficients(*arguments, dtype=dtype or upcast_dtype(*arguments))

        x = torch.zeros(1, 1, self.channels, device=next(self.parameters()).device)
        return self(x, run=run)

    def _step_arguments(self) -> tuple[Tensor | None, ...]:
        """Return `arguments`; with coefficients, a step may only use their shapes."""
        return self.arguments()

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        return f"{self.channels}, states={self.states}" + ", bidirectional=True" * self.bidirectional


class MovingAverage(RecurrentLayer):
    """Mega's damped multi-dimensional exponential moving average, silu(average + skip x): `damped_ema` with parameters.

    Source: Ma et al. 2022, section 3.1, with its initialization.

    Args:
        channels: D.
        states: states of a channel.
        bidirectional: add a second average from the end; such a layer has no states.
        skip: whether the layer has the skip connection and silu; otherwise the output is the average.
    """

    op, op_step, op_coefficients = damped_ema, damped_ema_step, ema_coefficients

    def __init__(self, channels: int, states: int = 16, *, bidirectional: bool = False, skip: bool = True) -> None:
        super().__init__(channels, states, bidirectional)
        shape = channels * (1 + bidirectional), states
        self.input_logit, self.damping_logit = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))
        self.expansion, self.projection = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))
        self.skip = nn.Parameter(torch.empty(channels)) if skip else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the parameters."""
        nn.init.normal_(self.input_logit, std=0.2)
        nn.init.normal_(self.damping_logit, std=0.2)
        nn.init.normal_(self.expansion, std=0.02)
        self.expansion[:, ::2] += 1.0
        self.expansion[:, 1::2] -= 1.0
        nn.init.normal_(self.projection)
        if self.skip is not None:
            nn.init.normal_(self.skip)

    def arguments(self) -> tuple[Tensor, ...]:
        """Return the parameters of the average."""
        return self.input_logit, self.damping_logit, self.expansion, self.projection


class ComplexMovingAverage(RecurrentLayer):
    """Megalodon's complex exponential moving average with its skip connection: `complex_ema` with parameters.

    Source: Ma et al. 2024, section 3.1, with the initialization of its code.

    Args:
        channels: D.
        states: complex states of a channel.
    """

    op, op_step, op_coefficients = complex_ema, complex_ema_step, complex_ema_coefficients

    def __init__(self, channels: int, states: int = 16) -> None:
        super().__init__(channels, states)
        shape = channels, states
        self.input_logit, self.damping_logit = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))
        self.phase_logit, self.projection = nn.Parameter(torch.empty(channels)), nn.Parameter(torch.empty(*shape, 2))
        self.skip = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the parameters."""
        nn.init.normal_(self.input_logit, std=0.2)
        nn.init.normal_(self.damping_logit, std=0.2)
        # In random order, channels have frequencies from 1 to 1 / D of the highest.
        number = torch.randperm(self.channels, device=self.phase_logit.device) + 1
        turns = torch.exp(-math.log(self.channels) / self.channels * number)
        self.phase_logit.copy_(torch.logit(turns, eps=1e-6))  # one channel has an entire turn
        nn.init.normal_(self.projection[..., 0])
        nn.init.zeros_(self.projection[..., 1])
        if type(self.skip).__name__ != "FakeTensor":  # has no values that could be compared with the bounds
            nn.init.trunc_normal_(self.skip, std=0.25, a=-1.0, b=1.0)

    def arguments(self) -> tuple[Tensor, ...]:
        """Return the parameters of the average."""
        return self.input_logit, self.damping_logit, self.phase_logit, self.projection


INITS = ("lin", "inv", "real")


class DiagonalSSM(RecurrentLayer):
    """The recurrence of S4D with its skip connection, without its activation and linear layer: `diagonal_ssm`.

    Source: Gu et al. 2022, "On the Parameterization and Initialization of Diagonal State Space Models", with its
    initializations.

    Args:
        channels: D.
        states: N complex states of a channel, one of each conjugate pair, which is half of S4D's `d_state`; with
            `init="real"`, real states.
        init: `"lin"`: A_n = -1/2 + pi n i (S4D-Lin); `"inv"`: S4D-Inv; `"real"`: A_n = -(n + 1) (S4D-Real).
        step: range of the initial time steps of the channels, whose logarithms are uniform.
        discretization: method of `discretize`: `"zoh"` or `"bilinear"`.
        bidirectional: add a second model from the end; such a layer has no states.

    Complex states are real pairs `[B, D, N, 2]`. Half-precision weights are converted to float32 before the
    discretization.
    """

    op, op_step, op_coefficients = diagonal_ssm, diagonal_ssm_step, diagonal_ssm_coefficients

    def __init__(
        self, channels: int, states: int = 32, *, init: str = "lin", step: tuple[float, float] = (0.001, 0.1),
        discretization: str = "zoh", bidirectional: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(channels, states, bidirectional)
        if init not in INITS:
            raise ValueError(f"there is no initialization {init!r} of DiagonalSSM; choose one of {', '.join(INITS)}")
        if discretization not in ("zoh", "bilinear"):
            raise ValueError(f"DiagonalSSM has no discretization {discretization!r}; choose one of zoh, bilinear")
        if not 0.0 < step[0] <= step[1]:
            raise ValueError(f"DiagonalSSM needs a range of positive time steps, got {step}")
        self.init, self.initial_step, self.discretization = init, step, discretization
        shape = channels * (1 + bidirectional), states
        self.log_step, self.log_rate = nn.Parameter(torch.empty(shape[0])), nn.Parameter(torch.empty(shape))
        self.frequency = None if init == "real" else nn.Parameter(torch.empty(shape))
        self.output_weight = nn.Parameter(torch.empty(*shape, *(() if init == "real" else (2,))))
        self.skip = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the parameters."""
        nn.init.uniform_(self.log_step, *map(math.log, self.initial_step))
        number = torch.arange(self.states, device=self.log_rate.device)
        self.log_rate.copy_(torch.log(number + 1.0) if self.frequency is None else torch.tensor(math.log(0.5)))
        if self.frequency is not None:
            order = 2 * self.states  # of the model with both numbers of each pair
            inverse = order / math.pi * (order / (2 * number + 1) - 1)
            self.frequency.copy_(inverse if self.init == "inv" else math.pi * number)
        # Complex numbers have a standard deviation of 1.
        nn.init.normal_(self.output_weight, std=1.0 if self.frequency is None else math.sqrt(0.5))
        nn.init.normal_(self.skip)

    def arguments(self) -> tuple[Tensor | None, ...]:
        """Return the log_decay, phase and weight of `diagonal_ssm`; complex weights are real pairs."""
        rate, step, weight = -torch.exp(upcast(self.log_rate)), torch.exp(upcast(self.log_step)), self.output_weight
        if self.frequency is None:
            log_decay, phase, weight = discretize(rate, step, weight, self.discretization)
        else:
            a, weight = torch.complex(rate, upcast(self.frequency)), as_complex(upcast(weight))
            log_decay, phase, weight = discretize(a, step, 2.0 * weight, self.discretization)
        return log_decay, phase, torch.view_as_real(weight) if weight.is_complex() else weight

    def _step_arguments(self) -> tuple[Tensor | None, ...]:
        if self.frequency is None and self.discretization == "zoh":
            return self.log_rate, None, self.output_weight
        weight = self.output_weight
        return self.log_rate, self.log_rate, weight if weight.dim() == 3 else weight[..., None].expand(-1, -1, 2)
