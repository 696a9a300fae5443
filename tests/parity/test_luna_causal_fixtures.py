"""`luna_causal_attention` in the original `LunarCausalAttention`: outputs, steps, state, all gradients."""

import itertools

import pytest
import torch
from torch import nn

from luna_mega.kernels.api import luna_causal_attention, luna_causal_attention_step, use_backend
from tests.parity.original import originals

CASES = {"tied": "softplus", "untied": "softplus", "elu_tied": "elu"}


class CausalAttention(nn.Module):
    """The op with the projections of the fixture; inputs and outputs are batch-first."""

    def __init__(self, meta, weights, activation):
        super().__init__()
        for name in sorted({name.split(".")[0] for name in weights}):
            self.add_module(name, nn.Linear(meta["embed_dim"], meta["embed_dim"]))
        self.load_state_dict(weights)
        self.heads, self.activation = meta["num_heads"], activation

    def forward(self, function, query, pquery, **options):
        key = self.c_proj(query) if hasattr(self, "c_proj") else self.k_proj(query)
        value = self.v_proj(query) if hasattr(self, "v_proj") else key
        tensors = (self.q_proj(query), self.pq_proj(pquery), self.pc_proj(query), key, value)
        tensors = [tensor.unflatten(-1, (self.heads, -1)) for tensor in tensors]
        output, state = function(*tensors, activation=self.activation, **options)
        return self.out_proj(output.flatten(-2)), state


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
@originals("luna", [f"raw_causal_{case}" for case in CASES])
def test_raw_module(original, parity, backend, request):
    if backend == "triton" and request.getfixturevalue("triton_device").type == "cuda":
        pytest.skip("the fixtures are compared on the CPU, by interpreted kernels")
    activation = CASES[original.folder.name.removeprefix("raw_causal_")]
    io, attention = original.io, CausalAttention(original.meta, original.starting_with("weights."), activation)
    for length, masking in itertools.product(("n1", "n7", "n65"), ("nomask", "pmask")):
        pack_mask = io[f"{length}.pmask"] == 0 if masking == "pmask" else None
        with use_backend(backend):
            _compare_parallel(parity, attention, io, length, masking, pack_mask)
            if (backend, length) != ("triton", "n65"):  # 65 interpreted steps take 15 seconds
                _compare_steps(parity, attention, io, length, masking, pack_mask)


def _compare_parallel(parity, attention, io, length, masking, pack_mask):
    prefix = f"{length}.{masking}"
    inputs = {  # the fixtures are time-major
        name: io[f"{length}.{name}"].transpose(0, 1).clone().requires_grad_() for name in ("query", "pquery")
    }
    output, _ = attention(luna_causal_attention, **inputs, pack_mask=pack_mask, return_state=True)
    output = output.transpose(0, 1)
    parity.check(f"{prefix}.out", output, io[f"{prefix}.out"])
    attention.zero_grad()
    (output * io[f"{length}.w"]).sum().backward()
    expected = {name.removeprefix(f"{prefix}.grad."): io[name] for name in io if name.startswith(f"{prefix}.grad.")}
    actual = {name: x.grad.transpose(0, 1) for name, x in inputs.items()}
    actual |= {name: parameter.grad for name, parameter in attention.named_parameters()}
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        # sums over up to 65 x 3 positions with magnitudes of 10 to 100 (see `FIXTURES`)
        parity.check(f"{prefix}.grad.{name}", actual[name], value, atol=2e-4, rtol=1e-3)


@torch.no_grad()
def _compare_steps(parity, attention, io, length, masking, pack_mask):
    prefix = f"{length}.{masking}"
    p, state, outputs = io[f"{length}.pquery"].transpose(0, 1), None, []
    for x in io[f"{length}.query"]:
        output, state = attention(luna_causal_attention_step, x, p, state=state, pack_mask=pack_mask)
        outputs.append(output)
    parity.check(f"{prefix}.out_incremental", torch.stack(outputs), io[f"{prefix}.out_incremental"])
    if prefix == "n7.nomask":
        original = {name: io[f"{prefix}.inc_state.prev_{name}"] for name in ("key_accum_mat", "value_accum_mat")}
        steps = io[f"{prefix}.inc_state.prev_num_steps"]
        assert torch.equal(state.count[:, None].expand(steps.shape).float(), steps)
        divisor = steps[:, :, None, None]
        parity.check(f"{prefix}.key_mean", state.key_mean, original["key_accum_mat"] / divisor)
        parity.check(f"{prefix}.value_mean", state.value_mean, original["value_accum_mat"] / divisor)
