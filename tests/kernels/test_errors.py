"""Bad arguments of all operators: what is changed in a valid call, and what the message says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from luna_mega.kernels import api
from luna_mega.kernels.api import LunaCausalState, TimestepNormState, TruncatedEmaState
from luna_mega.kernels.modules import DiagonalSSM

LONG, FLOAT = torch.int64, torch.float32


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(shape, dtype=torch.float64).to(dtype)


def bools(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def integers(*values: int) -> Tensor:
    return torch.tensor(values)


LUNA = {"key": random(2, 4, 3, 8), "value": random(2, 4, 3, 8)}
CAUSAL = {name: random(2, 9, 3, 5) for name in ("query", "pack_key", "key")}
CAUSAL |= {"pack_query": random(2, 4, 3, 5), "value": random(2, 9, 3, 6)}
X, SKIP, LOGITS = random(2, 6, 5), random(5), {"input_logit": random(5, 3), "damping_logit": random(5, 3)}
DAMPED = {"x": X, **LOGITS, "expansion": random(5, 3), "projection": random(5, 3), "skip": SKIP}
COMPLEX = {"x": X, **LOGITS, "phase_logit": random(5), "projection": random(5, 3, 2), "skip": SKIP}
DIAGONAL = {"x": X, "log_decay": -random(5, 3), "phase": random(5, 3), "weight": random(5, 3, 2), "skip": SKIP}
# A valid call of each operator.
CALLS: dict[str, dict[str, Any]] = {
    "luna_pack": {"pack_query": random(2, 2, 3, 8), **LUNA},
    "luna_unpack": {"query": random(2, 2, 3, 8), **LUNA},
    "luna_causal_attention": CAUSAL,
    "luna_causal_attention_step": {name: x if name == "pack_query" else x[:, 0] for name, x in CAUSAL.items()}
    | {"state": None},
    "damped_ema": DAMPED,
    "damped_ema_step": DAMPED | {"x": X[:, 0], "state": random(2, 5, 3)},
    "complex_ema": COMPLEX,
    "complex_ema_step": COMPLEX | {"x": X[:, 0], "state": random(2, 5, 3, 2)},
    "diagonal_ssm": DIAGONAL,
    "diagonal_ssm_step": DIAGONAL | {"x": X[:, 0], "state": random(2, 5, 3, 2)},
    "timestep_norm": {"x": random(2, 6, 12), "groups": 3},
    "timestep_norm_step": {"x": random(2, 12), "state": None, "groups": 3},
    "gated_attention": {"query": random(2, 9, 6), "key": random(2, 9, 6), "value": random(2, 9, 10)}
    | {"bias": random(17)},
    "gated_attention_step": {"query": random(2, 6), "key": random(2, 9, 6), "value": random(2, 9, 10)},
    "discretize": {"a": -random(5, 4), "step": random(5), "weight": random(5, 4)},
}  # fmt: skip
FLAT = {name: x[:1] for name, x in CALLS["gated_attention"].items() if name != "bias"}  # of varlen calls
ROWS = {name: x[:1, :, :, :] for name, x in LUNA.items()}
TOKENS = ("query", "pack_key", "key", "value")


def causal_state(key_mean=(2, 3, 5, 4), count=(2,), dtype=FLOAT, integer=LONG) -> LunaCausalState:
    return LunaCausalState(
        torch.zeros(key_mean, dtype=dtype), torch.zeros(2, 3, 4, 6, dtype=dtype), torch.zeros(count, dtype=integer)
    )


def norm_state(batch=2, groups=3, dtype=FLOAT, count=LONG) -> TimestepNormState:
    return TimestepNormState(torch.ones(batch, dtype=count), *(torch.ones(batch, groups, dtype=dtype),) * 2)


def truncated(inputs: int) -> TruncatedEmaState:
    return TruncatedEmaState(torch.zeros(2, 5, 3), torch.zeros(2, 5, 3), torch.zeros(2, inputs, 5))


def doubled(*names: str) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the change that adds a second direction to parameters."""
    return {name: lambda x: torch.cat((x, x)) for name in names}


def bounds_of(*bounds: int, **options: Any) -> dict[str, Any]:
    """Return the change to a varlen batch of one row."""
    return {"x": lambda x: x[:1], "cu_seqlens": torch.tensor(bounds), **options}


# Operator, changes (values, or functions of the values), message.
ERRORS: list[tuple[str, dict[str, Any], str]] = [
    *((op, {"mask": bools(*shape).float()}, "bool mask") for op, shape in {
        "luna_pack": (2, 4), "luna_causal_attention": (2, 9), "luna_causal_attention_step": (2,), "damped_ema": (2, 6),
        "damped_ema_step": (2,), "complex_ema": (2, 6), "complex_ema_step": (2,), "diagonal_ssm": (2, 6),
        "timestep_norm": (2, 6), "timestep_norm_step": (2,), "gated_attention": (2, 9),
    }.items()),
    *((op, {"mask": bools(2, 8)}, rf"bool mask{shape}") for op, shape in {
        "luna_pack": "", "luna_causal_attention": r" of shape \[2, 9\].*\[2, 8\]", "damped_ema": "", "complex_ema": "",
        "timestep_norm": "", "gated_attention": r" of shape \[2, 9\]",
    }.items()),
    *((op, {"x": lambda x: x[0]}, "batch, length, ") for op in ("damped_ema", "complex_ema", "diagonal_ssm")),
    *((op, {"x": lambda x: x[:, :0]}, "length 1 or more") for op in ("damped_ema", "complex_ema", "timestep_norm")),
    *((op, {"x": lambda x: x.long()}, "floating-point")
      for op in ("damped_ema", "complex_ema", "diagonal_ssm", "timestep_norm")),
    *((op, {"skip": lambda x: x[:4]}, "skip of shape") for op in ("damped_ema", "complex_ema", "diagonal_ssm")),
    *((op, {"cu_seqlens": integers(0, 6)}, rf"x \[1, total, {last}\]") for op, last in {
        "damped_ema": "channels", "complex_ema": "channels", "diagonal_ssm": "channels", "timestep_norm": "features",
    }.items()),
    *((op, {"max_seqlen": 6}, "max_seqlen requires cu_seqlens")
      for op in ("damped_ema", "complex_ema", "diagonal_ssm", "timestep_norm")),
    *((op, {"initial_state": random(2, 5, 3, *wrong)}, f"state .2, 5, 3{right}., got") for op, wrong, right in (
        ("damped_ema", (2,), ""), ("complex_ema", (), ", 2"), ("diagonal_ssm", (), ", 2"),
    )),
    *((op, {"initial_state": random(2, 5, 3, *pair, dtype=torch.float16)}, "float32 or float64 state")
      for op, pair in {"damped_ema": (), "complex_ema": (2,), "diagonal_ssm": (2,)}.items()),
    *((op, {"state": lambda x: x[:1]}, f"state .2, 5, 3{pair}., got") for op, pair in {
        "damped_ema_step": "", "complex_ema_step": ", 2", "diagonal_ssm_step": ", 2",
    }.items()),
    # Varlen sequences.
    ("damped_ema", bounds_of(1, 4, 6), "must increase from 0 to 6"),
    ("damped_ema", bounds_of(0, 4, 7), "must increase from 0 to 6"),
    ("damped_ema", bounds_of(0, 8, 6), "must increase from 0 to 6"),
    ("damped_ema", bounds_of(0, 4, 6, max_seqlen=3), "max_seqlen is 3, but a sequence has length 4"),
    ("damped_ema", bounds_of(0, 6, initial_state=random(2, 5, 3)), "state .1, 5, 3., got"),
    ("damped_ema", bounds_of(0, 6, truncation=4, return_state=True), "truncation with states does not support cu_seq"),
    *(("damped_ema", bounds_of(0, 6) | {"cu_seqlens": wrong}, r"cu_seqlens \[sequences \+ 1\] of int32 or int64, got")
      for wrong in (integers(0), integers(0, 6)[None], random(2))),
    ("luna_pack", {**ROWS, "cu_seqlens": integers(0, 1, 1, 4)},
     "needs key .1, total, heads, head size. and 3 rows in the other batch"),
    ("luna_pack", {**ROWS, "cu_seqlens": integers(0, 1, 3)}, "must increase from 0 to 4"),
    ("luna_pack", {**ROWS, "cu_seqlens": integers(0, 1, 4), "return_weights": True},
     "luna_pack does not return weights with cu_seqlens"),
    ("luna_unpack", {"cu_seqlens": integers(0, 1, 2)}, "needs query .1, total"),
    ("luna_unpack", {"query": lambda x: x[:1], "cu_seqlens": integers(0, 0, 2), "max_seqlen": 1}, "max_seqlen is 1"),
    ("luna_causal_attention", {"cu_seqlens": integers(0, 9)},
     r"with cu_seqlens needs tokens and mask \[1, 9, ...\], got \[2, 9\]"),
    ("luna_causal_attention", dict.fromkeys(CAUSAL, lambda x: x[:1]) | {"cu_seqlens": integers(0, 9)}
     | {"return_weights": True}, "luna_causal_attention does not return weights with cu_seqlens"),
    ("gated_attention", {"cu_seqlens": integers(0, 9)}, "batch size 1"),
    ("gated_attention", {**FLAT, "cu_seqlens": integers(0, 8)}, "increase from 0 to 9"),
    ("gated_attention", {**FLAT, "cu_seqlens": integers(0, 9), "start": integers(0)}, "no offset, row_offset or start"),
    ("gated_attention", {**FLAT, "cu_seqlens": integers(0, 9), "return_weights": True},
     "does not return weights with cu_seqlens"),
    # Luna attention.
    ("luna_pack", {"pack_query": lambda x: x[0]}, "batch, length, heads, head size"),
    ("luna_pack", {"value": lambda x: x[:, :2]}, "must agree"),
    ("luna_pack", {"pack_query": lambda x: x[:1]}, "batch size"),
    ("luna_pack", {"key": lambda x: x.float()}, "dtypes differ"),
    *((op, {name: lambda x: x.long() for name in (query, "key", "value")},
       f"{op} needs floating-point tensors, got torch.int64")
      for op, query in (("luna_pack", "pack_query"), ("luna_unpack", "query"))),
    ("luna_pack", {"dropout": 1.0}, "dropout must be in"),
    # Causal Luna attention.
    ("luna_causal_attention", {"query": lambda x: x[0]}, r"\[batch, length, heads, size\].*got \[9, 3, 5\]"),
    ("luna_causal_attention", dict.fromkeys(TOKENS, lambda x: x[:, :0]), "length 1 or more"),
    ("luna_causal_attention", {"query": lambda x: x[..., :4]}, r"query \[2, 9, 3, 4\].*must have the same shape"),
    ("luna_causal_attention", {"value": lambda x: x[:, :8]}, r"value \[2, 8, 3, 6\] must match it except in the last"),
    ("luna_causal_attention", {"pack_query": lambda x: x[:1]}, r"pack_query \[2, rows, 3, 5\].*got \[1, 4, 3, 5\]"),
    ("luna_causal_attention", {"pack_query": lambda x: x[:, :0]}, "1 row or more"),
    ("luna_causal_attention", {"key": lambda x: x.float()}, "the same dtype, got.*torch.float32"),
    ("luna_causal_attention", dict.fromkeys(CAUSAL, lambda x: x.long()), "floating-point tensors"),
    ("luna_causal_attention", {"pack_mask": bools(2, 9)}, r"bool pack_mask of shape \[2, 4\].*\[2, 9\]"),
    ("luna_causal_attention", {"activation": "gelu"}, "no activation 'gelu'; choose one of softplus, elu"),
    ("luna_causal_attention", {"dropout": 1.0}, "dropout must be in .*got 1.0"),
    ("luna_causal_attention", {"state": causal_state(key_mean=(2, 3, 5, 3))},
     r"'key_mean': \[2, 3, 5, 3\].*need.*\[2, 3, 5, 4\]"),
    ("luna_causal_attention", {"state": causal_state(dtype=torch.float16)}, "float32 or float64.*torch.float16"),
    ("luna_causal_attention", {"state": causal_state(integer=FLOAT)}, "int64 count"),
    ("luna_causal_attention_step", {"query": lambda x: x[:, None].expand(2, 9, 3, 5)},
     r"\[batch, heads, size\], got \[2, 9, 3, 5\]"),
    ("luna_causal_attention_step", {"state": causal_state(count=(1,))},
     "luna_causal_attention_step: a state of shapes"),
    ("luna_causal_attention_step", {"state": causal_state(), "inplace": True}, "inplace needs a state, and torch.no_"),
    # Averages.
    ("damped_ema", {"x": lambda x: x[..., :3]}, "5 rows of parameters fit neither 3 channels"),
    ("damped_ema", {"expansion": lambda x: x[:, :2]}, "one shape"),
    ("damped_ema", {"shift": True}, "two directions"),
    ("damped_ema", {"truncation": 4, "initial_state": random(2, 5, 3)}, "truncation=4 needs a TruncatedEmaSt"),
    ("damped_ema", {"truncation": 4, "initial_state": truncated(3)}, r"inputs \[2, 4, 5\], got \[2, 3, 5\]"),
    ("damped_ema", {"initial_state": truncated(3)}, "is a TruncatedEmaState; pass its truncation too"),
    ("damped_ema", doubled(*LOGITS, "expansion", "projection") | {"return_state": True},
     "a bidirectional model has no state"),
    ("damped_ema_step", doubled(*LOGITS, "expansion", "projection"), "one row of parameters per channel"),
    ("damped_ema_step", {"state": truncated(4), "coefficients": (SKIP, SKIP, SKIP)},
     "`coefficients` do not apply to a `TruncatedEmaState`; omit them"),
    *((op, {"lengths": wrong, "mask": bools(2, 6), "return_state": True}, message)
      for op in ("damped_ema", "complex_ema", "diagonal_ssm") for wrong, message in (
        (integers(6, 2, 1), r"lengths must be int32 or int64 \[2\], got torch.int64 \[3\]"),
        (integers(6, 2).to(torch.uint8), r"lengths must be int32 or int64 \[2\], got torch.uint8 \[2\]"),
        (bools(2), r"lengths must be int32 or int64 \[2\], got torch.bool \[2\]"),
        (integers(7, 2), r"lengths must be from 0 to 6, got \[7, 2\]"),
        (integers(6, -1), r"lengths must be from 0 to 6, got \[6, -1\]"),
    )),
    *((op, {"lengths": integers(6, 2), **given}, "lengths need return_state=True and a mask")
      for op in ("damped_ema", "complex_ema") for given in ({"mask": bools(2, 6)}, {"return_state": True})),
    ("complex_ema", {"x": lambda x: x[..., :3]}, "for 3 channels two logits"),
    ("complex_ema", {"phase_logit": lambda x: x[:, None]}, r"a phase_logit \[5\]"),
    ("complex_ema", {"projection": lambda x: x[..., 0]}, r"a projection \[5, N, 2\]"),
    ("complex_ema", {"damping_logit": lambda x: x[:, :2]}, "two logits"),
    ("complex_ema_step", {"x": X}, r"x \[batch, channels\]"),
    ("diagonal_ssm", {"x": lambda x: x[..., :3]}, "5 rows of log_decay fit neither 3 channels"),
    ("diagonal_ssm", {"log_decay": lambda x: x[:, :2]}, r"a phase \[5, 2\], the shape of log_decay, got \[5, 3\]"),
    ("diagonal_ssm", {"log_decay": lambda x: x[0]}, r"a log_decay \[rows, N\], got \[3\]"),
    ("diagonal_ssm", {"log_decay": lambda x: x.long()}, "floating-point"),
    ("diagonal_ssm", {"phase": lambda x: x[:, 0]}, r"a phase \[5, 3\], the shape of log_decay, got \[5\]"),
    ("diagonal_ssm", {"phase": None}, r"a real weight \[5, 3\] if phase is None, got torch.float64 \[5, 3, 2\]"),
    ("diagonal_ssm", {"weight": lambda x: x[..., 0]},
     r"complex weight \[5, 3\] or real pairs \[5, 3, 2\].* got torch.float64"),
    ("diagonal_ssm", {"weight": lambda x: torch.view_as_complex(x)[:2]}, r"got torch.complex128 \[2, 3\]"),
    ("diagonal_ssm", doubled("log_decay", "phase", "weight") | {"return_state": True},
     "bidirectional model has no state; omit initial_state and return_state"),
    ("diagonal_ssm_step", doubled("log_decay", "phase", "weight"),
     "one row of log_decay per channel, got 10 rows for 5 channels"),
    ("discretize", {"method": "euler"}, "no method 'euler' of discretize; choose one of zoh, bilinear, none"),
    *(("discretize", wrong, r"discretize needs a \[R, N\], a step \[R\] or \[R, N\]") for wrong in (
        {"a": lambda x: x[0], "weight": None}, {"step": lambda x: x[:2], "weight": None},
        {"weight": lambda x: x[:, :2]},
    )),
    # Norm.
    ("timestep_norm", {"x": lambda x: x[:, 0]}, "batch, length, features"),
    ("timestep_norm", {"groups": 5}, "5 groups do not divide 12 features"),
    ("timestep_norm", {"groups": 0}, "0 groups"),
    ("timestep_norm", {"weight": random(11)}, "weight of shape .12."),
    ("timestep_norm", {"bias": random(12, 1)}, "bias of shape .12."),
    ("timestep_norm", {"initial_state": norm_state(batch=1)}, r"mean and variance \[\[2\], \[2, 3\], \[2, 3\]\]"),
    ("timestep_norm", {"initial_state": norm_state(dtype=torch.float16)}, "float32 or float64"),
    ("timestep_norm", {"initial_state": norm_state(count=FLOAT)}, "integer count"),
    ("timestep_norm_step", {"x": random(2, 6, 12)}, r"x \[batch, features\]"),
    ("timestep_norm_step", {"state": norm_state(batch=3)}, "mean and variance"),
    # Gated attention.
    ("gated_attention", {"query": lambda x: x[0]}, r"\[batch, length, size\]"),
    ("gated_attention", {"query": lambda x: x[:, :, :2]}, "must agree in batch and size"),
    ("gated_attention", {"key": lambda x: x.float()}, "torch.float64, key torch.float32"),
    ("gated_attention", {"bias": lambda x: x[None]}, r"shape \[2 M - 1\]"),
    ("gated_attention", {"bias": lambda x: x[1:]}, r"shape \[2 M - 1\], got torch.float64 \[16\]"),
    ("gated_attention", {"bias": lambda x: x[1:-1]}, "length 15 covers 8 positions, but 9 are in use.*17"),
    ("gated_attention", {"bias": lambda x: x[6:-6], "chunk_size": 4}, "covers 3 positions, but 4"),
    ("gated_attention", {"function": "gelu"},
     "does not support function 'gelu'; choose one of softmax, laplace, relu2"),
    ("gated_attention", {"chunk_size": 0}, "at least 1.*got 0"),
    ("gated_attention", {"key": lambda x: x[:, :4], "value": lambda x: x[:, :4], "chunk_size": 4},
     "9 queries from position 0 on do not fit"),
    ("gated_attention", {"start": torch.zeros(2)}, r"needs start \[2\] of int32 or int64, got torch.float32 \[2\]"),
    ("gated_attention", {"start": integers(0, 1), "chunk_size": 4}, r"start is \[0, 1\], so the first keys"),
    ("gated_attention", {"row_offset": integers(0, 1), "causal": True}, "row_offset is only for cross-attention"),
    ("gated_attention", {"row_offset": integers(1)}, r"needs row_offset \[2\]"),
    ("gated_attention", {"causal": True, "offset": 1}, "9 queries from position 1 on do not fit 9 keys"),
    ("gated_attention", {"offset": -1}, "offset must not be negative"),
    ("gated_attention", {"dropout": 1.0}, "dropout must be in"),
    *(("gated_attention_step", wrong, r"query \[batch, size\] and key \[batch, length, size\] of length 1 or more")
      for wrong in ({"query": lambda x: x[:, None]}, {"key": lambda x: x[0]}, {"key": lambda x: x[:, :0]})),
    ("gated_attention_step", {"column": integers(8, 3), "chunk_size": 4}, "column does not support chunk_size=4"),
]  # fmt: skip


@pytest.mark.parametrize("operator", CALLS)
def test_the_unchanged_calls_are_valid(operator):
    getattr(api, operator)(**CALLS[operator])


@pytest.mark.parametrize(("operator", "changes", "message"), ERRORS)
def test_bad_arguments(operator, changes, message):
    call = dict(CALLS[operator])
    for name, change in changes.items():
        call[name] = change(call[name]) if callable(change) else change
    with pytest.raises(ValueError, match=message):
        getattr(api, operator)(**call)


def test_total_lengths_of_varlen_luna_attention():
    x, rows = random(1, 11, 2, 6), random(4, 5, 2, 6)
    with pytest.raises(ValueError, match="the same total length"):
        api.luna_attention(x[:, :5], rows, x, x, lambda y: (y, y), cu_seqlens=integers(0, 3, 3, 10, 11))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init": "legs"}, "no initialization 'legs' of DiagonalSSM; choose one of lin, inv, real"),
        ({"discretization": "none"}, "no discretization 'none'; choose one of zoh, bilinear"),
        ({"step": (0.1, 0.01)}, r"positive time steps, got \(0.1, 0.01\)"),
    ],
)
def test_bad_options_of_a_layer(options, message):
    with pytest.raises(ValueError, match=message):
        DiagonalSSM(6, 4, **options)
